"""A control for `impulse`: random weights with its norms, without its structure.

The authors of arXiv 2505.19985 asked whether the larger position embedding, queries and keys of
impulse initialisation explain its gain; their released code multiplies those of the default init
by constants (`default{p}_{q}_{v}`). Here each tensor gets the norm that `impulse` would give it.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from .baseline import Base, draw_base
from .impulse import impulse
from .layout import layout_of
from .views import VitLayout


@torch.no_grad()
def norm_matched(model: nn.Module | VitLayout, *, generator: torch.Generator,
                 base: Base = "default") -> None:
    """Draw the base, and scale what `impulse` would write to the norms that it would have.

    | tensor                                        | value                                   |
    |-----------------------------------------------|-----------------------------------------|
    | pos_embed                                     | base × one factor                       |
    | every block: attn.qkv.weight, Q, K, V rows    | base × one factor per head, for each    |
    |                                               |   of Q, K and V                         |
    | every block: attn.proj.weight                 | base × one factor                       |
    | everything else                               | as `base` drew it                       |

    base: also of `impulse`, whose options are the defaults otherwise; raises ValueError as it does.
    """
    vit = layout_of(model)
    assert isinstance(vit, VitLayout)
    before = copy.deepcopy(vit.model.state_dict())
    impulse(vit, generator=generator, base=base)
    norms = [norm for _, norm in written(vit)]
    vit.model.load_state_dict(before)
    draw_base(vit.model, base, generator)
    for (tensor, drawn), norm in zip(written(vit), norms):
        tensor.mul_(norm / drawn)


def written(vit: VitLayout) -> list[tuple[Tensor, Tensor]]:
    """What `impulse` writes, each with its norms: of Q, K and V, (h, d, D), one per head."""
    whole = [vit.pos_embed, *(block.proj for block in vit.blocks)]
    by_head = [tensor for block in vit.blocks for tensor in (block.q, block.k, block.v)]
    return [(tensor, torch.linalg.vector_norm(tensor, keepdim=True)) for tensor in whole] + [
        (tensor, torch.linalg.vector_norm(tensor, dim=(1, 2), keepdim=True)) for tensor in by_head]
