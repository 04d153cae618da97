"""Impulse initialisation of a SimpleViT, by rotating the sin-cos position embedding.

A pair (sin ωn, cos ωn), rotated by the angle ωδ, is the pair of position n + δ. If keys hold the
pairs of their own position m and queries those of n + δ, the logits along one axis of the grid are

    Σ w · cos(ω (n + δ − m)),        largest at m = n + δ.

The logits of rows and columns add up, so their softmax is the product of a softmax over rows and
one over columns, and together they are an impulse convolution. The rotation is exact, whereas
inverting the sin-cos embedding fails: its numerical rank is about 25 for any number of tokens.
"""

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from ..base.values import AtLeastOne, ProperFraction
from ..mixing.filters import Offset, Order, head_offsets, logit_for, offsets_on_grid
from ..models.layers import sincos_frequencies
from ..models.simple_vit import SimpleViT
from .baseline import Base, draw_base


class Axis(NamedTuple):
    """How the positions along one axis of the grid are represented: by pairs of frequencies."""

    frequencies: Tensor  # (p,), in radians per token
    logit: float  # Σ w over the pairs, the logit at position m = n + δ

    def pairs(self, positions: Tensor) -> Tensor:
        """(n,) → (n, 2p): sines, then cosines; those of a position have the square sum `logit`."""
        angles = positions[:, None].double() * self.frequencies  # (n, p)
        size = math.sqrt(self.logit / len(self.frequencies))
        return size * torch.cat([angles.sin(), angles.cos()], dim=1)


@torch.no_grad()
def impulse_simple_vit(
    model: SimpleViT,
    *,
    generator: Generator,
    base: Base = "default",
    kernel_size: AtLeastOne = 3,
    offsets: Order = "ordered",
    target_mass: ProperFraction = 0.9,
) -> None:
    """Make softmax(σ Q Kᵀ) near an impulse convolution, on the position embedding alone.

    | tensor (every block)                    | value                                            |
    |-----------------------------------------|--------------------------------------------------|
    | attn.qk.weight                          | K selects pairs of the sin-cos embedding, Q      |
    |                                         |   selects and rotates them by the head's offset  |
    | attn.query, attn.key, if free           | pairs of own frequencies π, 2π, 3π … / size      |
    | everything else                         | as `base` drew it                                |

    kernel_size, offsets: as for `impulse`.
    target_mass: the least share of attention that the target gets, wherever it is on the grid;
        √target_mass along each axis. Of the first head_dim // 4 frequencies (the highest of the
        embedding, the lowest of the free ones) each axis uses the first p, the p of least logits.

    A query whose target is off the grid attends to the nearby border if reads is "position"; with
    free Q and K it spreads its attention over that axis.

    "On the position embedding alone" means on P for reads = "position", on (1 − alpha) P for
    "mixed", and on LayerNorm(P) for "content", where the mass may fall slightly short. For the last
    two the patches' content is added, and swamps positions unless alpha is small (the papers').

    arXiv 2401.12511 reaches such maps by gradient descent, which is the init `impulse_gd`; this
    closed form is ours, sharper and much faster. Raises ValueError for a model whose queries do not
    read the position embedding, or which cannot reach target_mass, and for options out of range.
    """
    first = model.blocks[0].attn
    share = share_of_positions(model)
    if share == 0.0:
        raise ValueError(
            "init 'impulse' works on the position embedding, which this model's "
            "queries do not see; set input_pos_embed = true, alpha < 1, or another "
            "reads"
        )
    cells = offsets_on_grid(kernel_size, model.grid)  # checks kernel_size, before any draw
    axes = []
    for size in model.grid:
        if first.reads == "free":
            frequencies = torch.arange(1, max(size, 2)).double() * math.pi / size
        else:
            frequencies = sincos_frequencies(model.pos_embed.shape[1])
        frequencies = frequencies[: first.head_dim // 4]  # half of a head's pairs
        axes.append(sharpest_axis(frequencies, size, math.sqrt(target_mass)))
    draw_base(model, base, generator)

    amount = first.logit_scale**-0.5 / share
    for block in model.blocks:
        targets = head_offsets(first.num_heads, cells, offsets, generator)
        for query, key, offset in zip(*block.attn.factors, targets):  # (N, d), or (C, d)
            for view, by in ((query, offset), (key, (0, 0))):
                value = factor_of(model, axes, by)
                view.zero_()
                view[:, : value.shape[1]] = amount * value


def share_of_positions(model: SimpleViT) -> float:
    """The factor on P, at least, in what queries read where patches have no content; 1 if free."""
    first = model.blocks[0].attn
    if first.reads == "mixed":
        return 1.0 - first.alpha
    if first.reads != "content":
        return 1.0
    if model.alpha == 1.0 or not model.input_pos_embed:
        return 0.0
    # LayerNorm scales any multiple of P to unit variance.
    return 1.0 / model.pos_embed.std(dim=1, correction=0).max().item()


def factor_of(model: SimpleViT, axes: list[Axis], offset: Offset) -> Tensor:
    """The pairs of the positions at an offset from the tokens, (N, ≤ d), if queries and keys are
    free; else the weights, (C, ≤ d), that make these pairs of the tokens' embedding.
    """
    reads = model.blocks[0].attn.reads
    if reads == "free":
        tokens = torch.cartesian_prod(*map(torch.arange, model.grid))  # (N, 2), row and column
        places = (tokens + torch.tensor(offset)).T
        return torch.cat([axis.pairs(at) for axis, at in zip(axes, places)], 1)
    weights = rotated_weights(axes, offset, model.pos_embed.shape[1])
    if reads == "content":  # so that the mean in LayerNorm has no effect
        # At the slowest sine of the rows, which is nearly 0 at all tokens.
        weights[len(weights) // 4 * 3 - 1] -= weights.sum(dim=0)
    return weights


def sharpest_axis(frequencies: Tensor, size: int, mass: float) -> Axis:
    """An axis of the first p `frequencies`, with the p that needs the smallest logits for `mass`.

    mass: of the target in a softmax over all 2 · size − 1 displacements along the axis, of which
        each query sees a part; raises ValueError if no number of frequencies reaches it.
    """
    away = torch.arange(1 - size, size).double()  # displacements from the target
    axes = []
    for count in range(1, len(frequencies) + 1):
        shape = (away[:, None] * frequencies[:count]).cos().mean(dim=1)  # 1 at the target
        logit = logit_for(mass, shape, size - 1)
        if logit is not None:
            axes.append(Axis(frequencies[:count], logit))
    if not axes:
        raise ValueError(
            f"init 'impulse' cannot give one of {size} positions along an axis a mass "
            f"of {mass:g} with {len(frequencies)} pair(s) of sine and cosine; raise "
            "head_dim or lower target_mass"
        )
    return min(axes, key=lambda axis: axis.logit)


def rotated_weights(axes: list[Axis], offset: Offset, dim: int) -> Tensor:
    """Weights, (C, 2p of rows + 2p of columns), that make of a token's embedding the pairs of the
    position at this offset from it.
    """
    # What reads the quarters of the embedding: sin and cos of the column, sin and cos of the row.
    of_columns, of_rows = torch.eye(dim, dtype=torch.float64).unflatten(1, (2, 2, -1)).unbind(1)
    weights = []
    for axis, shift, quarters in zip(axes, offset, (of_rows, of_columns)):
        sine, cosine = quarters[..., : len(axis.frequencies)].unbind(1)  # (C, p)
        root = math.sqrt(axis.logit / len(axis.frequencies))
        turn = axis.frequencies * shift  # angles, (p,)
        # sin(ω(n + δ)) = cos ωδ · sin ωn + sin ωδ · cos ωn, and likewise the cosine.
        weights.append(root * (sine * turn.cos() + cosine * turn.sin()))
        weights.append(root * (cosine * turn.cos() - sine * turn.sin()))
    return torch.cat(weights, dim=1)
