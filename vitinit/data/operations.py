"""RandAugment's fifteen operations on batches (n, 3, H, W) uint8, with an argument per image.

Each is Pillow's, as AutoAugment (arXiv 1805.09501) and RandAugment (arXiv 1909.13719) use it: same
formula, same rounding. A GPU pays for each launch, so they are few functions:

    map_levels           eight map levels to levels: tables of 256 entries and one look-up
    color_or_sharpness   two blend an image with a plainer one
    affine               five are geometric: one affine map per image

Arithmetic is such that an image's result does not depend, to the bit, on the batch it is in, on the
device or on how much is read at once: integers, or single float operations whose rounding IEEE 754
fixes.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from .draw import Operation

LEVELS = 256
MOST = 256.0                    # a factor that goes as far as any larger one, for levels are whole


# In the order in which their functions take images. Of the levels', those come first whose tables
# depend on the image.
LEVEL_OPERATIONS = (Operation.AutoContrast, Operation.Equalize, Operation.Contrast,
                    Operation.Brightness, Operation.Invert, Operation.Posterize,
                    Operation.Solarize, Operation.SolarizeAdd)
BLENDS = (Operation.Color, Operation.Sharpness)
Axes = Literal["x", "y", "xy"]
GEOMETRIC: dict[Axes, tuple[Operation, ...]] = {     # by the axes along which pixels move
    "x": (Operation.ShearX, Operation.TranslateX),
    "y": (Operation.ShearY, Operation.TranslateY),
    "xy": (Operation.Rotate,),
}


def to_levels(values: Tensor) -> Tensor:
    """Floats as uint8, clipped and truncated as Pillow does it. Clips in place."""
    # By way of int16, which a CPU does four times as fast.
    return values.clamp_(0, 255).to(torch.int16).to(torch.uint8)


# ---------------------------------------------------------------------------------------------
# Blends: away from (factor 1 .. 2) or towards (0 .. 1) a plainer version of the image
# ---------------------------------------------------------------------------------------------


def blend_factors(arguments: np.ndarray) -> np.ndarray:
    return arguments.clip(max=MOST).astype(np.float32)


def blend(plain: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """plain + factor · (images − plain) as uint8; plain holds whole numbers, factor is float32."""
    plain = plain.float()
    return to_levels((images - plain).mul_(factor).add_(plain))


def grey(images: Tensor) -> Tensor:
    """ITU-R 601 luma as Pillow's convert("L") rounds it: (n, 1, H, W) int32."""
    red, green, blue = images.int().split(1, dim=1)
    luma = (red * 19595).add_(green, alpha=38470).add_(blue, alpha=7471)
    return luma.add_(0x8000).bitwise_right_shift_(16)


def color_or_sharpness(images: Tensor, coloured: int, factor: Tensor) -> Tensor:
    """Color for the first `coloured` images: a blend with grey. The others: with the smoothed image.

    factor: (n, 1, 1, 1) float32.
    """
    plain = []
    if coloured:
        plain.append(grey(images[:coloured]).to(torch.uint8).expand(-1, 3, -1, -1))
    if coloured < len(images):
        plain.append(smoothed(images[coloured:]))
    return blend(torch.cat(plain) if len(plain) > 1 else plain[0], images, factor)


def smoothed(images: Tensor) -> Tensor:
    """By a 3×3 kernel, 5 in the centre and 1 around it, of 13; the border stays as it is."""
    smooth = images.clone()
    if min(images.shape[2:]) > 2:
        wide = images.to(torch.int16)
        rows = (wide[:, :, :-2] + wide[:, :, 1:-1]).add_(wide[:, :, 2:])     # (n, 3, H - 2, W)
        box = (rows[..., :-2] + rows[..., 1:-1]).add_(rows[..., 2:])     # (n, 3, H - 2, W - 2)
        weighted = box.add_(wide[:, :, 1:-1, 1:-1], alpha=4)
        smooth[:, :, 1:-1, 1:-1] = nearest_of_13th(weighted)
    return smooth


def nearest_of_13th(sums: Tensor) -> Tensor:
    """(2 · sum + 13) // 26 of sums from 0 to 13 · 255, in int32."""
    # 10083 / 2^18 exceeds 1 / 26 by too little to matter below 2^18 / 14, and a product and a shift
    # take a seventh of a division's time.
    return sums.int().mul_(2 * 10083).add_(13 * 10083).bitwise_right_shift_(18)


# ---------------------------------------------------------------------------------------------
# Levels to levels: tables (n, 3, 256) uint8, or (n, 1, 256) where all channels have the same
# ---------------------------------------------------------------------------------------------


def level_arguments(codes: np.ndarray, arguments: np.ndarray
                    ) -> tuple[tuple[int, ...], np.ndarray, np.ndarray]:
    """What `map_levels` needs of images with these operations, in the order of LEVEL_OPERATIONS."""
    counts = tuple(int((codes == operation).sum()) for operation in LEVEL_OPERATIONS[:4])
    blended = slice(sum(counts[:2]), sum(counts))
    tables = [fixed_table(Operation(code), int(argument))
              for code, argument in zip(codes[blended.stop:], arguments[blended.stop:])]
    return (counts, blend_factors(arguments[blended])[:, None, None],
            np.array(tables, np.uint8).reshape(-1, 1, LEVELS))


def fixed_table(operation: Operation, argument: int) -> np.ndarray:
    """(256,) of an operation that looks at no image."""
    levels = np.arange(LEVELS)
    match operation:
        case Operation.Invert:
            return 255 - levels
        case Operation.Posterize:                    # bits that are kept; of 0 nothing is left: black
            return levels & (LEVELS - 2 ** (8 - argument))
        case Operation.Solarize:                     # from this level on inverted
            return np.where(levels < argument, levels, 255 - levels)
        case Operation.SolarizeAdd:                  # added to what is below 128
            return np.where(levels < 128, (levels + argument).clip(max=255), levels)
    raise ValueError(f"{operation!r} has no fixed table")


def map_levels(images: Tensor, counts: tuple[int, int, int, int], factors: Tensor, tables: Tensor
               ) -> Tensor:
    """Every value of a channel becomes what the channel's table says.

    counts: of AutoContrast, Equalize, Contrast, Brightness, as which images come first in this
    order. factors: (c, 1, 1) float32, those of Contrast and Brightness. tables: (m, 1, 256) uint8, of
    the m images that remain.
    """
    stretched, equalised, contrasted, brightened = counts
    parts = []
    if stretched:
        parts.append(auto_contrast_tables(images[:stretched]))
    if equalised:
        parts.append(equalize_tables(images[stretched:][:equalised]))
    if contrasted or brightened:
        plain = images.new_zeros((contrasted + brightened, 1, 1), dtype=torch.int64)
        if contrasted:                               # Brightness blends with black
            plain[:contrasted] = mean_grey(images[stretched + equalised:][:contrasted])
        levels = torch.arange(LEVELS, device=images.device)
        parts.append(blend(plain, levels, factors).expand(-1, 3, -1))
    if len(tables):
        parts.append(tables.expand(-1, 3, -1))
    table = torch.cat(parts) if len(parts) > 1 else parts[0]             # (n, 3, 256)
    return table.flatten().index_select(0, entries(images).flatten()).view(images.shape)


def entries(images: Tensor) -> Tensor:
    """Which entry of tables (n, 3, 256), one after another, each value has: (n, 3, H, W) int32."""
    tables = len(images) * 3
    first = torch.arange(0, tables * LEVELS, LEVELS, dtype=torch.int32, device=images.device)
    return images + first.view(-1, 3, 1, 1)


def auto_contrast_tables(images: Tensor) -> Tensor:
    """Stretch every channel so that its darkest value becomes 0 and its lightest 255."""
    low, high = (rearrange(bound, "n c -> n c 1").double()
                 for bound in (images.amin((2, 3)), images.amax((2, 3))))
    levels = torch.arange(LEVELS, device=images.device, dtype=torch.float64)
    scale = levels[-1] / (high - low)                                    # (n, 3, 1), of 255
    stretched = (levels * scale).sub_(low * scale).clamp_(0, 255)
    return torch.where(high > low, stretched, levels).to(torch.uint8)


def equalize_tables(images: Tensor) -> Tensor:
    """Spread every channel's values so that each range of levels holds as many pixels."""
    values = entries(images).flatten()
    one = torch.ones(1, dtype=torch.int32, device=images.device)
    histogram = one.new_zeros(len(images) * 3 * LEVELS).index_add_(0, values, one.expand(len(values)))
    histogram = histogram.view(-1, 3, LEVELS)
    # Pixels a level, were they spread evenly; those of the lightest value do not count.
    lightest = histogram.gather(2, images.amax((2, 3)).long()[..., None])
    step = (images.shape[2] * images.shape[3] - lightest) // 255         # (n, 3, 1)
    below = histogram.cumsum(2) - histogram
    spread = (below + step // 2) // step.clamp(min=1)
    levels = torch.arange(LEVELS, device=images.device)
    return torch.where(step > 0, spread.clamp(max=255), levels).to(torch.uint8)


def mean_grey(images: Tensor) -> Tensor:
    """(n, 1, 1) int64, rounded to the nearest."""
    count = images.shape[2] * images.shape[3]
    total = grey(images).sum((1, 2, 3))                                  # int64
    return ((2 * total + count) // (2 * count)).view(-1, 1, 1)


# ---------------------------------------------------------------------------------------------
# Geometric operations: one affine map per image
# ---------------------------------------------------------------------------------------------


FRAME = 2                       # pixels round an image that its interpolation reaches into


def affine_matrix(operation: Operation, argument: float, height: int, width: int) -> np.ndarray:
    """(2, 3): (x, y, 1) in the new image → (x, y) in the old, in pixels from the top left corner."""
    argument = float(argument)                       # numpy would warn of what becomes infinite
    match operation:
        case Operation.ShearX:
            return np.array([[1.0, argument, 0.0], [0.0, 1.0, 0.0]])
        case Operation.ShearY:
            return np.array([[1.0, 0.0, 0.0], [argument, 1.0, 0.0]])
        case Operation.TranslateX:
            return np.array([[1.0, 0.0, argument * width], [0.0, 1.0, 0.0]])
        case Operation.TranslateY:
            return np.array([[1.0, 0.0, 0.0], [0.0, 1.0, argument * height]])
        case Operation.Rotate:                       # about the centre
            angle = -math.radians(argument)
            turn = np.array([[math.cos(angle), math.sin(angle)],
                             [-math.sin(angle), math.cos(angle)]]).round(15)    # as Pillow does
            centre = np.array([width / 2.0, height / 2.0])
            return np.column_stack([turn, centre - (turn * centre).sum(1)])
    raise ValueError(f"{operation!r} is not a geometric operation")


def linear(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """Between two values, t from the first to the second."""
    return ((b - a) * t).add_(a)


def cubic(a: Tensor, b: Tensor, c: Tensor, d: Tensor, t: Tensor) -> Tensor:
    """Cubic convolution (Keys, 1981) with slope -1, as Pillow's transforms use it: t from b to c.

    b + t · ((c − a) + t · ((2 (a − b) + c − d) + t · (b − a + d − c)))
    """
    step = a - b
    values = (d - step).sub_(c) * t
    values.add_(torch.add(c, step, alpha=2).sub_(d)).mul_(t)
    return values.add_(c - a).mul_(t).add_(b)


# The interpolation, and which of four neighbours in a row it takes, by whether it is bicubic.
FILTERS = {False: (linear, range(1, 3)), True: (cubic, range(4))}


def affine(images: Tensor, bilinear: int, matrices: Tensor, bounds: Tensor, fill: Tensor, *,
           axes: Axes = "xy", at_once: bool) -> Tensor:
    """Each image (n, 3, H, W) uint8 seen through its matrix (n, 2, 3) float64.

    The first `bilinear` images are interpolated so, the others bicubically. A pixel whose centre falls
    outside of the old image gets `fill`, (3, 1, 1) uint8. Otherwise neighbours beyond the edge repeat
    the edge, as in Pillow. bounds: `image_bounds`. axes: along which pixels move; where they stay on
    their row (column), that row (column) alone need be read. at_once: read all neighbours of a pixel
    at once, which takes both axes; else one by one.
    """
    height, width = images.shape[2:]
    chosen = {"x": slice(0, 1), "y": slice(1, 2), "xy": slice(0, 2)}[axes]
    low, shares, inside = old_places(matrices[:, chosen], bounds[:, chosen], height, width)
    places = dict(zip(axes, low.unbind(1)))
    if axes == "x":
        places["y"] = torch.arange(height, dtype=torch.int32, device=images.device)[:, None]
    elif axes == "y":
        places["x"] = torch.arange(width, dtype=torch.int32, device=images.device)
    words = framed(images)
    stride, size = words.shape[2], words[0].numel()
    # Of the pixel's neighbour above on the left, among the words of all images: (n, H, W).
    first = torch.arange((FRAME - 1) * (stride + 1), len(images) * size, size, dtype=torch.int32,
                         device=images.device).view(-1, 1, 1)
    index = places["y"] * stride + places["x"] + first
    interpolate = interpolated_at_once if at_once else interpolated_by_neighbour
    parts = [interpolate(words, index[some], dict(zip(axes, shares[some].split(1, dim=1))), bicubic)
             for bicubic, some in ((False, slice(bilinear)), (True, slice(bilinear, None)))
             if len(index[some])]
    values = torch.cat(parts) if len(parts) > 1 else parts[0]
    # Arithmetic wraps round at 256: this is the value where `inside` is 1 and the fill where it is 0.
    return to_levels(values).sub_(fill).mul_(inside.view(torch.uint8)).add_(fill)


def image_bounds(height: int, width: int) -> np.ndarray:
    """Along x and along y: -1, the last pixel, the size: (3, 2, 1, 1) float64."""
    return np.array([[-1, -1], [width - 1, height - 1], [width, height]], float)[..., None, None]


def old_places(matrices: Tensor, bounds: Tensor, height: int, width: int
               ) -> tuple[Tensor, Tensor, Tensor]:
    """Where in the old images the new ones' pixels lie, along k axes: matrices (n, k, 3).

    Returns: the pixel below, as int32 and -1 to size - 1, (n, k, H, W); how far it is from there to
    the next one, 0 to 1 as float32, (n, k, H, W); which lie in the image, (n, 1, H, W) bool.
    """
    x = torch.arange(0.5, width, dtype=torch.float64, device=matrices.device)     # pixel centres
    y = torch.arange(0.5, height, dtype=torch.float64, device=matrices.device)[:, None]
    a, b, c = matrices[..., None, None].unbind(2)                        # (n, k, 1, 1)
    old = (a * x + b * y).add_(c)                                        # (n, k, H, W)
    before, last, sizes = bounds.unbind(0)                               # (k, 1, 1)
    inside = ((old >= 0) & (old < sizes)).all(1, keepdim=True)
    old = old.sub_(0.5)                              # in units of whole pixels from the first
    low = old.floor()
    share = (old - low).float()
    # What is outside is not looked at, but must not be read either.
    return low.clamp_(before, last).int(), share, inside


def framed(images: Tensor) -> Tensor:
    """A pixel's three channels in one word, so that one look-up fetches them.

    (n, 3, H, W) uint8 → (n, H + 4, W + 4) int32, the edge repeated around.
    """
    count, _, height, width = images.shape
    frame = images.new_empty(count, height + 2 * FRAME, width + 2 * FRAME, 4)
    for channel in range(3):
        frame[:, FRAME:-FRAME, FRAME:-FRAME, channel] = images[:, channel]
    words = frame.view(torch.int32)[..., 0]
    words[:, :FRAME] = words[:, FRAME:FRAME + 1]
    words[:, -FRAME:] = words[:, -FRAME - 1:-FRAME]
    words[:, :, :FRAME] = words[:, :, FRAME:FRAME + 1]
    words[:, :, -FRAME:] = words[:, :, -FRAME - 1:-FRAME]
    return words


def interpolated_at_once(words: Tensor, index: Tensor, shares: dict[str, Tensor], bicubic: bool
                         ) -> Tensor:
    """(n, 3, H, W) float32 between the neighbours of which `index`, (n, H, W), is the first.

    shares: (n, 1, H, W) for each axis, how far from the second neighbour to the third.
    """
    between, taps = FILTERS[bicubic]
    reach = torch.arange(taps.start, taps.stop, dtype=torch.int32, device=words.device)
    offsets = (reach[:, None] * words.shape[2] + reach)[..., None, None]     # (taps, taps, 1, 1)
    # (n, 3, taps, taps, H, W), whole numbers; no name holds the index, which is as large.
    neighbours = look_up(words, index[:, None, None] + offsets, torch.int16)
    rows = between(*neighbours.unbind(3), shares["x"][:, :, None])       # (n, 3, taps, H, W)
    return between(*rows.unbind(2), shares["y"])


def interpolated_by_neighbour(words: Tensor, index: Tensor, shares: dict[str, Tensor], bicubic: bool
                              ) -> Tensor:
    """The same in less memory; along an axis that has no share, pixels stay where they are."""
    between, taps = FILTERS[bicubic]

    def neighbour(down: int, right: int) -> Tensor:
        return look_up(words.flatten()[down * words.shape[2] + right:], index, torch.float32)

    def along_row(down: int) -> Tensor:
        if "x" not in shares:
            return neighbour(down, 1)
        return between(*[neighbour(down, right) for right in taps], shares["x"])
    return between(*map(along_row, taps), shares["y"]) if "y" in shares else along_row(1)


def look_up(words: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Channels of the words at (n, …), among all of them: (n, 3, …)."""
    found = words.flatten().index_select(0, index.flatten()).view(torch.uint8)
    channels = found.view(*index.shape, 4)[..., :3].movedim(-1, 1)
    return channels.to(dtype, memory_format=torch.contiguous_format)
