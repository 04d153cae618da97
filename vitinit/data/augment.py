"""RandAugment, normalisation and random erasing of a batch (B, 3, H, W), on the batch's own device.

    rand_augment   uint8 → uint8     each image goes through its own operations
    normalise      uint8 → float32
    erase          float32 → float32

These are pure functions. All random numbers were drawn before (draw.py) and come in as arguments,
one per image. The result for an image is the same, bit for bit, whatever batch it is in and
whatever the device. `rand_augment` and `erase` work in two parts: the host makes a plan (`plan_…`),
and a second function carries it out on the device. Training uses the two parts separately, so that
all plans of a micro-batch are copied to the device together (to_device.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .draw import Draws, Operation
from .operations import (BLENDS, GEOMETRIC, LEVEL_OPERATIONS, affine, affine_matrix, blend_factors,
                         color_or_sharpness, image_bounds, level_arguments, map_levels)
from .passes import Call, Pass, Passes, parts, passes_on, put

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


# ---------------------------------------------------------------------------------------------
# RandAugment
# ---------------------------------------------------------------------------------------------


def rand_augment(images: Tensor, draws: Draws, fill: Sequence[int], passes: Passes | None = None
                 ) -> Tensor:
    """Apply to each image of (B, 3, H, W) uint8 the operations drawn for it, in order.

    draws: those of the B images, on the host. fill: the colour (three values, 0 to 255) of pixels
    that a geometric operation brings in from outside the image. Returns a new tensor (B, 3, H, W)
    uint8.
    """
    plan = tuple(plan_rand_augment(draws, images.shape[2:], fill, passes or passes_on(images.device)))
    return augmented(images, put(plan, images.device))


def augmented(images: Tensor, plan: tuple[Pass, ...]) -> Tensor:
    """Carry out a plan of RandAugment, whose arrays are on the images' device; returns new images."""
    if not plan:
        return images.contiguous()
    images = images.clone(memory_format=torch.contiguous_format)
    for each in plan:
        each(images)
    return images


def plan_rand_augment(draws: Draws, size: tuple[int, int], fill: Sequence[int], passes: Passes
                      ) -> Iterator[Pass]:
    """Yield the passes of RandAugment, layer by layer; `draws` are those of the whole batch.

    Within a layer come first the operations on levels, then the blends, then the geometric
    operations (see operations.py). Each image goes through at most one operation per layer, so
    this order does not matter.
    """
    for codes, arguments, bicubic in zip(draws.operations.T, draws.arguments.T, draws.bicubic.T):
        for rows in parts(_sorted_rows(codes, LEVEL_OPERATIONS), size, passes):
            yield Pass(rows, map_levels, level_arguments(codes[rows], arguments[rows]))
        for rows in parts(_sorted_rows(codes, BLENDS), size, passes):
            factors = blend_factors(arguments[rows])[:, None, None, None]
            yield Pass(rows, color_or_sharpness, (int((codes[rows] == BLENDS[0]).sum()), factors))
        yield from _plan_geometric(codes, arguments, bicubic, size, fill, passes)


def _sorted_rows(codes: np.ndarray, operations: Sequence[Operation]) -> np.ndarray:
    """The images that go through one of `operations`, sorted in the order of `operations`.

    codes: (B,), each image's operation. Returns rows of the batch, (n,).
    """
    order = np.full(len(Operation), len(operations))
    order[list(operations)] = range(len(operations))
    rows = np.argsort(order[codes], kind="stable")
    return rows[:int(np.isin(codes, operations).sum())]


def _plan_geometric(codes: np.ndarray, arguments: np.ndarray, bicubic: np.ndarray,
                    size: tuple[int, int], fill: Sequence[int], passes: Passes) -> Iterator[Pass]:
    """Yield the passes of one layer's geometric operations.

    With `passes.at_once` all of them go through `affine` together. Otherwise they are grouped by
    the axes along which they move pixels, because moving along one axis alone takes less work.
    """
    outside = np.array(fill, np.uint8)[:, None, None]
    groups = {"xy": sum(GEOMETRIC.values(), ())} if passes.at_once else GEOMETRIC
    for axes, operations in groups.items():
        chosen = np.flatnonzero(np.isin(codes, operations))
        chosen = chosen[np.argsort(bicubic[chosen], kind="stable")]
        for rows in parts(chosen, size, passes):
            matrices = np.stack([affine_matrix(Operation(codes[row]), arguments[row], *size)
                                 for row in rows])
            yield Pass(rows, partial(affine, axes=axes, at_once=passes.at_once),
                       (int((~bicubic[rows]).sum()), matrices, image_bounds(*size), outside))


# ---------------------------------------------------------------------------------------------
# Normalising and erasing
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
    bits = keys + (counters + 1) * _signed(0x9E3779B97F4A7C15)
    bits = (bits ^ shifted(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ shifted(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ shifted(bits, 31)


def _signed(word: int) -> int:
    """The int64 with the same bits as an unsigned 64-bit integer."""
    return word - 2**64 if word >= 2**63 else word


Fill = Literal["pixel", "rand", "const"]


def erase(images: Tensor, draws: Draws, fill: Fill, quantiles: Tensor,
          passes: Passes | None = None) -> Tensor:
    """Fill each image's erased box; returns new images (B, 3, H, W) float32.

    images: normalised, float32. draws: those of the B images, on the host. fill: what the boxes are
    filled with, see `draw.Erasing`. quantiles: `normal_quantiles`, on the images' device. Noise is
    not drawn by a generator of the device. It is looked up among the quantiles by a hash of the
    image's noise key and the position in the box (channel, row, column), so that it is the same,
    bit for bit, on every device.
    """
    erased = images.clone(memory_format=torch.contiguous_format)
    plan = plan_erasing(draws.erase_boxes, draws.noise_keys, images.shape[2:],
                        passes or passes_on(images.device))
    return put(plan, images.device)(erased, fill, quantiles)


def plan_erasing(boxes: np.ndarray, keys: np.ndarray, size: tuple[int, int], passes: Passes) -> Call:
    """Plan a call that fills, in place, the boxes (B, 4) whose height is not 0.

    keys: (B,), the noise key of each image. size: (height, width) of the images. The call takes the
    images, the fill and the quantiles.
    """
    rows = np.flatnonzero(boxes[:, 2])
    tops, lefts, heights, widths = boxes[rows].T
    if not passes.at_once:
        return Call(fill_each, tuple(zip(*(values.tolist() for values in (
            rows, tops, lefts, heights, widths, keys[rows])))))
    sizes = 3 * heights * widths
    corners = (3 * rows * size[0] + tops) * size[1] + lefts
    table = np.stack([np.cumsum(sizes) - sizes, corners, heights * widths, widths, keys[rows]], 1)
    return Call(fill_at_once, (sizes, int(sizes.sum()), table))


def fill_each(images: Tensor, fill: Fill, quantiles: Tensor, *boxes: tuple[int, ...]) -> Tensor:
    """Fill one box after the other, in place. boxes: (row, top, left, height, width, key) each."""
    for row, top, left, height, width, key in boxes:
        values = noise(key, torch.arange(3).view(3, 1, 1),
                       torch.arange(3 * height * width).view(3, height, width), fill, quantiles)
        images[row, :, top:top + height, left:left + width] = values
    return images


def fill_at_once(images: Tensor, fill: Fill, quantiles: Tensor, sizes: Tensor, count: int,
                 table: Tensor) -> Tensor:
    """Fill all n boxes at once, in place, as one list of all their values.

    sizes: (n,), how many values (3 · height · width) each box has. count: their sum.
    table: (n, 5) int64. The columns are, for each box: the index of its first value in the list,
    the index of its top left corner in the flattened images, its number of pixels, its width and
    its noise key.
    """
    if not count:
        return images
    device, area = images.device, images.shape[2] * images.shape[3]
    box = torch.repeat_interleave(sizes, output_size=count)              # (count,), each value's box
    starts, corners, pixels, widths, keys = table.index_select(0, box).unbind(1)
    position = torch.arange(count, device=device) - starts               # of each value, in its box
    channel, pixel = position // pixels, position % pixels
    index = channel * area + pixel // widths * images.shape[3] + pixel % widths + corners
    images.view(-1)[index] = noise(keys, channel, position, fill, quantiles)
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
