"""What training changes comes back whole: model, optimiser, loss scale, average, progress."""

from __future__ import annotations

from pathlib import Path

import torch

import vitinit
from vitinit.train.ema import Ema
from vitinit.train.metrics import Progress
from vitinit.train.optim import adamw
from vitinit.train.state import TrainState


def fresh_state(seed: int) -> TrainState:
    model = vitinit.build_model("convmixer_256_8", num_classes=7, image_size=8, patch_size=2,
                                embed_dim=12, depth=1, kernel_size=3)
    vitinit.init_weights(model, "default", generator=torch.Generator().manual_seed(seed))
    return TrainState(model, adamw(model, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8),
                      torch.amp.GradScaler("cpu", init_scale=8.0 * (seed + 1)),
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
        ours.ema.update(ours.model)
        ours.progress.add_losses([1.0 + step])

    theirs.load_state_dict(ours.state_dict(), Path("last.pt"))
    assert theirs.scaler.get_scale() == ours.scaler.get_scale() == 6.0
    assert theirs.progress == ours.progress and theirs.progress.step == 3
    assert theirs.ema.updates == 3
    for mine, other in ((ours.model, theirs.model), (ours.ema.model, theirs.ema.model)):
        for name, value in mine.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name
    for mine, other in zip(ours.optimizer.state.values(), theirs.optimizer.state.values(),
                           strict=True):
        assert all(torch.equal(mine[key], other[key]) for key in ("exp_avg", "exp_avg_sq", "step"))
    assert len(theirs.optimizer.state) > 0


def test_what_is_evaluated_holds_no_optimiser():
    state = fresh_state(0)
    assert state.weights().keys() == state.state_dict().keys() - {"optimizer", "scaler"}
