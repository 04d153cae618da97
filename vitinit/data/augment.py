"""Pure batched functions on (B, 3, H, W), on whatever device the batch is.

    rand_augment   uint8 → uint8     each image through its own operations
    normalise      uint8 → float32
    erase          float32 → float32

Everything random was drawn before (draw.py); here arguments go in, one per image. An image's result
does not depend, to the bit, on the batch it is in or on the device. Each function is a plan made on
the host and what carries it out, so that the plans of a whole micro-batch travel in one copy.
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
    """(B, 3, H, W) uint8 → the same: every image through its operations, in order.

    draws: on the host, B of them. fill: the colour that geometric operations bring in, 0 to 255.
    """
    plan = tuple(plan_rand_augment(draws, images.shape[2:], fill, passes or passes_on(images.device)))
    return augmented(images, put(plan, images.device))


def augmented(images: Tensor, plan: tuple[Pass, ...]) -> Tensor:
    """Images as they come out of a plan of RandAugment that is on their device."""
    if not plan:
        return images.contiguous()
    images = images.clone(memory_format=torch.contiguous_format)
    for each in plan:
        each(images)
    return images


def plan_rand_augment(draws: Draws, size: tuple[int, int], fill: Sequence[int], passes: Passes
                      ) -> Iterator[Pass]:
    """Layer by layer, each with its passes of levels, blends and geometric operations."""
    for codes, arguments, bicubic in zip(draws.operations.T, draws.arguments.T, draws.bicubic.T):
        for rows in parts(_sorted_rows(codes, LEVEL_OPERATIONS), size, passes):
            yield Pass(rows, map_levels, level_arguments(codes[rows], arguments[rows]))
        for rows in parts(_sorted_rows(codes, BLENDS), size, passes):
            factors = blend_factors(arguments[rows])[:, None, None, None]
            yield Pass(rows, color_or_sharpness, (int((codes[rows] == BLENDS[0]).sum()), factors))
        yield from _plan_geometric(codes, arguments, bicubic, size, fill, passes)


def _sorted_rows(codes: np.ndarray, operations: Sequence[Operation]) -> np.ndarray:
    """Which images go through one of the operations, sorted as these are."""
    order = np.full(len(Operation), len(operations))
    order[list(operations)] = range(len(operations))
    rows = np.argsort(order[codes], kind="stable")
    return rows[:int(np.isin(codes, operations).sum())]


def _plan_geometric(codes: np.ndarray, arguments: np.ndarray, bicubic: np.ndarray,
                    size: tuple[int, int], fill: Sequence[int], passes: Passes) -> Iterator[Pass]:
    """In one pass whatever the axes, or along the axes of each operation alone."""
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
    """(B, 3, H, W) uint8 → float32: (value / 255 - mean) / std by channel.

    mean, std: three numbers each. device: the images'.
    """

    def __init__(self, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor,
                 device: torch.device) -> None:
        mean, std = (torch.as_tensor(values, dtype=torch.float64, device=device).view(3, 1, 1)
                     for values in (mean, std))
        # One product and one sum: devices divide by a number in different ways.
        self.scale, self.shift = (1.0 / (255.0 * std)).float(), (mean / std).float()

    def __call__(self, images: Tensor) -> Tensor:
        return (images * self.scale).sub_(self.shift)


def normalise(images: Tensor, mean: Sequence[float] | Tensor,
              std: Sequence[float] | Tensor) -> Tensor:
    """The same for once."""
    return Normalise(mean, std, images.device)(images)


def normal_quantiles(count: int = 2**16) -> Tensor:
    """The quantiles (i + ½) / count of N(0, 1): (count,) float32, from -4.3 to 4.3."""
    shares = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return torch.special.ndtri(shares).float()


def hashed(keys: Tensor | int, counters: Tensor) -> Tensor:
    """SplitMix64 (Steele et al., OOPSLA 2014): 64 random bits for each key and counter, int64.

    The counter-th output of the generator that starts from the key. Multiplications wrap, as
    int64's do; shifts are those of unsigned numbers.
    """
    def shifted(bits: Tensor, by: int) -> Tensor:
        return (bits >> by) & ((1 << (64 - by)) - 1)
    bits = keys + (counters + 1) * _signed(0x9E3779B97F4A7C15)
    bits = (bits ^ shifted(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ shifted(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ shifted(bits, 31)


def _signed(word: int) -> int:
    """An unsigned 64-bit constant as the int64 with the same bits."""
    return word - 2**64 if word >= 2**63 else word


Fill = Literal["pixel", "rand", "const"]


def erase(images: Tensor, draws: Draws, fill: Fill, quantiles: Tensor,
          passes: Passes | None = None) -> Tensor:
    """Fill every image's box in (B, 3, H, W) float32, normalised.

    draws: on the host. quantiles: those of N(0, 1) on the images' device. Noise is looked up in
    them by a hash of the image's key and the place in the box (channel, row, column), so that it is
    the same to the bit on every device.
    """
    erased = images.clone(memory_format=torch.contiguous_format)
    plan = plan_erasing(draws.erase_boxes, draws.noise_keys, images.shape[2:],
                        passes or passes_on(images.device))
    return put(plan, images.device)(erased, fill, quantiles)


def plan_erasing(boxes: np.ndarray, keys: np.ndarray, size: tuple[int, int], passes: Passes) -> Call:
    """A call that fills the boxes (B, 4), where their height is not 0, in place: by keys (B,)."""
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
    """boxes: (row, top, left, height, width, key) each."""
    for row, top, left, height, width, key in boxes:
        values = noise(key, torch.arange(3).view(3, 1, 1),
                       torch.arange(3 * height * width).view(3, height, width), fill, quantiles)
        images[row, :, top:top + height, left:left + width] = values
    return images


def fill_at_once(images: Tensor, fill: Fill, quantiles: Tensor, sizes: Tensor, count: int,
                 table: Tensor) -> Tensor:
    """The `count` values of all n boxes one after another, of which `sizes`, (n,), are each box'.

    table: (n, 5) int64, of each box the first of these values, its corner among all values of the
    images, the pixels it has, its width, its key.
    """
    if not count:
        return images
    device, area = images.device, images.shape[2] * images.shape[3]
    box = torch.repeat_interleave(sizes, output_size=count)              # (count,), each value's box
    starts, corners, pixels, widths, keys = table.index_select(0, box).unbind(1)
    place = torch.arange(count, device=device) - starts                  # in their box
    channel, within = place // pixels, place % pixels
    index = channel * area + within // widths * images.shape[3] + within % widths + corners
    images.view(-1)[index] = noise(keys, channel, place, fill, quantiles)
    return images


def noise(keys: Tensor | int, channels: Tensor, places: Tensor, fill: Fill, quantiles: Tensor
          ) -> Tensor:
    """What stands in a box at these places, which are in these channels."""
    if fill == "const":
        return torch.zeros((), device=quantiles.device)
    bits = hashed(keys, channels if fill == "rand" else places)
    return quantiles[bits & (len(quantiles) - 1)]
