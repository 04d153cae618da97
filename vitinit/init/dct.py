"""DCT initialisation: queries, keys or values are discrete cosine transforms of the channels.

Like `conditioned` it serves as a control for the structured inits: it writes a fixed orthogonal matrix
where they write a convolution, without any information about token positions.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ..models import SwinTransformer, VisionTransformer
from .baseline import Base, draw_base
from .mimetic import attentions


@torch.no_grad()
def dct(model: VisionTransformer | SwinTransformer, *, generator: torch.Generator,
        base: Base = "default",
        projection: Literal["query", "key", "value"] = "key") -> None:
    """Make W_Q, W_K or W_V of every block the orthonormal DCT matrix (arXiv 2405.13901).

    | tensor (every block)                    | value                                              |
    |-----------------------------------------|----------------------------------------------------|
    | attn.qkv.weight, rows of `projection`   | `dct_matrix(C)`; head h takes frequencies h·d …    |
    |                                         |   h·d + d − 1                                      |
    | everything else                         | as `base` drew it, including biases                |

    projection: which of the three is written. The authors' code has all three for Swin, and for ViT the
        key alone.

    As in the authors' code (NUBagciLab/DCT-Transformer), one matrix covers all heads of a block, at norm 1
    per row whatever the base's scale is, and is trained with the rest. They also write two of the three
    at once, and freeze or truncate the matrix; that is not offered here.
    """
    if projection not in ("query", "key", "value"):
        raise ValueError(f'projection is {projection!r}, expected "query", "key" or "value"')
    draw_base(model, base, generator)
    for attention in attentions(model):
        weights = {"query": attention.q_weight, "key": attention.k_weight,
                   "value": attention.v_weight}                          # (h, d, C) each
        weights[projection].copy_(dct_matrix(attention.proj.in_features).view_as(weights[projection]))


def dct_matrix(size: int) -> Tensor:
    """The orthonormal DCT-II, (size, size) in float64: row k is the cosine of frequency k.

    Entry (k, n) is √(2 / size) · cos(π k (2n + 1) / (2 size)), and √(1 / size) in row 0.
    """
    frequencies, channels = torch.arange(size)[:, None], torch.arange(size)
    # Whole periods are taken off while the numbers are integers, so that no digits are lost.
    steps = frequencies * (2 * channels + 1) % (4 * size)                # of π / (2 size)
    matrix = math.sqrt(2.0 / size) * (steps.double() * (math.pi / (2 * size))).cos()
    matrix[0] = math.sqrt(1.0 / size)
    return matrix
