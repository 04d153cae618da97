"""DeiT's augmentation, from its recipe, single steps of it on the host, and images to augment."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitinit.base.keys import Purpose, keyed_generator
from vitinit.data import augment
from vitinit.data.draw import (
    Augmentation,
    Draws,
    MixDraw,
    SampleKey,
    Samples,
    View,
    draw_view,
    unpack,
)
from vitinit.data.images import crop_and_flip
from vitinit.data.rand_augment import RandAugment, draw_operations, for_device, rand_augment
from vitinit.data.sources import Source
from vitinit.data.three_augment import ThreeAugment
from vitinit.recipe.files import RECIPES, load_recipe

_DEIT = load_recipe(RECIPES / "deit_base.toml")
AUGMENT, RAND_AUGMENT, MIX = _DEIT.augment, _DEIT.rand_augment, _DEIT.mix
THREE_AUGMENT = ThreeAugment(probability=1.0, color_jitter=0.3)  # DeiT III's
UNMIXED_ALWAYS = replace(MIX, probability=0.0)
SHIFT = dict(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0))  # crops that only move pixels
CPU = torch.device("cpu")


def noisy_batch(count: int, height: int, width: int, seed: int = 0) -> Tensor:
    """Noise (count, 3, height, width), uint8."""
    values = np.random.default_rng(seed).integers(0, 256, (count, 3, height, width), np.uint8)
    return torch.from_numpy(values)


def augmented(
    images: Tensor,
    operations: np.ndarray | Tensor,
    fill: Sequence[int] = RAND_AUGMENT.fill,
    *,
    few_launches: bool = False,
) -> Tensor:
    """RandAugment of images (B, 3, H, W); operations: (B, L, 3 or more), as in `draw.Draws`."""
    described = for_device(np.asarray(operations)[..., :3].astype(float), images.shape[2:])
    return rand_augment(images, torch.from_numpy(described), fill, few_launches=few_launches)


def random_operations(count: int, settings: RandAugment, seed: int = 0) -> np.ndarray:
    """The operations of `count` images, (count, L, 3)."""
    rng = np.random.default_rng(seed)
    return draw_operations([rng] * count, count, settings)


def samples(
    keys: Sequence[SampleKey], groups: Sequence[int] | None = None, step: int = 0
) -> Samples:
    """The samples of a micro-batch of one group, unless `groups` are given."""
    return Samples(step, list(keys), np.array(groups or [0] * len(keys)))


def view_of(augmentation: Augmentation, key: SampleKey, height: int, width: int) -> View:
    """The crop and flip of a sample, from a generator of its own."""
    rng = keyed_generator(augmentation.seed, Purpose.CROP_AND_FLIP, *key)
    return draw_view(rng, augmentation.augment, height, width)


def cropped(augmentation: Augmentation, source: Source, key: SampleKey) -> Tensor:
    """The view of a sample, (3, H, W) uint8."""
    image = source.image(key.image)
    box, flip, interpolation = view_of(augmentation, key, *image.shape[1:])
    return crop_and_flip(image, box, flip, augmentation.size, interpolation)


def draws_of(augmentation: Augmentation, keys: Sequence[SampleKey]) -> Draws:
    """What is drawn for samples of one group in step 0."""
    return unpack(augmentation.draws(samples(keys)))


def erase(images: Tensor, erased: Tensor, fill: str) -> Tensor:
    """Copies of float32 images with their boxes filled; erased: (B, 5), as in `draw.Draws`."""
    count = int(3 * (erased[:, 2] * erased[:, 3]).sum())
    images = images.clone(memory_format=torch.contiguous_format)
    return augment.erase(images, erased, count, fill, augment.normal_quantiles())


def box_and_key(erased: Tensor) -> list[int]:
    """Top, left, height, width and the noise's key of a row of `draw.Draws.erased`."""
    return [*erased[:4].long().tolist(), erased[4].view(torch.int64).item()]


def as_drawn(mixes: Sequence[MixDraw]) -> Tensor:
    """One draw per image as in `draw.Draws`, (B, 5)."""
    return torch.tensor([[share, *box] for share, box in mixes], dtype=torch.float64)


def equal(ours: Iterable[Sequence[Tensor]], theirs: Iterable[Sequence[Tensor]]) -> bool:
    """Whether batches have the same tensors, and there is one at least."""
    pairs = list(zip(ours, theirs, strict=True))
    return bool(pairs) and all(
        torch.equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True)
    )


class OnHost:
    """A tensor that the host reads, too, for which it stays real among fake ones."""

    def __init__(self, tensor: Tensor) -> None:
        self.array, self.dtype = tensor.numpy(), tensor.dtype

    def numpy(self) -> np.ndarray:
        return self.array

    def to(self, *where, **how) -> Tensor:
        return torch.empty(self.array.shape, dtype=self.dtype).to(*where, **how)


def write_images(folder: Path) -> Path:
    """Write 23 images of 23 sizes in three classes into an empty folder, and return it."""
    rng = np.random.default_rng(0)
    for number in range(23):
        path = folder / f"class_{number % 3}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        pixels = rng.integers(0, 256, (17 + number, 41 - number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return folder
