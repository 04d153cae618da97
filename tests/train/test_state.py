"""The moving average, and the state of training, which is restored completely."""

import copy
import math
from pathlib import Path

import pytest
import torch
from launches import launches_of
from optimisers import OPTIMISERS, state_of
from refused import refused
from same_run import assert_identical
from torch import nn

import vitinit
from vitinit.base.files import CheckpointError
from vitinit.train.distributed import Processes
from vitinit.train.state import Ema, TrainState, require_like

ALONE = Processes(0, 0, 1, torch.device("cpu"))
IMAGES = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(2))


def fresh_state(seed: int, dim: int = 12, optimiser: str = "muon") -> TrainState:
    model = vitinit.build_model(
        "convmixer_256_8",
        num_classes=7,
        image_size=8,
        patch_size=2,
        embed_dim=dim,
        depth=1,
        kernel_size=3,
    )
    vitinit.init_weights(model, "default", generator=torch.Generator().manual_seed(seed))
    return state_of(
        model,
        OPTIMISERS[optimiser](model),
        ema=Ema(model, decay=0.9, warmup=True),
        scaler=torch.amp.GradScaler("cpu", init_scale=8.0 * (seed + 1)),
    )


def step(state: TrainState, factor: float = 1.0) -> None:
    """A step at rate .01; factor: of the loss, infinite for gradients that overflow. A loss of
    one's own may be below 0."""
    for group in state.optimizer.param_groups:
        group["lr"] = 1e-2
    state.scaler.scale(state.model.eval()(IMAGES).square().mean() * factor).backward()
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad()
    state.ema.update(torch.tensor(factor > 1.0))
    state.progress.add(torch.tensor(-1.0), torch.tensor(factor > 1.0))
    state.progress.read_losses(ALONE)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("factors", [[], [float("inf")], [1.0, float("inf"), 1.0]])
def test_what_is_saved_comes_back_in_another_state_and_goes_on_alike(factors, optimiser):
    """Also before the first step, and where fp16 has skipped all of them: moments of 0."""
    ours, theirs = (fresh_state(seed, optimiser=optimiser) for seed in (0, 1))
    for factor in factors:
        step(ours, factor)
    saved = copy.deepcopy(ours.state_dict())
    for group in saved["optimizer"]["param_groups"]:  # the recipe states these
        group |= {"betas": (0.1, 0.2), "weight_decay": float("nan"), "fused": True, "more": 3}
    theirs.load_state_dict(saved, Path("last.pt"))
    for _ in range(2):
        step(ours), step(theirs)
    assert_identical(ours.state_dict(), theirs.state_dict())
    assert len(theirs.optimizer.state) > 0 and theirs.progress.step == 2 + len(factors)


def test_moments_take_the_memory_format_of_the_weights():
    """A fused kernel that reads both as if they were alike would mix up elements."""
    ours, theirs = fresh_state(0), fresh_state(1)
    theirs.model.to(memory_format=torch.channels_last)
    step(ours)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()), Path("last.pt"))
    step(ours), step(theirs)
    assert theirs.model.stem[0].weight.is_contiguous(memory_format=torch.channels_last)
    for parameter, values in theirs.optimizer.state.items():
        assert all(value.stride() == parameter.stride() for value in values.values() if value.ndim)
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters()):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "value",
    [torch.ones(3), torch.ones(()).long(), torch.tensor(float("inf")), -torch.ones(()), 1.0, None],
)
@pytest.mark.parametrize("kind", ["step", "exp_avg", "exp_avg_sq", "momentum_buffer"])
def test_a_moment_of_another_shape_type_or_value_is_refused(kind, value):
    own = fresh_state(0)
    step(own)
    saved = copy.deepcopy(own.state_dict())
    moments = next(part for part in saved["optimizer"]["state"].values() if kind in part)
    good = moments.pop(kind)
    for moments[kind] in (value, *[good + torch.nan, good.long(), good[None]]):
        line = refused(CheckpointError, fresh_state(1).load_state_dict, saved, Path("last.pt"))
        assert f".{kind} is " in line
    del moments[kind]
    assert kind in refused(CheckpointError, fresh_state(1).load_state_dict, saved, Path("last.pt"))


def test_a_checkpoint_of_something_else_is_one_line():
    own = fresh_state(0).state_dict()
    for state in (
        fresh_state(0, dim=13).state_dict(),
        own | {"progress": {"epoch": 3}},
        own | {"ema": None},
        own | {"progress": own["progress"] | {"step": 1.5}},
        own | {"progress": own["progress"] | {"seconds": float("nan")}},
        own | {"scaler": own["scaler"] | {"scale": 0.0}},
        own | {"ema": own["ema"] | {"updates": True}},
    ):
        line = refused(CheckpointError, fresh_state(1).load_state_dict, state, Path("last.pt"))
        assert line.startswith("last.pt: is not of this run: ")


@pytest.mark.parametrize(
    "like, least, most",
    [
        (0, 0, 2**63 - 1),  # whole numbers as tensors of int64 hold them
        (7, 1, 2**63 - 1),
        (0.0, -(2.0**63) * (1 - 2**-53), 2.0**63 * (1 - 2**-53)),
        (0.5, 5e-324, 2.0**63 * (1 - 2**-53)),  # from the least float above 0
        (None, -(2.0**63) * (1 - 2**-53), 2.0**63 * (1 - 2**-53)),
    ],
)
def test_a_number_is_taken_from_the_least_to_the_largest_that_a_run_has(like, least, most):
    whole = isinstance(like, int)
    for value in (least, most):
        require_like(value, like, "number", Path("last.pt"))
    below = least - 1 if whole else math.nextafter(least, -math.inf)
    above = most + 1 if whole else math.nextafter(most, math.inf)
    other = float(least) if whole else 1
    for value in (below, above, other, True, "1"):
        line = refused(CheckpointError, require_like, value, like, "number", Path("last.pt"))
        assert line.startswith(f"last.pt: is not of this run: number is {value!r}, expected a nu")
    if like is not None:
        assert refused(CheckpointError, require_like, None, like, "number", Path("last.pt"))


@pytest.mark.parametrize("skipped", [None, torch.tensor(False)])
def test_an_update_is_its_formula_in_one_call_for_each_kind_of_tensor(skipped, held_against):
    norm = nn.BatchNorm1d(5)  # with a counter, which is copied
    ema, expected = Ema(norm, decay=0.6, warmup=True), 1.0
    for number in range(7):
        nn.init.constant_(norm.weight, number), norm.num_batches_tracked.fill_(number)
        expected += (1 - min(0.6, 1 - (1 + number) ** (-2 / 3))) * (number - expected)
        ema.update(skipped)
        assert ema.model.weight.tolist() == pytest.approx([expected] * 5)
        held_against(ema.model.weight, [expected] * 5)
        assert ema.model.num_batches_tracked == number
    assert skipped is not None or sorted(launches_of(ema.update).by_name) == [
        "aten::_foreach_copy_",
        "aten::_foreach_lerp_.Scalar",
    ]
