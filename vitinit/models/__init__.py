"""All models: one literal table, name → (class, sizes), and `build_model`."""

from __future__ import annotations

import difflib
from typing import Any

from torch import nn

from .vit import VisionTransformer

__all__ = ["MODELS", "VisionTransformer", "build_model"]

# Sizes: ViT-B from arXiv 2010.11929, table 1; ViT-S and ViT-T from DeiT, arXiv 2012.12877, table 1.
MODELS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "vit_tiny": (VisionTransformer, dict(patch_size=16, embed_dim=192, depth=12, num_heads=3)),
    "vit_small": (VisionTransformer, dict(patch_size=16, embed_dim=384, depth=12, num_heads=6)),
    "vit_base": (VisionTransformer, dict(patch_size=16, embed_dim=768, depth=12, num_heads=12)),
}


def build_model(name: str, *, num_classes: int, image_size: int | tuple[int, int],
                **sizes: Any) -> nn.Module:
    """The model `name` with its table's sizes, of which `sizes` replaces or adds any.

    For example `build_model("vit_tiny", num_classes=10, image_size=32, patch_size=2)`.
    Raises ValueError for an unknown name or sizes that do not fit together.
    """
    if name not in MODELS:
        near = difflib.get_close_matches(name, MODELS, n=3) or sorted(MODELS)
        raise ValueError(f"there is no model '{name}'; near: {', '.join(near)}")
    model, defaults = MODELS[name]
    return model(num_classes=num_classes, image_size=image_size, **defaults | sizes)
