"""A small model of every family, and batches for these models."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from ...init import init_weights
from ...models import build_model
from ...models.layers import draw_drop_path
from ..training import Part

SIZE, BATCH, CLASSES = 16, 12, 7
FAMILIES = {
    "vit_tiny": dict(patch_size=4, embed_dim=24, depth=2, num_heads=3, drop_path=0.3),
    "swin_tiny": dict(patch_size=2, embed_dim=12, depths=(2, 1), num_heads=(3, 3), window_size=4,
                      drop_path=0.3),
    "mixer_s16": dict(patch_size=4, embed_dim=24, depth=2, drop_path=0.3),
    "convmixer_256_8": dict(patch_size=2, embed_dim=24, depth=2, kernel_size=3),
    "simple_vit": dict(patch_size=4, embed_dim=24, depth=2, num_heads=3),
}


def small_model(name: str) -> nn.Module:
    """Build the small model of a family on the CPU, with the same weights every time.

    name: a key of FAMILIES.
    """
    model = build_model(name, num_classes=CLASSES, image_size=SIZE, **FAMILIES[name])
    init_weights(model, "torch", generator=torch.Generator().manual_seed(0))
    return model


def batch_of(seed: int = 1, count: int = BATCH) -> Part:
    """Noise images (count, 3, SIZE, SIZE), and random soft targets (count, CLASSES); float32."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, SIZE, SIZE, generator=generator)
    return images, torch.randn(count, CLASSES, generator=generator).softmax(dim=1)


def drop_path_of(model: nn.Module, count: int = BATCH) -> Tensor | None:
    """Drop-path scales (branches, count) for a model with stochastic depth, else None."""
    if not any(model.drop_path_rates):
        return None
    return draw_drop_path(model.drop_path_rates, count, np.random.default_rng(4))
