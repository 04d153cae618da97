"""Any finite values in a recipe and any shape of a decoded image give a view."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from deit import AUGMENT, RAND_AUGMENT, augmented, noisy_batch, random_operations
from vitinit.data.draw import draw_erasing, draw_view
from vitinit.data.images import crop_and_flip
from vitinit.data.rand_augment import Operation

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
        settings = replace(AUGMENT, crop_scale=scale, crop_ratio=ratio, crop_padding=padding,
                           erase_probability=1.0, erase_area=scale, erase_ratio=ratio)
        view = draw_view(rng, settings, height, width)
        decoded = torch.zeros(3, height, width, dtype=torch.uint8)
        assert 0 < view.box.height <= height + 2 * padding
        assert 0 < view.box.width <= width + 2 * padding
        if view.box.height * view.box.width < 10**6:
            image = crop_and_flip(decoded, view.box, view.flip, (5, 7), view.interpolation)
            assert image.shape == (3, 5, 7)
        box, _ = draw_erasing(rng, settings, height, width)
        assert box.height < height and box.width < width


# In 2 × 2 pixels, the centre crop at a ratio of 9 is 0.2 pixels high, at a ratio of 3 two thirds.
@pytest.mark.parametrize("ratio, box", [(9.0, (0, 0, 1, 2)), (3.0, (0, 0, 1, 2)),
                                        (1 / 9, (0, 0, 2, 1))])
def test_of_a_flat_centre_one_row_is_left(ratio, box):
    settings = replace(AUGMENT, crop_scale=(1.0, 1.0), crop_ratio=(ratio, ratio))
    view = draw_view(np.random.default_rng(0), settings, 2, 2)
    assert tuple(view.box) == box


@pytest.mark.filterwarnings("error")                 # such as numpy's warnings of overflows
@pytest.mark.parametrize("extent", [-0.0, TINY, 1e10, 1e38, HUGE])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_operations_of_any_extent_leave_an_image_that_its_batch_does_not_change(extent, interpolation):
    images = noisy_batch(15, 9, 11)
    settings = replace(RAND_AUGMENT, layers=7, probability=1.0, magnitude=10.0, magnitude_std=HUGE,
                       interpolation=interpolation, rotate_degrees=extent, shear_factor=extent,
                       translate_share=extent, enhance_factor=extent)
    drawn = random_operations(15, settings, seed=1)
    assert np.isfinite(drawn).all() and len(set(drawn[..., 0].flat)) == 15
    together = augmented(images, drawn)
    assert torch.equal(augmented(images, drawn, few_launches=True), together)
    for index in range(15):
        alone = augmented(images[index:index + 1], drawn[index:index + 1])[0]
        assert torch.equal(together[index], alone)


def test_a_factor_beyond_256_goes_no_further():
    images = noisy_batch(4, 13, 17)
    codes = [Operation.Color, Operation.Contrast, Operation.Brightness, Operation.Sharpness]
    at_most, exact, beyond = (augmented(images, np.array([[(code, factor, 1)] for code in codes]))
                              for factor in (256.0, 1e4, HUGE))
    assert torch.equal(exact, at_most) and torch.equal(beyond, at_most)
    assert not (at_most == images).flatten(1).all(1).any()
