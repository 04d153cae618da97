"""All random draws of a sample of the training stream, keyed by (seed, epoch, index, repeat).

A sample's draws depend on nothing but its key: not on the worker, the process, the position in the
batch or how often the run was resumed. Each kind of draw has a stream of its own, so that switching
one augmentation off leaves the draws of all others as they were.

    CropAndFlip   applied where the image is decoded      → View
    RandAugment   applied to whole batches on the device    ┐
    Erasing       likewise, after normalisation             ┘ → Draws

The defaults of the three are DeiT's for ImageNet (arXiv 2012.12877, table 9, and its code).
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

CROP_ATTEMPTS = 10              # as in torchvision and timm, before the centre is taken
ERASE_ATTEMPTS = 10             # likewise, before the image is left as it is
BEYOND = 1e15                   # pixels a side, more than any image has; infinity has no integer
MAX_MAGNITUDE = 10.0            # where RandAugment's operations reach their full extent


class SampleKey(NamedTuple):
    """One view of one image: which epoch, which image, which of its views in that epoch."""

    epoch: int
    index: int
    repeat: int = 0


def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The order in which epoch `epoch` goes through `count` images."""
    return keyed_generator(seed, Stream.ORDER, epoch).permutation(count)


# ---------------------------------------------------------------------------------------------
# Crop and flip
# ---------------------------------------------------------------------------------------------


class View(NamedTuple):
    """The part of an image that becomes one sample, and how."""

    box: Box
    flip: bool
    interpolation: Literal["bilinear", "bicubic"]


@dataclass(frozen=True)
class CropAndFlip:
    """A random resized crop, then a horizontal flip.

    scale: range of the crop's share of the image's area; ratio: range of its width over height.
    padding: pixels round the image that a crop may reach into. flip: probability.
    interpolation: of the resize; "random" draws one of the two for every sample, as timm does.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    padding: int = 0
    flip: float = 0.5
    interpolation: Literal["bilinear", "bicubic", "random"] = "bicubic"

    def draw(self, rng: np.random.Generator, height: int, width: int) -> View:
        """For an image of height × width pixels."""
        box = draw_crop(rng, height, width, scale=self.scale, ratio=self.ratio,
                        padding=self.padding)
        flip = bool(rng.random() < self.flip)
        interpolation = self.interpolation
        if interpolation == "random":
            interpolation = "bicubic" if rng.random() < 0.5 else "bilinear"
        return View(box, flip, interpolation)


def draw_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    """What rng.uniform(low, high) gives, in a third of its time."""
    return low + (high - low) * rng.random()


def draw_sides(rng: np.random.Generator, pixels: int, share: tuple[float, float],
               ratio: tuple[float, float]) -> tuple[int, int]:
    """The sides of a box whose area is a uniform share of `pixels`, first over second log-uniform.

    In whole pixels, so 0 for less than half of one.
    """
    area = pixels * draw_uniform(rng, *share)
    quotient = math.exp(draw_uniform(rng, math.log(ratio[0]), math.log(ratio[1])))
    first, second = math.sqrt(area * quotient), math.sqrt(area / quotient)
    return round(min(first, BEYOND)), round(min(second, BEYOND))


def draw_crop(rng: np.random.Generator, height: int, width: int, *, scale: tuple[float, float],
              ratio: tuple[float, float], padding: int) -> Box:
    """A random resized crop (Szegedy et al., arXiv 1409.4842; torchvision's and timm's version).

    Its area is a uniform share of the image's, its width over height log-uniform, its place
    uniform on the image with `padding` pixels round it. After ten boxes that do not fit: the
    centre of the image, at the nearest ratio allowed. scale = ratio = (1, 1) on a square image
    is a random shift by up to `padding` pixels.
    """
    for _ in range(CROP_ATTEMPTS):
        box_width, box_height = draw_sides(rng, height * width, scale, ratio)
        if 0 < box_width <= width + 2 * padding and 0 < box_height <= height + 2 * padding:
            top = int(rng.integers(-padding, height + padding - box_height, endpoint=True))
            left = int(rng.integers(-padding, width + padding - box_width, endpoint=True))
            return Box(top, left, box_height, box_width)
    aspect = min(max(width / height, ratio[0]), ratio[1])
    # At an extreme ratio less than a pixel is left of a side, or more than any image has.
    box_height = max(1, round(min(height, width / aspect)))
    box_width = max(1, round(min(width, height * aspect)))
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


# ---------------------------------------------------------------------------------------------
# RandAugment
# ---------------------------------------------------------------------------------------------


class Operation(IntEnum):
    """RandAugment's operations, by the names that its papers and recipes use. Values never change.

    The argument that `augment.py` takes with each is in brackets.
    """

    NONE = 0
    AutoContrast = 1
    Equalize = 2
    Invert = 3
    Rotate = 4          # (degrees, counter-clockwise)
    Posterize = 5       # (bits that are kept)
    Solarize = 6        # (level from which on pixels are inverted)
    SolarizeAdd = 7     # (what is added to pixels below 128)
    Color = 8           # (factor; 1 changes nothing, in this and the next three)
    Contrast = 9
    Brightness = 10
    Sharpness = 11
    ShearX = 12         # (columns a row)
    ShearY = 13         # (rows a column)
    TranslateX = 14     # (share of the width)
    TranslateY = 15     # (share of the height)


ALL_OPERATIONS = tuple(operation.name for operation in Operation if operation)


@dataclass(frozen=True)
class RandAugment:
    """RandAugment (Cubuk et al., arXiv 1909.13719) as timm's `rand-m9-mstd0.5-inc1` means it.

    For each of `layers`, one of `operations` is drawn, with replacement, and applied with
    `probability`. Its magnitude is normal around `magnitude` with standard deviation
    `magnitude_std`, clipped to [0, 10]; signs are ±, one half each. "inc1": every operation grows
    with its magnitude. fill: the colour (0 to 255) that comes in from outside. interpolation: of
    the geometric operations; "random" draws one of the two for every application.

    What an operation's argument is at magnitude 10; it is proportional to the magnitude:
    rotate_degrees, shear_factor and translate_share (of the side): ± that much.
    enhance_factor: Color, Contrast, Brightness and Sharpness at factor 1 ± that, at least .1.
    posterize_bits: so many bits kept at magnitude 0, none at 10. solarize_levels: the threshold is
    256 minus that. solarize_add_levels: that much is added, at most 128.
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
        """What happens to one sample: codes, arguments, bicubic, each of length `layers`."""
        codes, arguments, bicubic = self.draw_each([rng], 1)
        return codes[0], arguments[0], bicubic[0]

    def draw_each(self, generators: Iterable[np.random.Generator], count: int
                  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What happens to each of `count` samples, (B, L): int64 codes, float64 arguments, bicubic.

        Each sample draws from a generator of its own. Every number is drawn whether it is used or
        not, so that no draw shifts another.
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
        with np.errstate(over="ignore"):             # beyond all bounds is clipped as well
            magnitudes = self.magnitude + self.magnitude_std * normals
        arguments = self.arguments(codes, magnitudes.clip(0.0, MAX_MAGNITUDE),
                                   np.where(signs < 0.5, -1.0, 1.0))
        share_bicubic = {"bilinear": 0.0, "bicubic": 1.0, "random": 0.5}[self.interpolation]
        return codes, arguments, kinds < share_bicubic

    def arguments(self, codes: np.ndarray, magnitudes: np.ndarray, signs: np.ndarray) -> np.ndarray:
        """Of operations at magnitudes in [0, 10], float64; signs: -1 or 1, where one has any.

        All of one shape, which is also the result's.
        """
        shares = magnitudes / MAX_MAGNITUDE
        swings = signs * shares
        values = np.zeros(codes.shape)
        for operations, theirs in [
                ([Operation.Rotate], swings * self.rotate_degrees),
                ([Operation.ShearX, Operation.ShearY], swings * self.shear_factor),
                ([Operation.TranslateX, Operation.TranslateY], swings * self.translate_share),
                ([Operation.Color, Operation.Contrast, Operation.Brightness, Operation.Sharpness],
                 np.maximum(0.1, 1.0 + swings * self.enhance_factor)),
                ([Operation.Posterize],
                 self.posterize_bits - np.trunc(shares * self.posterize_bits)),
                ([Operation.Solarize],
                 256 - np.minimum(256, np.trunc(shares * self.solarize_levels))),
                ([Operation.SolarizeAdd],
                 np.minimum(128, np.trunc(shares * self.solarize_add_levels)))]:
            values = np.where(np.isin(codes, operations), theirs, values)
        return values

    def argument(self, operation: Operation, magnitude: float, sign: float) -> float:
        """That of one operation."""
        return float(self.arguments(np.array(operation), np.array(magnitude), np.array(sign)))


# ---------------------------------------------------------------------------------------------
# Erasing
# ---------------------------------------------------------------------------------------------


NOTHING = Box(0, 0, 0, 0)


@dataclass(frozen=True)
class Erasing:
    """Random erasing (Zhong et al., arXiv 1708.04896) as in timm: one box an image.

    area: range of the box's share of the image; ratio: range of its height over width, drawn
    log-uniformly. fill: "pixel" N(0, 1) for every value, "rand" N(0, 1) for every channel,
    "const" 0, all of them after normalisation.
    """

    probability: float = 0.25
    area: tuple[float, float] = (0.02, 1 / 3)
    ratio: tuple[float, float] = (0.3, 1 / 0.3)
    fill: Literal["pixel", "rand", "const"] = "pixel"

    def draw(self, rng: np.random.Generator, height: int, width: int) -> tuple[Box, int]:
        """The box, NOTHING where nothing is erased, and the key of the noise in it (63 bits)."""
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
    """What happens to samples on the device. Without the leading B: to one sample.

    numpy arrays, so that they travel between processes by value and can be read on the host.
    """

    operations: np.ndarray      # (B, L) int64: RandAugment's codes in order, 0 for none
    arguments: np.ndarray       # (B, L) float64
    bicubic: np.ndarray         # (B, L) bool: how a geometric operation interpolates
    erase_boxes: np.ndarray     # (B, 4) int64: top, left, height, width; height 0: nothing
    noise_keys: np.ndarray      # (B,) int64


@dataclass(frozen=True)
class SampleDraws:
    """All draws of a run's samples, whose views are `size` = (height, width) pixels."""

    seed: int
    size: tuple[int, int]
    crop: CropAndFlip = CropAndFlip()
    rand_augment: RandAugment = RandAugment()
    erasing: Erasing = Erasing()

    def view(self, key: SampleKey, height: int, width: int) -> View:
        """The crop and flip of one sample whose image is height × width pixels."""
        return next(self.views([key], [(height, width)]))

    def views(self, keys: Sequence[SampleKey], sizes: Iterable[tuple[int, int]]) -> Iterator[View]:
        """Likewise of each sample, whose images are `sizes` = (height, width) pixels."""
        for rng, size in zip(keyed_generators(self.seed, Stream.CROP_AND_FLIP, keys), sizes):
            yield self.crop.draw(rng, *size)

    def for_device(self, key: SampleKey) -> Draws:
        """All other draws of one sample."""
        return Draws(*(part[0, ...] for part in self.batch_for_device([key])))

    def batch_for_device(self, keys: Sequence[SampleKey]) -> Draws:
        """Those of a batch, with a leading B, at a third of the time that each alone takes."""
        operations = self.rand_augment.draw_each(
            keyed_generators(self.seed, Stream.RAND_AUGMENT, keys), len(keys))
        boxes, noise_keys = [NOTHING] * len(keys), [0] * len(keys)
        if self.erasing.probability > 0.0:
            boxes, noise_keys = zip(*(
                self.erasing.draw(rng, *self.size)
                for rng in keyed_generators(self.seed, Stream.ERASE, keys)))
        return Draws(*operations, np.array(boxes), np.array(noise_keys))


def stack_draws(samples: Sequence[Draws]) -> Draws:
    """Those of a batch, with a leading B."""
    return Draws(*map(np.stack, zip(*samples)))
