"""Deep impulse initialisation: every block of a ViT starts as a convolution, not only the first.

`impulse` (arXiv 2505.19985) solves Q and K of each head so that every token attends to one of its
neighbours, which the head recognises by the position embedding. The effect fades with depth: V,
proj and the MLPs write over the position embedding, and the residual stream grows until the
position embedding is a small part of it. `deep_impulse` prevents this in three ways:

1. The position embedding has channels of its own, the first D_p of the D channels of the residual
   stream. At the start no layer writes to them, so every block reads the same values there.
2. These channels hold the Fourier code and, if asked for, the bias channels, both defined in
   fourier_code.py. For the Fourier code, the Q and K that attend to a given offset are known in
   closed form. The bias channels make the logit at the target independent of LayerNorm's statistics
   of a token.
3. Q and K of each block are scaled up by the standard deviation by which that block's LayerNorm is
   expected to divide (stream_scales.py).

Nothing is frozen: training may change every weight. No paper describes this initialisation.

Terms used below. The *offset* of a head is (rows down, columns right); the *target* of a query
token is the token at that offset from it. The *mass* of a head is the share of its attention among
the patch tokens that falls on the target. N is the number of patch tokens, d is head_dim.

Options:

base: the baseline that first draws every weight, "default", "torch" or "lecun"; see baseline.py.
    The default is "lecun".
kernel_size: f of the f×f impulse kernels, that is, the offsets that heads can have (9 for 3×3).
offsets: how offsets are assigned to heads. "rotating": head h of block l takes offset number
    l · heads + h, modulo the number of offsets, so that heads and blocks together go through the
    whole kernel, whatever the number of heads. "ordered" and "random": as for `impulse`.
target_mass: the mass that every head is to have. Either one number for all blocks, or a pair: the
    mass in the first and in the last block, between which the odds mass / (1 − mass) change by a
    constant factor per block. Q and K are solved for on the code alone and then scaled as described
    in point 3, so on images the mass differs from the wanted one, in the first block most: on
    CIFAR-10 it is .48 there by default, and .69 with constant_share = 0.95. train.py prints it. The
    default is the pair (0.3, 0.02), a soft start that fades with depth. A single number must be
    above uniform attention, 1/N. Of a pair, whether it is the default or not, an end below 1.25/N
    is raised to 1.25/N, so that a pair is possible on every grid: Q and K of uniform attention
    would be zero, and no gradient would reach them. The default is changed by this rule only where
    N ≤ 62.
target: "impulse": a single peak at the target. "gaussian": logits −‖Δ − δ‖² / 2 sigma² at
    displacement Δ from the query, for a head of offset δ, as closely as the waves that the head
    reads can represent them; target_mass is then ignored.
sigma: width of the Gaussian, in tokens; only for target "gaussian".
code: "fourier", or "random": normal draws in place of the waves, with Q and K by the factorisation
    that `impulse` uses.
code_channels: D_p as a share of D. The code takes at most two channels per wave of the grid, plus
    the bias channels, however large the share; and at least those of the slowest waves up to the
    first along either axis (two waves on a square grid), however small.
code_rms: root mean square, over all D channels, of what is written to pos_embed. 0.36 is what
    `impulse` gives its pos_embed.
period: period of the slowest wave, in units of the grid's side. At 1 the waves are orthogonal on
    the grid and wrap around its borders: a query whose target is off the grid attends to the
    opposite border. From 2 on it attends to the nearest border, which takes larger logits.
bias_channels: whether the three bias channels are used. They take three of the D_p channels and one
    of each head's d channels, and need `reserve`. They matter most for a large target_mass, and at
    longer periods, whose slow waves tell neighbouring tokens less clearly apart.
waves_of_heads: "slowest": every head reads the slowest waves, as many as fit into its d channels at
    two channels each. "disjoint": the waves are divided among the heads; when all waves have been
    given out, the assignment starts again from the slowest.
reserve: whether the first D_p channels are kept free of everything but the code at the start. If
    False, all layers write to them, as in `impulse`.
mlp_reads_code: whether the MLPs read the D_p channels at the start. If False, they see no
    positions, and the tokens of a shifted image are more nearly the shifted tokens of the image
    (`python -m vitinit.figures equivariance` measures it).
value_init, value_alpha, value_beta: as for `impulse`.
constant_share: the share of the tokens' variance before the first block that is due to two constant
    channels, so that LayerNorms start as fixed scalings; see steady_norms.py. 0: there are none.
    They stand behind the D_p channels and need `reserve`. LayerNorms' weights make up for them, as
    measured on training images.
images: (n, 3, H, W), normalised training images for `constant_share`; no option, train.py gives them.
    Without them white noise will do, less well.

Earlier defaults were base "default", target_mass 0.9, and code_channels 1/3 with bias channels, which
is a near exact convolution in every block. They were replaced because the present ones trained better,
with few seeds, in one small study: a small ViT on 10,000 images. That study, recipes/deep_impulse.md,
and README.md of this package have the measured effects of these options.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..filters import OFFSETS, head_offsets, offsets_on_grid
from ..models.attention import Attention
from ..models.vit import VisionTransformer
from .baseline import Base, draw_base
from .code_plan import CodePlan, plan_code, random_code, table_factors, wave_factors
from .fourier_code import wave_code, with_bias_channels
from .mimetic import balanced_factors, noisy_identity
from .steady_norms import constant_slice, write_steady_norms
from .stream_scales import stream_scales

LEAST_OF_PAIR = 1.25        # least mass that an end of a pair stands for, in units of uniform attention
CHOICES = {"offsets": OFFSETS, "target": ("impulse", "gaussian"), "code": ("fourier", "random"),
           "waves_of_heads": ("slowest", "disjoint"), "value_init": ("mimetic", "base")}


# ---------------------------------------------------------------------------------------------
# Checking the options
# ---------------------------------------------------------------------------------------------


def masses_by_block(target_mass: float | tuple[float, float], depth: int,
                    uniform: float) -> list[float]:
    """Return the wanted mass of each block.

    A single number holds for all blocks. For a pair, the log odds of the mass change linearly from
    the first block to the last, as they would if a logit at the target changed linearly. Ends of a
    pair that are too near to uniform attention, or below it, are raised first; see `target_mass`.

    uniform: the share of one token under uniform attention, 1/N.
    """
    if not isinstance(target_mass, Sequence):
        return [target_mass] * depth
    ends = torch.tensor([max(mass, LEAST_OF_PAIR * uniform) for mass in target_mass],
                        dtype=torch.float64).logit()                     # (2,)
    return torch.linspace(*ends.tolist(), depth, dtype=torch.float64).sigmoid().tolist()


def check_numbers(model: VisionTransformer, *, target_mass: float | tuple[float, float],
                  code_channels: float, sigma: float, code_rms: float, period: float) -> None:
    """Raise ValueError if a number is out of range; NaN is always out of range."""
    uniform = 1.0 / (model.grid[0] * model.grid[1])
    if isinstance(target_mass, Sequence):
        possible = all(0.0 < mass < 1.0 for mass in target_mass)
        expected = "0 < target_mass < 1 for both blocks of a pair"
    else:
        possible = uniform < target_mass < 1.0
        expected = f"{uniform:.2g} (uniform attention) < target_mass < 1"
    if not possible or not 0.0 < code_channels <= 1.0:
        raise ValueError(f"target_mass is {target_mass} and code_channels {code_channels}; expected "
                         f"{expected} and 0 < code_channels ≤ 1")
    if not (sigma > 0.0 and code_rms > 0.0 and period >= 1.0):
        raise ValueError(f"sigma is {sigma}, code_rms {code_rms} and period {period}; expected sigma "
                         "and code_rms > 0 and period ≥ 1")


def check_choices(*, bias_channels: bool, constant_share: float, reserve: bool, **chosen: str
                  ) -> None:
    """Raise ValueError for a value not in CHOICES, or for choices that contradict each other."""
    for name, value in chosen.items():
        if value not in CHOICES[name]:
            raise ValueError(f"{name} is {value!r}, expected one of {', '.join(CHOICES[name])}")
    if chosen["code"] == "random" and (chosen["target"] == "gaussian"
                                       or chosen["waves_of_heads"] == "disjoint"):
        raise ValueError('code is "random", which has no waves for target "gaussian" and waves_of_heads '
                         '"disjoint"; use "fourier"')
    if bias_channels and not reserve:
        raise ValueError("bias_channels = true needs reserve = true, since content in the bias channels "
                         "swamps the logits; set bias_channels = false")
    if constant_share and not reserve:
        raise ValueError("constant_share needs reserve = true, since channels to which layers write are "
                         "not constant; set constant_share = 0")


# ---------------------------------------------------------------------------------------------
# Writing the weights
# ---------------------------------------------------------------------------------------------


def write_code(model: VisionTransformer, plan: CodePlan, table: Tensor, code_rms: float) -> float:
    """Write the code and the bias channels into the first D_p channels of pos_embed.

    table: the code, (N, 2K).

    Returns the factor by which code and bias channels were multiplied to give pos_embed the root
    mean square `code_rms` over all its channels.
    """
    prefix, dim = model.num_prefix_tokens, model.pos_embed.shape[2]
    written = (with_bias_channels(table, prefix) if plan.bias_channels
               else F.pad(table, (0, 0, prefix, 0)))                     # (P + N, D_p)
    amplitude = code_rms * math.sqrt(dim / written[prefix:].square().sum(1).mean().item())
    model.pos_embed[..., :plan.channels] = amplitude * written           # (1, P + N, D_p)
    return amplitude


def clear_channels(model: VisionTransformer, count: int) -> None:
    """Zero what writes to the first `count` channels of the stream, and what V reads from them."""
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
    """Zero the weights with which the MLPs read the first `count` channels of the stream."""
    for block in model.blocks:
        block.mlp.fc1.weight[:, :count] = 0.0


def write_values_beside(attention: Attention, count: int, *, alpha: float, beta: float,
                        generator: torch.Generator) -> None:
    """Make V·proj = αZ − βI on all but the first `count` channels of the stream, and zero on those.

    The factorisation returns the inner channels, those between V and proj, in decreasing order of
    singular value. They are assigned to the heads by a random permutation, so that no head
    systematically carries more than another. `count` inner channels are left over: V is zero there,
    but proj keeps the base's draw in their columns, so that gradients reach V.
    """
    dim = attention.proj.in_features
    product = noisy_identity(dim - count, alpha, -beta, attention.proj.weight, generator)
    value, projection = balanced_factors(product, dim - count)           # (D − count, D − count)
    inner = torch.randperm(dim, generator=generator)[:dim - count]
    weight = torch.zeros_like(attention.proj.weight)
    weight[inner, count:] = value.mT
    attention.v_weight.copy_(weight.view_as(attention.v_weight))
    attention.proj.weight[:count] = 0.0
    attention.proj.weight[count:, inner] = projection


def write_queries_keys(attention: Attention, factors: list[tuple[Tensor, Tensor]]) -> None:
    """Write Q and K of each head, (≤ d, D_p) each, into the first D_p columns of its weights.

    All other entries of Q and K, and their biases, become 0.
    """
    for weight, solved in zip((attention.q_weight, attention.k_weight), zip(*factors)):
        solved = torch.stack(solved)                                     # (h, ≤ d, D_p)
        weight.zero_()
        weight[:, :solved.shape[1], :solved.shape[2]] = solved
    for bias in (attention.q_bias, attention.k_bias):
        if bias is not None:
            bias.zero_()


def scale_queries_keys(model: VisionTransformer, scales: list[float], amplitude: float) -> None:
    """Scale Q and K of each block so that the logits on images are those solved for on the code.

    Queries and keys are each read from a token that LayerNorm has divided by √scale; attention
    divides the logits by √d; and the code was written to pos_embed with the factor `amplitude`,
    which enters queries and keys alike.
    """
    for block, scale in zip(model.blocks, scales):
        gain = math.sqrt(scale * math.sqrt(block.attn.head_dim)) / amplitude
        block.attn.q_weight.mul_(gain)
        block.attn.k_weight.mul_(gain)


# ---------------------------------------------------------------------------------------------
# The initialisation itself
# ---------------------------------------------------------------------------------------------


@torch.no_grad()
def deep_impulse(model: VisionTransformer, *, generator: torch.Generator,
                 base: Base = "lecun",
                 kernel_size: int = 3,
                 offsets: Literal["rotating", "ordered", "random"] = "rotating",
                 target_mass: float | tuple[float, float] = (0.3, 0.02),
                 target: Literal["impulse", "gaussian"] = "impulse",
                 sigma: float = 1.0,
                 code: Literal["fourier", "random"] = "fourier",
                 code_channels: float = 1 / 12,
                 code_rms: float = 0.36, period: float = 1.0,
                 bias_channels: bool = False,
                 waves_of_heads: Literal["slowest", "disjoint"] = "slowest",
                 reserve: bool = True,
                 mlp_reads_code: bool = True,
                 value_init: Literal["mimetic", "base"] = "mimetic",
                 value_alpha: float = 0.4, value_beta: float = 0.4,
                 constant_share: float = 0.0,
                 images: Tensor | None = None) -> None:
    """Let every head of every block of a ViT attend to one neighbour, as a convolution does.

    The share of a head's attention that lies on this neighbour is its mass, `target_mass`. By
    default it falls from 0.3 in the first block to 0.02 in the last, on the base "lecun". With
    target_mass = 0.9, code_channels = 1/3 and bias_channels, softmax(Q Kᵀ / √d) is a near exact
    convolution in every block. The module's docstring says why that is no longer the default.

    | tensor                                     | value                                         |
    |--------------------------------------------|-----------------------------------------------|
    | pos_embed, the first D_p channels          | the Fourier code; bias channels if wanted     |
    | every block: attn.qkv.weight, Q, K rows    | K selects the head's waves, Q rotates them by |
    |                                            |   the head's offset; 0 beyond D_p channels    |
    | every block: attn.qkv.bias, Q, K           | 0                                             |
    | every block: attn.qkv.weight, V rows,      | value_init "mimetic": factors of              |
    |   attn.proj.weight                         |   value_alpha · Z − value_beta · I on the     |
    |                                            |   other channels; inner channels assigned to  |
    |                                            |   the heads at random                         |
    | if `reserve`: patch_embed.proj, attn.proj, | 0 in the rows (weight and bias) that write to |
    |   mlp.fc2, cls_, dist_, reg_token; V       |   the D_p channels; V: 0 in those columns     |
    | unless `mlp_reads_code`: mlp.fc1           | 0 in the D_p columns                          |
    | unless constant_share is 0: two channels   | ± a constant in pos_embed; else as the D_p    |
    | unless constant_share is 0: LayerNorms     | weight above 1; 0 for the two channels        |
    | everything else                            | as `base` drew it                             |

    The module's docstring explains the options. Raises ValueError for a model without a learned
    position embedding, for options out of range, and for a mass that the waves cannot reach.
    """
    if not model.learns_positions:
        raise ValueError("init 'deep_impulse' writes the position embedding, and the model's is fixed; "
                         'use pos_embed = "learned"')
    check_numbers(model, target_mass=target_mass, code_channels=code_channels, sigma=sigma,
                  code_rms=code_rms, period=period)
    check_choices(offsets=offsets, target=target, code=code, waves_of_heads=waves_of_heads,
                  value_init=value_init, bias_channels=bias_channels, constant_share=constant_share,
                  reserve=reserve)
    cells = offsets_on_grid(kernel_size, model.grid)     # checks kernel_size
    plan = plan_code(model, code_channels=code_channels, period=period, bias_channels=bias_channels,
                     disjoint=waves_of_heads == "disjoint", reserve=reserve)
    constants = constant_slice(plan.channels, constant_share, model.pos_embed.shape[2])
    masses = masses_by_block(target_mass, len(model.blocks), 1.0 / math.prod(model.grid))
    if code == "fourier":
        factors = wave_factors(plan, model.grid, period, masses, target, sigma)
    draw_base(model, base, generator)

    if code == "fourier":                            # (N, 2K) with a mean square of ½
        table = wave_code(plan.frequencies, model.grid)
    else:
        table = random_code(plan, model.grid, generator)
        factors = table_factors(plan, model.grid, table)
    amplitude = write_code(model, plan, table, code_rms)
    reserved = constants.stop if reserve else 0
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
    if constant_share:
        write_steady_norms(model, constants=constants, share=constant_share, images=images,
                           generator=generator)
