"""Impulse initialisation of a Swin Transformer, by its relative position bias alone."""

from __future__ import annotations

import math
from typing import Literal

import torch

from ..filters import OFFSETS, head_offsets, ordered_offsets
from ..models.swin import SwinTransformer
from .baseline import Base, draw_base
from .layout import block_of
from .mimetic import write_values


@torch.no_grad()
def impulse_swin(model: SwinTransformer, *, generator: torch.Generator,
                 base: Base = "default",
                 kernel_size: int = 3,
                 offsets: Literal["ordered", "rotating", "random"] = "ordered",
                 target_mass: float = 0.9,
                 value_init: Literal["mimetic", "base"] = "base",
                 value_alpha: float = 0.4,
                 value_beta: float = 0.4) -> None:
    """Make every head attend to one neighbour within the window (arXiv 2505.19985, §5).

    The paper writes the pattern into the relative position bias, but gives neither magnitudes nor
    code; these are ours.

    | tensor (every block)                    | value                                            |
    |-----------------------------------------|--------------------------------------------------|
    | attn.relative_position_bias_table       | β where query − key is minus the head's offset,  |
    |                                         |   0 elsewhere                                    |
    | attn.qkv.weight, V rows; attn.proj      | as `base` drew them, or value_init "mimetic"     |
    | everything else                         | as `base` drew it                                |

    β = ln(m (n − 1) / (1 − m)) gives the target the mass m = target_mass among the n tokens of a
    window, since e^β / (e^β + n − 1) = m. The base's logits Q Kᵀ, near 0 at the start, are added to
    it. Where the shift masks part of a window the mass is higher. A token whose target is outside
    its window, or masked, spreads its attention evenly over the tokens that it can attend to.

    kernel_size, offsets: as for ViT. A kernel that reaches beyond a window is an error.
    value_init: "base", as the paper's text says, or "mimetic": V·proj as in the paper's code for
        ViT.
    """
    if offsets not in OFFSETS or value_init not in ("mimetic", "base"):
        raise ValueError(f'offsets is {offsets!r} and value_init is {value_init!r}; expected one '
                         f'of '
                         f'{", ".join(OFFSETS)}, and "mimetic" or "base"')
    if not 0.0 < target_mass < 1.0:
        raise ValueError(f"target_mass is {target_mass}, expected 0 < target_mass < 1")
    blocks = [block for stage in model.layers for block in stage.blocks]
    narrowest = min(min(block.window) for block in blocks)
    if kernel_size // 2 >= narrowest:
        raise ValueError(f"kernel_size is {kernel_size}, but its outer offsets leave a window "
                         f"{narrowest} tokens wide from every token in it")
    cells = ordered_offsets(kernel_size)             # also checks kernel_size, before any draw
    draw_base(model, base, generator)

    heads_before = 0
    for block in blocks:
        attention = block.attn
        height, width = attention.window
        tokens = height * width
        table = attention.relative_position_bias_table.zero_()
        chosen = head_offsets(attention.num_heads, cells, offsets, generator, first=heads_before)
        heads_before += attention.num_heads
        for head, (down, right) in enumerate(chosen):
            # The table's rows count query − key, and the key is wanted at query + offset.
            row = (height - 1 - down) * (2 * width - 1) + width - 1 - right
            if tokens > 1:                           # a token alone in its window attends to itself
                table[row, head] = math.log(target_mass * (tokens - 1) / (1.0 - target_mass))
        if value_init == "mimetic":
            write_values(block_of(attention, block.norm1), alpha=value_alpha, beta=value_beta,
                         generator=generator)
