"""Rotary position embedding on a grid of patches (RoFormer, arXiv 2104.09864; on images RoPE-ViT,
arXiv 2403.13298): queries and keys are turned by their places, instead of marked by an embedding.

The d channels of a head form d / 2 pairs, channels 2i and 2i + 1. Each pair, a vector in a plane, is
turned by the angle ω · p: its frequency times the token's place p = (row, column). The product of a
query at p and a key at p + Δ then depends on Δ alone, and on what they contain: there is no table to
resize for images of another size. Prefix tokens are not turned.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from .layers import Sides

Frequencies = Literal["axial", "linear", "mixed"]
Coordinates = Literal["index", "centred"]


def places_of(grid: Sides, coordinates: Coordinates) -> Tensor:
    """The places of the patches, (N, 2) float64.

    "index": row and column, from 0. "centred": both from −2π to 2π, at the patches' centres, as in
    DINOv3 (arXiv 2508.10104): a model for more patches then turns by the same angles, more finely.
    """
    sides = [torch.arange(side, dtype=torch.float64) for side in grid]
    if coordinates == "centred":
        sides = [2 * math.pi * ((2 * side + 1) / len(side) - 1) for side in sides]
    return torch.cartesian_prod(*sides)


def frequencies_of(kind: Frequencies, heads: int, head_dim: int, base: float) -> Tensor:
    """ω of each pair, in radians per unit of (row, column): (h, d / 2, 2), float64.

    The first half of the pairs turns by columns, the other by rows; of each the i-th, from 0, at
    "axial": base^(−i / n) for n = d / 4. "linear": π (i + 1) / n, of which a head can form the
    kernel of any single offset. "mixed", which are learned, begin as "axial", with the axes of
    head j turned by j / h of a right angle (RoPE-ViT, §3.2, draws these turns).
    """
    step = torch.arange(head_dim // 4, dtype=torch.float64) / (head_dim // 4)
    size = math.pi * (step + 4 / head_dim) if kind == "linear" else base ** -step        # (n,)
    turn = torch.linspace(0, math.pi / 2, heads + 1, dtype=torch.float64)[:-1, None]     # (h, 1)
    turn = turn * (kind == "mixed")
    along, across = size * turn.cos(), size * turn.sin()                 # (h, n) each
    return torch.cat([torch.stack([across, along], 2), torch.stack([along, -across], 2)], 1)


class Rotary(nn.Module):
    """Turns the queries and the keys of one attention, (B, N, h, d) each, by their tokens' places.

    Only frequencies that are learned, (h, d / 2, 2), are parameters, and in a state dict.
    """

    def __init__(self, grid: Sides, *, prefix_tokens: int, heads: int, head_dim: int,
                 kind: Frequencies, base: float, coordinates: Coordinates) -> None:
        super().__init__()
        if head_dim % 4 or base <= 1.0:
            raise ValueError("rotary positions need rope_base > 1 and heads of 4 channels or a "
                             f"multiple; rope_base is {base}, head_dim {head_dim}")
        self.heads = heads
        places = nn.functional.pad(places_of(grid, coordinates), (0, 0, prefix_tokens, 0))
        omega = frequencies_of(kind, heads, head_dim, base)
        if kind == "mixed":
            self.register_buffer("places", places.float(), persistent=False)     # (N, 2)
            self.frequencies = nn.Parameter(omega.float())
        else:                                                                    # (N, 1, d / 2, 2)
            self.register_buffer("fixed", turns_of(places, omega[:1]).float(), persistent=False)

    def turns(self) -> Tensor:
        """Cosine and sine of each angle: (N, h, d / 2, 2), from learned frequencies or fixed."""
        turns = turns_of(self.places, self.frequencies) if hasattr(self, "places") else self.fixed
        return turns.expand(-1, self.heads, -1, -1).contiguous()

    def forward(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        turns = self.turns()
        return turned(queries, turns), turned(keys, turns)


def turns_of(places: Tensor, omega: Tensor) -> Tensor:
    """Places (N, 2), ω (h, d / 2, 2) → cosine and sine of each angle, (N, h, d / 2, 2)."""
    angles = (places[:, None, None] * omega).sum(-1)                     # (N, h, d / 2)
    return torch.stack([angles.cos(), angles.sin()], -1)


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """(a, b) → (a cos − b sin, a sin + b cos) for the pairs of x, (B, N, h, d), in float32 or wider.

    As a product of complex numbers it is one pass over memory; the compiler, which knows none,
    makes one pass of the formula.
    """
    pairs = x.unflatten(-1, (-1, 2)).to(torch.promote_types(x.dtype, turns.dtype))
    if torch.compiler.is_compiling():
        (a, b), (cos, sin) = pairs.unbind(-1), turns.unbind(-1)
        pairs = torch.stack([a * cos - b * sin, a * sin + b * cos], -1)
    else:
        pairs = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(turns))
    return pairs.flatten(-2).to(x.dtype)
