"""Normalisation and random erasing of a batch (B, 3, H, W), on the batch's own device.

The result for an image is the same, bit for bit, whatever batch it is in and whatever the device.
All random numbers were drawn before (draw.py) and come in as arguments, one per image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


# ---------------------------------------------------------------------------------------------
# Normalising
# ---------------------------------------------------------------------------------------------


class Normalise:
    """Map (B, 3, H, W) uint8 to float32: (value / 255 - mean) / std, per channel.

    mean, std: three numbers each, of values in [0, 1]. device: that of the images.
    """

    def __init__(self, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor,
                 device: torch.device) -> None:
        mean, std = (torch.as_tensor(values, dtype=torch.float64, device=device).view(3, 1, 1)
                     for values in (mean, std))
        # Written as one product and one difference, because devices divide in different ways.
        self.scale, self.shift = (1.0 / (255.0 * std)).float(), (mean / std).float()

    def __call__(self, images: Tensor) -> Tensor:
        return (images * self.scale).sub_(self.shift)


def normalise(images: Tensor, mean: Sequence[float] | Tensor,
              std: Sequence[float] | Tensor) -> Tensor:
    """Normalise one batch; see `Normalise`, which is cheaper for many."""
    return Normalise(mean, std, images.device)(images)


# ---------------------------------------------------------------------------------------------
# Erasing
# ---------------------------------------------------------------------------------------------


def normal_quantiles(count: int = 2**16) -> Tensor:
    """The quantiles of N(0, 1) at (i + ½) / count: (count,) float32, by default from -4.3 to 4.3."""
    shares = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return torch.special.ndtri(shares).float()


def hashed(keys: Tensor | int, counters: Tensor) -> Tensor:
    """64 random bits per pair of key and counter, as int64: SplitMix64 (Steele et al., OOPSLA 2014).

    The result is output number `counter` of the generator whose seed is `key`. Products wrap
    around, as is usual for int64, and shifts to the right fill with zeros, as for unsigned
    integers.
    """
    def shifted(bits: Tensor, by: int) -> Tensor:
        return (bits >> by) & ((1 << (64 - by)) - 1)
    # The constants 0x9E37…, 0xBF58… and 0x94D0… of the paper as int64, less 2^64.
    bits = keys + (counters + 1) * (0x9E3779B97F4A7C15 - 2**64)
    bits = (bits ^ shifted(bits, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    bits = (bits ^ shifted(bits, 27)) * (0x94D049BB133111EB - 2**64)
    return bits ^ shifted(bits, 31)


Fill = Literal["pixel", "rand", "const"]


class ErasedBoxes(NamedTuple):
    """The boxes that are erased of a batch, as a list of all their values; `upload` moves the arrays.

    The columns of `table` are, for each of n boxes: the index of its first value in the list, the
    index of its top left corner in the flattened images, its number of pixels, its width and the
    key of its noise.
    """

    boxes: list[list[int]]      # row in the batch, top, left, height, width and key, on the host
    count: int                  # how many values all boxes have
    sizes: np.ndarray           # (n,) int64: how many values (3 · height · width) each has
    table: np.ndarray           # (n, 5) int64


def erased_boxes(erased: np.ndarray, size: tuple[int, int]) -> ErasedBoxes:
    """List the boxes of images of `size` = (height, width); erased: (B, 5), as in `draw.Draws`."""
    rows = np.flatnonzero(erased[:, 2])
    boxes = np.column_stack([rows, erased[rows]])
    _, tops, lefts, heights, widths, keys = boxes.T
    sizes = 3 * heights * widths
    corners = (3 * rows * size[0] + tops) * size[1] + lefts
    table = np.stack([np.cumsum(sizes) - sizes, corners, heights * widths, widths, keys], 1)
    return ErasedBoxes(boxes.tolist(), int(sizes.sum()), sizes, table)


def erase(images: Tensor, boxes: ErasedBoxes, fill: Fill, quantiles: Tensor, *, at_once: bool
          ) -> Tensor:
    """Fill each image's erased box, in place; images: (B, 3, H, W) float32, normalised.

    fill: noise per value, noise per channel, or zeros. quantiles: `normal_quantiles`, on the
    images' device. Noise is not drawn by a generator of the device. It is looked up among the
    quantiles by a hash of the image's noise key and the position in the box (channel, row, column),
    so that it is the same, bit for bit, on every device.
    at_once: fill all boxes as one list, which takes fewest launches; else one after the other.
    """
    if at_once and boxes.count:
        area, width = images.shape[2] * images.shape[3], images.shape[3]
        box = torch.repeat_interleave(boxes.sizes, output_size=boxes.count)     # each value's box
        starts, corners, pixels, widths, keys = boxes.table.index_select(0, box).unbind(1)
        position = torch.arange(boxes.count, device=images.device) - starts     # in its box
        channel, pixel = position // pixels, position % pixels
        index = channel * area + pixel // widths * width + pixel % widths + corners
        images.view(-1)[index] = noise(keys, channel, position, fill, quantiles)
    elif not at_once:
        for row, top, left, height, width, key in boxes.boxes:
            images[row, :, top:top + height, left:left + width] = noise(
                key, torch.arange(3).view(3, 1, 1),
                torch.arange(3 * height * width).view(3, height, width), fill, quantiles)
    return images


def noise(keys: Tensor | int, channels: Tensor, positions: Tensor, fill: Fill, quantiles: Tensor
          ) -> Tensor:
    """The values that fill a box at these positions, counted from 0 over (channel, row, column).

    channels: the channel of each position, which decides the value where fill is "rand".
    """
    if fill == "const":
        return torch.zeros((), device=quantiles.device)
    bits = hashed(keys, channels if fill == "rand" else positions)
    return quantiles[bits & (len(quantiles) - 1)]
