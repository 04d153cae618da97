"""Batched operations against float64 arithmetic."""

from __future__ import annotations

import numpy as np
import torch

from vitinit.data.augment import normalise

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def test_normalise_equals_float64_arithmetic():
    values = np.random.default_rng(0).integers(0, 256, (5, 3, 7, 11), dtype=np.uint8)
    images = torch.from_numpy(values)
    expected = np.empty(images.shape, dtype=np.float64)
    for channel in range(3):
        expected[:, channel] = (values[:, channel] / 255 - MEAN[channel]) / STD[channel]
    ours = normalise(images, MEAN, STD)
    assert ours.dtype == torch.float32
    np.testing.assert_allclose(ours.numpy(), expected, rtol=0, atol=1e-6)


def test_normalise_leaves_its_input_alone():
    images = torch.arange(2 * 3 * 5 * 7, dtype=torch.uint8).view(2, 3, 5, 7)
    before = images.clone()
    normalise(images, MEAN, STD)
    assert torch.equal(images, before)


def test_normalised_mean_and_one_deviation_are_zero_and_one():
    at_mean = torch.tensor([51, 102, 153], dtype=torch.uint8).view(1, 3, 1, 1)
    std = (0.2, 0.4, 0.1)
    mean = tuple(value / 255 for value in (51, 102, 153))
    assert torch.allclose(normalise(at_mean, mean, std), torch.zeros(1, 3, 1, 1), atol=1e-6)
    mean = tuple(m - s for m, s in zip(mean, std))
    assert torch.allclose(normalise(at_mean, mean, std), torch.ones(1, 3, 1, 1), atol=1e-6)
