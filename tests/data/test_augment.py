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


def test_normalised_mean_and_one_deviation_are_zero_and_one():
    at_mean = torch.tensor([51, 102, 153], dtype=torch.uint8).view(1, 3, 1, 1)
    std = (0.2, 0.4, 0.1)
    mean = tuple(value / 255 for value in (51, 102, 153))
    assert torch.allclose(normalise(at_mean, mean, std), torch.zeros(1, 3, 1, 1), atol=1e-6)
    mean = tuple(m - s for m, s in zip(mean, std))
    assert torch.allclose(normalise(at_mean, mean, std), torch.ones(1, 3, 1, 1), atol=1e-6)


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


def erased_box(box: Box, key: int, fill: str = "pixel") -> Tensor:
    """The pixels in the box of an image that is erased alone, (3, box.height, box.width)."""
    return inside(erase(floats(1), erasing([box], [key]), fill)[0], box)


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


def test_pixel_noise_is_standard_normal_and_differs_by_value():
    count, box = 41, Box(1, 2, 23, 27)
    images = erase(floats(count), erasing([box] * count, list(range(count))), "pixel")
    values = torch.cat([inside(image, box).flatten() for image in images]).double()
    n = len(values)                                          # 76,383
    assert abs(values.mean()) < 4 / n**0.5
    assert abs(values.square().mean() - 1) < 4 * (2 / n)**0.5
    ranks = torch.special.ndtr(values).sort().values
    steps = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    assert (ranks - steps).abs().max() < 1.95 / n**0.5       # Kolmogorov-Smirnov, one in a thousand
    # Neighbours along every axis, and the same position in two images, are uncorrelated.
    noise = torch.stack([inside(image, box) for image in images]).double()
    for dim in range(4):
        length = noise.shape[dim] - 1
        products = noise.narrow(dim, 0, length) * noise.narrow(dim, 1, length)
        assert abs(products.mean()) < 4 / products.numel()**0.5
    # 65,536 quantiles: a value comes twice in a box of 1863 only by chance.
    assert len(inside(images[0], box).unique()) > 1863 - 100


def test_rand_noise_is_one_number_per_channel_and_differs_between_channels():
    numbers = []
    for key in range(101):
        values = erased_box(Box(3, 5, 7, 11), key, "rand")
        assert (values == values[:, :1, :1]).all()
        numbers.append(values[:, 0, 0])
    assert len(torch.cat(numbers).unique()) >= 303 - 5
    assert abs(torch.cat(numbers).mean()) < 4 / 303**0.5
    assert abs(torch.cat(numbers).square().mean() - 1) < 4 * (2 / 303)**0.5


@pytest.mark.parametrize("fill", ["pixel", "rand"])
def test_noise_depends_on_the_key_alone_and_not_on_the_batch_or_the_position(fill):
    erased = erase(floats(len(BOXES)), erasing(BOXES, NOISE_KEYS), fill)
    for image, box, key in zip(erased, BOXES, NOISE_KEYS):
        if box != NOWHERE:
            moved = Box(29 - box.height, 31 - box.width, box.height, box.width)
            assert torch.equal(inside(image, box), erased_box(box, key, fill))
            assert torch.equal(inside(image, box), erased_box(moved, key, fill))
    other = erased_box(BOXES[0], NOISE_KEYS[0] + 1, fill)
    assert (inside(erased[0], BOXES[0]) == other).double().mean() < 0.02
