"""What a model sees in images before its head decides: token maps by block, and the pooled vector.

Every family has `features(images, blocks=…)`, which is the first half of its `forward`:

    logits = model.classify(model.features(images))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn


class Tokens(NamedTuple):
    """The tokens of a layer, on their grid and before it."""

    map: Tensor             # (B, H, W, C): patch tokens at their places
    prefix: Tensor          # (B, P, C): class, distillation and register tokens in this order; P ≥ 0


class Features(NamedTuple):
    """What a model makes of images (B, 3, H, W)."""

    blocks: tuple[Tokens, ...]  # behind each block that was asked for, before the last norm
    last: Tokens                # behind the last block and the last norm, where it has one
    pooled: Tensor              # (B, C): what the head reads; of a distilled ViT (B, 2·C), both tokens


def block_numbers(blocks: Sequence[int], depth: int) -> list[int]:
    """Numbers from 0 to depth − 1, in the order given; negative ones count from the last block.

    Raises ValueError for a block that the model does not have.
    """
    for block in blocks:
        if not -depth <= block < depth:
            raise ValueError(f"block {block} is asked for, but the model has blocks 0…{depth - 1}")
    return [block % depth for block in blocks]


def make_head(dim: int, num_classes: int) -> nn.Module:
    """The last layer, (B, dim) → (B, num_classes); of a model without classes it does nothing."""
    return nn.Linear(dim, num_classes) if num_classes else nn.Identity()


def require_classes(num_classes: int) -> None:
    """Raise ValueError for a number of classes below 0; a model of 0 has no head."""
    if not 0 <= num_classes < 2**63:
        raise ValueError(f"num_classes is {num_classes}, expected at least 0 (a model without a head)")
