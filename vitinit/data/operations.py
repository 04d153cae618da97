"""The operations of RandAugment and 3-Augment on batches (n, 3, H, W) uint8, in four functions.

Each operation is the one of Pillow that AutoAugment (arXiv 1805.09501) and RandAugment (arXiv
1909.13719) use, with the same formula and rounding. (Only geometric operations may differ by one
level, because they interpolate in float32 and Pillow in float64.)

    map_levels   AutoContrast, Equalize, Invert, Posterize, Solarize, SolarizeAdd: a look-up
    enhance      Color, Contrast, Brightness, Sharpness: a blend with a plainer version
    affine       ShearX, ShearY, TranslateX, TranslateY, Rotate: one affine map per image
    blur         GaussianBlur: three boxes one after the other, along each axis

Every kernel launch has a fixed cost on a GPU, so images with different operations go through such a
function together: sorted by groups (rand_augment.py), of which `counts` states how many images each
has. `columns`, (n, COLUMNS) float64, describes the operation of each image. A level is one of the
256 values of a channel.

The bits of an image's result do not depend on the batch or the device: all arithmetic is on
integers, or single floating-point operations, whose rounding IEEE 754 defines.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray
from torch import Tensor

LEVELS = 256
BYTES = 4  # of the word that holds a pixel's channels where it is moved
FRAME = 2  # pixels of border that interpolation may read on each side
# What the columns hold: the drawn operation (code, argument, 1 if it is bicubic) and its group; for
# a fixed map of levels, threshold, addend, flip and mask (`fixed_tables`); for an affine map, the
# two rows of its matrix; for a blur, the five weights of a box.
ARGUMENT = 1
GROUP = 3
MAP = slice(4, 8)
MATRIX = slice(8, 14)
KERNEL = slice(14, 19)
COLUMNS = 19
BOXES = 3  # whose sequence is nearly a Gaussian
WEIGHT_BITS = 24  # weights are multiples of 2⁻²⁴


def map_levels(
    images: Tensor, counts: Sequence[int], columns: Tensor, *, few_launches: bool
) -> Tensor:
    """Look up each value in its channel's table; counts: of AutoContrast, Equalize and others.
    few_launches: all channels together, for a GPU; else one after the other, and in place.
    """
    stretched, equalised, fixed = counts
    adaptive = stretched + equalised  # how many tables depend on the image
    levels = torch.arange(LEVELS, dtype=torch.int16, device=images.device)
    tables = images.new_empty(*images.shape[:2], LEVELS)
    if fixed:
        tables[adaptive:] = fixed_tables(columns[adaptive:], levels)
    if adaptive:
        lightest = images[:adaptive].amax((2, 3))[..., None]  # (·, 3, 1)
    if stretched:
        tables[:stretched] = auto_contrast_tables(images[:stretched], lightest[:stretched], levels)
    if equalised:
        middle = slice(stretched, adaptive)  # the images that Equalize has
        if few_launches:
            entries = entries_of(images[middle]).flatten()
            histograms = entries.new_zeros(tables[middle].numel())
            histograms.index_add_(0, entries, entries.new_ones(1).expand(len(entries)))
        else:  # which a GPU would have to wait for
            channels = images[middle].flatten(0, 1).flatten(1)
            histograms = torch.cat([channel.bincount(minlength=LEVELS) for channel in channels])
        histograms = histograms.view(-1, *tables.shape[1:])
        tables[middle] = equalize_tables(histograms, lightest[middle], levels)
    if few_launches:
        return tables.flatten().index_select(0, entries_of(images).flatten()).view(images.shape)
    for values, table in zip(images.flatten(0, 1).numpy(), tables.flatten(0, 1).numpy()):
        changed = values.tobytes().translate(table.tobytes())  # Python's own is the fastest
        values[:] = np.frombuffer(changed, np.uint8).reshape(values.shape)
    return images


def entries_of(images: Tensor) -> Tensor:
    """Where the entry of each value is in flattened tables (n, 3, 256): (n, 3, H, W) int32."""
    count, channels = images.shape[:2]
    size = count * channels * LEVELS
    first = torch.arange(0, size, LEVELS, dtype=torch.int32, device=images.device)
    return images + first.view(count, channels, 1, 1)


def fixed_tables(columns: Tensor, levels: Tensor) -> Tensor:
    """The tables of maps that do not depend on the image, (n, 1, 256).

    Below the threshold an addend is added; no sum exceeds 255. From the threshold on, levels are
    inverted if flip is 255. Of the result only the bits of the mask are kept.
    """
    threshold, addend, flip, mask = columns[:, MAP].to(torch.int16)[..., None].unbind(1)  # (n, 1)
    changed = torch.where(levels < threshold, levels + addend, levels ^ flip)  # (n, 256)
    return (changed & mask)[:, None]


def auto_contrast_tables(images: Tensor, lightest: Tensor, levels: Tensor) -> Tensor:
    """Stretch each channel so that its darkest value becomes 0 and its lightest, (n, 3, 1), 255."""
    low = images.amin((2, 3)).double()[..., None]
    high = lightest.double()
    scale = levels[-1] / (high - low)  # (n, 3, 1), of 255
    stretched = (levels * scale).sub_(low * scale).clamp_(0, 255)
    return torch.where(high > low, stretched, levels).to(torch.uint8)


def equalize_tables(histograms: Tensor, lightest: Tensor, levels: Tensor) -> Tensor:
    """Spread the pixels of each channel's histogram, (n, 3, 256), evenly over the levels."""
    so_far = histograms.cumsum(2)
    darker = so_far - histograms  # pixels below each level
    # Pixels per level if spread evenly, without those of the lightest value, (n, 3, 1), as Pillow.
    step = (so_far[..., -1:] - histograms.gather(2, lightest.long())) // 255
    spread = (darker + step // 2) // step.clamp(min=1)
    return torch.where(step > 0, spread.clamp_(max=255), levels).to(torch.uint8)


def enhance(images: Tensor, counts: Sequence[int], columns: Tensor) -> Tensor:
    """plain + factor · (image − plain), where plain has whole levels; above 1 away from plain.

    counts: how many images Color (plain: grey), Contrast (plain: the mean grey), Brightness (plain:
        black) and Sharpness (plain: smoothed) have, in this order.
    """
    coloured, contrasted, brightened, sharpened = counts
    values = images.float()  # at once: a CPU is slow at arithmetic on two types
    parts = []
    if coloured or contrasted:
        greys = grey(values[: coloured + contrasted])  # (·, 1, H, W)
    if coloured:
        parts.append(greys[:coloured])
    if contrasted:
        pixels = images.shape[2] * images.shape[3]
        total = greys[coloured:].sum((1, 2, 3), keepdim=True, dtype=torch.int64)
        parts.append((2 * total + pixels) // (2 * pixels))  # the mean, rounded
    if brightened:
        parts.append(images.new_zeros(brightened, 1, 1, 1))
    if sharpened:
        parts.append(smoothed(images[-sharpened:]))
    plain = parts[0]
    if len(parts) > 1:
        plain = torch.cat([part.expand(-1, *images.shape[1:]) for part in parts])
    plain = plain.float()
    factors = columns[:, ARGUMENT].float()[:, None, None, None]
    return to_levels(values.sub_(plain).mul_(factors).add_(plain))


def to_levels(values: Tensor) -> Tensor:
    """Floats as uint8, clipped and truncated like in Pillow. The argument is clipped in place."""
    return values.clamp_(0, 255).to(torch.int16).to(torch.uint8)  # faster so on a CPU


def grey(images: Tensor) -> Tensor:
    """The ITU-R 601 luma of float32, rounded like in Pillow's convert("L"): (n, 1, H, W) float32.

    Weights are multiples of 2⁻¹⁶ with a sum of 1, so no sum has more bits than float32 holds. Of
    images of one channel it is that channel.
    """
    if images.shape[1] == 1:
        return images.clone()
    red, green, blue = images.split(1, dim=1)
    luma = (red * (19595 / 2**16)).add_(green, alpha=38470 / 2**16)
    return luma.add_(blue, alpha=7471 / 2**16).add_(0.5).floor_()


def smoothed(images: Tensor) -> Tensor:
    """Smooth by the kernel 1/13, in its centre 5/13, but for the border: whole levels, float32."""
    smooth = images.float()
    if min(images.shape[2:]) <= 2:  # nothing but border
        return smooth
    wide = images.to(torch.int16)
    rows = wide[:, :, :-2] + wide[:, :, 1:-1]
    rows.add_(wide[:, :, 2:])  # sums of three rows: (n, 3, H - 2, W)
    sums = rows[..., :-2] + rows[..., 1:-1]
    sums.add_(rows[..., 2:])  # of 3×3 pixels: (n, 3, H - 2, W - 2)
    sums.add_(wide[:, :, 1:-1, 1:-1], alpha=4)
    # No sum is nearer than 1/26 to where rounding changes, so a product serves as division.
    smooth[:, :, 1:-1, 1:-1] = sums.float().mul_(1 / 13).round_()
    return smooth


def affine(
    images: Tensor, counts: Sequence[int], columns: Tensor, *, fill: Tensor, few_launches: bool
) -> Tensor:
    """Transform each image by its matrix, which maps (x, y, 1) to (x, y) in the old image.

    A pixel whose centre is mapped outside of the old image gets the colour `fill`, (3, 1, 1) uint8.
    For all others, neighbours beyond the edge repeat it, as in Pillow. counts: of images whose
    pixels move along x, along y and along both, with bilinear, then with bicubic interpolation.
    few_launches: read all rows of neighbours at once, which takes much memory.
    """
    along_x, along_y, along_both = map(sum, zip(counts[:3], counts[3:]))
    axes = ""
    if along_x or along_both:
        axes += "x"
    if along_y or along_both:
        axes += "y"
    size = images.shape[2:]
    low, shares, inside = source_positions(columns[:, MATRIX].view(-1, 2, 3), axes, size)
    integers = partial(torch.arange, dtype=torch.int32, device=images.device)
    y, x = map(integers, size)
    y = y[:, None]  # (H, 1)
    if "x" in axes:
        x = low[:, 0]  # (n, H, W)
    if "y" in axes:
        y = low[:, -1]
    stride = size[1] + 2 * FRAME
    area = (size[0] + 2 * FRAME) * stride
    # The word above on the left of each image's first pixel, in the flattened words, (n,), and of
    # each source pixel, (n, H, W).
    first = integers((FRAME - 1) * (stride + 1), area * len(images), area)
    index = y * stride + x + first[:, None, None]
    bilinear = sum(counts[:3])
    groups = []  # of the channels that a word holds
    for some in images.split(BYTES, dim=1):
        read = partial(pixels_around, framed(some), some.shape[1])
        parts = []
        for part, bicubic in ((slice(bilinear), False), (slice(bilinear, None), True)):
            if len(index[part]):
                by_axis = dict(zip(axes, shares[part].split(1, dim=1)))
                parts.append(interpolated(read, index[part], by_axis, bicubic, few_launches))
        groups.append(joined(parts, 0))
    values = joined(groups, 1)
    # uint8 arithmetic wraps around at 256: this gives the value where `inside` is 1, else the fill.
    return to_levels(values).sub_(fill).mul_(inside.view(torch.uint8)).add_(fill)


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """The parts along a dimension, without a copy of a single one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def source_positions(
    matrices: Tensor, axes: str, size: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Where in the old images the pixels of the new images come from, along the k axes.

    matrices: (n, 2, 3). size: (H, W). Returns the index of the source pixel, rounded down, int32
    from -1 to side - 1, the share of the way to the next one, float32 from 0 to 1, both
    (n, k, H, W), and whether the position lies in the image, (n, 1, H, W) bool.
    """
    y, x = (torch.arange(0.5, side, dtype=torch.float64, device=matrices.device) for side in size)
    along = {"x": slice(1), "y": slice(1, 2), "xy": slice(2)}[axes]
    a, b, c = matrices[:, along, :, None, None].unbind(2)  # (n, k, 1, 1)
    old = (a * x + b * y[:, None]).add_(c)  # (n, k, H, W)
    sides = size[::-1][along]
    inside = old >= 0
    for within, positions, side in zip(inside.unbind(1), old.unbind(1), sides):
        within &= positions < side
    old.sub_(0.5)  # in units of whole pixels from the first
    low = old.floor()
    shares = (old - low).float()
    # Pixels from outside get the fill in the end, but their indices must be valid, too.
    for positions, side in zip(low.unbind(1), sides):
        positions.clamp_(-1, side - 1)
    inside = inside[:, :1] & inside[:, -1:]  # along both axes
    return low.int(), shares, inside


def framed(images: Tensor) -> Tensor:
    """Pack the channels of each pixel, four at most, into one word, so that one look-up fetches them.

    (n, 3, H, W) uint8 → (n, H + 4, W + 4) int32, with a border of 2 pixels that repeats the edge.
    """
    pixels = images.new_empty(len(images), *images.shape[2:], BYTES)
    pixels[..., : images.shape[1]] = images.permute(0, 2, 3, 1)
    words = pixels.view(torch.float32)[..., 0]  # only floats can be padded so, bit by bit
    return F.pad(words, (FRAME,) * 4, mode="replicate").view(torch.int32)


def interpolated(
    read: Callable, index: Tensor, shares: dict[str, Tensor], bicubic: bool, few_launches: bool
) -> Tensor:
    """Interpolate between the neighbours of each source pixel, first along x, then along y.

    read: `pixels_around` of the framed images. index: (n, H, W), of the first of 4 × 4 neighbours,
    above on the left. shares: for each axis, (n, 1, H, W). Returns (n, 3, H, W) float32.
    """
    between: Callable = cubic if bicubic else linear
    taps = range(4) if bicubic else range(1, 3)
    across = taps if "x" in shares else range(1, 2)
    down = taps if "y" in shares else range(1, 2)
    at_once = len(down) if few_launches else 1
    rows = []  # (n, 3, H, W) each
    for start in down[::at_once]:
        pixels = read(index, range(start, start + at_once), across)
        if "x" in shares:
            rows.extend(between(*pixels.unbind(1), shares["x"]))
        else:
            rows.extend(pixels[:, 0])
    if "y" in shares:
        return between(*rows, shares["y"])
    return rows[0]


def pixels_around(
    words: Tensor, channels: int, index: Tensor, down: range, across: range
) -> Tensor:
    """Look up rows and columns of each pixel's neighbours: (down, across, n, 3, H, W) int16.

    words: `framed`, of images of so many channels.
    """
    stride = words.stride(1)
    size = len(down), len(across)
    words = words.flatten()[down.start * stride + across.start :]
    if size != (1, 1):  # a view of all windows, which overlap
        reach = (len(down) - 1) * stride + len(across) - 1  # from a window's first word to its last
        words = words.as_strided((len(words) - reach, *size), (1, stride, 1))
    pixels = words.index_select(0, index.flatten()).view(torch.uint8)
    values = pixels.view(*index.shape, *size, BYTES)[..., :channels].permute(3, 4, 0, 5, 1, 2)
    return values.to(torch.int16, memory_format=torch.contiguous_format)


def linear(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """Linear interpolation between a (t = 0) and b (t = 1)."""
    return ((b - a) * t).add_(a)


def cubic(a: Tensor, b: Tensor, c: Tensor, d: Tensor, t: Tensor) -> Tensor:
    """Cubic convolution (Keys, 1981) between b (t = 0) and c (t = 1), with neighbours a and d.

    Parameter −1, as Pillow: b + t · ((c − a) + t · ((2 (a − b) + c − d) + t · (b − a + d − c))).
    """
    step = a - b
    values = (d - step).sub_(c) * t
    quadratic = torch.add(c, step, alpha=2).sub_(d)
    values.add_(quadratic).mul_(t)
    return values.add_(c - a).mul_(t).add_(b)


def blur(images: Tensor, counts: Sequence[int], columns: Tensor) -> Tensor:
    """Blur each image by three boxes along x, then along y, with levels rounded after each one.

    Beyond the edge is the edge's pixel.
    """
    kernel = columns[:, KERNEL].int()[..., None, None, None].unbind(1)  # (n, 1, 1, 1)
    for axis in (3,) * BOXES + (2,) * BOXES:
        side = images.shape[axis]
        places = torch.arange(-2, side + 2, device=images.device).clamp_(0, side - 1)
        framed = images.index_select(axis, places).int()
        sums = torch.full_like(images, 2**WEIGHT_BITS // 2, dtype=torch.int32)  # half a level
        for start, weight in enumerate(kernel):
            sums.addcmul_(framed.narrow(axis, start, side), weight)
        # Sums of up to 2³² wrap around; the shift repeats their sign, which uint8 cuts off.
        images = (sums >> WEIGHT_BITS).to(torch.uint8)
    return images


def blur_kernels(radii: ndarray) -> ndarray:
    """The KERNEL of Gaussian blurs whose standard deviations are `radii`, at most 2.4: (…, 5).

    Each of the three boxes has a third of the variance. Its ends weigh a share of what its other
    pixels weigh (Gwosdek et al., SSVM 2011). In float32, as Pillow computes them.
    """
    variance = np.square(radii, dtype=np.float32) / BOXES
    whole = np.floor((np.sqrt(12 * variance + 1) - 1) / 2)  # pixels on each side, without the end
    share = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance)
    share /= 6 * (variance - np.square(whole + 1))
    radius = whole + share
    inside = (2**WEIGHT_BITS / (2 * radius + 1)).astype(np.int64)
    reach = radius.astype(np.int64)
    ends = (2**WEIGHT_BITS - (2 * reach + 1) * inside) // 2
    beyond = np.abs(np.arange(-2, 3)) - reach[..., None]  # how far each weight is: (…, 5)
    return np.select([beyond <= 0, beyond == 1], [inside[..., None], ends[..., None]])
