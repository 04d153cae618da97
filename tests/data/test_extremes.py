"""Any finite values in a recipe and any shape of a decoded image give a view."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import torch

from vitinit.data.augment import rand_augment
from vitinit.data.draw import (CropAndFlip, Draws, Erasing, Operation, RandAugment,
                               stack_draws)
from vitinit.data.images import crop_and_flip

TINY, HUGE = 5e-324, sys.float_info.max
SHAPES = ((1, 1), (1, 5003), (5003, 1), (2, 2), (3, 7))


@pytest.fixture(autouse=True)
def one_thread():
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.mark.parametrize("ratio", [(TINY, TINY), (TINY, HUGE), (HUGE, HUGE), (1.0, 1.0),
                                   (100.0, 100.0), (0.01, 0.01), (0.75, 4 / 3)], ids=str)
@pytest.mark.parametrize("scale", [(TINY, TINY), (TINY, 1.0), (1e-9, 1e-9), (1.0, 1.0)], ids=str)
def test_every_crop_of_every_shape_becomes_a_view(ratio, scale):
    rng = np.random.default_rng(0)
    for (height, width), padding in itertools.product(SHAPES, (0, 5, 2**40)):
        view = CropAndFlip(scale=scale, ratio=ratio, padding=padding).draw(rng, height, width)
        decoded = torch.zeros(3, height, width, dtype=torch.uint8)
        assert 0 < view.box.height <= height + 2 * padding
        assert 0 < view.box.width <= width + 2 * padding
        if view.box.height * view.box.width < 10**6:
            image = crop_and_flip(decoded, view.box, view.flip, (5, 7), view.interpolation)
            assert image.shape == (3, 5, 7)
        box, _ = Erasing(probability=1.0, area=scale, ratio=ratio).draw(rng, height, width)
        assert box.height < height and box.width < width


# In 2 × 2 pixels, the centre crop at a ratio of 9 is 0.2 pixels high, at a ratio of 3 two thirds.
@pytest.mark.parametrize("ratio, box", [(9.0, (0, 0, 1, 2)), (3.0, (0, 0, 1, 2)),
                                        (1 / 9, (0, 0, 2, 1))])
def test_of_a_flat_centre_one_row_is_left(ratio, box):
    view = CropAndFlip(scale=(1.0, 1.0), ratio=(ratio, ratio)).draw(np.random.default_rng(0), 2, 2)
    assert tuple(view.box) == box


def test_a_negative_zero_is_a_deviation_of_zero():
    negative, positive = (RandAugment(magnitude_std=std).draw(np.random.default_rng(0))
                          for std in (-0.0, 0.0))
    for one, other in zip(negative, positive):
        assert np.array_equal(one, other)


@pytest.mark.filterwarnings("error")                 # such as numpy's warnings of overflows
@pytest.mark.parametrize("extent", [-0.0, TINY, 1e10, 1e38, HUGE])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_operations_of_any_extent_leave_an_image_that_its_batch_does_not_change(extent, interpolation):
    rng = np.random.default_rng(1)
    images = torch.from_numpy(rng.integers(0, 256, (15, 3, 9, 11), np.uint8))
    settings = RandAugment(layers=7, probability=1.0, magnitude=10.0, magnitude_std=HUGE,
                           interpolation=interpolation, rotate_degrees=extent, shear_factor=extent,
                           translate_share=extent, enhance_factor=extent)
    draws = stack_draws([Draws(*settings.draw(rng), np.zeros(4, np.int64), np.array(0))
                         for _ in range(15)])
    assert np.isfinite(draws.arguments).all() and len(set(draws.operations.flat)) == 15
    together = rand_augment(images, draws, (0, 1, 2))
    for index in range(15):
        one_draw = Draws(*(part[index:index + 1] for part in draws))
        alone = rand_augment(images[index:index + 1], one_draw, (0, 1, 2))
        assert torch.equal(together[index], alone[0])


@pytest.mark.parametrize("operation", [Operation.Color, Operation.Contrast, Operation.Brightness,
                                       Operation.Sharpness], ids=str)
def test_a_factor_beyond_256_goes_no_further(operation):
    images = torch.from_numpy(np.random.default_rng(2).integers(0, 256, (5, 3, 13, 17), np.uint8))
    column = np.ones((5, 1))
    at_most, exact, beyond = (
        rand_augment(images, Draws((operation * column).astype(np.int64), factor * column, column > 0,
                                   np.zeros((5, 4), np.int64), np.zeros(5, np.int64)), (0, 1, 2))
        for factor in (256.0, 1e4, HUGE))
    assert torch.equal(exact, at_most) and torch.equal(beyond, at_most)
    assert not torch.equal(at_most, images)
