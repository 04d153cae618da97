"""All random draws of the training stream, keyed by (seed, epoch, index).

A sample's draws depend on nothing but its key: not on the worker, the process, the position in the
batch or how often the run was resumed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..keys import Stream, keyed_generator
from .images import Box

CROP_ATTEMPTS = 10              # as in torchvision and timm, before the centre is taken


class SampleKey(NamedTuple):
    """One view of one image: which epoch, which image."""

    epoch: int
    index: int


class View(NamedTuple):
    """What was drawn for one sample."""

    box: Box
    flip: bool


def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order in which epoch `epoch` goes through `count` images."""
    return keyed_generator(seed, Stream.ORDER, epoch).permutation(count)


def draw_view(key: SampleKey, height: int, width: int, *, seed: int,
              scale: tuple[float, float], ratio: tuple[float, float], padding: int,
              flip: float) -> View:
    """The crop and flip of one sample whose picture is height × width pixels."""
    rng = keyed_generator(seed, Stream.CROP_AND_FLIP, key.epoch, key.index)
    box = draw_crop(rng, height, width, scale=scale, ratio=ratio, padding=padding)
    return View(box, bool(rng.random() < flip))


def draw_crop(rng: np.random.Generator, height: int, width: int, *, scale: tuple[float, float],
              ratio: tuple[float, float], padding: int) -> Box:
    """A random resized crop (Szegedy et al., arXiv 1409.4842; torchvision's and timm's version).

    Its area is a uniform share of the picture's, its width over height log-uniform, its place
    uniform on the picture with `padding` pixels round it. After ten boxes that do not fit: the
    centre of the picture, at the nearest ratio allowed. scale = ratio = (1, 1) on a square picture
    is a random shift by up to `padding` pixels.
    """
    log_ratio = np.log(ratio)
    for _ in range(CROP_ATTEMPTS):
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(*log_ratio))
        box_width = round(math.sqrt(area * aspect))
        box_height = round(math.sqrt(area / aspect))
        if 0 < box_width <= width + 2 * padding and 0 < box_height <= height + 2 * padding:
            top = int(rng.integers(-padding, height + padding - box_height, endpoint=True))
            left = int(rng.integers(-padding, width + padding - box_width, endpoint=True))
            return Box(top, left, box_height, box_width)
    aspect = min(max(width / height, ratio[0]), ratio[1])
    box_height = min(height, round(width / aspect))
    box_width = min(width, round(height * aspect))
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)
