"""Normalising and erasing equal arithmetic in float64 or plain integers, image by image."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor

from deit import erase, noisy_batch
from vitinit.data.augment import hashed, normal_quantiles, normalise
from vitinit.data.images import Box


# ---------------------------------------------------------------------------------------------
# Normalising
# ---------------------------------------------------------------------------------------------


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def test_normalise_equals_float64_arithmetic():
    images = noisy_batch(5, 7, 11)
    values = images.numpy()
    expected = np.empty(images.shape, dtype=np.float64)
    for channel in range(3):
        expected[:, channel] = (values[:, channel] / 255 - MEAN[channel]) / STD[channel]
    normalised = normalise(images, MEAN, STD)
    assert normalised.dtype == torch.float32
    np.testing.assert_allclose(normalised.numpy(), expected, rtol=0, atol=1e-6)
    tensors = (torch.tensor(values, dtype=torch.float64) for values in (MEAN, STD))
    assert torch.equal(normalise(images, *tensors), normalised)
    assert torch.equal(images, noisy_batch(5, 7, 11))


# ---------------------------------------------------------------------------------------------
# Noise and erasing
# ---------------------------------------------------------------------------------------------


QUANTILES = normal_quantiles()
KEYS = [0, 1, 1009, 2**31 - 1, 2**53 + 1, 0x9E3779B97F4A7C15 >> 1, 2**63 - 1]


def split_mix_64(key: int, count: int) -> list[int]:
    """The first outputs of the generator that starts from `key`, in plain integers."""
    outputs, state = [], key
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        bits = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
        outputs.append(bits ^ bits >> 31)
    return outputs


def test_the_reference_gives_the_published_outputs():
    assert split_mix_64(0, 3) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("key", KEYS)
def test_hashed_equals_splitmix64_in_plain_integers(key):
    bits = hashed(torch.tensor([key]), torch.arange(1009))
    assert bits.dtype == torch.int64
    assert [word % 2**64 for word in bits.tolist()] == split_mix_64(key, 1009)


def test_quantiles_are_sorted_symmetric_and_of_mean_0_and_variance_1():
    assert len(QUANTILES) == 2**16 and (QUANTILES.diff() > 0).all()
    torch.testing.assert_close(QUANTILES, -QUANTILES.flip(0), rtol=1e-5, atol=0)
    assert abs(QUANTILES.double().mean()) < 1e-7
    assert abs(QUANTILES.double().square().mean() - 1) < 1e-3
    assert QUANTILES[-1] == pytest.approx(NormalDist().inv_cdf(1 - 2.0**-17), rel=1e-6)


NOWHERE = Box(0, 0, 0, 0)
BOXES = [Box(3, 5, 7, 11), NOWHERE, Box(0, 0, 1, 1), Box(18, 2, 11, 29), Box(28, 30, 1, 1),
         Box(1, 0, 13, 2)]                                   # in 29×31 pixels
NOISE_KEYS = [0, 17, 2**63 - 1, 19, 23, 29]


def erasing(boxes: list[Box], keys: list[int]) -> np.ndarray:
    """What is erased of each image, as in `draw.Draws`."""
    return np.column_stack([boxes, keys])


def floats(count: int, height: int = 29, width: int = 31) -> Tensor:
    """Images with values that no noise has."""
    return 100 + torch.arange(count * 3 * height * width).view(count, 3, height, width).float()


def inside(image: Tensor, box: Box) -> Tensor:
    return image[:, box.top:box.top + box.height, box.left:box.left + box.width]


@pytest.mark.parametrize("fill", ["pixel", "rand", "const"])
def test_the_box_changes_and_nothing_else(fill):
    images = floats(len(BOXES))
    erased = erase(images, erasing(BOXES, NOISE_KEYS), fill)
    assert erased.shape == images.shape and erased.dtype == torch.float32
    for before, after, box in zip(images, erased, BOXES):
        within = torch.zeros(29, 31, dtype=torch.bool)
        within[box.top:box.top + box.height, box.left:box.left + box.width] = True
        assert torch.equal((after != before), within.expand(3, -1, -1))
        assert (after[:, within].abs() < 5).all()
        assert fill != "const" or not after[:, within].any()


@pytest.mark.parametrize("fill", ["pixel", "rand"])
def test_noise_equals_its_definition_in_plain_integers(fill):
    erased = erase(floats(len(BOXES)), erasing(BOXES, NOISE_KEYS), fill)
    for image, box, key in zip(erased, BOXES, NOISE_KEYS):
        values = inside(image, box)
        indices = [word % len(QUANTILES) for word in split_mix_64(key, values.numel() + 3)]
        expected = (QUANTILES[indices[:values.numel()]].view(values.shape) if fill == "pixel"
                    else QUANTILES[indices[:3]].view(3, 1, 1).expand_as(values))
        assert torch.equal(values, expected)
