"""All random draws for a training sample, keyed by (seed, epoch, index, repeat).

A sample is one view of one image in one epoch. Its draws depend on its key alone: not on the
worker, the process, the position in the batch, or on how often the run was resumed. Each kind of
draw has a random stream of its own (keys.py), so that switching one augmentation off leaves the
draws of all others as they were.

    crop and flip   applied in the worker that decodes the image                   → View
    RandAugment     applied to whole batches on the device                         ┐
    erasing         applied to whole batches there, after normalisation            ├ → Draws
    mixing          likewise; drawn for a group of samples, by (seed, step, group) ┘

`Augment` and `RandAugment` are the sections of a recipe with these names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..bounds import COUNT, number
from ..keys import Stream, keyed_generator, keyed_generators
from .images import Box
from .mix import UNMIXED, Mix

ATTEMPTS = 10                   # boxes tried before the centre is taken, or nothing is erased; as
                                # in torchvision and timm
BEYOND = 1e15                   # longer than the side of any image, in pixels; a box's sides are
                                # cut to this, because infinity cannot be made an integer
MAX_MAGNITUDE = 10.0            # the magnitude at which RandAugment's operations are strongest
NOTHING = Box(0, 0, 0, 0)       # the box of an image of which nothing is erased


class Operation(IntEnum):
    """RandAugment's operations, by the names that papers and recipes use. Values never change.

    The comments say what the argument of each operation means.
    """

    NONE = 0
    AutoContrast = 1
    Equalize = 2
    Invert = 3
    Rotate = 4          # degrees, counter-clockwise
    Posterize = 5       # how many of the 8 bits are kept
    Solarize = 6        # the level from which on pixels are inverted
    SolarizeAdd = 7     # what is added to pixels below 128
    Color = 8           # a factor, for this and the next three; 1 changes nothing
    Contrast = 9
    Brightness = 10
    Sharpness = 11
    ShearX = 12         # shift in columns per row
    ShearY = 13         # shift in rows per column
    TranslateX = 14     # shift as a share of the width
    TranslateY = 15     # shift as a share of the height


ALL_OPERATIONS = tuple(operation.name for operation in Operation if operation)
OperationName = Literal[ALL_OPERATIONS]


@dataclass(frozen=True)
class Augment:
    """A random crop that is resized to the image size, a flip, and erasing after normalisation.

    Padding and shifting is the special case crop_scale = crop_ratio = [1, 1] with crop_padding > 0.
    A sample is erased in one box at most, as in timm.
    """

    repeats: int = number(minimum=1, below=COUNT)   # repeated augmentation: views per image
    crop_scale: tuple[float, float] = number(above=0.0, maximum=1.0)  # share of the image's area
    crop_ratio: tuple[float, float] = number(above=0.0)               # width over height
    crop_padding: int = number(minimum=0, below=COUNT)  # black pixels on each side before the crop
    flip: float = number(minimum=0.0, maximum=1.0)  # probability of a horizontal flip
    interpolation: Literal["bilinear", "bicubic", "random"]           # random: drawn per sample
    erase_probability: float = number(minimum=0.0, maximum=1.0)
    erase_area: tuple[float, float] = number(above=0.0, maximum=1.0)  # share of the image's area
    erase_ratio: tuple[float, float] = number(above=0.0)              # height over width
    erase_fill: Literal["pixel", "rand", "const"]   # noise per value, noise per channel, zeros
    erase_after_mix: bool                           # false: before mixing, as in DeiT


@dataclass(frozen=True)
class RandAugment:
    """RandAugment (Cubuk et al., arXiv 1909.13719) with the settings of timm's.

    DeiT uses timm's `rand-m9-mstd0.5-inc1`. In each of `layers` layers, one of `operations` is
    drawn, with replacement, and applied with `probability`. Its magnitude is normally distributed
    around `magnitude` with standard deviation `magnitude_std`, clipped to [0, 10]. Where an
    operation has a direction, its sign is + or −, each with probability one half. As "inc1" says,
    every operation gets stronger with its magnitude: the keys after `operations` say how strong it
    is at magnitude 10, and its strength is proportional to its magnitude. layers = 0: none.
    """

    layers: int = number(minimum=0, below=2**16)    # operations drawn per image
    probability: float = number(minimum=0.0, maximum=1.0)  # that a drawn operation is applied
    magnitude: float = number(minimum=0.0, maximum=MAX_MAGNITUDE)     # mean of the magnitude
    magnitude_std: float = number(minimum=0.0)             # its standard deviation
    fill: tuple[int, int, int] = number(minimum=0, maximum=255)  # colour of pixels from outside
    interpolation: Literal["bilinear", "bicubic", "random"]     # random: drawn per application
    operations: tuple[OperationName, ...]
    rotate_degrees: float = number(minimum=0.0)     # ± the angle
    shear_factor: float = number(minimum=0.0)       # ± the shear
    translate_share: float = number(minimum=0.0)    # ± the shift, as a share of the image's side
    enhance_factor: float = number(minimum=0.0)     # Color, Contrast, Brightness and Sharpness use
                                                    # the factor 1 ± this, at least 0.1
    posterize_bits: int = number(minimum=0, maximum=8)      # kept at magnitude 0; at 10 none is
    solarize_levels: int = number(minimum=0, maximum=256)   # the threshold is 256 minus this
    solarize_add_levels: int = number(minimum=0, maximum=255)   # what is added, at most 128

    def arguments(self, codes: np.ndarray, magnitudes: np.ndarray, signs: np.ndarray) -> np.ndarray:
        """The arguments of operations at magnitudes in [0, 10], as float64.

        signs: -1 or 1, used only by operations that have a direction. All four arrays, the result
        included, have the same shape.
        """
        strengths = magnitudes / MAX_MAGNITUDE
        signed = signs * strengths
        values = np.zeros(codes.shape)
        for operations, candidates in [
                ([Operation.Rotate], signed * self.rotate_degrees),
                ([Operation.ShearX, Operation.ShearY], signed * self.shear_factor),
                ([Operation.TranslateX, Operation.TranslateY], signed * self.translate_share),
                ([Operation.Color, Operation.Contrast, Operation.Brightness, Operation.Sharpness],
                 np.maximum(0.1, 1.0 + signed * self.enhance_factor)),
                ([Operation.Posterize],
                 self.posterize_bits - np.trunc(strengths * self.posterize_bits)),
                ([Operation.Solarize],
                 256 - np.minimum(256, np.trunc(strengths * self.solarize_levels))),
                ([Operation.SolarizeAdd],
                 np.minimum(128, np.trunc(strengths * self.solarize_add_levels)))]:
            values = np.where(np.isin(codes, operations), candidates, values)
        return values


def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order in which an epoch goes through `count` images: a permutation of their indices."""
    return keyed_generator(seed, Stream.ORDER, epoch).permutation(count)


# ---------------------------------------------------------------------------------------------
# The draws of one sample, from a generator of its own
# ---------------------------------------------------------------------------------------------


class View(NamedTuple):
    """The part of an image that becomes one sample, and how it is resized and flipped."""

    box: Box
    flip: bool
    interpolation: Literal["bilinear", "bicubic"]


def draw_view(rng: np.random.Generator, augment: Augment, height: int, width: int) -> View:
    """Draw the crop and flip of an image of height × width pixels."""
    box = draw_crop(rng, height, width, scale=augment.crop_scale, ratio=augment.crop_ratio,
                    padding=augment.crop_padding)
    flip = bool(rng.random() < augment.flip)
    interpolation = augment.interpolation
    if interpolation == "random":
        interpolation = "bicubic" if rng.random() < 0.5 else "bilinear"
    return View(box, flip, interpolation)


def draw_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    """The same number as rng.uniform(low, high) gives, computed faster."""
    return low + (high - low) * rng.random()


def draw_sides(rng: np.random.Generator, pixels: int, share: tuple[float, float],
               ratio: tuple[float, float]) -> tuple[int, int]:
    """Draw the two sides of a box.

    Its area is `pixels` times a number that is uniform on `share`; the first side over the second
    is log-uniform on `ratio`. Sides are rounded to whole pixels, so a side of less than half a
    pixel becomes 0.
    """
    area = pixels * draw_uniform(rng, *share)
    quotient = math.exp(draw_uniform(rng, math.log(ratio[0]), math.log(ratio[1])))
    first, second = math.sqrt(area * quotient), math.sqrt(area / quotient)
    return round(min(first, BEYOND)), round(min(second, BEYOND))


def draw_crop(rng: np.random.Generator, height: int, width: int, *, scale: tuple[float, float],
              ratio: tuple[float, float], padding: int) -> Box:
    """Draw the box of a random resized crop (Szegedy et al., arXiv 1409.4842).

    This is the version of torchvision and timm: the area is a uniform share of the image's area,
    width over height is log-uniform, and the position is uniform on the image extended by
    `padding` pixels on each side. After ten boxes that do not fit, the crop is the centre of the
    image, at the allowed ratio that is nearest to the image's. With scale = ratio = (1, 1), a
    square image is only shifted, by up to `padding` pixels.
    """
    for _ in range(ATTEMPTS):
        box_width, box_height = draw_sides(rng, height * width, scale, ratio)
        if 0 < box_width <= width + 2 * padding and 0 < box_height <= height + 2 * padding:
            top = int(rng.integers(-padding, height + padding - box_height, endpoint=True))
            left = int(rng.integers(-padding, width + padding - box_width, endpoint=True))
            return Box(top, left, box_height, box_width)
    aspect = min(max(width / height, ratio[0]), ratio[1])
    # At an extreme ratio a side could be shorter than a pixel, or longer than the image's.
    box_height = max(1, round(min(height, width / aspect)))
    box_width = max(1, round(min(width, height * aspect)))
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def draw_operations(generators: Iterable[np.random.Generator], count: int, settings: RandAugment
                    ) -> np.ndarray:
    """Draw RandAugment's operations of `count` samples; each sample has a generator of its own.

    Returns `Draws.operations` for L = settings.layers. Every number is drawn whether it is used or
    not, so that settings do not change which numbers other draws get.
    """
    layers = settings.layers
    chosen = np.empty((count, layers), np.int64)
    chances, normals = np.empty((2, count, layers))
    signs_and_kinds = np.empty((count, 2, layers))
    for rng, which, chance, normal, rest in zip(generators, chosen, chances, normals,
                                                signs_and_kinds):
        which[:] = [rng.integers(len(settings.operations)) for _ in range(layers)]
        rng.random(out=chance)
        rng.standard_normal(out=normal)
        rng.random(out=rest)
    signs, kinds = signs_and_kinds.swapaxes(0, 1)                        # (B, L) each
    known = np.array([Operation[name] for name in settings.operations], np.int64)
    codes = np.where(chances < settings.probability, known[chosen], Operation.NONE)
    with np.errstate(over="ignore"):                 # an infinite magnitude is clipped, too
        magnitudes = settings.magnitude + settings.magnitude_std * normals
    arguments = settings.arguments(codes, magnitudes.clip(0.0, MAX_MAGNITUDE),
                                   np.where(signs < 0.5, -1.0, 1.0))
    share_bicubic = {"bilinear": 0.0, "bicubic": 1.0, "random": 0.5}[settings.interpolation]
    return np.stack([codes, arguments, kinds < share_bicubic], axis=2)


def draw_erasing(rng: np.random.Generator, augment: Augment, height: int, width: int
                 ) -> tuple[Box, int]:
    """Draw what is erased of an image of height × width pixels (Zhong et al., arXiv 1708.04896).

    Returns the box, which is NOTHING where nothing is erased, and the 63-bit key of its noise.
    """
    if rng.random() >= augment.erase_probability:
        return NOTHING, 0
    noise_key = int(rng.integers(2**63))
    for _ in range(ATTEMPTS):
        box_height, box_width = draw_sides(rng, height * width, augment.erase_area,
                                           augment.erase_ratio)
        if 0 < box_height < height and 0 < box_width < width:
            top = int(rng.integers(height - box_height, endpoint=True))
            left = int(rng.integers(width - box_width, endpoint=True))
            return Box(top, left, box_height, box_width), noise_key
    return NOTHING, noise_key


# ---------------------------------------------------------------------------------------------
# The draws of samples, by their keys
# ---------------------------------------------------------------------------------------------


class SampleKey(NamedTuple):
    """One view of one image: the epoch, the image, and which of its views in that epoch it is."""

    epoch: int
    index: int
    repeat: int = 0


class Samples(NamedTuple):
    """The B samples of a micro-batch of the run's step number `step`."""

    step: int
    keys: list[SampleKey]
    groups: np.ndarray          # (B,), the mixing group of each sample


class Draws(NamedTuple):
    """What happens to the B samples of a micro-batch on the device, as tensors on the host."""

    operations: Tensor          # (B, L, 3) float64: for each of RandAugment's layers the code of
                                # the operation (0 for none), its argument, and 1 if it is bicubic
    erased: Tensor              # (B, 5) int64: top, left, height and width of the box that is
                                # erased (height 0: none), and the key of the noise in it
    mixed: Tensor               # (B, 5) float64: a `MixDraw`, the same for two partners: λ, then
                                # top, left, height and width of the box (0: none)


@dataclass(frozen=True)
class Augmentation:
    """How a run's samples are augmented: the seed, (height, width) of a view, and the settings."""

    seed: int
    size: tuple[int, int]
    augment: Augment
    rand_augment: RandAugment
    mix: Mix

    def views(self, keys: Sequence[SampleKey], sizes: Iterable[tuple[int, int]]) -> Iterator[View]:
        """Yield the crop and flip of each sample; `sizes` are (height, width) of their images."""
        for rng, size in zip(keyed_generators(self.seed, Stream.CROP_AND_FLIP, keys), sizes):
            yield draw_view(rng, self.augment, *size)

    def draws(self, samples: Samples) -> Draws:
        """Draw what is applied to a micro-batch on the device."""
        step, keys, groups = samples
        operations = draw_operations(keyed_generators(self.seed, Stream.RAND_AUGMENT, keys),
                                     len(keys), self.rand_augment)
        erased = np.zeros((len(keys), 5), np.int64)
        if self.augment.erase_probability > 0.0:
            for row, rng in zip(erased, keyed_generators(self.seed, Stream.ERASE, keys)):
                box, noise_key = draw_erasing(rng, self.augment, *self.size)
                row[:] = *box, noise_key
        mixed = np.tile([UNMIXED.share, *UNMIXED.box], (len(keys), 1))
        if self.mix.mixes:
            for group in set(groups.tolist()):
                share, box = self.mix.draw(
                    keyed_generator(self.seed, Stream.MIX, step, group), *self.size)
                mixed[groups == group] = share, *box
        return Draws(*map(torch.from_numpy, (operations, erased, mixed)))
