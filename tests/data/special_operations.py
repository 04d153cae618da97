"""RandAugment with a function for each of its operations: the reference for the passes that it takes.

Slower and plainer: each operation by its own formula, as Pillow has it, on batches (n, 3, H, W) uint8
with one argument per image. The package's passes must equal it to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from vitinit.data.draw import Draws, Operation
from vitinit.data.operations import affine_matrix

LEVELS = 256


# ---------------------------------------------------------------------------------------------
# Point operations: images (n, 3, H, W) uint8, argument (n, 1, 1, 1) float64
# ---------------------------------------------------------------------------------------------


def look_up(tables: Tensor, images: Tensor) -> Tensor:
    """Every value v of channel c becomes tables[n, c, v]; tables: (n, 3, 256)."""
    values = rearrange(images, "n c h w -> n c (h w)").long()
    return tables.to(torch.uint8).gather(2, values).view(images.shape)


def auto_contrast(images: Tensor, _: Tensor) -> Tensor:
    """Stretch every channel so that its darkest value becomes 0 and its lightest 255."""
    low, high = (rearrange(bound, "n c -> n c 1").double()
                 for bound in (images.amin((2, 3)), images.amax((2, 3))))
    levels = torch.arange(LEVELS, device=images.device, dtype=torch.float64)
    scale = torch.full_like(low, 255.0) / (high - low)                   # (n, 3, 1)
    stretched = (levels * scale + -low * scale).clamp(0, 255)
    return look_up(torch.where(high > low, stretched, levels), images)


def equalize(images: Tensor, _: Tensor) -> Tensor:
    """Spread every channel's values so that each range of levels holds as many pixels."""
    values = rearrange(images, "n c h w -> n c (h w)").long()
    histogram = torch.zeros(*values.shape[:2], LEVELS, dtype=torch.int64, device=images.device)
    histogram.scatter_add_(2, values, torch.ones_like(values))           # (n, 3, 256)
    # Pixels a level, were they spread evenly; those of the lightest value do not count.
    lightest = histogram.gather(2, values.amax(2, keepdim=True))
    step = (values.shape[2] - lightest) // 255                           # (n, 3, 1)
    below = histogram.cumsum(2) - histogram
    spread = (below + step // 2) // step.clamp(min=1)
    levels = torch.arange(LEVELS, device=images.device)
    return look_up(torch.where(step > 0, spread.clamp(max=255), levels), images)


def invert(images: Tensor, _: Tensor) -> Tensor:
    return 255 - images


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest `bits` bits; of 0 bits nothing is left, which is black."""
    mask = LEVELS - 2 ** (8 - bits)
    return images & mask.to(torch.uint8)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert what is at `threshold` or above."""
    return torch.where(images < threshold.to(torch.int16), images, 255 - images)


def solarize_add(images: Tensor, addend: Tensor) -> Tensor:
    """Add to pixels below 128."""
    added = (images.to(torch.int16) + addend.to(torch.int16)).clamp(max=255).to(torch.uint8)
    return torch.where(images < 128, added, images)


# ---------------------------------------------------------------------------------------------
# Blends: away from (factor 1 .. 2) or towards (0 .. 1) a plainer version of the image
# ---------------------------------------------------------------------------------------------


def blend(plain: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """plain + factor · (images − plain), clipped and truncated to uint8 as Pillow does.

    plain: whole numbers, so that a factor of 256 goes as far as any larger one.
    """
    plain = plain.float()
    factor = factor.clamp(max=256.0).float()
    return (plain + factor * (images.float() - plain)).clamp(0, 255).to(torch.uint8)


def grey(images: Tensor) -> Tensor:
    """ITU-R 601 luma as Pillow's convert("L") rounds it: (n, 1, H, W) int32."""
    red, green, blue = images.to(torch.int32).split(1, dim=1)
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


def color(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image in grey."""
    return blend(grey(images), images, factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image's mean grey."""
    count = images.shape[2] * images.shape[3]
    total = grey(images).sum((1, 2, 3), keepdim=True)                    # (n, 1, 1, 1) int64
    return blend((2 * total + count) // (2 * count), images, factor)     # rounded to the nearest


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with black."""
    return blend(torch.zeros_like(images[:, :1]), images, factor)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image smoothed by a 3×3 kernel, 5 in the centre and 1 around it, of 13."""
    wide = images.to(torch.int32)
    rows = wide[:, :, :-2] + wide[:, :, 1:-1] + wide[:, :, 2:]           # (n, 3, H - 2, W)
    box = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]               # (n, 3, H - 2, W - 2)
    smooth = images.clone()                          # the border stays as it is
    if box.numel():
        weighted = box + 4 * wide[:, :, 1:-1, 1:-1]
        smooth[:, :, 1:-1, 1:-1] = ((2 * weighted + 13) // 26).to(torch.uint8)   # nearest of /13
    return blend(smooth, images, factor)


# ---------------------------------------------------------------------------------------------
# Geometric operations: one affine map an image
# ---------------------------------------------------------------------------------------------


def linear(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """Between two values, t from the first to the second."""
    return a + (b - a) * t


def cubic(a: Tensor, b: Tensor, c: Tensor, d: Tensor, t: Tensor) -> Tensor:
    """Cubic convolution (Keys, 1981) with slope -1, as Pillow's transforms use it: t from b to c."""
    return b + t * ((c - a) + t * ((2.0 * (a - b) + c - d) + t * (b - a + d - c)))


def affine(images: Tensor, matrices: Tensor, *, bicubic: bool, fill: Sequence[int],
           axes: Literal["x", "y", "xy"] = "xy") -> Tensor:
    """Each image (n, 3, H, W) uint8 seen through its matrix (n, 2, 3) float64.

    A pixel whose centre falls outside of the old image gets `fill`. Otherwise neighbours beyond the
    edge repeat the edge, as in Pillow. axes: along which pixels move; where they stay on their row
    (column), that row (column) alone need be read.
    """
    height, width = images.shape[2:]
    device = images.device
    x = torch.arange(width, device=device, dtype=torch.float64) + 0.5    # pixel centres
    y = torch.arange(height, device=device, dtype=torch.float64)[:, None] + 0.5
    (a, b, c), (d, e, f) = (row.unbind(1) for row in matrices[..., None, None].unbind(1))
    old_x, old_y = a * x + b * y + c, d * x + e * y + f                  # (n, H, W) each
    inside = (old_x >= 0) & (old_x < width) & (old_y >= 0) & (old_y < height)
    old_x, old_y = old_x - 0.5, old_y - 0.5          # in units of whole pixels from the first
    left, top = old_x.floor(), old_y.floor()
    across, down = ((old - low).float()[:, None] for old, low in ((old_x, left), (old_y, top)))
    left, top = left.long(), top.long()

    # One integer a pixel, so that one look-up fetches all three channels.
    red, green, blue = images.int().unbind(1)
    packed = rearrange(red | green << 8 | blue << 16, "n h w -> n (h w)")
    shifts = torch.tensor([0, 8, 16], dtype=torch.int32).to(device, non_blocking=True).view(3, 1, 1)
    between, taps = (cubic, (-1, 0, 1, 2)) if bicubic else (linear, (0, 1))
    # The neighbours that count: as many rows and columns, or the pixel's own.
    rows = [(top + tap).clamp(0, height - 1) * width for tap in (taps if "y" in axes else (0,))]
    columns = [(left + tap).clamp(0, width - 1) for tap in (taps if "x" in axes else (0,))]

    def pixels(place: Tensor) -> Tensor:
        """place: (n, H, W), row · width + column → (n, 3, H, W) float32"""
        found = packed.gather(1, place.flatten(1)).view(-1, 1, height, width)
        return ((found >> shifts) & 255).float()

    def along(row: Tensor) -> Tensor:
        values = [pixels(row + column) for column in columns]
        return between(*values, across) if "x" in axes else values[0]

    values = between(*map(along, rows), down) if "y" in axes else along(rows[0])
    values = values.clamp(0, 255).to(torch.uint8)
    outside = torch.tensor(fill, dtype=torch.uint8).to(device, non_blocking=True).view(3, 1, 1)
    return torch.where(inside[:, None], values, outside)


# ---------------------------------------------------------------------------------------------
# Both kinds
# ---------------------------------------------------------------------------------------------


PLAIN: dict[Operation, Callable[[Tensor, Tensor], Tensor]] = {
    Operation.AutoContrast: auto_contrast,
    Operation.Equalize: equalize,
    Operation.Invert: invert,
    Operation.Posterize: posterize,
    Operation.Solarize: solarize,
    Operation.SolarizeAdd: solarize_add,
    Operation.Color: color,
    Operation.Contrast: contrast,
    Operation.Brightness: brightness,
    Operation.Sharpness: sharpness,
}
GEOMETRIC: dict[str, tuple[Operation, ...]] = {      # by the axes along which pixels move
    "x": (Operation.ShearX, Operation.TranslateX),
    "y": (Operation.ShearY, Operation.TranslateY),
    "xy": (Operation.Rotate,),
}


def rand_augment(images: Tensor, draws: Draws, fill: Sequence[int]) -> Tensor:
    """Layer by layer and operation by operation."""
    images = images.clone(memory_format=torch.contiguous_format)
    for codes, arguments, bicubic in zip(draws.operations.T, draws.arguments.T, draws.bicubic.T):
        for operation, function in PLAIN.items():
            rows = np.flatnonzero(codes == operation)
            if len(rows):
                images[rows] = function(images[rows],
                                        torch.from_numpy(arguments[rows, None, None, None]))
        for axes, operations in GEOMETRIC.items():
            for smooth in (False, True):
                rows = np.flatnonzero(np.isin(codes, operations) & (bicubic == smooth))
                if len(rows):
                    matrices = np.stack([affine_matrix(Operation(codes[row]), arguments[row],
                                                       *images.shape[2:]) for row in rows])
                    images[rows] = affine(images[rows], torch.from_numpy(matrices), bicubic=smooth,
                                          fill=fill, axes=axes)
    return images
