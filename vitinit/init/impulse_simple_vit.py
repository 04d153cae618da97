"""Impulse initialisation of a SimpleViT: queries see the position embedding turned by the head's offset.

A pair (sin ωn, cos ωn) turned by the angle ωδ is the pair of place n + δ. So with keys that hold the
pairs of their own place m, and queries those of n + δ, the logits on one axis are

    Σ w · cos(ω (n + δ − m)),        largest at m = n + δ.

Rows and columns of the grid add up in the logits, so their softmax is the product of one for the rows
and one for the columns, and the whole is an impulse convolution. Nothing is solved for: where an
inverse of the sin-cos embedding fails (its numerical rank is about 25, for any number of tokens), turning
it is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..filters import Offset, offsets_on_grid
from ..models.layers import sincos_frequencies
from ..models.simple_vit import SimpleViT
from .baseline import draw_base
from .factorize import STEEPEST, smallest_reaching
from .impulse import head_offsets


@dataclass(frozen=True)
class Axis:
    """What represents the places of one axis: pairs of these frequencies, (p,), in radians a place.

    logit is Σ w over the pairs: what place m = n + δ gets.
    """

    frequencies: Tensor
    logit: float

    def pairs(self, places: Tensor) -> Tensor:
        """(n,) places → (n, 2p): their sines, then cosines, so that products sum to `logit` at most."""
        angles = places[:, None].double() * self.frequencies             # (n, p)
        return math.sqrt(self.logit / len(self.frequencies)) * torch.cat([angles.sin(), angles.cos()],
                                                                         dim=1)


@torch.no_grad()
def impulse_simple_vit(model: SimpleViT, *, generator: torch.Generator,
                       base: Literal["default", "torch"] = "default",
                       kernel_size: int = 3,
                       offsets: Literal["ordered", "random"] = "ordered",
                       target_mass: float = 0.9) -> None:
    """softmax(σ Q Kᵀ) on the position embedding alone is near an impulse convolution in every head.

    | tensor (every block)                    | value                                            |
    |-----------------------------------------|--------------------------------------------------|
    | attn.qk.weight                          | K picks pairs of the sin-cos embedding, Q picks them   |
    |                                         |   and turns them by the head's offset            |
    | attn.query, attn.key, if free           | pairs of own frequencies π, 2π, 3π … / size       |
    | everything else                         | as `base` drew it                                |

    kernel_size, offsets: as for ViT.
    target_mass: what the target gets at least, wherever it is on the grid; √target_mass on each axis.
        Of the head_dim // 4 highest frequencies of the embedding (lowest of the free ones) an axis uses
        the first so many that need the smallest logits. A query whose target is off the grid looks
        at the border near it if reads is "position"; with free ones it spreads over its axis.

    arXiv 2401.12511 reaches such maps by gradient descent, which is init `impulse_gd`; this closed
    form is ours. "On the position embedding alone" means P for reads = "position", where it is the whole truth,
    and (1 − alpha) P for "mixed", LayerNorm(P) for "content" (there .89 at worst for .9). In the last
    two patches come on top, and drown the position embedding unless alpha is small: at .1 next to nothing is left.
    So do the papers' solutions, which see the position embedding alone, too.

    On 16×16 tokens, width 512, 8 heads of 64: ≥ .90 at every place in .03 s. Gradient descent as in
    the paper's code (kernel 5, σ = .1, renorm_every = 100): .21 after 1,000 steps (13 s), .22 after
    10,000. Raises ValueError for a model whose queries see no position embedding, or one that cannot reach
    target_mass.
    """
    if not 0.0 < target_mass < 1.0:
        raise ValueError(f"target_mass is {target_mass}, expected 0 < target_mass < 1")
    if offsets not in ("ordered", "random"):
        raise ValueError(f'offsets is {offsets!r}, expected "ordered" or "random"')
    first = model.blocks[0].attn
    free, share = first.reads == "free", 1.0 if first.reads == "free" else position_share(model)
    if share == 0.0:
        raise ValueError("init 'impulse' works on the position embedding, which this model's queries do not "
                         "see; set input_pos_embed = true, alpha < 1, or another reads")
    limit = first.head_dim // 4                      # pairs for rows, and as many for columns
    if limit < 1:
        raise ValueError(f"head_dim is {first.head_dim}, and init 'impulse' needs 4 or more: a pair "
                         "for rows and a pair for columns")
    cells = offsets_on_grid(kernel_size, model.grid)     # checks kernel_size, before any draw
    axes = [sharpest_axis((torch.arange(1, max(size, 2)).double() * math.pi / size if free else
                           sincos_frequencies(model.pos_embed.shape[1]))[:limit],
                          size, math.sqrt(target_mass)) for size in model.grid]
    draw_base(model, base, generator)

    for block in model.blocks:
        attention = block.attn
        amount = attention.logit_scale ** -0.5 / share
        for head, offset in enumerate(head_offsets(attention.num_heads, cells, offsets, generator)):
            if free:
                query, key = places_turned(axes, offset, model.grid)     # (N, ≤ d) each
                unused = (0, attention.head_dim - key.shape[1])
                attention.query[head] = F.pad(amount * query, unused)
                attention.key[head] = F.pad(amount * key, unused)
            else:
                query, key = positions_turned(axes, offset, model.pos_embed.shape[1])  # (≤ d, C) each
                if attention.reads == "content":
                    query, key = blind_to_mean(query), blind_to_mean(key)
                unused = (0, 0, 0, attention.head_dim - len(key))
                attention.q_weight[head] = F.pad(amount * query, unused)
                attention.k_weight[head] = F.pad(amount * key, unused)


def position_share(model: SimpleViT) -> float:
    """How strongly queries see the position embedding where patches add nothing: at least P · share."""
    attention = model.blocks[0].attn
    if attention.reads == "content":
        # LayerNorm brings P, and any multiple of it, to unit variance.
        return 1.0 / model.pos_embed.std(dim=1, correction=0).max().item() if (
            model.input_pos_embed and model.alpha < 1.0) else 0.0
    return 1.0 if attention.reads == "position" else 1.0 - attention.alpha


def sharpest_axis(frequencies: Tensor, size: int, mass: float) -> Axis:
    """Of the first 1, 2, … of `frequencies` those that reach `mass` with the smallest logits.

    mass: of the target in a softmax over all 2 · size − 1 displacements, of which every query sees a
        part with its target in it, and so gives it more. Raises ValueError if none reaches it.
    """
    away = torch.arange(1 - size, size).double()                         # displacements from the target
    found = []
    for count in range(1, len(frequencies) + 1):
        shape = (away[:, None] * frequencies[:count]).cos().mean(dim=1)  # 1 at the target

        def reached(logit: float) -> bool:
            return (logit * shape).softmax(0)[size - 1].item() >= mass
        logit = smallest_reaching(reached, STEEPEST)
        if logit is not None:
            found.append(Axis(frequencies[:count], logit))
    if not found:
        raise ValueError(f"init 'impulse' cannot tell {size} places in a row apart by so few as "
                         f"{len(frequencies)} frequencies to a mass of {mass:g}; raise head_dim or "
                         "lower target_mass")
    return min(found, key=lambda axis: axis.logit)


def places_turned(axes: list[Axis], offset: Offset, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Queries and keys of all tokens, (N, 2p of rows + 2p of columns) each."""
    rows, columns = (axis.flatten() for axis in torch.meshgrid(
        torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij"))
    key = torch.cat([axes[0].pairs(rows), axes[1].pairs(columns)], dim=1)
    query = torch.cat([axes[0].pairs(rows + offset[0]), axes[1].pairs(columns + offset[1])], dim=1)
    return query, key


def positions_turned(axes: list[Axis], offset: Offset, dim: int) -> tuple[Tensor, Tensor]:
    """Weights, (2p of rows + 2p of columns, C) each, that read the same off the sin-cos embedding."""
    weights = []
    for axis, shift, part in zip(axes, offset, ("rows", "columns")):
        count = len(axis.frequencies)
        query, key = (torch.zeros(2 * count, 4, dim // 4, dtype=torch.float64) for _ in range(2))
        # The embedding's quarters: sin and cos of the column, sin and cos of the row.
        sine, cosine = (2, 3) if part == "rows" else (0, 1)
        one = math.sqrt(axis.logit / count)
        turn = axis.frequencies * shift                                  # angles, (p,)
        pair, other = torch.arange(count), torch.arange(count, 2 * count)
        key[pair, sine, pair] = key[other, cosine, pair] = one
        # sin(ω(n + δ)) = cos ωδ · sin ωn + sin ωδ · cos ωn, and likewise the cosine.
        query[pair, sine, pair] = query[other, cosine, pair] = one * turn.cos()
        query[pair, cosine, pair] = one * turn.sin()
        query[other, sine, pair] = -one * turn.sin()
        weights.append((query.flatten(1), key.flatten(1)))
    return torch.cat([weights[0][0], weights[1][0]]), torch.cat([weights[0][1], weights[1][1]])


def blind_to_mean(weight: Tensor) -> Tensor:
    """Rows, (n, C), that sum to zero, so that the mean which LayerNorm subtracts leaves no trace.

    What is missing goes to the embedding's slowest sine of the rows, which is nearly 0 at every place.
    """
    slowest = weight.shape[1] // 4 * 3 - 1
    weight = weight.clone()
    weight[:, slowest] -= weight.sum(dim=1)
    return weight
