"""The epoch's sums, the progress lines, and FLOPs, which equal the formulas."""

import sys
from types import SimpleNamespace

import pytest
import torch

from vitinit.models import build_model
from vitinit.train import metrics
from vitinit.train.distributed import Processes
from vitinit.train.metrics import Diverged, Progress, training_flops

ALONE = Processes(0, 0, 1, torch.device("cpu"))


def added(progress: Progress, losses: list[float], at_once: int = 100) -> Progress:
    """Count these losses, and read `at_once` of them together."""
    for number, loss in enumerate(losses, 1):
        progress.add(torch.tensor(loss, dtype=torch.float64), None)
        if number % at_once == 0:
            progress.read_losses(ALONE)
    progress.read_losses(ALONE)
    return progress


def test_losses_add_up_in_order_until_one_is_not_finite_which_is_named_and_not_counted():
    losses = [0.1 * k for k in range(17)]
    one, many = added(Progress(), losses), added(Progress(), losses, 5)
    assert one == many and one.step == one.epoch_steps == 17
    for bad in (float("nan"), float("inf")):
        progress = Progress(step=40)
        with pytest.raises(Diverged, match="loss of step 43 is"):
            added(progress, [1.0, 2.0, bad, 3.0])
        assert progress.step == 42 and progress.loss_sum == 3.0


@pytest.mark.parametrize("system, unit", [("linux", 2**10), ("darwin", 1)])
def test_peak_memory_is_in_gib_from_the_unit_of_the_system(monkeypatch, system, unit):
    """getrusage(2): ru_maxrss is in kilobytes on Linux, and in bytes on macOS."""
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(
        "resource.getrusage", lambda _: SimpleNamespace(ru_maxrss=3 * 2**30 // unit)
    )
    assert metrics.peak_gib(torch.device("cpu")) == 3.0


@pytest.mark.parametrize(
    "by, values, better",
    [
        ("val_top1", [None, 3.0, 2.0, 3.0, 4.0], [False, True, False, False, True]),
        ("val_loss", [float("nan"), 3.0, 4.0, None, 2.0], [False, True, False, False, True]),
    ],
)
def test_the_best_metric_is_the_highest_accuracy_or_the_lowest_loss(by, values, better):
    progress = Progress()
    assert [progress.improves(value, by) for value in values] == better


def simple_vit_flops(tokens: int, width: int, inner: int) -> tuple[int, int]:
    """FLOPs per image of two blocks: of all that depends on the image, and of Q, K and Q Kᵀ."""
    return (
        2
        * (
            2 * tokens * tokens * inner  # A V
            + 2 * 2 * tokens * width * inner  # values, proj
            + 2 * 2 * tokens * width * width
        ),  # MLP
        2 * (2 * tokens * width * 2 * inner + 2 * tokens * tokens * inner),
    )


@pytest.mark.parametrize("reads", ["content", "position"])
def test_flops_are_those_of_the_products_that_the_formulas_name(reads):
    """Four heads of 5 channels each; the width of the residual stream is 28. Queries and keys that
    depend on positions alone are computed once for all images of a batch."""
    model = build_model(
        "simple_vit",
        num_classes=7,
        image_size=20,
        patch_size=4,
        embed_dim=28,
        depth=2,
        num_heads=4,
        head_dim=5,
        mlp_ratio=1.0,
        reads=reads,
        input_pos_embed=reads == "content",
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    each, of_positions = simple_vit_flops(25, 28, 20)
    shared = of_positions / (1 if reads == "content" else 3)
    expected = 2 * 25 * 48 * 28 + each + 2 * 28 * 7 + shared
    assert training_flops(model, 3, (20, 20)) == pytest.approx(3 * expected)  # with backward
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
