"""RandAugment's fifteen operations on batches (n, 3, H, W) uint8, with one argument per image.

Each operation is the one of Pillow that AutoAugment (arXiv 1805.09501) and RandAugment (arXiv
1909.13719) use, with the same formula and the same rounding. (Only geometric operations may differ
from Pillow's by one level, because they interpolate in float32 and Pillow in float64.) Since every
kernel launch on a GPU has a fixed cost, the fifteen are implemented by only three functions:

    map_levels           8 operations that map levels to levels: tables of 256 entries, one look-up
    color_or_sharpness   2 operations that blend the image with a plainer version of it
    affine               5 geometric operations: one affine map per image

`rand_augment` takes a batch through its operations. What the host can compute for that, such as
which images go through which function, is in `OperationTables`, which travel to the device at once.

A level is one of the 256 values of a channel. The result for an image is the same, bit for bit,
whatever batch it is in, whatever the device, and however much is read at once. To that end all
arithmetic is either on integers or consists of single floating-point operations, whose rounding
IEEE 754 defines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from .draw import Operation

LEVELS = 256
MOST = 256.0                    # no larger factor of a blend changes the result, as levels are integers


Axes = Literal["x", "y", "xy"]              # the axes along which a geometric operation moves pixels
# What images go through, in the order of a layer, and the groups for which it is. Images of one
# group are treated alike.
FUNCTIONS: list[tuple[Literal["map_levels", "blend"] | Axes, range]] = [
    ("map_levels", range(5)), ("blend", range(5, 7)), ("x", range(7, 9)), ("y", range(9, 11)),
    ("xy", range(11, 13))]
GROUPS = 14                                 # the last group, 13, has no operation
# The group of each operation; geometric operations with bicubic interpolation are in the next one.
GROUP_OF = np.full(len(Operation), 13)
for _group, _operations in {
        0: [Operation.AutoContrast], 1: [Operation.Equalize], 2: [Operation.Contrast],
        3: [Operation.Brightness],          # tables of these four depend on the image; of these not:
        4: [Operation.Invert, Operation.Posterize, Operation.Solarize, Operation.SolarizeAdd],
        5: [Operation.Color], 6: [Operation.Sharpness],
        7: [Operation.ShearX, Operation.TranslateX], 9: [Operation.ShearY, Operation.TranslateY],
        11: [Operation.Rotate]}.items():
    GROUP_OF[_operations] = _group
# The most pixels that go through a function at once. For CPUs: what fits into the cache, 2.6 images of
# 224×224. For GPUs: a geometric operation that reads all neighbours at once takes 280 bytes of
# memory per pixel, so these, 334 images, take 4.4 GiB.
CHUNK, MOST_PIXELS = 2**17, 2**24


class OperationTables(NamedTuple):
    """What the host computes for RandAugment of n images in L layers; `upload` moves the arrays.

    In each layer the images are sorted by group, and so are the entries of all tables.
    """

    ends: list[list[int]]       # (L, 15): where each group begins in this order, and the end
    at_once: bool               # how `affine` reads neighbours
    rows: np.ndarray            # (L, n) int64: which image of the batch
    levels: np.ndarray          # (L, n, 1, 256) uint8: the table of a map of levels
    factors: np.ndarray         # (L, n, 1, 1, 1) float32: the factor of a blend
    matrices: np.ndarray        # (L, n, 2, 3) float64: the matrix of a geometric operation
    bounds: np.ndarray          # (3, 2, 1, 1) float64: `image_bounds`
    fill: np.ndarray            # (3, 1, 1) uint8: the colour of pixels from outside


def operation_tables(operations: np.ndarray, size: tuple[int, int], fill: Sequence[int], *,
                     at_once: bool) -> OperationTables:
    """Compute the tables for n images of `size` = (height, width).

    operations: (n, L, 3), as in `draw.Draws`. fill: the colour (three values, 0 to 255).
    at_once: all geometric operations go through `affine` together, which takes fewest launches;
        else grouped by the axes along which they move pixels, which takes least arithmetic.
    """
    operations = operations.swapaxes(0, 1)                               # (L, n, 3)
    codes, bicubic = operations[..., 0].astype(np.int64), operations[..., 2] > 0
    groups = GROUP_OF[codes]
    geometric = (groups >= 7) & (groups < 13)
    groups = np.where(geometric, (11 if at_once else groups) + bicubic, groups)
    rows = groups.argsort(1, kind="stable")
    ends = [[0, *np.bincount(layer, minlength=GROUPS).cumsum().tolist()] for layer in groups]
    codes, arguments = (np.take_along_axis(part, rows, 1) for part in (codes, operations[..., 1]))
    factors = arguments.clip(-MOST, MOST).astype(np.float32)[..., None, None, None]
    return OperationTables(ends, at_once, rows, FIXED_TABLES[fixed_table(codes, arguments)], factors,
                           affine_matrices(codes, arguments, *size), image_bounds(*size),
                           np.array(fill, np.uint8)[:, None, None])


def rand_augment(images: Tensor, tables: OperationTables) -> Tensor:
    """Apply to each image of (n, 3, H, W) uint8 the operations drawn for it, layer by layer.

    Each image goes through at most one operation per layer. tables: those of `operation_tables`,
    with their arrays as tensors on the images' device. Returns new images (n, 3, H, W) uint8.
    """
    images = images.clone(memory_format=torch.contiguous_format)
    most = max(1, (MOST_PIXELS if tables.at_once else CHUNK) // (images.shape[2] * images.shape[3]))
    for ends, *layer in zip(tables.ends, tables.rows, tables.levels, tables.factors, tables.matrices):
        for function, groups in FUNCTIONS:
            for first in range(ends[groups.start], ends[groups.stop], most):
                last = min(first + most, ends[groups.stop])
                rows, levels, factors, matrices = (table[first:last] for table in layer)
                # How many of these images each of the function's groups has.
                counts = [max(0, min(ends[group + 1], last) - max(ends[group], first))
                          for group in groups]
                part = images.index_select(0, rows)
                if function == "map_levels":
                    part = map_levels(part, counts, factors, levels)
                elif function == "blend":
                    part = color_or_sharpness(part, counts[0], factors)
                else:
                    part = affine(part, counts[0], matrices, tables.bounds, tables.fill, function,
                                  tables.at_once)
                images.index_copy_(0, rows, part)
    return images


def to_levels(values: Tensor) -> Tensor:
    """Floats as uint8, clipped and truncated like in Pillow. The argument is clipped in place."""
    # By way of int16, because that is faster on a CPU.
    return values.clamp_(0, 255).to(torch.int16).to(torch.uint8)


# ---------------------------------------------------------------------------------------------
# Blends with a plainer version of the image: towards it (factors 0 to 1) or away from it (above 1)
# ---------------------------------------------------------------------------------------------


def blend(plain: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """plain + factor · (images − plain) as uint8; `plain` holds integers, `factor` is float32."""
    plain = plain.float()
    return to_levels((images - plain).mul_(factor).add_(plain))


def grey(images: Tensor) -> Tensor:
    """The ITU-R 601 luma, rounded like in Pillow's convert("L"): (n, 1, H, W) int32."""
    red, green, blue = images.int().split(1, dim=1)
    luma = (red * 19595).add_(green, alpha=38470).add_(blue, alpha=7471)
    return luma.add_(0x8000).bitwise_right_shift_(16)


def color_or_sharpness(images: Tensor, coloured: int, factor: Tensor) -> Tensor:
    """Apply Color to the first `coloured` images, and Sharpness to the others.

    Color blends an image with its grey version, Sharpness with its smoothed version.
    factor: (n, 1, 1, 1) float32, one per image; 1 leaves an image as it is.
    """
    plain = []
    if coloured:
        plain.append(grey(images[:coloured]).to(torch.uint8).expand(-1, 3, -1, -1))
    if coloured < len(images):
        plain.append(smoothed(images[coloured:]))
    return blend(torch.cat(plain) if len(plain) > 1 else plain[0], images, factor)


def smoothed(images: Tensor) -> Tensor:
    """Images smoothed by the 3×3 kernel with 5/13 in the centre and 1/13 around it, as in Pillow.

    Pixels on the border stay as they are.
    """
    smooth = images.clone()
    if min(images.shape[2:]) > 2:
        wide = images.to(torch.int16)
        rows = (wide[:, :, :-2] + wide[:, :, 1:-1]).add_(wide[:, :, 2:])     # (n, 3, H - 2, W)
        box = (rows[..., :-2] + rows[..., 1:-1]).add_(rows[..., 2:])     # (n, 3, H - 2, W - 2)
        weighted = box.add_(wide[:, :, 1:-1, 1:-1], alpha=4)
        smooth[:, :, 1:-1, 1:-1] = nearest_of_13th(weighted)
    return smooth


def nearest_of_13th(sums: Tensor) -> Tensor:
    """sums / 13 rounded to the nearest integer, for sums from 0 to 13 · 255: (2 · sum + 13) // 26."""
    # A product and a shift are much faster than a division. 10083 / 2^18 exceeds 1 / 26 by too
    # little to change the result for numerators below 2^18 / 14.
    return sums.int().mul_(2 * 10083).add_(13 * 10083).bitwise_right_shift_(18)


# ---------------------------------------------------------------------------------------------
# Maps of levels: tables (n, 3, 256) uint8, or (n, 1, 256) where all channels have the same table
# ---------------------------------------------------------------------------------------------


_LEVELS = np.arange(LEVELS)
# Tables (395, 256) uint8 that do not depend on the image: Solarize from each level on (from level 0
# on is Invert), SolarizeAdd of each addend, Posterize to each number of bits (0 bits make black).
FIXED_TABLES = np.concatenate([
    np.where(_LEVELS < np.arange(257)[:, None], _LEVELS, 255 - _LEVELS),
    np.where(_LEVELS < 128, (_LEVELS + np.arange(129)[:, None]).clip(max=255), _LEVELS),
    _LEVELS & (LEVELS - 2 ** (8 - np.arange(9)[:, None]))]).astype(np.uint8)[:, None]
FIRST_TABLE = {Operation.Solarize: 0, Operation.SolarizeAdd: 257, Operation.Posterize: 257 + 129}


def fixed_table(codes: np.ndarray, arguments: np.ndarray) -> np.ndarray:
    """Which of FIXED_TABLES each operation has, as int64; 0 for operations that have none."""
    which = np.zeros(codes.shape, np.int64)
    for operation, first in FIRST_TABLE.items():
        which = np.where(codes == operation, first + arguments, which)
    return which.astype(np.int64)


def map_levels(images: Tensor, counts: Sequence[int], factors: Tensor, tables: Tensor) -> Tensor:
    """Replace each value of each channel by its entry in the table of that channel.

    First come the images of AutoContrast, Equalize, Contrast and Brightness, whose tables are made
    here from the images. The remaining images have fixed tables.
    counts: how many images each of these five groups has.
    factors: (n, 1, 1, 1) float32, of which those of Contrast and Brightness are used.
    tables: (n, 1, 256) uint8, of which those of the remaining images are used.
    """
    stretched, equalised, contrasted, brightened, fixed = counts
    parts = []
    if stretched:
        parts.append(auto_contrast_tables(images[:stretched]))
    if equalised:
        parts.append(equalize_tables(images[stretched:][:equalised]))
    if contrasted or brightened:
        plain = images.new_zeros((contrasted + brightened, 1, 1), dtype=torch.int64)
        if contrasted:                               # Contrast: the mean grey; Brightness: black, 0
            plain[:contrasted] = mean_grey(images[stretched + equalised:][:contrasted])
        levels = torch.arange(LEVELS, device=images.device)
        factors = factors[stretched + equalised:len(images) - fixed, 0]
        parts.append(blend(plain, levels, factors).expand(-1, 3, -1))
    if fixed:
        parts.append(tables[-fixed:].expand(-1, 3, -1))
    table = torch.cat(parts) if len(parts) > 1 else parts[0]             # (n, 3, 256)
    return table.flatten().index_select(0, entries(images).flatten()).view(images.shape)


def entries(images: Tensor) -> Tensor:
    """The index of each value's entry in the flattened tables (n, 3, 256): (n, 3, H, W) int32."""
    tables = len(images) * 3
    first = torch.arange(0, tables * LEVELS, LEVELS, dtype=torch.int32, device=images.device)
    return images + first.view(-1, 3, 1, 1)


def auto_contrast_tables(images: Tensor) -> Tensor:
    """Tables that stretch each channel so that its darkest value becomes 0 and its lightest 255."""
    low, high = (rearrange(bound, "n c -> n c 1").double()
                 for bound in (images.amin((2, 3)), images.amax((2, 3))))
    levels = torch.arange(LEVELS, device=images.device, dtype=torch.float64)
    scale = levels[-1] / (high - low)                                    # (n, 3, 1), of 255
    stretched = (levels * scale).sub_(low * scale).clamp_(0, 255)
    return torch.where(high > low, stretched, levels).to(torch.uint8)


def equalize_tables(images: Tensor) -> Tensor:
    """Tables that equalise each channel's histogram: its pixels spread evenly over the levels."""
    values = entries(images).flatten()
    one = torch.ones(1, dtype=torch.int32, device=images.device)
    histogram = one.new_zeros(len(images) * 3 * LEVELS).index_add_(0, values, one.expand(len(values)))
    histogram = histogram.view(-1, 3, LEVELS)
    # How many pixels each level would have if they were spread evenly, not counting those of the
    # lightest value (as in Pillow).
    lightest = histogram.gather(2, images.amax((2, 3)).long()[..., None])
    step = (images.shape[2] * images.shape[3] - lightest) // 255         # (n, 3, 1)
    below = histogram.cumsum(2) - histogram
    spread = (below + step // 2) // step.clamp(min=1)
    levels = torch.arange(LEVELS, device=images.device)
    return torch.where(step > 0, spread.clamp(max=255), levels).to(torch.uint8)


def mean_grey(images: Tensor) -> Tensor:
    """The mean of each image's grey version, rounded to the nearest integer: (n, 1, 1) int64."""
    count = images.shape[2] * images.shape[3]
    total = grey(images).sum((1, 2, 3))                                  # int64
    return ((2 * total + count) // (2 * count)).view(-1, 1, 1)


# ---------------------------------------------------------------------------------------------
# Geometric operations: one affine map per image
# ---------------------------------------------------------------------------------------------


FRAME = 2                       # pixels of border that interpolation may read on each side


def affine_matrices(codes: np.ndarray, arguments: np.ndarray, height: int, width: int) -> np.ndarray:
    """The matrices that map (x, y, 1) in the new image to (x, y) in the old one, (…, 2, 3) float64.

    codes, arguments: (…). Coordinates are in pixels from the top left corner. Operations that are
    not geometric have the identity.
    """
    matrices = np.zeros((*codes.shape, 2, 3))
    matrices[..., (0, 1), (0, 1)] = 1.0
    with np.errstate(over="ignore"):
        for operation, (row, column), scale in [
                (Operation.ShearX, (0, 1), 1), (Operation.ShearY, (1, 0), 1),
                (Operation.TranslateX, (0, 2), width), (Operation.TranslateY, (1, 2), height)]:
            chosen = codes == operation
            matrices[chosen, row, column] = arguments[chosen] * scale
    centre = np.array([width / 2.0, height / 2.0])
    for place in zip(*np.nonzero(codes == Operation.Rotate)):            # about the centre of the image
        angle = -math.radians(arguments[place])
        turn = np.array([[math.cos(angle), math.sin(angle)],
                         [-math.sin(angle), math.cos(angle)]]).round(15)     # as Pillow does
        matrices[place] = np.column_stack([turn, centre - (turn * centre).sum(1)])
    return matrices


def linear(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """Linear interpolation between a (t = 0) and b (t = 1)."""
    return ((b - a) * t).add_(a)


def cubic(a: Tensor, b: Tensor, c: Tensor, d: Tensor, t: Tensor) -> Tensor:
    """Cubic convolution (Keys, 1981) between b (t = 0) and c (t = 1), with neighbours a and d.

    Keys's parameter is -1, as in Pillow's transforms:
    b + t · ((c − a) + t · ((2 (a − b) + c − d) + t · (b − a + d − c)))
    """
    step = a - b
    values = (d - step).sub_(c) * t
    values.add_(torch.add(c, step, alpha=2).sub_(d)).mul_(t)
    return values.add_(c - a).mul_(t).add_(b)


# By whether interpolation is bicubic: the function, and which of four neighbours in a row it takes.
FILTERS = {False: (linear, range(1, 3)), True: (cubic, range(4))}


def affine(images: Tensor, bilinear: int, matrices: Tensor, bounds: Tensor, fill: Tensor, axes: Axes,
           at_once: bool) -> Tensor:
    """Transform each image of (n, 3, H, W) uint8 by its matrix, (n, 2, 3) (`affine_matrices`).

    A pixel of the new image whose centre is mapped outside of the old image gets `fill`. For all
    others, neighbours beyond the edge repeat the edge, as in Pillow.

    bilinear: how many images, from the first on, are interpolated bilinearly; the others
    bicubically.
    bounds: `image_bounds`. fill: the colour, (3, 1, 1) uint8.
    axes: the axes along which pixels move. Where pixels stay in their row (or column), only that
    row (or column) is read.
    at_once: read all neighbours of a pixel at once, for which `axes` must be "xy"; else read one
    neighbour after the other.
    """
    height, width = images.shape[2:]
    chosen = {"x": slice(0, 1), "y": slice(1, 2), "xy": slice(0, 2)}[axes]
    low, shares, inside = source_positions(matrices[:, chosen], bounds[:, chosen], height, width)
    source = dict(zip(axes, low.unbind(1)))
    if axes == "x":
        source["y"] = torch.arange(height, dtype=torch.int32, device=images.device)[:, None]
    elif axes == "y":
        source["x"] = torch.arange(width, dtype=torch.int32, device=images.device)
    words = framed(images)
    stride, size = words.shape[2], words[0].numel()
    # The index of a pixel's neighbour above on the left, among the words of all images: (n, H, W).
    first = torch.arange((FRAME - 1) * (stride + 1), len(images) * size, size, dtype=torch.int32,
                         device=images.device).view(-1, 1, 1)
    index = source["y"] * stride + source["x"] + first
    interpolate = interpolated_at_once if at_once else interpolated_by_neighbour
    parts = [interpolate(words, index[some], dict(zip(axes, shares[some].split(1, dim=1))), bicubic)
             for bicubic, some in ((False, slice(bilinear)), (True, slice(bilinear, None)))
             if len(index[some])]
    values = torch.cat(parts) if len(parts) > 1 else parts[0]
    # uint8 arithmetic wraps around at 256: this gives the value where `inside` is 1, else the fill.
    return to_levels(values).sub_(fill).mul_(inside.view(torch.uint8)).add_(fill)


def image_bounds(height: int, width: int) -> np.ndarray:
    """-1, the index of the last pixel, and the size, each along x and y: (3, 2, 1, 1) float64."""
    return np.array([[-1, -1], [width - 1, height - 1], [width, height]], float)[..., None, None]


def source_positions(matrices: Tensor, bounds: Tensor, height: int, width: int
                     ) -> tuple[Tensor, Tensor, Tensor]:
    """Where in the old images the pixels of the new images come from, along k of the axes.

    matrices: (n, k, 3), the rows of the affine matrices for these axes. Returns the index of the
    source pixel, rounded down, int32 from -1 to size - 1, (n, k, H, W); the remaining share of the
    way to the next pixel, float32 from 0 to 1, (n, k, H, W); and whether the position lies in the
    image, (n, 1, H, W) bool.
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
    # Pixels from outside get the fill in the end, but their indices must be valid, too.
    return low.clamp_(before, last).int(), share, inside


def framed(images: Tensor) -> Tensor:
    """Pack the three channels of each pixel into one word, so that one look-up fetches them.

    (n, 3, H, W) uint8 → (n, H + 4, W + 4) int32, with a border of 2 pixels that repeats the edge.
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
    """Interpolate between neighbours, all of which are read at once: (n, 3, H, W) float32.

    index: (n, H, W), the word of each pixel's first neighbour, above on the left.
    shares: for each axis (n, 1, H, W), the share of the way from the second neighbour to the third.
    """
    between, taps = FILTERS[bicubic]
    reach = torch.arange(taps.start, taps.stop, dtype=torch.int32, device=words.device)
    offsets = (reach[:, None] * words.shape[2] + reach)[..., None, None]     # (taps, taps, 1, 1)
    # (n, 3, taps, taps, H, W). The index is as large, so no name keeps it in memory.
    neighbours = look_up(words, index[:, None, None] + offsets, torch.int16)
    rows = between(*neighbours.unbind(3), shares["x"][:, :, None])       # (n, 3, taps, H, W)
    return between(*rows.unbind(2), shares["y"])


def interpolated_by_neighbour(words: Tensor, index: Tensor, shares: dict[str, Tensor], bicubic: bool
                              ) -> Tensor:
    """The result of `interpolated_at_once` in less memory: neighbours are read one after the other.

    Along an axis that is not in `shares`, pixels stay where they are.
    """
    between, taps = FILTERS[bicubic]

    def neighbour(down: int, right: int) -> Tensor:
        return look_up(words.flatten()[down * words.shape[2] + right:], index, torch.float32)

    def along_row(down: int) -> Tensor:
        if "x" not in shares:
            return neighbour(down, 1)
        return between(*[neighbour(down, right) for right in taps], shares["x"])
    return between(*map(along_row, taps), shares["y"]) if "y" in shares else along_row(1)


def look_up(words: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """The three channels of the words at `index`, (n, …), in the flattened `words`: (n, 3, …)."""
    found = words.flatten().index_select(0, index.flatten()).view(torch.uint8)
    channels = found.view(*index.shape, 4)[..., :3].movedim(-1, 1)
    return channels.to(dtype, memory_format=torch.contiguous_format)
