"""Calibration: the error as its paper defines it, the temperature as a search over many finds it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from counting import calibration_error_by_hand

from vitinit.programs.shared.calibration import calibration_error, fit_temperature, reliability
from vitinit.tasks import CROSS_ENTROPY, Loss

LOSSES = [CROSS_ENTROPY, Loss("binary_cross_entropy", "share", "none")]


def drawn(images: int = 997, classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and labels that are likelier where they are larger."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(images, classes)) * rng.uniform(0.5, 4, size=(images, 1))
    labels = (logits / 1.7 + rng.gumbel(size=logits.shape)).argmax(1)
    return torch.from_numpy(logits), torch.from_numpy(labels)


def test_the_error_is_that_of_the_paper_however_images_are_batched():
    logits, labels = drawn()
    shares = logits.softmax(1)
    shares[0] = F.one_hot(labels[0], 7)  # the end of the last bin
    shares[1] = 1e-30  # as of sigmoids
    bins = sum(map(reliability, shares.split(101), labels.split(101)))
    assert (bins[0] == 0).any() and bins[0].sum() == 997
    expected = calibration_error_by_hand(shares.numpy(), labels.tolist())
    assert expected > 1 and calibration_error(bins) == pytest.approx(expected, rel=1e-12)
    for share, place in ((0.0, 0), (0.2, 2), (1.0, 14)):  # 0: of sigmoids that underflow
        assert reliability(torch.tensor([[share]], dtype=torch.float64), labels[:1])[0, place] == 1


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_a_temperature_is_the_best_of_a_fine_grid_and_goes_with_the_scale_of_logits(loss):
    logits, labels = drawn()
    targets = F.one_hot(labels, 7).double()

    def loss_at(temperature: float) -> float:
        if loss is CROSS_ENTROPY:
            return F.cross_entropy(logits / temperature, labels).item()
        return F.binary_cross_entropy_with_logits(logits / temperature, targets).item()

    found = fit_temperature(logits, labels, loss)
    grid = np.geomspace(0.2, 20, 2001)
    best = grid[np.argmin([loss_at(temperature) for temperature in grid])]
    assert found == pytest.approx(best, rel=2e-3) and loss_at(found) <= loss_at(best)
    for factor in (0.03, 37.0):
        scaled = fit_temperature(factor * logits, labels, loss)
        assert scaled == pytest.approx(factor * found, rel=1e-9)


def test_where_all_are_right_there_is_none():
    logits, _ = drawn()
    with pytest.raises(ValueError, match="as where all or none are classified correctly"):
        fit_temperature(logits, logits.argmax(1), CROSS_ENTROPY)
