"""All random draws for one training sample, keyed by (seed, epoch, index, repeat).

A sample is one view of one image in one epoch. Its draws depend on its key alone: not on the
worker, the process, the position in the batch, or on how often the run was resumed. Each kind of
draw has a random stream of its own (keys.py), so that switching one augmentation off leaves the
draws of all others as they were.

    CropAndFlip   applied in the worker that decodes the image          → View
    RandAugment   applied to whole batches on the device                ┐
    Erasing       applied to whole batches there, after normalisation   ┘ → Draws

The defaults of these three are those of DeiT on ImageNet (arXiv 2012.12877, table 9, and its code).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

import numpy as np

from ..keys import Stream, keyed_generator, keyed_generators
from .images import Box

CROP_ATTEMPTS = 10              # boxes tried before the centre is taken; as in torchvision and timm
ERASE_ATTEMPTS = 10             # boxes tried before the image is left as it is; likewise
BEYOND = 1e15                   # longer than the side of any image, in pixels; a box's sides are cut
                                # to this length because infinity cannot be made an integer
MAX_MAGNITUDE = 10.0            # the magnitude at which RandAugment's operations are strongest


class SampleKey(NamedTuple):
    """One view of one image: the epoch, the image, and which of its views in that epoch it is."""

    epoch: int
    index: int
    repeat: int = 0


def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order in which an epoch goes through `count` images: a permutation of their indices."""
    return keyed_generator(seed, Stream.ORDER, epoch).permutation(count)


# ---------------------------------------------------------------------------------------------
# Crop and flip
# ---------------------------------------------------------------------------------------------


class View(NamedTuple):
    """The part of an image that becomes one sample, and how it is resized and flipped."""

    box: Box
    flip: bool
    interpolation: Literal["bilinear", "bicubic"]


@dataclass(frozen=True)
class CropAndFlip:
    """A random resized crop, then a horizontal flip.

    scale: range of the crop's area as a share of the image's area.
    ratio: range of the crop's width over its height.
    padding: how many pixels a crop may reach beyond each edge of the image.
    flip: probability of the flip.
    interpolation: how the crop is resized; "random" draws bilinear or bicubic for each sample, as
    timm does.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    padding: int = 0
    flip: float = 0.5
    interpolation: Literal["bilinear", "bicubic", "random"] = "bicubic"

    def draw(self, rng: np.random.Generator, height: int, width: int) -> View:
        """Draw the view of an image of height × width pixels."""
        box = draw_crop(rng, height, width, scale=self.scale, ratio=self.ratio,
                        padding=self.padding)
        flip = bool(rng.random() < self.flip)
        interpolation = self.interpolation
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
    for _ in range(CROP_ATTEMPTS):
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


# ---------------------------------------------------------------------------------------------
# RandAugment
# ---------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class RandAugment:
    """RandAugment (Cubuk et al., arXiv 1909.13719), by default timm's `rand-m9-mstd0.5-inc1`.

    In each of `layers` layers, one of `operations` is drawn, with replacement, and applied with
    `probability`. Its magnitude is normally distributed around `magnitude` with standard deviation
    `magnitude_std`, clipped to [0, 10]. Where an operation has a direction, its sign is + or −,
    each with probability one half. As "inc1" says, every operation gets stronger with its
    magnitude.
    fill: the colour (0 to 255) of pixels that come in from outside the image.
    interpolation: of the geometric operations; "random" draws bilinear or bicubic per application.

    The other fields say how strong each operation is at magnitude 10; its strength is proportional
    to its magnitude.
    rotate_degrees, shear_factor: ± the angle, and ± the shear.
    translate_share: ± the shift, as a share of the image's side.
    enhance_factor: Color, Contrast, Brightness and Sharpness use the factor 1 ± this, at least 0.1.
    posterize_bits: how many of the 8 bits are kept at magnitude 0; at magnitude 10 none is kept.
    solarize_levels: the threshold of Solarize is 256 minus this.
    solarize_add_levels: what SolarizeAdd adds, at most 128.
    """

    layers: int = 2
    probability: float = 0.5
    magnitude: float = 9.0
    magnitude_std: float = 0.5
    fill: tuple[int, int, int] = (124, 116, 104)
    interpolation: Literal["bilinear", "bicubic", "random"] = "bicubic"
    operations: Sequence[str] = ALL_OPERATIONS
    rotate_degrees: float = 30.0
    shear_factor: float = 0.3
    translate_share: float = 0.45
    enhance_factor: float = 0.9
    posterize_bits: int = 4
    solarize_levels: int = 256
    solarize_add_levels: int = 110

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw the operations of one sample: codes, arguments and bicubic, each of length `layers`."""
        codes, arguments, bicubic = self.draw_each([rng], 1)
        return codes[0], arguments[0], bicubic[0]

    def draw_each(self, generators: Iterable[np.random.Generator], count: int
                  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw the operations of `count` samples; each sample has a generator of its own.

        Returns codes (int64, of `Operation`), arguments (float64) and bicubic (bool: how a
        geometric operation interpolates), each (B, L) for B = count and L = layers. Every number is
        drawn whether it is used or not, so that settings do not change which numbers other draws
        get.
        """
        chosen = np.empty((count, self.layers), np.int64)
        chances, normals = np.empty((2, count, self.layers))
        signs_and_kinds = np.empty((count, 2, self.layers))
        for rng, which, chance, normal, rest in zip(generators, chosen, chances, normals,
                                                    signs_and_kinds):
            which[:] = [rng.integers(len(self.operations)) for _ in range(self.layers)]
            rng.random(out=chance)
            rng.standard_normal(out=normal)
            rng.random(out=rest)
        signs, kinds = signs_and_kinds.swapaxes(0, 1)                    # (B, L) each
        known = np.array([Operation[name] for name in self.operations], np.int64)
        codes = np.where(chances < self.probability, known[chosen], Operation.NONE)
        with np.errstate(over="ignore"):             # an infinite magnitude is clipped like any other
            magnitudes = self.magnitude + self.magnitude_std * normals
        arguments = self.arguments(codes, magnitudes.clip(0.0, MAX_MAGNITUDE),
                                   np.where(signs < 0.5, -1.0, 1.0))
        share_bicubic = {"bilinear": 0.0, "bicubic": 1.0, "random": 0.5}[self.interpolation]
        return codes, arguments, kinds < share_bicubic

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

    def argument(self, operation: Operation, magnitude: float, sign: float) -> float:
        """The argument of one operation; see `arguments`."""
        return float(self.arguments(np.array(operation), np.array(magnitude), np.array(sign)))


# ---------------------------------------------------------------------------------------------
# Erasing
# ---------------------------------------------------------------------------------------------


NOTHING = Box(0, 0, 0, 0)


@dataclass(frozen=True)
class Erasing:
    """Random erasing (Zhong et al., arXiv 1708.04896) as in timm, with one box per image.

    probability: that an image gets a box at all.
    area: range of the box's area as a share of the image's area.
    ratio: range of the box's height over its width, which is drawn log-uniformly.
    fill: what the box is filled with, after normalisation. "pixel": one draw from N(0, 1) for each
    value; "rand": one draw from N(0, 1) for each channel; "const": zeros.
    """

    probability: float = 0.25
    area: tuple[float, float] = (0.02, 1 / 3)
    ratio: tuple[float, float] = (0.3, 1 / 0.3)
    fill: Literal["pixel", "rand", "const"] = "pixel"

    def draw(self, rng: np.random.Generator, height: int, width: int) -> tuple[Box, int]:
        """Draw the box in an image of height × width pixels, and the 63-bit key of the noise in it.

        The box is NOTHING where nothing is erased.
        """
        if rng.random() >= self.probability:
            return NOTHING, 0
        noise_key = int(rng.integers(2**63))
        for _ in range(ERASE_ATTEMPTS):
            box_height, box_width = draw_sides(rng, height * width, self.area, self.ratio)
            if 0 < box_height < height and 0 < box_width < width:
                top = int(rng.integers(height - box_height, endpoint=True))
                left = int(rng.integers(width - box_width, endpoint=True))
                return Box(top, left, box_height, box_width), noise_key
        return NOTHING, noise_key


# ---------------------------------------------------------------------------------------------
# One sample
# ---------------------------------------------------------------------------------------------


class Draws(NamedTuple):
    """What happens to the B samples of a batch on the device; without the leading B, to one sample.

    These are numpy arrays, so that processes send them to each other by value and the host can read
    them.
    """

    operations: np.ndarray      # (B, L) int64: RandAugment's codes in order, 0 for none
    arguments: np.ndarray       # (B, L) float64
    bicubic: np.ndarray         # (B, L) bool: how a geometric operation interpolates
    erase_boxes: np.ndarray     # (B, 4) int64: top, left, height, width; height 0: nothing is erased
    noise_keys: np.ndarray      # (B,) int64: what the noise in each box is made from


@dataclass(frozen=True)
class SampleDraws:
    """All draws for the samples of a run, whose views have `size` = (height, width) pixels."""

    seed: int
    size: tuple[int, int]
    crop: CropAndFlip = CropAndFlip()
    rand_augment: RandAugment = RandAugment()
    erasing: Erasing = Erasing()

    def view(self, key: SampleKey, height: int, width: int) -> View:
        """The crop and flip of one sample whose image is height × width pixels."""
        return next(self.views([key], [(height, width)]))

    def views(self, keys: Sequence[SampleKey], sizes: Iterable[tuple[int, int]]) -> Iterator[View]:
        """Yield the crop and flip of each sample; `sizes` are (height, width) of their images."""
        for rng, size in zip(keyed_generators(self.seed, Stream.CROP_AND_FLIP, keys), sizes):
            yield self.crop.draw(rng, *size)

    def for_device(self, key: SampleKey) -> Draws:
        """The draws of one sample that are applied on the device."""
        return Draws(*(part[0, ...] for part in self.batch_for_device([key])))

    def batch_for_device(self, keys: Sequence[SampleKey]) -> Draws:
        """The draws of a batch that are applied on the device; faster than one by one."""
        operations = self.rand_augment.draw_each(
            keyed_generators(self.seed, Stream.RAND_AUGMENT, keys), len(keys))
        boxes, noise_keys = [NOTHING] * len(keys), [0] * len(keys)
        if self.erasing.probability > 0.0:
            boxes, noise_keys = zip(*(
                self.erasing.draw(rng, *self.size)
                for rng in keyed_generators(self.seed, Stream.ERASE, keys)))
        return Draws(*operations, np.array(boxes), np.array(noise_keys))


def stack_draws(samples: Sequence[Draws]) -> Draws:
    """Combine the draws of single samples into those of a batch, with a leading B."""
    return Draws(*map(np.stack, zip(*samples)))
