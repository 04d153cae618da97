"""Which channels `deep_impulse` gives to its position embedding, and how each head reads them.

Letters used here: N patch tokens; D channels, of which the first D_p hold the code; d channels per
head; K waves of two channels each, of which a head reads m. "The code" is the Fourier code (see
fourier_code.py) or a table of random draws in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from ..filters import Offset, convolution_matrix, impulse_kernel, shift_targets
from ..models.vit import VisionTransformer
from .fourier_code import (BIAS_CHANNELS, STEEPEST, extend_to_bias_channels, gaussian_weights,
                           impulse_weights, rotated_factors, smallest_reaching, waves)
from .impulse import position_basis, query_key_factors

HeadFactors = Callable[[float, int, Offset], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class CodePlan:
    """The waves of the code, and which of them each head reads."""

    frequencies: Tensor             # (K, 2), the waves of the code, slowest first
    bias_channels: bool
    groups: list[Tensor]            # (m,) each: head h reads the waves groups[h % len(groups)]

    @property
    def channels(self) -> int:
        """D_p: two channels per wave, and the bias channels."""
        return code_size(self.frequencies, self.bias_channels)

    @property
    def width(self) -> int:
        """How many of a head's d channels read waves: 2m."""
        return 2 * len(self.groups[0])


def slowest_waves(model: VisionTransformer, code_channels: float, period: float,
                  bias_channels: bool) -> Tensor:
    """The slowest waves of the grid, (K, 2), as many as fit into that share of the width.

    Three of the channels are set aside for the bias channels, if they are used. However small the
    share, there are at least the waves up to the first that changes along either axis: without
    them, tokens of one row or one column would have the same code.
    """
    room = int(code_channels * model.pos_embed.shape[2]) - BIAS_CHANNELS * bias_channels
    frequencies = waves(model.grid, period)
    least = max((int(axis.nonzero()[0]) + 1 for axis in frequencies.T if axis.any()), default=0)
    return frequencies[:max(room // 2, least)]


def code_size(frequencies: Tensor, bias_channels: bool) -> int:
    """D_p, the number of channels that these waves and the bias channels take."""
    return 2 * len(frequencies) + BIAS_CHANNELS * bias_channels


def plan_code(model: VisionTransformer, *, code_channels: float, period: float, bias_channels: bool,
              disjoint: bool, reserve: bool) -> CodePlan:
    """Choose the waves of the code and assign them to heads; see the options of `deep_impulse`.

    Raises ValueError if not even one wave fits into a head, if the grid has no waves, or if the code
    would leave no channel for the image.
    """
    dim, attention = model.pos_embed.shape[2], model.blocks[0].attn
    frequencies = slowest_waves(model, code_channels, period, bias_channels)
    pairs = len(frequencies)
    used = min((attention.head_dim - bias_channels) // 2, pairs)
    if used < 1:
        raise ValueError(f"head_dim is {attention.head_dim}, on a {model.grid[0]}×{model.grid[1]} grid; "
                         f"init 'deep_impulse' needs a head_dim of at least {2 + bias_channels}, and a "
                         "grid side of 3 or more; have fewer and wider heads, or smaller patches")
    size = code_size(frequencies, bias_channels)
    if size > dim - reserve:                         # without `reserve`, images have all channels, too
        raise ValueError(f"code_channels is {code_channels:g} and the code takes {size} of {dim} channels, "
                         "so that none is left for images; use a smaller share, or a wider model")
    firsts = range(0, attention.num_heads * used, used) if disjoint else [0]
    return CodePlan(frequencies, bias_channels,
                    [torch.arange(first, first + used) % pairs for first in firsts])


def random_code(plan: CodePlan, grid: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw a code of normal values with the Fourier code's mean square, ½: (N, 2K)."""
    table = torch.empty(grid[0] * grid[1], 2 * len(plan.frequencies), dtype=torch.float64)
    return table.normal_(std=0.5**0.5, generator=generator)


# ---------------------------------------------------------------------------------------------
# How a head reads the code
# ---------------------------------------------------------------------------------------------


def wave_factors(plan: CodePlan, grid: tuple[int, int], period: float, masses: list[float],
                 target: Literal["impulse", "gaussian"], sigma: float) -> HeadFactors:
    """Return a function (mass, group, offset) → (Q, K), each (≤ d, D_p), for the Fourier code.

    group: index into plan.groups. Raises ValueError at once if the waves cannot reach one of the
        masses.
    """
    weights = {(mass, number): impulse_weights(plan.frequencies[group], grid, period, mass)
               if target == "impulse" else
               gaussian_weights(plan.frequencies[group], grid, period, sigma)
               for mass in dict.fromkeys(masses) for number, group in enumerate(plan.groups)}

    @cache                                           # the same heads recur in other blocks
    def factors(mass: float, group: int, offset: Offset) -> tuple[Tensor, Tensor]:
        weight = weights[mass, group]
        query, key = rotated_factors(plan.frequencies, plan.groups[group], weight, offset)
        if not plan.bias_channels:
            return query, key
        return extend_to_bias_channels(query, key, weight.sum().item())
    return factors


def table_factors(plan: CodePlan, grid: tuple[int, int], table: Tensor) -> HeadFactors:
    """As `wave_factors`, for a code without waves, (N, C): Q and K come from a factorisation."""
    @cache
    def factors(mass: float, group: int, offset: Offset) -> tuple[Tensor, Tensor]:
        query, key, peak = fitted_factors(table, offset, grid, plan.width, mass)
        return extend_to_bias_channels(query, key, peak) if plan.bias_channels else (query, key)
    return factors


def fitted_factors(table: Tensor, offset: Offset, grid: tuple[int, int], width: int,
                   mass: float) -> tuple[Tensor, Tensor, float]:
    """Q and K, each (≤ width, C), for a code without waves (arXiv 2505.19985, Algorithm 1).

    table: the code, (N, C).

    Q and K are scaled so that the target gets the share `mass` of the attention, on average over
    the tokens whose target is on the grid. The third value returned is the logit at the target,
    averaged over the same tokens. Raises ValueError if the mass is out of reach.
    """
    size = 2 * max(abs(offset[0]), abs(offset[1])) + 1
    shift = convolution_matrix(impulse_kernel(offset, size), grid).double()          # (N, N)
    query, key = query_key_factors(shift, position_basis(table, min(width, *table.shape)), width, 1.0)
    logits = table @ query.mT @ key @ table.mT                           # (N, N)
    targets = shift_targets(offset, grid)
    rows = (targets >= 0).nonzero()[:, 0]

    def reached(scale: float) -> bool:
        return (scale * logits).softmax(1)[rows, targets[rows]].mean().item() >= mass
    # Bisection is justified although this is only nearly monotone: as the scale grows, a few tokens
    # whose largest logit is not the target's lose their mass again.
    scale = smallest_reaching(reached, STEEPEST / logits.abs().max().item())
    if scale is None:
        raise ValueError(f"a random code of {table.shape[1]} channels cannot give one token of a "
                         f"{grid[0]}×{grid[1]} grid a mass of {mass:g}; use more channels or a lower "
                         "target_mass")
    peak = scale * logits[rows, targets[rows]].mean().item()
    return query * math.sqrt(scale), key * math.sqrt(scale), peak
