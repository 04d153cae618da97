"""DeiT's augmentation, from its recipe, and single steps of it on whole batches on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vitinit.data import augment, mix
from vitinit.data.draw import Draws, RandAugment, draw_operations
from vitinit.data.operations import operation_tables, rand_augment
from vitinit.data.to_device import upload
from vitinit.recipe.files import RECIPES, load_recipe

_DEIT = load_recipe(RECIPES / "deit_base.toml")
AUGMENT, RAND_AUGMENT, MIX = _DEIT.augment, _DEIT.rand_augment, _DEIT.mix
SHIFT = dict(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0))       # crops that only move pixels
CPU = torch.device("cpu")


def noisy_batch(count: int, height: int, width: int, seed: int = 0) -> Tensor:
    """Noise (count, 3, height, width), uint8."""
    values = np.random.default_rng(seed).integers(0, 256, (count, 3, height, width), np.uint8)
    return torch.from_numpy(values)


def augmented(images: Tensor, operations: np.ndarray | Tensor,
              fill: Sequence[int] = RAND_AUGMENT.fill, *, at_once: bool = False) -> Tensor:
    """RandAugment of images (B, 3, H, W); operations: (B, L, 3), as in `draw.Draws`."""
    tables = operation_tables(np.asarray(operations), images.shape[2:], fill, at_once=at_once)
    return rand_augment(images, *upload(CPU, [tables]))


def random_operations(count: int, settings: RandAugment, seed: int = 0) -> np.ndarray:
    """The operations of `count` images, (count, L, 3)."""
    rng = np.random.default_rng(seed)
    return draw_operations([rng] * count, count, settings)


def erase(images: Tensor, erased: np.ndarray | Tensor, fill: str, *, at_once: bool = False) -> Tensor:
    """Copies of float32 images with their boxes filled; erased: (B, 5), as in `draw.Draws`."""
    boxes, = upload(CPU, [augment.erased_boxes(np.asarray(erased), images.shape[2:])])
    images = images.clone(memory_format=torch.contiguous_format)
    return augment.erase(images, boxes, fill, augment.normal_quantiles(), at_once=at_once)


def mix_images(images: Tensor, mixes: Sequence[mix.MixDraw], *, at_once: bool = False) -> Tensor:
    """Images mixed by one draw per image."""
    return mix.mix_images(images, *upload(CPU, [mix.mixing_of(mixes)]), at_once=at_once)


def mix_targets(targets: Tensor, mixes: Sequence[mix.MixDraw]) -> Tensor:
    """Targets mixed by one draw per image."""
    return mix.blend(targets, upload(CPU, [mix.mixing_of(mixes)])[0].weights)


def some(draws: Draws, rows) -> Draws:
    """The draws of some images of a batch."""
    return Draws(*(part[rows] for part in draws))
