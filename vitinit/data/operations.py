"""RandAugment's fifteen operations on batches (n, 3, H, W) uint8, with one argument per image.

Each operation is the one of Pillow that AutoAugment (arXiv 1805.09501) and RandAugment (arXiv
1909.13719) use, with the same formula and the same rounding. (Only geometric operations may differ
from Pillow's by one level, because they interpolate in float32 and Pillow in float64.) They are of
three kinds:

    maps of levels   AutoContrast, Equalize, Invert, Posterize, Solarize, SolarizeAdd: a look-up
    enhancements     Color, Contrast, Brightness, Sharpness: a blend with a plainer version
    affine maps      Rotate, ShearX, ShearY, TranslateX, TranslateY

`rand_augment` takes a batch through the operations that were drawn for it. In each layer, images
with the same operation are treated together, since every kernel launch on a GPU has a fixed cost.

A level is one of the 256 values of a channel. The result for an image is the same, bit for bit,
whatever batch it is in, and whatever the device. To that end all arithmetic is either on integers
or consists of single floating-point operations, whose rounding IEEE 754 defines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from .draw import Operation

LEVELS = 256
MOST = 256.0                    # no larger factor changes the result, as levels are integers
# The most pixels that go through a function at once. CPUs: what fits into the cache, 2.6 images of
# 224×224. GPUs: bicubic rotation takes about 180 bytes of memory per pixel, so these take 3 GiB.
CPU_CHUNK, GPU_CHUNK = 2**17, 2**24


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor on the device. The host does not wait for what is queued there."""
    host = torch.from_numpy(array)
    if device.type == "cuda" and torch.cuda.is_available():
        # Only from pinned memory need the host not wait for a copy. (Tensor.pin_memory would do the
        # same, but it is not implemented for fake tensors.)
        host = torch.empty(host.shape, dtype=host.dtype, pin_memory=True).copy_(host)
    return host.to(device, non_blocking=True)


# ---------------------------------------------------------------------------------------------
# Maps of levels: by tables (n, 3, 256) uint8
# ---------------------------------------------------------------------------------------------


_LEVELS = np.arange(LEVELS)
# Tables (395, 256) uint8 that do not depend on the image: Solarize from each level on (from level 0
# on is Invert), SolarizeAdd of each addend, Posterize to each number of bits (0 bits make black).
FIXED_TABLES = np.concatenate([
    np.where(_LEVELS < np.arange(257)[:, None], _LEVELS, 255 - _LEVELS),
    np.where(_LEVELS < 128, (_LEVELS + np.arange(129)[:, None]).clip(max=255), _LEVELS),
    _LEVELS & (LEVELS - 2 ** (8 - np.arange(9)[:, None]))]).astype(np.uint8)
FIRST_TABLE = {Operation.Invert: 0, Operation.Solarize: 0, Operation.SolarizeAdd: 257,
               Operation.Posterize: 257 + 129}


def fixed_tables(codes: np.ndarray, arguments: np.ndarray) -> np.ndarray:
    """The tables (n, 256) uint8 of operations that have a fixed one; of others some table."""
    which = np.zeros(len(codes))
    for operation, first in FIRST_TABLE.items():
        which = np.where(codes == operation, first + arguments, which)
    return FIXED_TABLES[which.astype(np.int64)]


def map_levels(images: Tensor, tables: Tensor) -> Tensor:
    """Replace each value by its entry in its channel's table, or its image's, (n, 256) uint8."""
    tables = tables.view(len(images), -1, LEVELS).expand(-1, 3, -1)
    return tables.flatten().index_select(0, entries(images).flatten()).view(images.shape)


def entries(images: Tensor) -> Tensor:
    """The index of each value's entry in flattened tables (n, 3, 256): (n, 3, H, W) int32."""
    tables = len(images) * 3
    first = torch.arange(0, tables * LEVELS, LEVELS, dtype=torch.int32, device=images.device)
    return images + first.view(-1, 3, 1, 1)


def auto_contrast(images: Tensor) -> Tensor:
    """Stretch each channel so that its darkest value becomes 0 and its lightest 255."""
    low, high = (images.amin((2, 3)).double()[..., None], images.amax((2, 3)).double()[..., None])
    levels = torch.arange(LEVELS, device=images.device, dtype=torch.float64)
    scale = levels[-1] / (high - low)                                    # (n, 3, 1), of 255
    stretched = (levels * scale).sub_(low * scale).clamp_(0, 255)
    return map_levels(images, torch.where(high > low, stretched, levels).to(torch.uint8))


def equalize(images: Tensor) -> Tensor:
    """Equalise each channel's histogram: spread its pixels evenly over the levels."""
    values = entries(images).flatten()
    one = torch.ones(1, dtype=torch.int32, device=images.device)
    histogram = one.new_zeros(len(images) * 3 * LEVELS)
    histogram = histogram.index_add_(0, values, one.expand(len(values))).view(-1, 3, LEVELS)
    # How many pixels each level would have if they were spread evenly, not counting those of the
    # lightest value (as in Pillow).
    lightest = histogram.gather(2, images.amax((2, 3)).long()[..., None])
    step = (images.shape[2] * images.shape[3] - lightest) // 255         # (n, 3, 1)
    below = histogram.cumsum(2) - histogram
    spread = (below + step // 2) // step.clamp(min=1)
    levels = torch.arange(LEVELS, device=images.device)
    return map_levels(images, torch.where(step > 0, spread.clamp(max=255), levels).to(torch.uint8))


# ---------------------------------------------------------------------------------------------
# Enhancements: blends with a plainer version, towards it (factors 0 to 1) or away (above 1)
# ---------------------------------------------------------------------------------------------


def to_levels(values: Tensor) -> Tensor:
    """Floats as uint8, clipped and truncated like in Pillow. The argument is clipped in place."""
    # By way of int16, because that is faster on a CPU.
    return values.clamp_(0, 255).to(torch.int16).to(torch.uint8)


def blend(plain: Tensor | float, images: Tensor, factors: Tensor) -> Tensor:
    """plain + factor · (images − plain) as uint8; `plain` holds integers, as float32.

    factors: (n, 1, 1, 1) float32, one per image; 1 leaves an image as it is.
    """
    return to_levels((images - plain).mul_(factors).add_(plain))


def grey(images: Tensor) -> Tensor:
    """The ITU-R 601 luma, rounded like in Pillow's convert("L"): (n, 1, H, W) int32."""
    red, green, blue = images.int().split(1, dim=1)
    luma = (red * 19595).add_(green, alpha=38470).add_(blue, alpha=7471)
    return luma.add_(0x8000).bitwise_right_shift_(16)


def color(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with the grey version."""
    return blend(grey(images).float(), images, factors)


def contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with the mean of the grey version, rounded to the nearest integer."""
    count = images.shape[2] * images.shape[3]
    total = grey(images).sum((1, 2, 3), keepdim=True)                    # int64
    return blend(((2 * total + count) // (2 * count)).float(), images, factors)


def brightness(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with black."""
    return to_levels(images * factors)


def sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with the image smoothed by the 3×3 kernel with 5/13 in the centre, 1/13 around it.

    Pixels on the border stay as they are.
    """
    smooth = images.float()
    if min(images.shape[2:]) > 2:
        wide = images.to(torch.int16)
        rows = (wide[:, :, :-2] + wide[:, :, 1:-1]).add_(wide[:, :, 2:])     # (n, 3, H - 2, W)
        box = (rows[..., :-2] + rows[..., 1:-1]).add_(rows[..., 2:])     # (n, 3, H - 2, W - 2)
        weighted = box.add_(wide[:, :, 1:-1, 1:-1], alpha=4)
        smooth[:, :, 1:-1, 1:-1] = nearest_of_13th(weighted)
    return blend(smooth, images, factors)


def nearest_of_13th(sums: Tensor) -> Tensor:
    """sums / 13 rounded to the nearest, for sums from 0 to 13 · 255: (2 · sum + 13) // 26."""
    # A product and a shift are much faster than a division. 10083 / 2^18 exceeds 1 / 26 by too
    # little to change the result for numerators below 2^18 / 14.
    return sums.int().mul_(2 * 10083).add_(13 * 10083).bitwise_right_shift_(18)


# ---------------------------------------------------------------------------------------------
# Affine maps
# ---------------------------------------------------------------------------------------------


FRAME = 2                       # pixels of border that interpolation may read on each side


def affine_matrices(codes: np.ndarray, arguments: np.ndarray, height: int, width: int
                    ) -> np.ndarray:
    """The matrices (n, 2, 3) float64 that map (x, y, 1) in the new image to (x, y) in the old one.

    Coordinates are in pixels from the top left corner. Operations that are not geometric have the
    identity.
    """
    matrices = np.tile(np.eye(2, 3), (len(codes), 1, 1))
    with np.errstate(over="ignore"):
        for operation, (row, column), scale in [
                (Operation.ShearX, (0, 1), 1), (Operation.ShearY, (1, 0), 1),
                (Operation.TranslateX, (0, 2), width), (Operation.TranslateY, (1, 2), height)]:
            chosen = codes == operation
            matrices[chosen, row, column] = arguments[chosen] * scale
    centre = np.array([width / 2.0, height / 2.0])
    for place in np.flatnonzero(codes == Operation.Rotate):              # about the centre
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


def affine(images: Tensor, matrices: Tensor, fill: Tensor, *, axes: str, bicubic: bool) -> Tensor:
    """Transform each image by its matrix, (n, 2, 3) (`affine_matrices`).

    A pixel whose centre is mapped outside of the old image gets the colour `fill`, (n, 3, 1, 1)
    uint8. For all others, neighbours beyond the edge repeat the edge, as in Pillow.

    axes: "x", "y" or "xy", along which pixels move. Where they stay in their row (or column), only
        that row (or column) is read.
    """
    words, first = framed(images)
    shares, inside, index = {}, True, first
    for axis, size, stride in (("x", images.shape[3], 1), ("y", images.shape[2], words.stride(1))):
        if axis in axes:
            low, shares[axis], within = source_positions(
                matrices[:, "xy".index(axis)], size, images.shape[2:])
            inside = within & inside
        else:
            low = torch.arange(size, dtype=torch.int32, device=images.device)
            low = low if axis == "x" else low[:, None]
        index = index + low * stride                                     # (n, H, W)
    interpolate, taps = (cubic, range(4)) if bicubic else (linear, range(1, 3))
    index = index.flatten()

    def neighbour(down: int, right: int) -> Tensor:
        """The neighbours of all pixels in one direction: (n, 3, H, W) float32."""
        found = words.flatten()[down * words.stride(1) + right:].index_select(0, index)
        channels = found.view(torch.uint8).view(len(images), *images.shape[2:], 4)[..., :3]
        return channels.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)

    def along_row(down: int) -> Tensor:
        return (interpolate(*[neighbour(down, right) for right in taps], shares["x"])
                if "x" in axes else neighbour(down, 1))
    values = interpolate(*map(along_row, taps), shares["y"]) if "y" in axes else along_row(1)
    # uint8 arithmetic wraps around at 256: this gives the value where `inside` is 1, else the fill.
    return to_levels(values).sub_(fill).mul_(inside[:, None].view(torch.uint8)).add_(fill)


def source_positions(rows: Tensor, size: int, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    """Where in the old images the pixels of the new images come from, along an axis of `size`.

    rows: (n, 3), those of the matrices for this axis. shape: (H, W). Returns the index of the
    source pixel, rounded down, int32 from -1 to size - 1, (n, H, W); the remaining share of the way
    to the next pixel, float32 from 0 to 1, (n, 1, H, W); and whether the position lies in the
    image, (n, H, W) bool.
    """
    y, x = (torch.arange(0.5, side, dtype=torch.float64, device=rows.device) for side in shape)
    a, b, c = rows[..., None, None].unbind(1)                            # (n, 1, 1)
    old = (a * x + b * y[:, None]).add_(c)                               # (n, H, W)
    inside = (old >= 0) & (old < size)
    old = old.sub_(0.5)                              # in units of whole pixels from the first
    low = old.floor()
    share = (old - low).float()[:, None]
    # Pixels from outside get the fill in the end, but their indices must be valid, too.
    return low.clamp_(-1, size - 1).int(), share, inside


def framed(images: Tensor) -> tuple[Tensor, Tensor]:
    """Pack the three channels of each pixel into one word, so that one look-up fetches them.

    (n, 3, H, W) uint8 → (n, H + 4, W + 4) int32, with a border of 2 pixels that repeats the edge;
    and the index in it, flattened, of the word above on the left of each image's first, (n, 1, 1).
    """
    count, _, height, width = images.shape
    frame = images.new_empty(count, height + 2 * FRAME, width + 2 * FRAME, 4)
    frame[:, FRAME:-FRAME, FRAME:-FRAME, :3] = images.permute(0, 2, 3, 1)
    words = frame.view(torch.int32)[..., 0]
    words[:, :FRAME] = words[:, FRAME:FRAME + 1]
    words[:, -FRAME:] = words[:, -FRAME - 1:-FRAME]
    words[:, :, :FRAME] = words[:, :, FRAME:FRAME + 1]
    words[:, :, -FRAME:] = words[:, :, -FRAME - 1:-FRAME]
    corner = (FRAME - 1) * (words.stride(1) + 1)
    first = torch.arange(corner, words.numel(), words.stride(0), dtype=torch.int32,
                         device=images.device)
    return words, first[:, None, None]


# ---------------------------------------------------------------------------------------------
# RandAugment
# ---------------------------------------------------------------------------------------------


# What images go through in a layer, in this order: the operations, the function, and what it needs
# beside the images. Of two geometric entries, the second is bicubic.
FUNCTIONS = [
    ([Operation.AutoContrast], auto_contrast, ()), ([Operation.Equalize], equalize, ()),
    (list(FIRST_TABLE), map_levels, ("tables",)),
    *(([operation], function, ("factors",)) for operation, function in [
        (Operation.Color, color), (Operation.Contrast, contrast),
        (Operation.Brightness, brightness), (Operation.Sharpness, sharpness)]),
    *((operations, partial(affine, axes=axes, bicubic=bicubic), ("matrices", "fill"))
      for axes, operations in [("x", [Operation.ShearX, Operation.TranslateX]),
                               ("y", [Operation.ShearY, Operation.TranslateY]),
                               ("xy", [Operation.Rotate])] for bicubic in (False, True))]
NONE, FIRST_AFFINE, LAST_AFFINE = len(FUNCTIONS), 7, 11
FUNCTION_OF = np.full(len(Operation), NONE)          # the (first) entry of each operation
for _number, (_operations, *_) in reversed(list(enumerate(FUNCTIONS))):
    FUNCTION_OF[_operations] = _number


def rand_augment(images: Tensor, operations: np.ndarray, fill: Sequence[int], *,
                 few_launches: bool | None = None) -> Tensor:
    """Apply to each image of (n, 3, H, W) uint8 the operations drawn for it, layer by layer.

    operations: (n, L, 3), as in `draw.Draws`, on the host. fill: the colour of pixels from outside
        (three values, 0 to 255). Returns new images (n, 3, H, W) uint8.
    few_launches: all geometric operations go through `affine` as "xy", together, as a GPU needs,
        which has a fixed cost per launch; else by the axes along which they move pixels, which
        takes least arithmetic. By default what suits the device; the bits are the same.
    """
    device, size = images.device, images.shape[2:]
    few_launches = device.type != "cpu" if few_launches is None else few_launches
    most = max(1, (CPU_CHUNK if device.type == "cpu" else GPU_CHUNK) // (size[0] * size[1]))
    images = images.clone(memory_format=torch.contiguous_format)
    fills = upload(np.array(fill, np.uint8), device).view(3, 1, 1).expand(len(images), -1, -1, -1)
    for layer in operations.swapaxes(0, 1):                              # (n, 3)
        functions = FUNCTION_OF[layer[:, 0].astype(np.int64)]
        geometric = (functions >= FIRST_AFFINE) & (functions != NONE)
        functions += geometric * (layer[:, 2] > 0)
        if few_launches:
            functions[geometric] = LAST_AFFINE + (layer[geometric, 2] > 0)
        order = functions.argsort(kind="stable")
        ends = functions[order].searchsorted(np.arange(NONE + 1)).tolist()
        codes, arguments, _ = layer[order].T
        rows, tables, factors, matrices = (upload(array, device) for array in (
            order, fixed_tables(codes, arguments),
            arguments.clip(-MOST, MOST).astype(np.float32)[:, None, None, None],
            affine_matrices(codes, arguments, *size)))
        given = {"tables": tables, "factors": factors, "matrices": matrices, "fill": fills}
        for (_, function, needs), begin, end in zip(FUNCTIONS, ends, ends[1:]):
            for first in range(begin, end, most):
                some = slice(first, min(first + most, end))
                part = images.index_select(0, rows[some])
                part = function(part, *(given[name][some] for name in needs))
                images.index_copy_(0, rows[some], part)
    return images
