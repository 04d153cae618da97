"""The random draws of a training sample's augmentation, keyed by (seed, epoch, image, repeat).

A sample is one view of one image in one epoch. Its draws depend on its key alone, and each kind of
draw has a generator of its own (keys.py): one augmentation less leaves all other draws as they
were.

    crop and flip   applied in the worker that decodes the image                   → View
    RandAugment     applied to whole batches on the device                         ┐
    3-Augment       likewise, after it                                             │
    erasing         applied to whole batches there, after normalisation            ├ → Draws
    mixing          likewise; drawn for a group of samples, by (seed, step, group) ┘

`Augment` and `Mix` are the sections of a recipe with these names.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy import ndarray
from numpy.random import Generator
from torch import Tensor

from ..base.keys import Purpose, keyed_generator, keyed_generators
from ..base.values import AtLeastOne, BelowOne, Bounds, Count, Fraction, NonNegative, Proportion
from .classes import members_of
from .images import NOWHERE, Box, HeightWidth
from .operations import COLUMNS
from .rand_augment import RandAugment, draw_operations, for_device
from .three_augment import NO_THREE_AUGMENT, ThreeAugment

ATTEMPTS = 10  # boxes tried, then the centre or nothing; as torchvision and timm

Ratio = Annotated[float, Bounds(minimum=0.01, maximum=100.0)]


@dataclass(frozen=True)
class Augment:
    """A random crop, or the whole image, resized to the image size, a flip, and erasing after
    normalisation.

    Padding and shifting is the special case crop_scale = crop_ratio = [1, 1] with crop_padding > 0.
    A sample is erased in one box at most, as in timm.
    """

    repeats: AtLeastOne  # repeated augmentation: views per image
    crop_scale: tuple[Fraction, Fraction]  # share of the image's area
    crop_ratio: tuple[Ratio, Ratio]  # width over height
    crop_padding: Count  # black pixels on each side before the crop
    # crop: as these say; else all of the image, in evaluation, too. squash: whatever its
    # proportions; pad: its longer side fits, with data.mean beside it.
    fit: Literal["crop", "squash", "pad"]
    flip: Proportion  # probability of a horizontal flip
    interpolation: Literal["bilinear", "bicubic", "random"]  # random: drawn per sample
    erase_probability: Proportion
    erase_area: tuple[Fraction, Fraction]  # share of the image's area
    erase_ratio: tuple[Ratio, Ratio]  # height over width
    erase_fill: Literal["pixel", "rand", "const"]  # noise per value, noise per channel, zeros
    erase_after_mix: bool  # false: before mixing, as in DeiT


def epoch_order(seed: int, epoch: int, count: int) -> ndarray:
    """The order in which an epoch goes through `count` images: a permutation of their indices."""
    return keyed_generator(seed, Purpose.ORDER, epoch).permutation(count)


def balanced_order(seed: int, epoch: int, labels: ndarray) -> tuple[ndarray, ndarray]:
    """The order of an epoch in which all classes have as many places: images, and which copies.

    labels: (N,), the class of each image. Both are (N,) int64: an index, and 0 for the first place
    of that image, 1 for the second and so on. Classes have N / K places, and images of one class as
    many of these as each other, rounded down or up; which are rounded up is drawn.
    """
    rng = keyed_generator(seed, Purpose.ORDER, epoch)
    by_class = [images for images in members_of(labels, labels.max() + 1) if len(images)]
    least, more = divmod(len(labels), len(by_class))
    with_more = set(rng.permutation(len(by_class))[:more].tolist())
    images, copies = [], []
    for number, of_class in enumerate(by_class):
        places = least + (number in with_more)
        drawn = np.resize(rng.permutation(of_class), places)  # repeated from its beginning
        images.append(drawn)
        copies.append(np.arange(places) // len(of_class))
    shuffled = rng.permutation(len(labels))
    return np.concatenate(images)[shuffled], np.concatenate(copies)[shuffled]


class View(NamedTuple):
    """The part of an image that becomes one sample, and how it is resized and flipped."""

    box: Box
    flip: bool
    interpolation: str  # "bilinear" or "bicubic"


def draw_view(rng: Generator, augment: Augment, height: int, width: int) -> View:
    """Draw the crop and flip of an image of height × width pixels."""
    box = Box(0, 0, height, width)
    if augment.fit == "crop":
        box = draw_crop(rng, augment, height, width)
    flip = bool(rng.random() < augment.flip)
    interpolation: str = augment.interpolation
    if interpolation == "random":
        interpolation = "bicubic" if rng.random() < 0.5 else "bilinear"
    return View(box, flip, interpolation)


def draw_sides(
    rng: Generator, pixels: int, share: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int]:
    """Draw the two sides of a box, in whole pixels, possibly 0.

    Area over `pixels`: uniform on `share`; first side over second: log-uniform on `ratio`.
    """
    shortest, longest = map(math.log, ratio)  # below as by rng.uniform, but faster
    area = pixels * (share[0] + (share[1] - share[0]) * rng.random())
    quotient = math.exp(shortest + (longest - shortest) * rng.random())
    return round(math.sqrt(area * quotient)), round(math.sqrt(area / quotient))


def draw_crop(rng: Generator, augment: Augment, height: int, width: int) -> Box:
    """Draw the box of a random resized crop (Szegedy et al., arXiv 1409.4842).

    As in torchvision and timm: sides by `draw_sides`, a position uniform on the image with its
    padding; after ten boxes that do not fit the centre of the image, at the allowed ratio that is
    nearest to the image's.
    """
    ratio = augment.crop_ratio
    padding = augment.crop_padding
    for _ in range(ATTEMPTS):
        box_width, box_height = draw_sides(rng, height * width, augment.crop_scale, ratio)
        if 0 < box_width <= width + 2 * padding and 0 < box_height <= height + 2 * padding:
            top = int(rng.integers(-padding, height + padding - box_height, endpoint=True))
            left = int(rng.integers(-padding, width + padding - box_width, endpoint=True))
            return Box(top, left, box_height, box_width)
    aspect = min(max(width / height, ratio[0]), ratio[1])
    box_height = max(1, round(min(height, width / aspect)))
    box_width = max(1, round(min(width, height * aspect)))
    top = (height - box_height) // 2
    left = (width - box_width) // 2
    return Box(top, left, box_height, box_width)


def draw_erasing(rng: Generator, augment: Augment, height: int, width: int) -> tuple[Box, int]:
    """Draw what is erased (arXiv 1708.04896): a box, or NOWHERE, and its noise's 63-bit key."""
    if rng.random() >= augment.erase_probability:
        return NOWHERE, 0
    noise_key = int(rng.integers(2**63))
    for _ in range(ATTEMPTS):
        box_height, box_width = draw_sides(
            rng, height * width, augment.erase_area, augment.erase_ratio
        )
        if 0 < box_height < height and 0 < box_width < width:
            top = int(rng.integers(height - box_height, endpoint=True))
            left = int(rng.integers(width - box_width, endpoint=True))
            return Box(top, left, box_height, box_width), noise_key
    return NOWHERE, noise_key


class MixDraw(NamedTuple):
    """How an image and its partner are mixed."""

    share: float  # λ: the weight of the image's own label in its target
    box: Box  # cutmix: the box that comes from the partner; else NOWHERE


UNMIXED = MixDraw(1.0, NOWHERE)


@dataclass(frozen=True)
class Mix:
    """Mixup (Zhang et al., arXiv 1710.09412), cutmix (Yun et al., arXiv 1905.04899), smoothing.

    A group of images is mixed with `probability`, where both kinds are on by cutmix with
    `switch_probability`, else by mixup. All targets are smoothed, mixed or not.
    """

    mixup_alpha: NonNegative  # λ ~ Beta(α, α); 0: no mixup
    cutmix_alpha: NonNegative  # likewise
    probability: Proportion  # that a group is mixed
    switch_probability: Proportion  # of cutmix, where both are on
    label_smoothing: BelowOne
    # Images per draw: even, divides global_batch.
    group: Annotated[int, Bounds(minimum=2, below=2**31)]

    @property
    def mixes(self) -> bool:
        """Whether any image is ever mixed with these settings."""
        return self.probability > 0.0 and max(self.mixup_alpha, self.cutmix_alpha) > 0.0

    def draw(self, rng: Generator, height: int, width: int) -> MixDraw:
        """Draw how a group of images of height × width pixels is mixed."""
        if not self.mixes or rng.random() >= self.probability:
            return UNMIXED
        switch = rng.random() < self.switch_probability
        if self.cutmix_alpha and (switch or not self.mixup_alpha):
            return self.draw_cutmix(rng, height, width)
        return MixDraw(rng.beta(self.mixup_alpha, self.mixup_alpha), NOWHERE)

    def draw_cutmix(self, rng: Generator, height: int, width: int) -> MixDraw:
        """Draw a box of (1 − λ) of the area around a uniform centre, and clip it at the border.

        What is clipped off counts for λ, which is the share of the area outside of the box.
        """
        side = math.sqrt(1.0 - rng.beta(self.cutmix_alpha, self.cutmix_alpha))
        half_height = int(height * side) // 2
        half_width = int(width * side) // 2
        y = int(rng.integers(height))
        x = int(rng.integers(width))
        top = max(y - half_height, 0)
        left = max(x - half_width, 0)
        bottom = min(y + half_height, height)
        right = min(x + half_width, width)
        box = Box(top, left, bottom - top, right - left)
        return MixDraw(1.0 - box.height * box.width / (height * width), box)


class Masks(NamedTuple):
    """Which patches of a view a model sees that is to reconstruct the others (arXiv 2111.06377)."""

    patches: int  # of an image
    visible: int  # of these

    def draw(self, generators: Iterable[Generator]) -> ndarray:
        """For each generator the indices of the visible patches, ascending: (B, visible) int64."""
        return np.stack(
            [np.sort(rng.permutation(self.patches)[: self.visible]) for rng in generators]
        )


class SampleKey(NamedTuple):
    """One view of one image: the epoch, the image, and which of its views in that epoch it is."""

    epoch: int
    image: int
    repeat: int = 0


class Samples(NamedTuple):
    """The B samples of a micro-batch."""

    step: int  # of the run, from 0
    keys: list[SampleKey]
    groups: ndarray  # (B,), the mixing group of each sample


Array = TypeVar("Array", Tensor, ndarray)


class Draws(NamedTuple, Generic[Array]):
    """What happens to the B samples of a micro-batch on the device, as float64."""

    operations: Array  # (B, L, COLUMNS): RandAugment's and 3-Augment's, L layers, of `for_device`
    # (B, 5): the `Box` that is erased (height 0: none), and the key of the noise in it, as the bits
    # of a float: `view(torch.int64)`.
    erased: Array
    mixed: Array  # (B, 5): a `MixDraw`, λ and its `Box`, the same for two partners


def unpack(draws: Array) -> Draws[Array]:
    """The parts of `Augmentation.draws`, as views; so also of an array."""
    layers = (draws.shape[1] - 10) // COLUMNS
    operations = draws[:, 10:].reshape(len(draws), layers, COLUMNS)
    return Draws(operations, draws[:, :5], draws[:, 5:10])


@dataclass(frozen=True)
class Augmentation:
    """How a run's samples are augmented: the seed, (height, width) of a view, and the settings."""

    seed: int
    size: HeightWidth
    augment: Augment
    rand_augment: RandAugment
    mix: Mix
    masks: Masks | None = None  # None: all patches are seen
    border: Sequence[int] | None = None  # the colour beside a whole image; None: none is padded
    three_augment: ThreeAugment = NO_THREE_AUGMENT

    def draws(self, samples: Samples) -> Tensor:
        """Draw what is applied to a micro-batch on the device: `Draws` in one tensor, (B, …)."""
        step, keys, groups = samples
        count = len(keys)
        generators = keyed_generators(self.seed, Purpose.RAND_AUGMENT, keys)
        layers = draw_operations(generators, count, self.rand_augment)
        generators = keyed_generators(self.seed, Purpose.THREE_AUGMENT, keys)
        further = self.three_augment.draw(generators, count)
        operations = for_device(np.concatenate([layers, further], 1), self.size)
        operations = operations.reshape(count, -1)
        erased = np.zeros((count, 5))
        if self.augment.erase_probability > 0.0:
            generators = keyed_generators(self.seed, Purpose.ERASE, keys)
            for row, rng in zip(erased, generators):
                row[:4], noise_key = draw_erasing(rng, self.augment, *self.size)
                row.view(np.int64)[4] = noise_key
        mixed = np.tile([UNMIXED.share, *UNMIXED.box], (count, 1))
        if self.mix.mixes:
            for group in set(groups.tolist()):
                rng = keyed_generator(self.seed, Purpose.MIX, step, group)
                share, box = self.mix.draw(rng, *self.size)
                mixed[groups == group] = share, *box
        return torch.from_numpy(np.concatenate([erased, mixed, operations], 1))
