"""Deep impulse initialisation: a convolution in every block of a ViT, not in the first alone.

`impulse` (arXiv 2505.19985) fades with depth, because V, proj and the MLP write over the position code
and the residual stream grows past it. Here the code has channels of its own, which at first nothing
writes to; it shifts by rotation, and the logit at the target does not depend on what LayerNorm does
to a token (both in fourier_code.py); and each block's Q and K are as large as that LayerNorm asks for.
Nothing is frozen. This init is ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..filters import Offset, convolution_matrix, impulse_kernel, offsets_on_grid, shift_targets
from ..models.attention import Attention
from ..models.vit import VisionTransformer
from .baseline import draw_base
from .factorize import (STEEPEST, balanced_factors, code_basis, query_key_factors,
                        smallest_reaching)
from .fourier_code import (MARKS, gaussian_weights, impulse_weights, reading_marks, turned_factors,
                           wave_code, waves, with_marks)
from .impulse import OFFSETS, head_offsets
from .mimetic import noisy_identity

ROWS_APART = 8          # of a matrix of independent draws, every 8th row tells its mean square
# What `stream_scales` takes for granted, chosen so that on photographs at 224 px (ViT-T, S, B) and on
# CIFAR-10 (ViT-T, patch 2) every block reaches the default target mass.
PIXELS = 2.0            # mean square of normalised pixels: 1 on average, but more in many a patch
ALIKE = 0.7             # how neighbouring tokens' content correlates at first: .7 to .9 was measured
LESS_ALIKE = 0.4        # and what each block leaves of it, by mixing their channels


@torch.no_grad()
def deep_impulse(model: VisionTransformer, *, generator: torch.Generator,
                 base: Literal["default", "torch"] = "default",
                 kernel_size: int = 3,
                 offsets: Literal["rotating", "ordered", "random"] = "rotating",
                 target_mass: float | tuple[float, float] = 0.9,
                 target: Literal["impulse", "gaussian"] = "impulse",
                 sigma: float = 1.0,
                 code: Literal["fourier", "random"] = "fourier",
                 code_channels: float = 1 / 3,
                 code_rms: float = 0.36,
                 period: float = 1.0,
                 marks: bool = True,
                 waves_of_heads: Literal["slowest", "disjoint"] = "slowest",
                 reserve: bool = True,
                 mlp_reads_code: bool = True,
                 value_init: Literal["mimetic", "base"] = "mimetic",
                 value_alpha: float = 0.4,
                 value_beta: float = 0.4) -> None:
    """softmax(Q Kᵀ / √d) is near an impulse convolution in every head of every block.

    | tensor                                     | value                                         |
    |--------------------------------------------|-----------------------------------------------|
    | pos_embed, the first D_p channels          | a 2-D Fourier code, and the marks             |
    | every block: attn.qkv.weight, Q, K rows    | K picks a head's waves, Q turns them by its   |
    |                                            |   offset; 0 beyond the D_p channels           |
    | every block: attn.qkv.bias, Q, K           | 0                                             |
    | every block: attn.qkv.weight, V rows,      | value_init "mimetic": factors of              |
    |   attn.proj.weight                         |   value_alpha · Z − value_beta · I on the     |
    |                                            |   other channels, inner channels dealt to the |
    |                                            |   heads at random                             |
    | if `reserve`: patch_embed.proj, attn.proj, | 0 in their rows for the D_p channels, weight  |
    |   mlp.fc2, cls_token, dist_token; V        |   and bias; V in those columns                |
    | unless `mlp_reads_code`: mlp.fc1           | 0 in the D_p columns                          |
    | everything else                            | as `base` drew it                             |

    kernel_size: f of the f×f impulse kernels.
    offsets: "rotating": head h of block l takes offset l · heads + h, modulo their number, so that any
        number of heads covers the kernel over depth; "ordered", "random": as for `impulse`.
    target_mass: what a head's target gets of the attention among patches, in every block; or a pair,
        in the first and in the last one, between which its odds change by the same factor from block
        to block. The logits are solved for on the code alone, and Q and K grow with the LayerNorm's
        scale that `stream_scales` expects. (0.3, 0.02) trained best: recipes/deep_impulse.md.
    target: "gaussian": logits −‖Δ − δ‖² / 2 sigma² in place of a single peak, as far as a head's waves
        can say that; target_mass then means nothing.
    code: "random": normal draws in place of waves, with Q and K by factorisation as in `impulse`.
    code_channels: D_p as a share of the width, at most two channels for each wave of the grid and
        the marks.
    code_rms: root mean square of pos_embed over all channels, .36 as in `impulse`.
    period: of the slowest wave, in grids. At 1 the waves are orthogonal and a head whose target is off
        the grid looks round to the other side; from 2 on it looks at the border, with larger logits.
    marks: three channels of the D_p, and one of each head's, by which the logit at the target is 0
        whatever LayerNorm subtracts and divides by. Without them, slow waves cost mass (at period 2
        .60 to .78 for .9, width 96, 8×8, CIFAR-10). They need `reserve`.
    waves_of_heads: each head uses the slowest waves, two channels each, or its own share, in turn.
    reserve: False leaves the code's channels to be written to by everybody, as in `impulse`.
    mlp_reads_code: False keeps position out of the MLPs, too, at first: then tokens move with the
        picture (error on ViT-B .11 instead of .55; `figures equivariance`).
    value_init, value_alpha, value_beta: as for `impulse`.

    Raises ValueError for a model without a learned position code, options out of range, and a mass that
    the waves cannot reach.
    """
    if not model.learns_positions:
        raise ValueError("init 'deep_impulse' writes the position code, and the model's is fixed; use "
                         'pos_embed = "learned"')
    uniform = 1.0 / (model.grid[0] * model.grid[1])
    masses = masses_by_block(target_mass, len(model.blocks))
    if not all(uniform < mass < 1.0 for mass in masses) or not 0.0 < code_channels <= 1.0:
        raise ValueError(f"target_mass is {target_mass} and code_channels {code_channels}; expected "
                         f"{uniform:.2g} (uniform attention) < target_mass < 1 and 0 < code_channels "
                         "≤ 1")
    if not (sigma > 0.0 and code_rms > 0.0 and period >= 1.0):           # NaN is none of them
        raise ValueError(f"sigma is {sigma}, code_rms {code_rms} and period {period}; expected sigma "
                         "and code_rms > 0 and period ≥ 1")
    for name, value, choices in (
            ("offsets", offsets, OFFSETS),
            ("target", target, ("impulse", "gaussian")), ("code", code, ("fourier", "random")),
            ("waves_of_heads", waves_of_heads, ("slowest", "disjoint")),
            ("value_init", value_init, ("mimetic", "base"))):
        if value not in choices:
            raise ValueError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
    if code == "random" and (target == "gaussian" or waves_of_heads == "disjoint"):
        raise ValueError('code is "random", which has no waves for target "gaussian" and waves_of_heads '
                         '"disjoint"; use "fourier"')
    if marks and not reserve:
        raise ValueError("marks = true needs reserve = true, since content in the marks' channels swamps "
                         "the logits; set marks = false")
    cells = offsets_on_grid(kernel_size, model.grid)
    dim, attention = model.pos_embed.shape[2], model.blocks[0].attn
    heads, head_dim = attention.num_heads, attention.head_dim
    frequencies = waves(model.grid, period)
    pairs = min((int(code_channels * dim) - MARKS * marks) // 2, len(frequencies))
    used = min((head_dim - marks) // 2, pairs)
    if used < 1:
        raise ValueError(f"head_dim is {head_dim}, and {code_channels:g} of {dim} channels are for "
                         f"the code of a {model.grid[0]}×{model.grid[1]} grid; init 'deep_impulse' "
                         f"needs {2 + marks} and {2 + MARKS * marks} for a wave")
    count = 2 * pairs + MARKS * marks                                    # D_p
    if reserve and count == dim:
        raise ValueError(f"code_channels is {code_channels:g} and the code has all {dim} channels, so "
                         "that none is left for images; use a smaller share, or reserve = false")
    frequencies = frequencies[:pairs]
    groups = [torch.arange(first, first + used) % pairs for first in
              (range(0, heads * used, used) if waves_of_heads == "disjoint" else [0])]
    weights = {}
    if code == "fourier":
        weights = {(mass, number): impulse_weights(frequencies[group], model.grid, period, mass)
                   if target == "impulse" else
                   gaussian_weights(frequencies[group], model.grid, period, sigma)
                   for mass in dict.fromkeys(masses) for number, group in enumerate(groups)}
    draw_base(model, base, generator)

    # The code, (N, 2 · pairs) with a mean square of ½, and how a head reads it.
    if code == "fourier":
        table = wave_code(frequencies, model.grid)
    else:
        table = torch.empty(model.grid[0] * model.grid[1], 2 * pairs, dtype=torch.float64)
        table.normal_(std=0.5**0.5, generator=generator)

    @cache                                           # heads repeat from block to block
    def factors(mass: float, group: int, offset: Offset) -> tuple[Tensor, Tensor]:
        if code == "fourier":
            query, key = turned_factors(frequencies, groups[group], weights[mass, group], offset)
            peak = weights[mass, group].sum().item()
        else:
            query, key, peak = fitted_factors(table, offset, model.grid, 2 * used, mass)
        return reading_marks(query, key, peak) if marks else (query, key)

    prefix = model.num_prefix_tokens
    written = with_marks(table, prefix) if marks else F.pad(table, (0, 0, prefix, 0))
    amplitude = code_rms * math.sqrt(dim / written[prefix:].square().sum(1).mean().item())
    model.pos_embed[..., :count] = amplitude * written                   # (1, P + N, D_p)

    reserved = count if reserve else 0
    if reserve:
        clear_channels(model, count)
    if not mlp_reads_code:
        keep_from_mlps(model, count)
    for number, block in enumerate(model.blocks):
        if value_init == "mimetic":
            write_values_beside(block.attn, reserved, alpha=value_alpha, beta=value_beta,
                                generator=generator)
        chosen = head_offsets(heads, cells, offsets, generator, first=number * heads)
        write_queries_keys(block.attn, [factors(masses[number], head % len(groups), offset)
                                        for head, offset in enumerate(chosen)])
    for block, scale in zip(model.blocks, stream_scales(model, reserved, code_rms)):
        # Queries and keys are divided by √scale each, and logits by √d.
        gain = math.sqrt(scale * math.sqrt(head_dim)) / amplitude
        block.attn.q_weight.mul_(gain)
        block.attn.k_weight.mul_(gain)


def masses_by_block(target_mass: float | tuple[float, float], depth: int) -> list[float]:
    """The wanted mass of each block; of a pair, the logarithm of the odds goes in equal steps.

    That is what a logit at the target would do. NaN where an end is not between 0 and 1.
    """
    if not isinstance(target_mass, Sequence):
        return [target_mass] * depth
    ends = torch.tensor(target_mass, dtype=torch.float64).logit()        # (2,)
    return torch.linspace(*ends.tolist(), depth, dtype=torch.float64).sigmoid().tolist()


def fitted_factors(table: Tensor, offset: Offset, grid: tuple[int, int], width: int,
                   mass: float) -> tuple[Tensor, Tensor, float]:
    """Q and K, each (≤ width, C), by Algorithm 1 of arXiv 2505.19985 on a code without waves.

    table: (N, C). Scaled so that the target gets `mass`, on average over the tokens that have one.
    The third is the logit at the target, averaged likewise.
    """
    size = 2 * max(abs(offset[0]), abs(offset[1])) + 1
    shift = convolution_matrix(impulse_kernel(offset, size), grid).double()          # (N, N)
    query, key = query_key_factors(shift, code_basis(table, min(width, *table.shape)), width, 1.0)
    logits = table @ query @ key.mT @ table.mT
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
    return query.mT * math.sqrt(scale), key.mT * math.sqrt(scale), peak


def clear_channels(model: VisionTransformer, count: int) -> None:
    """Nothing writes to the first `count` channels of the residual stream, and no value reads them."""
    writers = [model.patch_embed.proj] + [layer for block in model.blocks
                                          for layer in (block.attn.proj, block.mlp.fc2)]
    for layer in writers:
        layer.weight[:count] = 0.0
        layer.bias[:count] = 0.0
    for name in ("cls_token", "dist_token"):
        if hasattr(model, name):
            getattr(model, name)[..., :count] = 0.0
    for block in model.blocks:
        block.attn.v_weight[..., :count] = 0.0


def keep_from_mlps(model: VisionTransformer, count: int) -> None:
    """No MLP reads the first `count` channels of the residual stream."""
    for block in model.blocks:
        block.mlp.fc1.weight[:, :count] = 0.0


def write_values_beside(attention: Attention, count: int, *, alpha: float, beta: float,
                        generator: torch.Generator) -> None:
    """V·proj = αZ − βI on all but the first `count` channels, on which both are 0.

    Inner channels come in falling order of singular value and are dealt to the heads at random, so
    that no head carries more than another. To those that are left over, V gives nothing; their part of
    proj stays as it was drawn, so that V can learn to use them.
    """
    dim = attention.proj.in_features
    product = noisy_identity(dim - count, alpha, -beta, attention.proj.weight, generator)
    value, projection = balanced_factors(product, dim - count)           # (rest, rest) each
    inner = torch.randperm(dim, generator=generator)[:dim - count]
    weight = torch.zeros_like(attention.proj.weight)
    weight[inner, count:] = value.mT
    attention.v_weight.copy_(weight.view_as(attention.v_weight))
    attention.proj.weight[:count] = 0.0
    attention.proj.weight[count:, inner] = projection


def write_queries_keys(attention: Attention, factors: list[tuple[Tensor, Tensor]]) -> None:
    """Q and K of each head, (≤ d, D_p), into the first D_p columns of its weights; biases 0."""
    for weight, ours in zip((attention.q_weight, attention.k_weight), zip(*factors)):
        ours = torch.stack(ours)                                         # (h, ≤ d, D_p)
        weight.zero_()
        weight[:, :ours.shape[1], :ours.shape[2]] = ours
    for bias in (attention.q_bias, attention.k_bias):
        if bias is not None:
            bias.zero_()


def stream_scales(model: VisionTransformer, reserved: int, code_rms: float) -> list[float]:
    """The mean square of the patch tokens before each block's first LayerNorm, as weights suggest.

    No image is looked at. Content starts as normalised pixels times the patch embedding's weights. A
    branch adds its own mean square, and attention, whose V·proj is partly a multiple of the identity,
    what it has in common with the stream, where neighbouring tokens are alike.
    """
    dim = model.pos_embed.shape[2]
    share = (dim - reserved) / dim                   # of the channels that hold content
    patches, position = model.patch_embed.proj, model.pos_embed[0, model.num_prefix_tokens:]
    content = (PIXELS * patches.weight[reserved:].flatten(1).square().sum(1)
               + patches.bias[reserved:].square()).mean().item()
    if reserved:
        content += position[:, reserved:].square().mean().item()
    scales = []
    for number, block in enumerate(model.blocks):
        scale = code_rms**2 + share * content
        scales.append(scale)
        # Inner channel i of V·proj carries ‖v_i‖² ‖p_i‖², whether factors or independent draws.
        value = block.attn.v_weight.flatten(0, 1).square().sum(1)        # (D,)
        carried = (value @ block.attn.proj.weight.square().sum(0)).item()
        kept = (block.attn.v_weight.flatten(0, 1).T * block.attn.proj.weight).sum().item()
        common = 2.0 * ALIKE * LESS_ALIKE**number * kept / math.sqrt(scale)
        content += content * (carried / scale + common) / (dim - reserved)
        content += mlp_mean_square(block.mlp) * dim / (dim - reserved)
    return scales


def mlp_mean_square(mlp: torch.nn.Module) -> float:
    """What an MLP gives on average over all its channels, for inputs with a mean square of 1."""
    rows = slice(None, None, ROWS_APART)
    hidden, dim = mlp.fc1.weight.shape
    spread = math.sqrt(mlp.fc1.weight[rows].square().mean().item() * dim)
    grid = torch.linspace(-6.0, 6.0, 1201)
    density = (-0.5 * grid.square()).softmax(0)      # of a standard normal, on the grid
    activation = (density * F.gelu(spread * grid).square()).sum().item()
    return mlp.fc2.weight[:, rows].square().mean().item() * hidden * activation
