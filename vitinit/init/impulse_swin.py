"""Impulse initialisation of a Swin Transformer, by its relative position bias alone."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn

from ..filters import head_offsets, offsets_on_grid
from .baseline import Base, draw_base
from .layout import layout_of
from .views import SwinLayout


@torch.no_grad()
def impulse_swin(model: nn.Module | SwinLayout, *, generator: torch.Generator,
                 base: Base = "default", kernel_size: int = 3,
                 offsets: Literal["ordered", "random"] = "ordered",
                 target_mass: float = 0.9) -> None:
    """Make every head attend to one neighbour within the window (arXiv 2505.19985, §5).

    The paper gives neither magnitudes nor code; these are ours.

    | tensor (every block)                    | value                                            |
    |-----------------------------------------|--------------------------------------------------|
    | attn.relative_position_bias_table       | β where query − key is minus the head's offset,  |
    |                                         |   0 elsewhere                                    |
    | everything else                         | as `base` drew it                                |

    β = ln(m (n − 1) / (1 − m)) gives the target the mass m = target_mass among the n tokens of a
    window, since e^β / (e^β + n − 1) = m. The base's logits Q Kᵀ, near 0 at the start, are added to
    it. Where the shift masks part of a window the mass is higher. A token whose target is outside
    its window, or masked, spreads its attention evenly over the tokens that it can attend to.

    kernel_size, offsets: as for `impulse`. Raises ValueError for a kernel that reaches beyond every
        window.
    """
    if not 0.0 < target_mass < 1.0:
        raise ValueError(f"target_mass is {target_mass}, expected 0 < target_mass < 1")
    swin = layout_of(model)
    assert isinstance(swin, SwinLayout)
    cells = offsets_on_grid(kernel_size, min(swin.grids, key=min))   # checks it, before any draw
    draw_base(swin.model, base, generator)

    for block in swin.blocks:
        tokens = len(block.bias_rows)
        targets = head_offsets(len(block.q), cells, offsets, generator)
        block.bias_table.zero_()
        if tokens > 1:                               # a token alone in its window attends to itself
            beta = math.log(target_mass * (tokens - 1) / (1.0 - target_mass))
            for head, offset in enumerate(targets):
                block.bias_table[block.bias_row(offset), head] = beta
