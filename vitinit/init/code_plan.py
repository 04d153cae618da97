"""Where `deep_impulse` puts its position embedding, and how a head reads it there.

N tokens, D channels, of which the code has the first D_p; d channels per head. K waves, two channels
each, of which a head reads m.
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
from .factorize import STEEPEST, position_basis, query_key_factors, smallest_reaching
from .fourier_code import (BIAS_CHANNELS, gaussian_weights, impulse_weights, reading_bias_channels, turned_factors,
                           waves)

HeadFactors = Callable[[float, int, Offset], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class CodePlan:
    """Which channels of the residual stream hold the code, and which part of it each head reads."""

    frequencies: Tensor             # (K, 2), the waves of the code, slowest first
    bias_channels: bool
    groups: list[Tensor]            # head h reads the waves groups[h modulo their number], (m,) each

    @property
    def channels(self) -> int:
        """D_p: two per wave, and the bias channels."""
        return code_size(self.frequencies, self.bias_channels)

    @property
    def width(self) -> int:
        """Of a head's channels, those that read waves: 2m."""
        return 2 * len(self.groups[0])


def waves_with_room(model: VisionTransformer, code_channels: float, period: float,
                    bias_channels: bool) -> Tensor:
    """(K, 2): as many of the grid's waves, slowest first, as a share of the width has room for."""
    room = int(code_channels * model.pos_embed.shape[2]) - BIAS_CHANNELS * bias_channels
    return waves(model.grid, period)[:max(room // 2, 0)]


def code_size(frequencies: Tensor, bias_channels: bool) -> int:
    return 2 * len(frequencies) + BIAS_CHANNELS * bias_channels


def planned(model: VisionTransformer, *, code_channels: float, period: float, bias_channels: bool,
            disjoint: bool, reserve: bool) -> CodePlan:
    """Raises ValueError where the width or a head has no room for a wave, or none for images."""
    dim, attention = model.pos_embed.shape[2], model.blocks[0].attn
    frequencies = waves_with_room(model, code_channels, period, bias_channels)
    pairs = len(frequencies)
    used = min((attention.head_dim - bias_channels) // 2, pairs)
    if used < 1:
        raise ValueError(f"head_dim is {attention.head_dim}, and {code_channels:g} of {dim} channels "
                         f"are for the code of a {model.grid[0]}×{model.grid[1]} grid; init "
                         f"'deep_impulse' needs {2 + bias_channels} and {2 + BIAS_CHANNELS * bias_channels} for a wave; raise "
                         "code_channels, or have fewer and wider heads")
    if reserve and code_size(frequencies, bias_channels) == dim:
        raise ValueError(f"code_channels is {code_channels:g} and the code has all {dim} channels, so "
                         "that none is left for images; use a smaller share, or reserve = false")
    firsts = range(0, attention.num_heads * used, used) if disjoint else [0]
    return CodePlan(frequencies, bias_channels,
                    [torch.arange(first, first + used) % pairs for first in firsts])


def random_code(plan: CodePlan, grid: tuple[int, int], generator: torch.Generator) -> Tensor:
    """(N, 2K) normal draws with the mean square of waves, ½."""
    table = torch.empty(grid[0] * grid[1], 2 * len(plan.frequencies), dtype=torch.float64)
    return table.normal_(std=0.5**0.5, generator=generator)


# ---------------------------------------------------------------------------------------------
# How a head reads the code
# ---------------------------------------------------------------------------------------------


def wave_factors(plan: CodePlan, grid: tuple[int, int], period: float, masses: list[float],
                 target: Literal["impulse", "gaussian"], sigma: float) -> HeadFactors:
    """(mass, group, offset) → Q and K, (≤ d, D_p) each, on waves.

    Raises ValueError, at once, for a mass that the waves cannot reach.
    """
    weights = {(mass, number): impulse_weights(plan.frequencies[group], grid, period, mass)
               if target == "impulse" else
               gaussian_weights(plan.frequencies[group], grid, period, sigma)
               for mass in dict.fromkeys(masses) for number, group in enumerate(plan.groups)}

    @cache                                           # heads repeat from block to block
    def factors(mass: float, group: int, offset: Offset) -> tuple[Tensor, Tensor]:
        weight = weights[mass, group]
        query, key = turned_factors(plan.frequencies, plan.groups[group], weight, offset)
        return reading_bias_channels(query, key, weight.sum().item()) if plan.bias_channels else (query, key)
    return factors


def table_factors(plan: CodePlan, grid: tuple[int, int], table: Tensor) -> HeadFactors:
    """The same on a code without waves, (N, C): by factorisation."""
    @cache
    def factors(mass: float, group: int, offset: Offset) -> tuple[Tensor, Tensor]:
        query, key, peak = fitted_factors(table, offset, grid, plan.width, mass)
        return reading_bias_channels(query, key, peak) if plan.bias_channels else (query, key)
    return factors


def fitted_factors(table: Tensor, offset: Offset, grid: tuple[int, int], width: int,
                   mass: float) -> tuple[Tensor, Tensor, float]:
    """Q and K, each (≤ width, C), by Algorithm 1 of arXiv 2505.19985 on a code without waves.

    table: (N, C). Scaled so that the target gets `mass`, on average over the tokens that have one.
    The third is the logit at the target, averaged likewise.
    """
    size = 2 * max(abs(offset[0]), abs(offset[1])) + 1
    shift = convolution_matrix(impulse_kernel(offset, size), grid).double()          # (N, N)
    query, key = query_key_factors(shift, position_basis(table, min(width, *table.shape)), width, 1.0)
    logits = table @ query.mT @ key @ table.mT                           # (N, N)
    targets = shift_targets(offset, grid)
    rows = (targets >= 0).nonzero()[:, 0]

    def reached(scale: float) -> bool:
        return (scale * logits).softmax(1)[rows, targets[rows]].mean().item() >= mass
    # Nearly monotone: with the scale, a few tokens may be lost again.
    scale = smallest_reaching(reached, STEEPEST / logits.abs().max().item())
    if scale is None:
        raise ValueError(f"a random code of {table.shape[1]} channels cannot give one token of a "
                         f"{grid[0]}×{grid[1]} grid a mass of {mass:g}; use more channels or a lower "
                         "target_mass")
    peak = scale * logits[rows, targets[rows]].mean().item()
    return query * math.sqrt(scale), key * math.sqrt(scale), peak
