"""DeiT's augmentation, from its recipe, and single steps of it on whole batches on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vitinit.data import augment
from vitinit.data.draw import Augmentation, Draws, RandAugment, SampleKey, Samples, draw_operations
from vitinit.data.mix import MixDraw
from vitinit.data.operations import rand_augment
from vitinit.recipe.files import RECIPES, load_recipe

_DEIT = load_recipe(RECIPES / "deit_base.toml")
AUGMENT, RAND_AUGMENT, MIX = _DEIT.augment, _DEIT.rand_augment, _DEIT.mix
UNMIXED_ALWAYS = replace(MIX, probability=0.0)
SHIFT = dict(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0))       # crops that only move pixels
CPU = torch.device("cpu")


def noisy_batch(count: int, height: int, width: int, seed: int = 0) -> Tensor:
    """Noise (count, 3, height, width), uint8."""
    values = np.random.default_rng(seed).integers(0, 256, (count, 3, height, width), np.uint8)
    return torch.from_numpy(values)


def augmented(images: Tensor, operations: np.ndarray | Tensor,
              fill: Sequence[int] = RAND_AUGMENT.fill, *, few_launches: bool = False) -> Tensor:
    """RandAugment of images (B, 3, H, W); operations: (B, L, 3), as in `draw.Draws`."""
    return rand_augment(images, np.asarray(operations), fill, few_launches=few_launches)


def random_operations(count: int, settings: RandAugment, seed: int = 0) -> np.ndarray:
    """The operations of `count` images, (count, L, 3)."""
    rng = np.random.default_rng(seed)
    return draw_operations([rng] * count, count, settings)


def samples(keys: Sequence[SampleKey], groups: Sequence[int] | None = None, step: int = 0
            ) -> Samples:
    """The samples of a micro-batch of one group, unless `groups` are given."""
    return Samples(step, list(keys), np.array(groups or [0] * len(keys)))


def draws_of(augmentation: Augmentation, keys: Sequence[SampleKey]) -> Draws:
    """What is drawn for samples of one group in step 0."""
    return augmentation.draws(samples(keys))


def erase(images: Tensor, erased: np.ndarray | Tensor, fill: str) -> Tensor:
    """Copies of float32 images with their boxes filled; erased: (B, 5), as in `draw.Draws`."""
    erased = torch.as_tensor(erased)
    count = int(3 * (erased[:, 2] * erased[:, 3]).sum())
    images = images.clone(memory_format=torch.contiguous_format)
    return augment.erase(images, erased, count, fill, augment.normal_quantiles())


def as_drawn(mixes: Sequence[MixDraw]) -> Tensor:
    """One draw per image as in `draw.Draws`, (B, 5)."""
    return torch.tensor([[share, *box] for share, box in mixes], dtype=torch.float64)


class OnHost:
    """A tensor that the host reads, too, for which it stays real among fake ones."""

    def __init__(self, tensor: Tensor) -> None:
        self.array, self.dtype = tensor.numpy(), tensor.dtype

    def numpy(self) -> np.ndarray:
        return self.array

    def to(self, *where, **how) -> Tensor:
        return torch.empty(self.array.shape, dtype=self.dtype).to(*where, **how)
