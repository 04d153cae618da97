"""A control for `impulse`: random weights with its norms, without its structure.

The authors of arXiv 2505.19985 asked whether the larger position embedding, queries and keys of
impulse initialisation explain its gain; their released code multiplies those of the default init
by constants (`default{p}_{q}_{v}`). Here the factors are not guessed: each tensor gets the norm
that `impulse` would have given it.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from .baseline import Base, draw_base
from .impulse import impulse
from .layout import Layout, layout_of


@torch.no_grad()
def norm_matched(model: nn.Module | Layout, *, generator: torch.Generator,
                 base: Base = "default") -> None:
    """Draw the base, and scale what `impulse` would write to the norms that it would have.

    | tensor                                        | value                                   |
    |-----------------------------------------------|-----------------------------------------|
    | pos_embed                                     | base × one factor                       |
    | every block: attn.qkv.weight, Q, K, V rows    | base × one factor per head, for each    |
    |                                               |   of Q, K and V                         |
    | every block: attn.proj.weight                 | base × one factor                       |
    | everything else                               | as `base` drew it                       |

    base: also the base of `impulse`, which has its own default options otherwise.

    Norms are Frobenius norms. Raises ValueError as `impulse` does.
    """
    vit = layout_of(model)
    own = copy.deepcopy(vit.model.state_dict())
    impulse(vit, generator=generator, base=base)
    structured = copy.deepcopy(replace(vit, model=None))     # its views, apart from the model
    vit.model.load_state_dict(own)
    draw_base(vit.model, base, generator)
    _match_norm(vit.pos_embed, structured.pos_embed)
    for block, example in zip(vit.blocks, structured.blocks):
        for ours, theirs in zip((block.q, block.k, block.v), (example.q, example.k, example.v)):
            _match_norm(ours, theirs, dim=(1, 2))        # (h, d, C), a norm per head
        _match_norm(block.proj, example.proj)


def _match_norm(tensor: Tensor, example: Tensor, dim: tuple[int, ...] | None = None) -> None:
    """Scale `tensor` in place so that its norm over `dim` is that of `example`."""
    wanted, own = (torch.linalg.vector_norm(each, dim=dim, keepdim=True)
                   for each in (example, tensor))
    tensor.mul_(wanted / own)
