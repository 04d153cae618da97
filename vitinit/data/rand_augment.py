"""RandAugment: what is drawn for an image, and the way of a batch through its operations.

`draw_operations` draws, and `for_device` adds to each drawn operation all that a device needs to
apply it; both happen where the batch is loaded. `rand_augment` applies them on the device, by the
functions of operations.py.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
import torch
from numpy import ndarray
from numpy.random import Generator
from torch import Tensor

from ..base.values import Bounds, Proportion
from .images import HeightWidth
from .operations import GROUP, affine, blur, blur_kernels, enhance, map_levels

MAX_MAGNITUDE = 10.0  # the magnitude at which operations are strongest
# The most pixels that go through a function at once, but one image at least. CPUs: what fits into
# the cache. GPUs: a bicubic map takes, by counting, 250 bytes of memory per pixel, hence 4 GiB.
CPU_CHUNK = 2**15
GPU_CHUNK = 2**24


class Operation(IntEnum):
    """All operations, whose values never change, and what their arguments mean."""

    NONE = 0
    AutoContrast = 1
    Equalize = 2
    Invert = 3
    Rotate = 4  # degrees, counter-clockwise
    Posterize = 5  # how many of the 8 bits are kept
    Solarize = 6  # the level from which on pixels are inverted
    SolarizeAdd = 7  # what is added to pixels below 128
    Color = 8  # a factor, for this and the next three; 1 changes nothing
    Contrast = 9
    Brightness = 10
    Sharpness = 11
    ShearX = 12  # shift in columns per row
    ShearY = 13  # shift in rows per column
    TranslateX = 14  # shift as a share of the width
    TranslateY = 15  # shift as a share of the height
    GaussianBlur = 16  # standard deviation in pixels; not of RandAugment


ALL_OPERATIONS = tuple(operation.name for operation in Operation)[1:-1]  # RandAugment's
OF_COLOURS = ("Color", "Contrast")  # which read red, green and blue together
OperationName = Annotated[str, Literal[ALL_OPERATIONS]]
Level = Annotated[int, Bounds(minimum=0, maximum=255)]
Strength = Annotated[float, Bounds(minimum=0.0, maximum=100.0)]


@dataclass(frozen=True)
class RandAugment:
    """RandAugment (Cubuk et al., arXiv 1909.13719) with the settings of timm's.

    DeiT uses timm's `rand-m9-mstd0.5-inc1`. In each of `layers` layers, one of `operations` is
    drawn, with replacement, and applied with `probability`. Its magnitude is normally distributed
    around `magnitude` with standard deviation `magnitude_std`, clipped to [0, 10]. Where an
    operation has a direction, its sign is + or −, each with probability one half. The keys after
    `operations` say how strong one is at magnitude 10; strength is proportional to magnitude.
    """

    layers: Annotated[int, Bounds(minimum=0, below=2**16)]  # operations drawn per image
    probability: Proportion  # that a drawn operation is applied
    magnitude: Annotated[float, Bounds(minimum=0.0, maximum=MAX_MAGNITUDE)]  # its mean
    magnitude_std: Strength  # its standard deviation
    fill: tuple[Level, ...]  # colour of pixels from outside, per channel, or one value for all
    interpolation: Literal["bilinear", "bicubic", "random"]  # random: drawn per application
    operations: tuple[OperationName, ...]
    rotate_degrees: Annotated[float, Bounds(minimum=0.0, maximum=360.0)]  # ± the angle
    shear_factor: Strength  # ± the shear
    translate_share: Strength  # ± the share of a side
    enhance_factor: Strength  # Color to Sharpness: 1 ± this, at least .1
    posterize_bits: Annotated[int, Bounds(minimum=0, maximum=8)]  # kept at 0; at 10 none is
    solarize_levels: Annotated[int, Bounds(minimum=0, maximum=256)]  # 256 minus the threshold
    solarize_add_levels: Level  # what is added, at most 128

    def require_channels(self, channels: int) -> None:
        """Raise ValueError unless its operations are defined for images of so many channels."""
        if not self.layers:
            return
        others = [name for name in self.operations if name not in OF_COLOURS]
        if channels not in (1, 3) and len(others) < len(self.operations):
            raise ValueError(
                f"rand_augment.operations has {' or '.join(OF_COLOURS)}, which are defined for RGB and "
                f"grey, and data.mean {channels} values; expected {others}, or rand_augment.layers = 0"
            )
        if len(self.fill) not in (1, channels):
            raise ValueError(
                f"rand_augment.fill has {len(self.fill)} values, and data.mean {channels}; expected as "
                "many, or one for all, or rand_augment.layers = 0"
            )

    def arguments(self, codes: ndarray, magnitudes: ndarray, signs: ndarray) -> ndarray:
        """The arguments of operations at magnitudes in [0, 10]; signs: -1 or 1, of directions."""
        shares = magnitudes / MAX_MAGNITUDE
        signed = signs * shares
        factors = np.maximum(0.1, 1.0 + signed * self.enhance_factor)
        by_code = np.zeros((len(Operation), *codes.shape))  # 0: of an operation without argument
        by_code[Operation.Rotate] = signed * self.rotate_degrees
        by_code[Operation.Posterize] = self.posterize_bits - np.trunc(shares * self.posterize_bits)
        by_code[Operation.Solarize] = 256 - np.minimum(256, np.trunc(shares * self.solarize_levels))
        by_code[Operation.SolarizeAdd] = np.minimum(
            128, np.trunc(shares * self.solarize_add_levels)
        )
        by_code[Operation.Color : Operation.Sharpness + 1] = factors
        by_code[[Operation.ShearX, Operation.ShearY]] = signed * self.shear_factor
        by_code[[Operation.TranslateX, Operation.TranslateY]] = signed * self.translate_share
        return np.choose(codes, by_code)


def draw_operations(generators: Iterable[Generator], count: int, settings: RandAugment) -> ndarray:
    """Draw the operations of `count` samples; each sample has a generator of its own.

    Returns (count, layers, 3) float64: the code of the operation (0 for none), its argument, and 1
    if it is bicubic. Every number is drawn, used or not, so that settings do not change others.
    """
    layers = settings.layers
    indices = np.empty((count, layers), np.int64)  # of operations
    chances, normals, signs, kinds = np.empty((4, count, layers))
    for row, rng in enumerate(generators):
        indices[row] = [rng.integers(len(settings.operations)) for _ in range(layers)]
        rng.random(out=chances[row])
        rng.standard_normal(out=normals[row])
        rng.random(out=signs[row])
        rng.random(out=kinds[row])
    known = np.array([Operation[name] for name in settings.operations], np.int64)
    codes = np.where(chances < settings.probability, known[indices], Operation.NONE)
    magnitudes = settings.magnitude + settings.magnitude_std * normals
    magnitudes = magnitudes.clip(0.0, MAX_MAGNITUDE)
    arguments = settings.arguments(codes, magnitudes, np.where(signs < 0.5, -1.0, 1.0))
    share_bicubic = {"bilinear": 0.0, "bicubic": 1.0, "random": 0.5}[settings.interpolation]
    return np.stack([codes, arguments, kinds < share_bicubic], axis=2)


# The groups of operations that are treated alike, in the order in which images are sorted: three
# of `map_levels`, four of `enhance`, three of `affine`, these again where they are bicubic, one of
# `blur`, none.
GROUPS = [
    ["AutoContrast"],
    ["Equalize"],
    ["Invert", "Posterize", "Solarize", "SolarizeAdd"],
    ["Color"],
    ["Contrast"],
    ["Brightness"],
    ["Sharpness"],
    ["ShearX", "TranslateX"],
    ["ShearY", "TranslateY"],
    ["Rotate"],
    [],
    [],
    [],
    ["GaussianBlur"],
    ["NONE"],
]
GROUP_OF = np.empty(len(Operation), np.int64)
for _group, _names in enumerate(GROUPS):
    GROUP_OF[[Operation[name] for name in _names]] = _group


def for_device(operations: ndarray, size: HeightWidth) -> ndarray:
    """What the device needs of `draw_operations`, (B, L, COLUMNS) float64; size: of the views."""
    codes, arguments, bicubic = np.moveaxis(operations, 2, 0)  # (B, L) each
    codes = codes.astype(np.int64)
    groups = GROUP_OF[codes]
    groups[(groups >= 7) & (groups < 10) & (bicubic > 0)] += 3  # of `affine`
    add = codes == Operation.SolarizeAdd
    posterize = codes == Operation.Posterize
    threshold = np.select([add, posterize, codes == Operation.Solarize], [128, 256, arguments], 0)
    addend = np.where(add, arguments, 0)
    flip = np.where(add, 0, 255)
    mask = 256 - 2 ** (8 - np.where(posterize, arguments, 8))
    matrices = affine_matrices(codes, arguments, *size).reshape(*codes.shape, 6)
    kernels = blur_kernels(np.where(codes == Operation.GaussianBlur, arguments, 0.0))
    added = np.stack([groups, threshold, addend, flip, mask], 2)
    return np.concatenate(
        [operations, added, matrices, kernels], 2
    )  # in the order of operations.py


def affine_matrices(codes: ndarray, arguments: ndarray, height: int, width: int) -> ndarray:
    """The matrices that map (x, y, 1) in the new image to (x, y) in the old one, (…, 2, 3) float64.

    codes, arguments: (…). Coordinates are in pixels from the top left corner. Operations that are
    not geometric have the identity.
    """
    matrices = np.tile(np.eye(2, 3), (*codes.shape, 1, 1))
    matrices[..., 0, 1] = np.where(codes == Operation.ShearX, arguments, 0.0)
    matrices[..., 1, 0] = np.where(codes == Operation.ShearY, arguments, 0.0)
    matrices[..., 0, 2] = np.where(codes == Operation.TranslateX, arguments * width, 0.0)
    matrices[..., 1, 2] = np.where(codes == Operation.TranslateY, arguments * height, 0.0)
    centre = np.array([width / 2.0, height / 2.0])
    for place in zip(*np.nonzero(codes == Operation.Rotate)):
        angle = -math.radians(arguments[place])
        cosine = math.cos(angle)
        sine = math.sin(angle)
        turn = np.array([[cosine, sine], [-sine, cosine]]).round(15)  # as Pillow does
        shift = centre - (turn * centre).sum(1)  # the centre stays where it is
        matrices[place] = np.column_stack([turn, shift])
    return matrices


def pieces(
    limits: Sequence[int], most: int, *, together: bool
) -> Iterator[tuple[slice, list[int]]]:
    """Yield which of the sorted images go through a function at once, and how many of each group.

    limits: where each of the function's groups begins, and where the last one ends. most: images
    at once. together: whether images of several groups may go through it together.
    """
    parts = [(limits[0], limits[-1])] if together else pairwise(limits)
    for first, last in parts:
        for start in range(first, last, most):
            stop = min(start + most, last)
            counts = np.diff(np.clip(limits, start, stop))
            yield slice(start, stop), counts.tolist()


def rand_augment(
    images: Tensor,
    operations: Tensor,
    fill: Sequence[int] | Tensor,
    *,
    groups: ndarray | None = None,
    few_launches: bool | None = None,
) -> Tensor:
    """Apply to each image of (n, 3, H, W) uint8 its operations; returns new images, or these
    if there are none.

    operations: (n, L, COLUMNS), of `for_device`, on the images' device. fill: the colour of pixels
        from outside (a value per channel, or one for all, 0 to 255).
    groups: (n, L), the column GROUP of `operations` on the host; without it a GPU is waited for.
    few_launches: all groups of a function go through it together, for a GPU; else one after the
        other, which takes least arithmetic and memory. None: what suits the device.
    """
    on_cpu = images.device.type == "cpu"
    if few_launches is None:
        few_launches = not on_cpu
    if groups is None:
        groups = operations[..., GROUP].cpu().numpy()
    # Where each group begins in each layer, once images are sorted: how many are of a lower one.
    starts = (groups[..., None] < np.arange(len(GROUPS))).sum(0).tolist()  # (L, groups)
    orders = operations[..., GROUP].argsort(dim=0, stable=True)  # (n, L)
    fill = torch.as_tensor(fill, dtype=torch.uint8, device=images.device).view(-1, 1, 1)
    look_up = partial(map_levels, few_launches=few_launches)
    shift = partial(affine, fill=fill, few_launches=few_launches)
    pixels = CPU_CHUNK if on_cpu else GPU_CHUNK
    most = max(1, pixels // (images.shape[2] * images.shape[3]))  # images at once
    functions = (
        (look_up, 0, 3, len(images) if on_cpu else most),  # a CPU looks up channel by channel
        (enhance, 3, 7, most),
        (shift, 7, 13, most),
        (blur, 13, 14, most),
    )
    places = orders.argsort(dim=0)  # (n, L), where each image is in the order of a layer
    moves = torch.cat([orders[:, :1], places[:, :-1].gather(0, orders[:, 1:])], 1)
    layers = (part.unbind(1) for part in (operations, orders, moves))
    for layer, order, move, bounds in zip(*layers, starts):
        columns = layer.index_select(0, order)  # (n, COLUMNS), sorted
        images = images.index_select(0, move)  # contiguous, from the last layer's order to this
        for function, begin, end, most in functions:
            for piece, counts in pieces(bounds[begin : end + 1], most, together=few_launches):
                images[piece] = function(images[piece], counts, columns[piece])
    return images.index_select(0, places[:, -1]) if starts else images
