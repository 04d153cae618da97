"""Impulse initialisation of rotary attention: a kernel that is the same in every block.

Rotary attention (models/rotary.py) turns a pair of channels by ω · p at place p. If query and key
have a constant part, of length √A and phases ω · δ and 0 in each pair, that part of the logit is

    ℓ Σ a cos(ω · (Δ − δ)),        Σ a = 1,        A = ℓ a √d,

at the key that is Δ away: a kernel of the displacement alone, largest, ℓ, at Δ = δ. What weights
make of content is added, and `target_mass` reckons with it. In a model of patches alone whose Q and
K have biases nothing in the residual stream is reserved, and nothing fades with depth. a ∝ |ω|², in
closed form, needs 1.1 to 1.8 times the least logit that any a ≥ 0 does
(recipes/exact_convolution.md). No paper describes this.
"""

import math
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from ..base.values import AtLeastOne, NonNegative, ProperFraction
from ..mixing.filters import Grid, Offset, head_offsets, neighbours, offsets_on_grid, smallest_logit
from .attentions import Block, Layout, ShiftBlock
from .baseline import Base, draw_base, whiten_patches
from .layout import vit_layout
from .mimetic import write_values
from .residual_stream import stream_of

LOUD = 2.0  # std over channels of prefix tokens, nearly all in one of them


def mean_mass(logit: float, cosines: Tensor, targets: Tensor, spread: tuple[float, ...]) -> float:
    """The mass of a query on its target, on average over the queries that have one.

    cosines: (2H − 1, 2W − 1), Σ a cos(ω · u) by displacement u from the target. targets: the cells
    that are one. spread: what content, normal noise, adds to the log of a competitor's expected
    exponential: of_query ℓ (1 − cosine) + of_key ℓ + of_both. Approximate: the target's own noise,
    which is left out, makes the mass a little lower still (.994 for .997 in cifar10_10k_ahead).
    """
    of_query, of_key, of_both = spread
    height = cosines.shape[0] // 2 + 1
    width = cosines.shape[1] // 2 + 1
    exponents = logit * ((of_query - 1.0) * (1.0 - cosines) + of_key) + of_both
    exponents[height - 1, width - 1] = 0.0  # the target itself
    # All keys around a target are a window of displacements; that of −u is that of u.
    sums = exponents.exp().unfold(0, height, 1).sum(-1)  # (H, 2W − 1)
    sums = sums.unfold(1, width, 1).sum(-1)  # (H, W)
    return (1.0 / sums.flatten()[targets]).mean().item()


def kernel_of(omega: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The weights a ∝ |ω|² of the pairs, (d / 2,), and their sum of cosines Σ a cos(ω · u), by
    displacement u: (2H − 1, 2W − 1). omega: (d / 2, 2).
    """
    share = omega.square().sum(1) / omega.square().sum()
    down, right = (torch.arange(1.0 - side, side) for side in grid)
    away = torch.cartesian_prod(down, right).double()
    cosines = (away @ omega.T).cos() @ share
    return share, cosines.view(len(down), len(right))


def write_constants(
    block: Block, offsets: list[Offset], mass: float, grid: Grid, muted: bool
) -> None:
    """Write the constant parts of each head's queries and keys, by which it attends to its offset.

    They are biases; where Q or K has none, a channel that the norm before the attention makes 1.
    muted: take them from the tokens that `mute_prefix` has given the last channel.
    """
    assert block.rotation is not None
    pairs = block.rotation.pairs
    norm = block.norm
    heads, head_dim, dim = block.q.shape
    bare = block.q_bias is None or block.k_bias is None
    if norm.weight is None or bare and norm.bias is None:
        raise ValueError(
            "the norm before the attention has no weight, or neither it nor Q and K have biases"
        )
    reserved = []  # channels that carry the constants, and no content
    if bare:
        reserved.append(0)  # which the norm makes 1
        norm.weight[0] = 0.0
        norm.bias[0] = 1.0
    if muted:
        reserved.append(dim - 1)  # which prefix tokens alone have
    for weight in (block.q, block.k, block.v):
        weight[..., reserved] = 0.0
    # The variance of what each head's Q and K make of content.
    of_queries = (block.q * norm.weight).square().sum(2).mean(1).tolist()
    of_keys = (block.k * norm.weight).square().sum(2).mean(1).tolist()
    omegas = block.rotation.frequencies(grid).expand(heads, -1, -1)  # (h, d / 2, 2)
    constants = block.q.new_zeros(2, heads, head_dim)  # of Q and of K
    for head, (omega, offset) in enumerate(zip(omegas, offsets)):
        share, cosines = kernel_of(omega, grid)
        _, targets = neighbours(offset, grid)
        of_q, of_k = of_queries[head], of_keys[head]
        # Half a logit's variance, by content of Q, of K and of both: E exp(z) = exp(Var z / 2).
        spread = of_q / math.sqrt(head_dim), of_k / math.sqrt(head_dim) / 2, of_q * of_k / 2
        logit = smallest_logit(lambda logit: mean_mass(logit, cosines, targets, spread) >= mass)
        if logit is None:
            raise ValueError(
                f"target_mass is {mass}, which these queries and keys do not reach: "
                "too much content, or too few frequencies for the grid; lower it, "
                'take wider heads, another rope_base, or base = "default"'
            )
        size = (logit * share * math.sqrt(head_dim)).sqrt()  # (d / 2,)
        phase = omega @ omega.new_tensor(offset)
        turned = torch.view_as_real(torch.polar(size, phase))  # (d / 2, 2)
        constants[0, head, pairs] = turned.to(constants)
        constants[1, head, pairs[:, 0]] = size.to(constants)
    for weight, bias, constant in zip((block.q, block.k), (block.q_bias, block.k_bias), constants):
        if bias is None:
            weight[..., 0] = constant
        else:
            bias.copy_(constant)
        if muted:
            weight[..., -1] = -constant / math.sqrt(dim - 1)


def mute_prefix(vit: Layout) -> None:
    """Give the last channel to prefix tokens alone, so that it is nearly all that norms leave them,
    and cancels the constants: they have no place, and read and offer content instead.
    """
    for tensor in (*stream_of(vit).writers, vit.pos_embed.T):
        tensor[-1] = 0.0
    for token in vit.tokens:
        token[..., -1] = LOUD * math.sqrt(token.shape[-1])


def impulse_rotary(
    model: nn.Module | Layout,
    *,
    generator: Generator,
    base: Base = "torch",
    kernel_size: AtLeastOne = 3,
    target_mass: ProperFraction = 0.9,
    value_init: Literal["mimetic", "base"] = "base",
    value_alpha: NonNegative = 0.4,
    value_beta: float = 0.4,
    patch_init: Literal["whitened", "base"] = "base",
    images: Tensor | None = None,
) -> None:
    """Let every head of every block of a rotary ViT attend to one neighbour, as a convolution.

    | tensor                                 | value                                              |
    |----------------------------------------|----------------------------------------------------|
    | every block: biases of Q and K         | the constants; see the module's docstring          |
    | without a bias of Q or K: norm1,       | weight 0, bias 1 in channel 0                      |
    |   columns 0 of Q, K; of V              | the constant, or 0 beside a bias; 0                |
    | with prefix tokens, the last channel:  | 2√D in these; 0 in what writes to it and in V;     |
    |                                        | −constant / √(D − 1) in Q and K                    |
    | every block, also of shifts: V,        | value_init "mimetic": factors of αZ − βI, with     |
    |   proj.weight                          | their inner channels in random order               |
    | patch_embed                            | "whitened": whitened patches                       |
    | everything else                        | as `base` drew it                                  |

    kernel_size: heads go through its offsets in turn, on from block to block (9 for 3×3). Where
        the target is off the grid, attention is spread over the tokens where Σ a cos is largest,
        which need not be the nearest (recipes/exact_convolution.md).
    target_mass: the mass of a query on its target, among patches, on average over the queries that
        have one and over what random weights make of content.
    value_init, value_alpha, value_beta: as for `mimetic`; worth likely three points on one of three
        sets of photographs, and none that show elsewhere (recipes/README.md, "Photographs").
    patch_init: "whitened": as `whitened` writes them. images: as there.
    """
    deep_impulse_rotary(
        model,
        generator=generator,
        base=base,
        kernel_size=kernel_size,
        target_mass=(target_mass,) * 2,
        value_init=value_init,
        value_alpha=value_alpha,
        value_beta=value_beta,
        patch_init=patch_init,
        images=images,
    )


@torch.no_grad()
def deep_impulse_rotary(
    model: nn.Module | Layout,
    *,
    generator: Generator,
    base: Base = "torch",
    kernel_size: AtLeastOne = 3,
    patch_init: Literal["whitened", "base"] = "base",
    target_mass: tuple[ProperFraction, ProperFraction] = (0.9, 0.3),
    value_init: Literal["mimetic", "base"] = "base",
    value_alpha: NonNegative = 0.4,
    value_beta: float = 0.4,
    images: Tensor | None = None,
) -> None:
    """As `impulse_rotary`; target_mass: in the first block and the last, and linearly between."""
    vit = vit_layout(model)
    offsets = offsets_on_grid(kernel_size, vit.grid)  # checks kernel_size, before any draw
    draw_base(vit.model, base, generator)
    if patch_init == "whitened":
        whiten_patches(vit.model, images, generator)
    if value_init == "mimetic":
        parts: list[Block | ShiftBlock] = [*vit.shifting, *vit.blocks]
        for part in parts:
            write_values(part, value_alpha, value_beta, generator, shuffled=True)
    if vit.tokens:
        mute_prefix(vit)
    masses = torch.linspace(*target_mass, len(vit.blocks), dtype=torch.float64).tolist()
    for number, (block, mass) in enumerate(zip(vit.blocks, masses), len(vit.shifting)):
        heads = len(block.q)
        targets = head_offsets(heads, offsets, "ordered", generator, first=number * heads)
        write_constants(block, targets, mass, vit.grid, muted=bool(vit.tokens))
