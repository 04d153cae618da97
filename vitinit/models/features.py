"""What a model computes before its head: token maps after chosen blocks, and the pooled features.

Every model family has `features(images, blocks=…)`, which is the first half of its `forward`:

    logits = model.classify(model.features(images))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn


class Tokens(NamedTuple):
    """The tokens after a layer: patch tokens on their grid, and the prefix tokens before them."""

    map: Tensor             # (B, H, W, C): patch tokens by row and column
    prefix: Tensor          # (B, P, C): class, distillation, register tokens in this order; P ≥ 0


class Features(NamedTuple):
    """The features of images (B, 3, H, W)."""

    blocks: tuple[Tokens, ...]  # after each chosen block, without the last norm
    last: Tokens                # after the last block and the last norm, if there is one
    pooled: Tensor              # (B, C), what the head reads; (B, 2·C) for a distilled ViT


def block_numbers(blocks: Sequence[int], depth: int) -> list[int]:
    """Translate block numbers to 0 … depth − 1, in the order given.

    Negative numbers count from the last block. Raises ValueError for a block that the model does
    not have.
    """
    for block in blocks:
        if not -depth <= block < depth:
            raise ValueError(f"block {block} is asked for, but the model has blocks 0…{depth - 1}")
    return [block % depth for block in blocks]


def make_head(dim: int, num_classes: int) -> nn.Module:
    """The last layer, (B, dim) → (B, num_classes); the identity for num_classes = 0."""
    return nn.Linear(dim, num_classes) if num_classes else nn.Identity()


def require_classes(num_classes: int) -> None:
    """Raise ValueError for a negative number of classes; 0 stands for a model without a head."""
    if not 0 <= num_classes < 2**63:
        raise ValueError(f"num_classes is {num_classes}, expected at least 0 (a model without a head)")
