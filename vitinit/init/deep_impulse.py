"""Deep impulse initialisation: a convolution in every block of a ViT, not in the first alone.

`impulse` (arXiv 2505.19985) fades with depth, because V, proj and the MLP write over the position embedding
and the residual stream grows past it. Here the code has channels of its own, which at first nothing
writes to; it shifts by rotation, and the logit at the target does not depend on what LayerNorm does
to a token (both in fourier_code.py); and each block's Q and K are as large as that LayerNorm asks for
(stream_scales.py). Nothing is frozen. This init is ours.

Its options:

kernel_size: f of the f×f impulse kernels.
offsets: "rotating": head h of block l takes offset l · heads + h, modulo their number, so that any
    number of heads covers the kernel over depth; "ordered", "random": as for `impulse`.
target_mass: what a head's target gets of the attention among patches, in every block; or a pair, in
    the first and in the last one, between which its odds change by the same factor from block to
    block. The logits are solved for on the code alone, and Q and K grow with the LayerNorm's scale
    that `stream_scales` expects. The default, .9, keeps the convolution in every block and is *not*
    what trains best: on 10,000 images of CIFAR-10 its gain over `impulse` is not shown (+1.4 ± 1.7
    points, three seeds), while that of (0.3, 0.02) is (+4.2 ± 1.3); see recipes/deep_impulse.md.
target: "gaussian": logits −‖Δ − δ‖² / 2 sigma² in place of a single peak, as far as a head's waves
    can say that; target_mass then means nothing.
code: "random": normal draws in place of waves, with Q and K by factorisation as in `impulse`.
code_channels: D_p as a share of the width, at most two channels for each wave of the grid and the
    bias channels.
code_rms: root mean square of pos_embed over all channels, .36 as in `impulse`.
period: of the slowest wave, in grids. At 1 the waves are orthogonal and a head whose target is off
    the grid looks round to the other side; from 2 on it looks at the border, with larger logits.
bias_channels: three constant channels of the D_p, and one of each head's, by which the logit at the target is 0
    whatever LayerNorm subtracts and divides by. Without them, slow waves cost mass (at period 2
    .60 to .78 for .9, width 96, 8×8, CIFAR-10). They need `reserve`.
waves_of_heads: each head uses the slowest waves, two channels each, or its own share, in turn.
reserve: False leaves the code's channels to be written to by everybody, as in `impulse`.
mlp_reads_code: False keeps position out of the MLPs, too, at first: then tokens move with the image
    (error on ViT-B .11 instead of .55; `figures equivariance`).
value_init, value_alpha, value_beta: as for `impulse`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..filters import offsets_on_grid
from ..models.attention import Attention
from ..models.vit import VisionTransformer
from .baseline import draw_base
from .code_plan import CodePlan, planned, random_code, table_factors, wave_factors
from .factorize import balanced_factors
from .fourier_code import wave_code, with_bias_channels
from .impulse import OFFSETS, head_offsets
from .mimetic import noisy_identity
from .options import require_not_negative
from .stream_scales import stream_scales

CHOICES = {"offsets": OFFSETS, "target": ("impulse", "gaussian"), "code": ("fourier", "random"),
           "waves_of_heads": ("slowest", "disjoint"), "value_init": ("mimetic", "base")}


# ---------------------------------------------------------------------------------------------
# What is asked for
# ---------------------------------------------------------------------------------------------


def masses_by_block(target_mass: float | tuple[float, float], depth: int) -> list[float]:
    """The wanted mass of each block; of a pair, the logarithm of the odds goes in equal steps.

    That is what a logit at the target would do. NaN where an end is not between 0 and 1.
    """
    if not isinstance(target_mass, Sequence):
        return [target_mass] * depth
    ends = torch.tensor(target_mass, dtype=torch.float64).logit()        # (2,)
    return torch.linspace(*ends.tolist(), depth, dtype=torch.float64).sigmoid().tolist()


def check_numbers(model: VisionTransformer, *, target_mass: float | tuple[float, float],
                  code_channels: float, sigma: float, code_rms: float, period: float) -> None:
    """ValueError for numbers out of range; NaN is in none."""
    uniform = 1.0 / (model.grid[0] * model.grid[1])
    masses = masses_by_block(target_mass, len(model.blocks))
    if not all(uniform < mass < 1.0 for mass in masses) or not 0.0 < code_channels <= 1.0:
        raise ValueError(f"target_mass is {target_mass} and code_channels {code_channels}; expected "
                         f"{uniform:.2g} (uniform attention) < target_mass < 1 and 0 < code_channels "
                         "≤ 1")
    if not (sigma > 0.0 and code_rms > 0.0 and period >= 1.0):
        raise ValueError(f"sigma is {sigma}, code_rms {code_rms} and period {period}; expected sigma "
                         "and code_rms > 0 and period ≥ 1")


def check_choices(*, bias_channels: bool, reserve: bool, **chosen: str) -> None:
    """ValueError for a word that is none of CHOICES, and for choices that contradict each other."""
    for name, value in chosen.items():
        if value not in CHOICES[name]:
            raise ValueError(f"{name} is {value!r}, expected one of {', '.join(CHOICES[name])}")
    if chosen["code"] == "random" and (chosen["target"] == "gaussian"
                                       or chosen["waves_of_heads"] == "disjoint"):
        raise ValueError('code is "random", which has no waves for target "gaussian" and waves_of_heads '
                         '"disjoint"; use "fourier"')
    if bias_channels and not reserve:
        raise ValueError("bias_channels = true needs reserve = true, since content in the bias channels swamps "
                         "the logits; set bias_channels = false")


# ---------------------------------------------------------------------------------------------
# What is written
# ---------------------------------------------------------------------------------------------


def write_code(model: VisionTransformer, plan: CodePlan, table: Tensor, code_rms: float) -> float:
    """table, (N, 2K), and the bias channels into the first D_p channels of pos_embed; returns their factor."""
    prefix, dim = model.num_prefix_tokens, model.pos_embed.shape[2]
    written = with_bias_channels(table, prefix) if plan.bias_channels else F.pad(table, (0, 0, prefix, 0))
    amplitude = code_rms * math.sqrt(dim / written[prefix:].square().sum(1).mean().item())
    model.pos_embed[..., :plan.channels] = amplitude * written           # (1, P + N, D_p)
    return amplitude


def clear_channels(model: VisionTransformer, count: int) -> None:
    """Nothing writes to the first `count` channels of the residual stream, and no value reads them."""
    writers = [model.patch_embed.proj] + [layer for block in model.blocks
                                          for layer in (block.attn.proj, block.mlp.fc2)]
    for layer in writers:
        layer.weight[:count] = 0.0
        layer.bias[:count] = 0.0
    for name in ("cls_token", "dist_token", "reg_token"):
        if hasattr(model, name):
            getattr(model, name)[..., :count] = 0.0
    for block in model.blocks:
        block.attn.v_weight[..., :count] = 0.0


def shield_from_mlps(model: VisionTransformer, count: int) -> None:
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


def scale_queries_keys(model: VisionTransformer, scales: list[float], amplitude: float) -> None:
    """Make up for what a token is divided by before it is read: LayerNorm's √scale, for Q and for K,
    and √d; and for the code's amplitude, which is in both, too."""
    for block, scale in zip(model.blocks, scales):
        gain = math.sqrt(scale * math.sqrt(block.attn.head_dim)) / amplitude
        block.attn.q_weight.mul_(gain)
        block.attn.k_weight.mul_(gain)


# ---------------------------------------------------------------------------------------------
# The whole
# ---------------------------------------------------------------------------------------------


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
                 bias_channels: bool = True,
                 waves_of_heads: Literal["slowest", "disjoint"] = "slowest",
                 reserve: bool = True,
                 mlp_reads_code: bool = True,
                 value_init: Literal["mimetic", "base"] = "mimetic",
                 value_alpha: float = 0.4,
                 value_beta: float = 0.4) -> None:
    """softmax(Q Kᵀ / √d) is near an impulse convolution in every head of every block.

    | tensor                                     | value                                         |
    |--------------------------------------------|-----------------------------------------------|
    | pos_embed, the first D_p channels          | a 2-D Fourier code, and the bias channels     |
    | every block: attn.qkv.weight, Q, K rows    | K picks a head's waves, Q turns them by its   |
    |                                            |   offset; 0 beyond the D_p channels           |
    | every block: attn.qkv.bias, Q, K           | 0                                             |
    | every block: attn.qkv.weight, V rows,      | value_init "mimetic": factors of              |
    |   attn.proj.weight                         |   value_alpha · Z − value_beta · I on the     |
    |                                            |   other channels, inner channels dealt to the |
    |                                            |   heads at random                             |
    | if `reserve`: patch_embed.proj, attn.proj, | 0 in their rows for the D_p channels, weight  |
    |   mlp.fc2, cls_, dist_, reg_token; V       |   and bias; V in those columns                |
    | unless `mlp_reads_code`: mlp.fc1           | 0 in the D_p columns                          |
    | everything else                            | as `base` drew it                             |

    The options are explained at the top of this file. Raises ValueError for a model without a learned
    position embedding, options out of range, and a mass that the waves cannot reach.
    """
    if not model.learns_positions:
        raise ValueError("init 'deep_impulse' writes the position embedding, and the model's is fixed; use "
                         'pos_embed = "learned"')
    check_numbers(model, target_mass=target_mass, code_channels=code_channels, sigma=sigma,
                  code_rms=code_rms, period=period)
    check_choices(offsets=offsets, target=target, code=code, waves_of_heads=waves_of_heads,
                  value_init=value_init, bias_channels=bias_channels, reserve=reserve)
    require_not_negative(value_alpha=value_alpha)
    cells = offsets_on_grid(kernel_size, model.grid)     # checks kernel_size
    plan = planned(model, code_channels=code_channels, period=period, bias_channels=bias_channels,
                   disjoint=waves_of_heads == "disjoint", reserve=reserve)
    masses = masses_by_block(target_mass, len(model.blocks))
    if code == "fourier":
        factors = wave_factors(plan, model.grid, period, masses, target, sigma)
    draw_base(model, base, generator)

    if code == "fourier":                            # (N, 2K) with a mean square of ½
        table = wave_code(plan.frequencies, model.grid)
    else:
        table = random_code(plan, model.grid, generator)
        factors = table_factors(plan, model.grid, table)
    amplitude = write_code(model, plan, table, code_rms)
    reserved = plan.channels if reserve else 0
    if reserve:
        clear_channels(model, reserved)
    if not mlp_reads_code:
        shield_from_mlps(model, plan.channels)
    for number, block in enumerate(model.blocks):
        if value_init == "mimetic":
            write_values_beside(block.attn, reserved, alpha=value_alpha, beta=value_beta,
                                generator=generator)
        heads = block.attn.num_heads
        chosen = head_offsets(heads, cells, offsets, generator, first=number * heads)
        write_queries_keys(block.attn, [factors(masses[number], head % len(plan.groups), offset)
                                        for head, offset in enumerate(chosen)])
    scale_queries_keys(model, stream_scales(model, reserved, code_rms), amplitude)
