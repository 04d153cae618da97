"""Impulse initialisation of rotary attention: exact in every block, the same for every image.

Rotary attention (models/rotary.py) turns a pair of channels by ω · p at place p. If query and key
have a constant part, of length √A and phases ω · δ and 0 in each pair, that part of the logit is

    ℓ Σ a cos(ω · (Δ − δ)),        Σ a = 1,        A = ℓ a √d,

at the key that is Δ away: a kernel of the displacement alone, largest, ℓ, at Δ = δ. It comes from
biases, not from the residual stream, so that nothing in it has to be reserved, and nothing fades
with depth. Of all weights a ≥ 0, a ∝ |ω|² needs a logit near the least one. No paper describes this.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ..filters import Grid, Offset, head_offsets, neighbours, offsets_on_grid
from ..values import AtLeastOne, ProperFraction
from .baseline import Base, draw_base, whiten_patches
from .layout import layout_of
from .stream import stream_of
from .views import Block, Layout

LOUD = 30.0             # what prefix tokens hold in a channel of their own: nearly all their variance
MOST_LOGIT = 1e3


def mean_mass(logit: float, cosines: Tensor, targets: Tensor, spread: tuple[float, ...]) -> float:
    """The mass of a query on its target, on average over the queries that have one.

    cosines: (2H − 1, 2W − 1), Σ a cos(ω · u) by displacement u from the target. targets: the cells
    that are one. spread: what content, normal noise, adds to the expected exponential of a
    competitor: per unit of ℓ (1 − cosine), of ℓ, and at once.
    """
    of_query, of_key, of_both = spread
    height, width = (len(side) // 2 + 1 for side in (cosines, cosines.T))
    exponents = logit * ((of_query - 1.0) * (1.0 - cosines) + of_key) + of_both
    exponents[height - 1, width - 1] = 0.0                               # the target itself
    # All keys around a target are a window of displacements.
    means = F.avg_pool2d(exponents.exp()[None], (height, width), stride=1)[0].flip(0, 1)     # (H, W)
    return (1.0 / (height * width * means.flatten()[targets])).mean().item()


def logit_of(mass: float, cosines: Tensor, targets: Tensor, spread: tuple[float, ...]) -> float:
    """The smallest ℓ for which `mean_mass` is `mass`. Raises ValueError if there is none."""
    low, high = 0.0, MOST_LOGIT
    if mean_mass(high, cosines, targets, spread) < mass:
        raise ValueError(f"target_mass is {mass}, which these queries and keys do not reach, as "
                         "their content is too large beside a constant; lower it, or use base = "
                         '"default"')
    for _ in range(50):
        middle = 0.5 * (low + high)
        reached = mean_mass(middle, cosines, targets, spread) >= mass
        low, high = (low, middle) if reached else (middle, high)
    return high


def write_constants(block: Block, offsets: list[Offset], mass: float, grid: Grid) -> None:
    """Write the constant parts of each head's queries and keys, by which it attends to its offset.

    They are biases; where Q or K has none, a channel that the norm before the attention makes 1.
    """
    rotation, (heads, head_dim, _) = block.rotation, block.q.shape
    assert rotation is not None
    omegas = rotation.frequencies(grid).expand(heads, -1, -1)            # (h, d / 2, 2)
    cells = torch.cartesian_prod(*(torch.arange(1.0 - side, side) for side in grid)).double()
    constants = block.q.new_zeros(2, heads, head_dim)                    # of Q and of K
    for head, (omega, offset) in enumerate(zip(omegas, offsets)):
        share = omega.square().sum(1) / omega.square().sum()             # (d / 2,), a above
        cosines = ((cells @ omega.T).cos() @ share).view(2 * grid[0] - 1, 2 * grid[1] - 1)
        of_query, of_key = ((weight[head] * block.norm.weight).square().sum(1).mean().item()
                            for weight in (block.q, block.k))            # variance of a channel
        logit = logit_of(mass, cosines, neighbours(offset, grid)[1], (
            of_query / math.sqrt(head_dim), of_key / math.sqrt(head_dim) / 2, of_query * of_key / 2))
        size, phase = (logit * share * math.sqrt(head_dim)).sqrt(), omega @ omega.new_tensor(offset)
        constants[0, head, rotation.pairs] = torch.stack(
            [size * phase.cos(), size * phase.sin()], 1).to(constants)
        constants[1, head, rotation.pairs[:, 0]] = size.to(constants)
    bare = block.q_bias is None or block.k_bias is None
    if bare:
        if block.norm.bias is None:
            raise ValueError("Q or K has no bias, and nor has the norm before the attention, which "
                             "could make a channel constant")
        block.norm.weight[0], block.norm.bias[0] = 0.0, 1.0
        block.v[..., 0] = 0.0
    for weight, bias, constant in zip((block.q, block.k), (block.q_bias, block.k_bias), constants):
        if bare:
            weight[..., 0] = constant if bias is None else 0.0
        if bias is not None:
            bias.copy_(constant)


def mute_prefix(vit: Layout) -> None:
    """Let prefix tokens, which have no place, read and offer content alone, without the constants.

    The last channel of the stream is theirs, so that it is nearly all that their norm leaves.
    """
    tokens = [*vit.tokens, *([vit.pos_embed] if vit.pos_embed is not None else [])]
    for tensor in (*stream_of(vit).writers, *(part for block in vit.blocks
                                             for part in (block.proj, block.proj_bias))):
        if tensor is not None:
            tensor[-1] = 0.0
    for token in tokens:
        token[..., -1] = 0.0
    for token in vit.tokens:
        token[..., -1] = LOUD
    for block in vit.blocks:
        dim = block.q.shape[-1]
        block.v[..., -1] = 0.0
        for weight, bias in ((block.q, block.q_bias), (block.k, block.k_bias)):
            constant = weight[..., 0] if bias is None else bias
            weight[..., -1] = -constant / math.sqrt(dim - 1)


@torch.no_grad()
def deep_impulse_rotary(
        model: nn.Module | Layout, *, generator: Generator, base: Base = "torch",
        kernel_size: AtLeastOne = 3,
        target_mass: tuple[ProperFraction, ProperFraction] = (0.9, 0.3),
        patch_init: Literal["whitened", "base"] = "base", images: Tensor | None = None) -> None:
    """As `impulse_rotary`, with a mass that changes from the first block to the last.

    target_mass: in the first block and in the last; in between, linearly.
    """
    vit = layout_of(model)
    assert isinstance(vit, Layout)
    draw_base(vit.model, base, generator)
    if patch_init == "whitened":
        whiten_patches(vit.model, images, generator)
    offsets, before = offsets_on_grid(kernel_size, vit.grid), 0
    for block, mass in zip(vit.blocks, torch.linspace(*target_mass, len(vit.blocks)).tolist()):
        of_heads = head_offsets(len(block.q), offsets, "ordered", generator, first=before)
        write_constants(block, of_heads, mass, vit.grid)
        before += len(block.q)
    if vit.tokens:
        mute_prefix(vit)


def impulse_rotary(model: nn.Module | Layout, *, generator: Generator, base: Base = "torch",
                   kernel_size: AtLeastOne = 3, target_mass: ProperFraction = 0.9,
                   patch_init: Literal["whitened", "base"] = "base",
                   images: Tensor | None = None) -> None:
    """Let every head of a rotary ViT attend to one neighbour, as a convolution does, in every block.

    | tensor                                 | value                                              |
    |----------------------------------------|----------------------------------------------------|
    | every block: biases of Q and K         | the constants; see the module's docstring          |
    | without a bias of Q or K: norm1,       | weight 0, bias 1 in channel 0                      |
    |   columns 0 of Q, K; of V              | the constant, or 0 beside a bias; 0                |
    | with prefix tokens, the last channel:  | 30 in these tokens; 0 in what writes to it, and in |
    |                                        | columns of V; −constant / √(D − 1) in those of Q, K |
    | patch_embed                            | "whitened": whitened patches                       |
    | everything else                        | as `base` drew it                                  |

    kernel_size: heads go through its offsets in turn, on from block to block (9 for 3×3). Off the
        grid, the target is the nearest token on it.
    target_mass: the mass of a query on its target, among patches, on average over the queries that
        have one and over what random weights make of content.
    patch_init: "whitened": as `whitened` writes them. images: as there.
    """
    deep_impulse_rotary(model, generator=generator, base=base, kernel_size=kernel_size,
                        target_mass=(target_mass, target_mass), patch_init=patch_init,
                        images=images)
