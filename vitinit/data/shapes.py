"""`shapes`: an embedded data set, so that the first command needs no download.

Ten classes of simple figures at random place, size, angle and colour on cluttered backgrounds,
32×32 pixels, 5,000 to train on and 1,000 to validate. Image i of a split is a pure function of
(split, i). A figure is a formula: whether the point (u, v), in units of its size, is inside it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..keys import Stream, keyed_generator

SIZE = 32                       # pixels a side
SUPERSAMPLING = 2               # points a pixel side; their mean is the anti-aliased edge
SPLITS = {"train": 5_000, "val": 1_000}
SEED = 0                        # of the data set itself, not of a run
# Each colour channel is uniform on its range, of [0, 1].
GROUND_RANGE, CLUTTER_RANGE, FIGURE_RANGE = (0.0, 0.45), (0.0, 0.7), (0.45, 1.0)
NOISE_STD = 0.03


def _polygon(u: np.ndarray, v: np.ndarray, sides: int) -> np.ndarray:
    """The apothem at which a regular polygon's edge passes through the point (u, v)."""
    angles = 2.0 * np.pi * np.arange(sides) / sides
    return np.max([u * np.cos(angle) + v * np.sin(angle) for angle in angles], axis=0)


FIGURES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "disc": lambda u, v: u**2 + v**2 < 0.85**2,
    "ring": lambda u, v: (u**2 + v**2 < 0.9**2) & (u**2 + v**2 > 0.5**2),
    "half_disc": lambda u, v: ((u + 0.35)**2 + v**2 < 1.0) & (u > -0.35),
    "crescent": lambda u, v: (u**2 + v**2 < 1.0) & ((u - 0.45)**2 + v**2 > 0.75**2),
    "square": lambda u, v: np.maximum(abs(u), abs(v)) < 0.75,
    "frame": lambda u, v: (np.maximum(abs(u), abs(v)) < 0.8) & (np.maximum(abs(u), abs(v)) > 0.42),
    "triangle": lambda u, v: _polygon(u, v, 3) < 0.5,
    "cross": lambda u, v: (np.maximum(abs(u), abs(v)) < 0.95) & (np.minimum(abs(u), abs(v)) < 0.28),
    # A five-pointed star is what at least four of five half-planes have in common.
    "star": lambda u, v: sum((u * np.cos(t) + v * np.sin(t) < 0.38).astype(int)
                             for t in 2.0 * np.pi * np.arange(5) / 5) >= 4,
    "bars": lambda u, v: (abs(v) < 0.9) & (abs(abs(u) - 0.5) < 0.26),
}
CLASSES = list(FIGURES)


def _points() -> tuple[np.ndarray, np.ndarray]:
    """Column and row, in pixels, of the sampling points: two of (SIZE·SUPERSAMPLING)²."""
    axis = (np.arange(SIZE * SUPERSAMPLING, dtype=np.float32) + 0.5) / SUPERSAMPLING
    return np.meshgrid(axis, axis)


def _turned(x: np.ndarray, y: np.ndarray, centre: np.ndarray, angle: float,
            scale: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """The points in the frame of a figure at `centre`, turned by `angle`, `scale` pixels large."""
    x, y = x - centre[0], y - centre[1]
    across, down = (scale, scale) if np.isscalar(scale) else scale
    return ((x * np.cos(angle) + y * np.sin(angle)) / across,
            (y * np.cos(angle) - x * np.sin(angle)) / down)


def _window(centre: np.ndarray, radius: float) -> tuple[slice, slice]:
    """Rows and columns of the sampling points within `radius` pixels of `centre`."""
    column, row = ((max(0, int((c - radius) * SUPERSAMPLING)), int((c + radius) * SUPERSAMPLING) + 1)
                   for c in centre)
    return slice(*row), slice(*column)


def draw_image(rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """One image (3, SIZE, SIZE) uint8 and its class.

    Background: a dark colour ramp. Clutter: a few thin bars and small ellipses in darker colours.
    Figure: one of ten in a lighter colour, 7 to 12 pixels in radius. On top a little noise.
    """
    x, y = _points()
    corner, other = rng.uniform(*GROUND_RANGE, (2, 3))
    across, _ = _turned(x, y, np.full(2, SIZE / 2), rng.uniform(0, 2 * np.pi), SIZE)
    canvas = corner + (other - corner) * np.clip(across + 0.5, 0, 1)[..., None]  # (·, ·, 3)
    for _ in range(rng.integers(4, 10)):
        half = rng.uniform((0.6, 0.6), (6.0, 1.5))                       # half length, half width
        centre = rng.uniform(0, SIZE, 2)
        near = _window(centre, 1.5 * half.max())     # 1.5 > √2: the bar's corner
        u, v = _turned(x[near], y[near], centre, rng.uniform(0, 2 * np.pi), half)
        inside = np.maximum(abs(u), abs(v)) < 1 if rng.random() < 0.5 else u**2 + v**2 < 1
        canvas[near][inside] = rng.uniform(*CLUTTER_RANGE, 3)

    label = int(rng.integers(len(CLASSES)))
    radius = rng.uniform(7.0, 12.0)
    centre = rng.uniform(radius * 0.8, SIZE - radius * 0.8, 2)
    u, v = _turned(x, y, centre, rng.uniform(0, 2 * np.pi), radius)
    canvas[FIGURES[CLASSES[label]](u, v)] = rng.uniform(*FIGURE_RANGE, 3)

    pixels = canvas.reshape(SIZE, SUPERSAMPLING, SIZE, SUPERSAMPLING, 3).mean(axis=(1, 3))
    noisy = pixels + rng.normal(0.0, NOISE_STD, pixels.shape)
    return np.rint(255 * noisy.clip(0, 1)).astype(np.uint8).transpose(2, 0, 1), label


def make_split(split: str) -> tuple[Tensor, np.ndarray]:
    """All images (N, 3, SIZE, SIZE) uint8 and labels (N,) of "train" or "val"; a few seconds."""
    images = np.empty((SPLITS[split], 3, SIZE, SIZE), dtype=np.uint8)
    labels = np.empty(SPLITS[split], dtype=np.int64)
    for index in range(SPLITS[split]):
        rng = keyed_generator(SEED, Stream.SHAPES, list(SPLITS).index(split), index)
        images[index], labels[index] = draw_image(rng)
    return torch.from_numpy(images), labels
