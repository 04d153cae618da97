"""`shapes`: an embedded data set, so that the first command needs no download.

Each image is 32×32 pixels and shows one of ten simple shapes, at a random position, size, angle and
colour, on a cluttered background. There are 5,000 training images and 1,000 validation images.
Image i of a split is a pure function of (split, i). A shape is defined by a formula that says
whether the point (u, v), in units of the shape's radius, is inside it.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy import ndarray
from numpy.random import Generator
from torch import Tensor

from ..base.keys import Purpose, keyed_generator
from .sources import Source

SIZE = 32  # pixels per side of an image
SUPERSAMPLING = 2  # sampling points per side of a pixel; their mean smooths edges
SIZES_OF_SPLITS = {"train": 5_000, "val": 1_000}
SEED = 0  # the seed of the data set itself, which is not that of a run
# Each colour channel is uniform on one of these ranges in [0, 1].
GROUND_RANGE = (0.0, 0.45)
CLUTTER_RANGE = (0.0, 0.7)
SHAPE_RANGE = (0.45, 1.0)
NOISE_STD = 0.03


def from_square(u: ndarray, v: ndarray) -> ndarray:
    """Half the side of the upright square around the centre on whose edge a point lies."""
    return np.maximum(abs(u), abs(v))


def along_rays(u: ndarray, v: ndarray, count: int) -> ndarray:
    """The coordinates of points along each of `count` rays from the centre, (count, …)."""
    angles = 2.0 * np.pi * np.arange(count) / count
    return np.stack([u * np.cos(t) + v * np.sin(t) for t in angles])


SHAPES: dict[str, Callable] = {
    "disc": lambda u, v: u**2 + v**2 < 0.85**2,
    "ring": lambda u, v: (u**2 + v**2 < 0.9**2) & (u**2 + v**2 > 0.5**2),
    "half_disc": lambda u, v: ((u + 0.35) ** 2 + v**2 < 1.0) & (u > -0.35),
    "crescent": lambda u, v: (u**2 + v**2 < 1.0) & ((u - 0.45) ** 2 + v**2 > 0.75**2),
    "square": lambda u, v: from_square(u, v) < 0.75,
    "frame": lambda u, v: (from_square(u, v) < 0.8) & (from_square(u, v) > 0.42),
    # Half of the radius is that of a regular triangle's inscribed circle.
    "triangle": lambda u, v: along_rays(u, v, 3).max(0) < 0.5,
    "cross": lambda u, v: (from_square(u, v) < 0.95) & (np.minimum(abs(u), abs(v)) < 0.28),
    # A five-pointed star consists of the points that lie in at least four of five half-planes.
    "star": lambda u, v: (along_rays(u, v, 5) < 0.38).sum(0) >= 4,
    "bars": lambda u, v: (abs(v) < 0.9) & (abs(abs(u) - 0.5) < 0.26),
}
CLASSES = list(SHAPES)


def _turned(
    x: ndarray, y: ndarray, centre: ndarray, angle: float, scale: ndarray | float
) -> tuple[ndarray, ndarray]:
    """Points in the coordinates of a shape; scale: its radius in pixels, or one along each axis."""
    x = x - centre[0]
    y = y - centre[1]
    u = x * np.cos(angle) + y * np.sin(angle)
    v = y * np.cos(angle) - x * np.sin(angle)
    across, down = np.broadcast_to(scale, 2)
    return u / across, v / down


def _window(centre: ndarray, radius: float) -> tuple[slice, slice]:
    """The rows and columns of the sampling points within `radius` pixels of `centre`, as slices."""
    first = ((centre - radius) * SUPERSAMPLING).astype(int).clip(min=0)
    last = ((centre + radius) * SUPERSAMPLING).astype(int)
    columns, rows = map(slice, first, last + 1)
    return rows, columns


class Drawing(NamedTuple):
    """What is painted; points and lengths are in pixels, colours (3,) in [0, 1]."""

    ground: tuple[ndarray, ndarray, float]  # a gradient's two colours and its angle
    clutter: list[tuple]  # half length and half width, centre, angle, whether a bar, colour
    label: int  # the class of the shape
    radius: float
    centre: ndarray  # (2,), like all points (column, row)
    angle: float
    colour: ndarray


def draw(rng: Generator) -> Drawing:
    """Draw what an image shows, but for its noise."""
    corner, other = rng.uniform(*GROUND_RANGE, (2, 3))
    ground = corner, other, rng.uniform(0, 2 * np.pi)
    clutter = []
    for _ in range(rng.integers(4, 10)):
        half = rng.uniform((0.6, 0.6), (6.0, 1.5))
        centre = rng.uniform(0, SIZE, 2)
        angle = rng.uniform(0, 2 * np.pi)
        is_bar = rng.random() < 0.5
        clutter.append((half, centre, angle, is_bar, rng.uniform(*CLUTTER_RANGE, 3)))
    label = int(rng.integers(len(CLASSES)))
    radius = rng.uniform(7.0, 12.0)
    centre = rng.uniform(radius * 0.8, SIZE - radius * 0.8, 2)
    angle = rng.uniform(0, 2 * np.pi)
    colour = rng.uniform(*SHAPE_RANGE, 3)
    return Drawing(ground, clutter, label, radius, centre, angle, colour)


def paint(drawing: Drawing, rng: Generator) -> ndarray:
    """The image, (3, SIZE, SIZE) uint8: on a dark gradient a few thin bars and small ellipses in
    rather dark colours, then the shape in a lighter colour, then noise, which is drawn here.
    """
    axis = (np.arange(SIZE * SUPERSAMPLING, dtype=np.float32) + 0.5) / SUPERSAMPLING
    x, y = np.meshgrid(axis, axis)  # of the sampling points, in pixels: (64, 64)
    corner, other, angle = drawing.ground
    across, _ = _turned(x, y, np.full(2, SIZE / 2), angle, SIZE)
    canvas = corner + (other - corner) * np.clip(across + 0.5, 0, 1)[..., None]  # (·, ·, 3)
    for half, centre, angle, is_bar, colour in drawing.clutter:
        near = _window(centre, 1.5 * half.max())  # 1.5 > √2, so a bar's corners are included
        u, v = _turned(x[near], y[near], centre, angle, half)
        if is_bar:
            inside = from_square(u, v) < 1
        else:
            inside = u**2 + v**2 < 1
        canvas[near][inside] = colour
    u, v = _turned(x, y, drawing.centre, drawing.angle, drawing.radius)
    contains = SHAPES[CLASSES[drawing.label]]
    canvas[contains(u, v)] = drawing.colour

    pixels = canvas.reshape(SIZE, SUPERSAMPLING, SIZE, SUPERSAMPLING, 3).mean(axis=(1, 3))
    noisy = pixels + rng.normal(0.0, NOISE_STD, pixels.shape)
    levels = np.rint(255 * noisy.clip(0, 1))
    return levels.astype(np.uint8).transpose(2, 0, 1)


def draw_image(rng: Generator) -> tuple[ndarray, int]:
    """Draw and paint an image, (3, SIZE, SIZE) uint8, and return it with its class."""
    drawing = draw(rng)
    return paint(drawing, rng), drawing.label


def label_of(split: int, index: int) -> int:
    """The class of image `index` of the split of this number in SPLITS."""
    return draw(keyed_generator(SEED, Purpose.SHAPES, split, index)).label


@cache
def image_of(split: int, index: int) -> Tensor:
    """The image, (3, SIZE, SIZE) uint8: painted when it is first read, and kept."""
    image, _ = draw_image(keyed_generator(SEED, Purpose.SHAPES, split, index))
    return torch.from_numpy(image)


class Shapes(Source):
    """A split, "train" or "val"."""

    def __init__(self, split: str) -> None:
        self.split = list(SIZES_OF_SPLITS).index(split)
        count = SIZES_OF_SPLITS[split]
        labels = [label_of(self.split, index) for index in range(count)]
        super().__init__(torch.arange(count), labels, CLASSES)

    def pixels(self, index: int) -> Tensor:
        return image_of(self.split, int(self.stored[index]))
