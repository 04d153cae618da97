"""The state of training is restored completely: model, optimiser, loss scale, average, progress."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from optimisers import muon

import vitinit
from vitinit.train.checkpoint import CheckpointError
from vitinit.train.distributed import Processes
from vitinit.train.ema import Ema
from vitinit.train.metrics import Progress
from vitinit.train.state import TrainState

ALONE = Processes(0, 0, 1, torch.device("cpu"))


def fresh_state(seed: int) -> TrainState:
    model = vitinit.build_model("convmixer_256_8", num_classes=7, image_size=8, patch_size=2,
                                embed_dim=12, depth=1, kernel_size=3)
    vitinit.init_weights(model, "default", generator=torch.Generator().manual_seed(seed))
    optimizer = muon(model, factor=1.3, momentum=0.9, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8)
    return TrainState(model, optimizer, torch.amp.GradScaler("cpu", init_scale=8.0 * (seed + 1)),
                      Ema(model, decay=0.9, warmup=True), Progress())


def test_what_is_saved_comes_back_in_another_state():
    ours, theirs = fresh_state(0), fresh_state(1)
    images = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    for step in range(3):
        for group in ours.optimizer.param_groups:
            group["lr"] = 1e-2
        ours.scaler.scale(ours.model.train()(images).square().mean()).backward()
        ours.scaler.step(ours.optimizer)
        ours.scaler.update(4.0 + step)
        ours.optimizer.zero_grad()
        ours.ema.update()
        ours.progress.add(torch.tensor(1.0 + step), None)
        ours.progress.read_losses(ALONE)

    theirs.load_state_dict(ours.state_dict(), Path("last.pt"))
    assert theirs.scaler.get_scale() == ours.scaler.get_scale() == 6.0
    assert theirs.progress == ours.progress and theirs.progress.step == 3
    assert theirs.ema.updates == 3
    for mine, other in ((ours.model, theirs.model), (ours.ema.model, theirs.ema.model)):
        for name, value in mine.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name
    for mine, other in zip(ours.optimizer.state.values(), theirs.optimizer.state.values(),
                           strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[key], other[key]) for key in mine)
    assert len(theirs.optimizer.state) > 0


def test_moments_take_the_memory_format_of_the_weights():
    """A fused kernel that reads both as if they were alike would mix up elements."""
    ours, theirs = fresh_state(0), fresh_state(1)
    theirs.model.to(memory_format=torch.channels_last)
    images = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(2))

    def step(state: TrainState) -> None:
        for group in state.optimizer.param_groups:
            group["lr"] = 1e-2
        state.model.eval()(images).square().mean().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.progress.add(torch.tensor(1.0), None)
        state.progress.read_losses(ALONE)
    step(ours)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()), Path("last.pt"))
    step(ours), step(theirs)
    assert theirs.model.stem[0].weight.is_contiguous(memory_format=torch.channels_last)
    for parameter, values in theirs.optimizer.state.items():
        assert all(value.stride() == parameter.stride() for key, value in values.items() if key != "step")
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters()):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------
# What does not fit
# ---------------------------------------------------------------------------------------------


def trained_state() -> dict:
    """A checkpoint after one step, with copies of the tensors."""
    state = fresh_state(0)
    state.model.train()(torch.ones(2, 3, 8, 8)).square().mean().backward()
    state.optimizer.step()
    state.ema.update()
    state.progress.add(torch.tensor(1.0), None)
    state.progress.read_losses(ALONE)
    return copy.deepcopy(state.state_dict())


NAN = float("nan")
WRONG = [
    (("progress",), None, "progress does not fit: it lacks progress.step, progress.epochs, "),
    (("progress", "epoch"), 3, "progress does not fit: it has also progress.epoch"),
    (("progress", "step"), True, "progress.step is True; expected int from 0 on"),
    (("progress", "loss_sum"), NAN, "progress.loss_sum is nan; expected float from 0 on"),
    (("progress", "best"), "50", "progress.best is 50; expected int or float"),
    (("model", "head.bias"), torch.full((7,), NAN), "model.head.bias is (7,) torch.float32, not finite; expected"),
    (("ema", "updates"), -1, "ema.updates is -1; expected int from 0 on"),
    (("ema", "model", "head.bias"), torch.zeros(3), "ema.model.head.bias is (3,) torch.float32; expected"),
    (("optimizer",), [], "optimizer is no state of AdamW or Muon"),
    (("optimizer", "param_groups"), [], "optimizer.groups is []; expected [[0"),
    (("optimizer", "state", 0), {"exp_avg": torch.ones(1)},
     "lacks optimizer.state.0.momentum_buffer and has also optimizer.state.0.exp_avg"),
    (("optimizer", "state", 1, "exp_avg_sq"), [0.0], "state.1.exp_avg_sq is [0.0]; expected a tensor"),
    (("optimizer", "state", 2, "exp_avg"), torch.zeros(12, dtype=torch.float64), "torch.float64"),
    (("scaler", "scale"), NAN, "scaler.scale is nan"),
]


@pytest.mark.parametrize("place, value, words", WRONG,
                         ids=[f"{number} {'.'.join(map(str, row[0]))}"
                              for number, row in enumerate(WRONG)])
def test_what_does_not_fit_is_one_line_and_changes_nothing(place, value, words):
    state, ours = trained_state(), fresh_state(1)
    *parents, last = place
    part = state
    for key in parents:
        part = part[key]
    part[last] = value
    before = copy.deepcopy(ours.model.state_dict())
    with pytest.raises(CheckpointError) as caught:
        ours.load_state_dict(state, Path("last.pt"))
    message = str(caught.value)
    assert message.startswith("last.pt: ") and words in message and "\n" not in message
    assert all(torch.equal(value, before[name]) for name, value in ours.model.state_dict().items())
    assert not ours.optimizer.state and ours.progress == Progress()


def test_hyper_parameters_are_the_recipes_and_not_the_checkpoints():
    state, ours = trained_state(), fresh_state(1)
    for group in state["optimizer"]["param_groups"]:
        group |= {"betas": (0.1, 0.2), "weight_decay": NAN, "fused": True, "more": 3}
    ours.load_state_dict(state, Path("last.pt"))
    assert ours.optimizer.state_dict()["param_groups"] == (
        fresh_state(2).optimizer.state_dict()["param_groups"])


def test_a_run_whose_steps_were_all_skipped_goes_on():
    """At step 0 there are no moments; a step that overflows in fp16 makes them, and they stay 0."""
    ours, theirs = fresh_state(0), fresh_state(1)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()), Path("last.pt"))
    assert not theirs.optimizer.state
    images = torch.ones(2, 3, 8, 8)
    for factor in (float("inf"), float("inf"), 1.0):
        if factor == 1.0:
            theirs.load_state_dict(copy.deepcopy(ours.state_dict()), Path("last.pt"))
            assert theirs.optimizer.state and theirs.progress.step == 2
        for state in (ours, theirs):
            state.optimizer.param_groups[0]["lr"] = 1e-2
            loss = state.model.eval()(images).square().mean() * factor
            state.scaler.scale(loss).backward()
            state.scaler.step(state.optimizer)
            state.scaler.update()
            state.optimizer.zero_grad()
            state.progress.add(torch.tensor(1.0), torch.tensor(factor > 1.0))
            state.progress.read_losses(ALONE)
    assert all(map(torch.equal, ours.model.parameters(), theirs.model.parameters()))
