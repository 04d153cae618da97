"""RandAugment with one function per operation: the reference for the package's implementation.

It is slower and simpler: each operation follows its own formula, as in Pillow, on batches (n, 3, H, W)
uint8 with one argument per image. The package must give the same bits.
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
    # How many pixels each level would have if they were spread evenly, without those of the
    # lightest value.
    lightest = histogram.gather(2, values.amax(2, keepdim=True))
    step = (values.shape[2] - lightest) // 255                           # (n, 3, 1)
    below = histogram.cumsum(2) - histogram
    spread = (below + step // 2) // step.clamp(min=1)
    levels = torch.arange(LEVELS, device=images.device)
    return look_up(torch.where(step > 0, spread.clamp(max=255), levels), images)


def invert(images: Tensor, _: Tensor) -> Tensor:
    return 255 - images


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest `bits` bits; 0 bits make the image black."""
    mask = LEVELS - 2 ** (8 - bits)
    return images & mask.to(torch.uint8)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert values from `threshold` on."""
    return torch.where(images < threshold.to(torch.int16), images, 255 - images)


def solarize_add(images: Tensor, addend: Tensor) -> Tensor:
    """Add `addend` to values below 128."""
    added = (images.to(torch.int16) + addend.to(torch.int16)).clamp(max=255).to(torch.uint8)
    return torch.where(images < 128, added, images)


# ---------------------------------------------------------------------------------------------
# Blends with a plainer version of the image: towards it (factors 0 to 1) or away from it (above 1)
# ---------------------------------------------------------------------------------------------


def blend(plain: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """plain + factor · (images − plain), clipped and truncated to uint8 as Pillow does.

    plain: integers, so that no factor above 256 gives another result than 256.
    """
    plain = plain.float()
    factor = factor.clamp(max=256.0).float()
    return (plain + factor * (images.float() - plain)).clamp(0, 255).to(torch.uint8)


def grey(images: Tensor) -> Tensor:
    """The ITU-R 601 luma, rounded like in Pillow's convert("L"): (n, 1, H, W) int32."""
    red, green, blue = images.to(torch.int32).split(1, dim=1)
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


def color(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the grey version of the image."""
    return blend(grey(images), images, factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the mean of the grey version of the image."""
    count = images.shape[2] * images.shape[3]
    total = grey(images).sum((1, 2, 3), keepdim=True)                    # (n, 1, 1, 1) int64
    return blend((2 * total + count) // (2 * count), images, factor)     # rounded to the nearest


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with black."""
    return blend(torch.zeros_like(images[:, :1]), images, factor)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the image smoothed by the 3×3 kernel with 5/13 in the centre and 1/13 around it."""
    wide = images.to(torch.int32)
    rows = wide[:, :, :-2] + wide[:, :, 1:-1] + wide[:, :, 2:]           # (n, 3, H - 2, W)
    box = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]               # (n, 3, H - 2, W - 2)
    smooth = images.clone()                          # the border stays as it is
    if box.numel():
        weighted = box + 4 * wide[:, :, 1:-1, 1:-1]
        smooth[:, :, 1:-1, 1:-1] = ((2 * weighted + 13) // 26).to(torch.uint8)   # nearest of /13
    return blend(smooth, images, factor)


# ---------------------------------------------------------------------------------------------
# Geometric operations: one affine map per image
# ---------------------------------------------------------------------------------------------


def linear(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """Linear interpolation between a (t = 0) and b (t = 1)."""
    return a + (b - a) * t


def cubic(a: Tensor, b: Tensor, c: Tensor, d: Tensor, t: Tensor) -> Tensor:
    """Cubic convolution (Keys, 1981) between b (t = 0) and c (t = 1), with Keys's parameter -1."""
    return b + t * ((c - a) + t * ((2.0 * (a - b) + c - d) + t * (b - a + d - c)))


def affine(images: Tensor, matrices: Tensor, *, bicubic: bool, fill: Sequence[int],
           axes: Literal["x", "y", "xy"] = "xy") -> Tensor:
    """Transform each image of (n, 3, H, W) uint8 by its matrix, (n, 2, 3) float64.

    A pixel whose centre is mapped outside of the old image gets `fill`. For all others, neighbours
    beyond the edge repeat the edge, as in Pillow. axes: the axes along which pixels move. Where
    pixels stay in their row (or column), only that row (or column) is read.
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

    # One integer per pixel, so that one look-up fetches all three channels.
    red, green, blue = images.int().unbind(1)
    packed = rearrange(red | green << 8 | blue << 16, "n h w -> n (h w)")
    shifts = torch.tensor([0, 8, 16], dtype=torch.int32).to(device, non_blocking=True).view(3, 1, 1)
    between, taps = (cubic, (-1, 0, 1, 2)) if bicubic else (linear, (0, 1))
    # The rows and columns of the neighbours, or the pixel's own along an axis that does not move.
    rows = [(top + tap).clamp(0, height - 1) * width for tap in (taps if "y" in axes else (0,))]
    columns = [(left + tap).clamp(0, width - 1) for tap in (taps if "x" in axes else (0,))]

    def pixels(index: Tensor) -> Tensor:
        """The pixels at `index`, (n, H, W), which is row · width + column: (n, 3, H, W) float32."""
        words = packed.gather(1, index.flatten(1)).view(-1, 1, height, width)
        return ((words >> shifts) & 255).float()

    def along(row: Tensor) -> Tensor:
        values = [pixels(row + column) for column in columns]
        return between(*values, across) if "x" in axes else values[0]

    values = between(*map(along, rows), down) if "y" in axes else along(rows[0])
    values = values.clamp(0, 255).to(torch.uint8)
    outside = torch.tensor(fill, dtype=torch.uint8).to(device, non_blocking=True).view(3, 1, 1)
    return torch.where(inside[:, None], values, outside)


# ---------------------------------------------------------------------------------------------
# All operations
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
    """Apply each image's operations, layer by layer and operation by operation."""
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
