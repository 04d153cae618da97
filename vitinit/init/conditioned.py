"""Conditioned initialisation: queries, keys and values whose singular values are all equal.

It serves as a control for the structured inits: it writes the same weights as they do, but without
any information about token positions.
"""

from __future__ import annotations

import torch
from torch import nn

from ..models import SwinTransformer, VisionTransformer
from .baseline import Base, draw_base
from .mimetic import attentions


@torch.no_grad()
def conditioned(model: VisionTransformer | SwinTransformer, *, generator: torch.Generator,
                base: Base = "default") -> None:
    """Make Q and K semi-orthogonal and V a rectangular identity in every head.

    Source: "Conditioned Initialization for Attention", ICLR 2026.

    | tensor (every block)          | value                                                        |
    |-------------------------------|--------------------------------------------------------------|
    | attn.qkv.weight, Q and K rows | (d, C) with orthonormal rows, uniform among such matrices    |
    | attn.qkv.weight, V rows       | head h takes channels h·d … h·d + d − 1; all heads together  |
    |                               |   form the identity                                          |
    | everything else               | as `base` drew it, including proj and the biases             |

    The paper makes each W_V a d×C identity, which could also mean that all heads read the same
    first d channels. That the heads divide the channels among themselves is our interpretation; the
    authors' code was not available to us.
    """
    draw_base(model, base, generator)
    for attention in attentions(model):
        for head in range(attention.num_heads):
            for weight in (attention.q_weight, attention.k_weight):      # (h, d, C)
                weight[head] = nn.init.orthogonal_(torch.empty_like(weight[head]),
                                                   generator=generator)
        dim = attention.proj.in_features
        attention.v_weight.copy_(torch.eye(dim).view_as(attention.v_weight))
