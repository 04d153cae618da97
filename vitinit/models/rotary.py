"""Rotary positions on a grid of patches (RoFormer, arXiv 2104.09864; RoPE-ViT, arXiv 2403.13298).

The d channels of a head form d / 2 pairs, channels 2i and 2i + 1: vectors in a plane. Each is
turned by the angle ω · p, its frequency times the token's place p = (row, column). So the product
of a query at p and a key at p + Δ depends on Δ alone, and on what they contain: no table has to be
resized for images of another size. Prefix tokens are not turned.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from .layers import Sides

Frequencies = Literal["axial", "linear", "mixed"]
Coordinates = Literal["index", "scaled", "centred"]


def frequencies_of(kind: Frequencies, heads: int, head_dim: int, base: float) -> Tensor:
    """ω of each pair, in radians per (row, column): (h, d / 2, 2) float64. The first half turns by
    columns, the other by rows; the i-th, from 0, of n = d / 4 by base^(−i / n) if "axial", and by
    π (i + 1) / n if "linear", of which a head can form the kernel of any single offset on a grid
    of at most 2n a side. "mixed" begins as "axial", the axes of head j turned by j / h of a right
    angle (RoPE-ViT draws these). Raises ValueError for head_dim or base out of range.
    """
    if head_dim < 4 or head_dim % 4:
        raise ValueError(
            f"embed_dim / num_heads is {head_dim}, expected a multiple of 4 with rotary positions"
        )
    if base <= 1.0:
        raise ValueError(f"rope_base is {base}, expected more than 1")
    count = head_dim // 4
    step = torch.arange(count).double() / count
    if kind == "linear":
        size = torch.pi * (step + 1 / count)  # (n,)
    else:
        size = base**-step
    turn = torch.zeros(heads, 1).double()  # (h, 1), of each head's axes
    if kind == "mixed":
        turn = torch.arange(heads)[:, None].double() / heads * torch.pi / 2
    along = size * turn.cos()  # (h, n)
    across = size * turn.sin()
    by_columns = torch.stack([across, along], 2)  # (h, n, 2): per row, and per column
    by_rows = torch.stack([along, -across], 2)
    return torch.cat([by_columns, by_rows], 1)


def coordinates_of(kind: Coordinates, side: int) -> Tensor:
    """The coordinate of each row, or column, of a grid with `side` of them; float64."""
    index = torch.arange(side).double()
    if kind == "scaled":
        return 16 * index / side
    if kind == "centred":
        middle = (2 * index + 1) / side - 1  # of each, between −1 and 1
        return 2 * torch.pi * middle
    return index


def spacing_of(kind: Coordinates, side: int) -> float:
    """How far apart neighbouring rows, or columns, of such a grid are in `coordinates_of`."""
    if kind == "scaled":
        return 16 / side
    if kind == "centred":
        return 4 * torch.pi / side
    return 1.0


def between_tokens(omega: Tensor, kind: Coordinates, grid: Sides) -> Tensor:
    """ω, (h, d / 2, 2), in radians from row to row and from column to column of a grid, at most π:
    a larger turn is a smaller one the other way round.
    """
    turns = omega * omega.new_tensor([spacing_of(kind, side) for side in grid])
    return turns - 2 * torch.pi * (turns / (2 * torch.pi)).round()


class Rotary(nn.Module):
    """Turns queries and keys, (B, N, h, d), by their tokens' places. Only frequencies that are
    learned, (h, d / 2, 2), are in a state dict. coordinates: "index", row and column from 0. The
    others turn by the same angles, more finely, for more patches: "scaled" from 0 up to 16, as
    EVA-02 (arXiv 2303.11331); "centred" from −2π to 2π, as DINOv3 (arXiv 2508.10104).
    """

    frequencies: nn.Parameter | None
    fixed: Tensor  # places, (N, 2), if "mixed"; else turns, (N, 1, d / 2, 2)

    def __init__(
        self,
        grid: Sides,
        *,
        prefix_tokens: int,
        heads: int,
        head_dim: int,
        kind: Frequencies,
        base: float,
        coordinates: Coordinates,
    ) -> None:
        super().__init__()
        self.heads = heads
        omega = frequencies_of(kind, heads, head_dim, base)
        rows, columns = (coordinates_of(coordinates, side) for side in grid)
        places = torch.cartesian_prod(rows, columns)
        # (N, 2): prefix tokens stand at 0, and so are not turned.
        places = nn.functional.pad(places, (0, 0, prefix_tokens, 0))
        if kind == "mixed":
            self.frequencies = nn.Parameter(omega.float())
            fixed = places
        else:
            self.frequencies = None
            fixed = turns_of(places, omega[:1])  # all heads have the same frequencies
        self.register_buffer("fixed", fixed.float(), persistent=False)

    def turns(self) -> Tensor:
        """Cosine and sine of each angle, (N, h, d / 2, 2)."""
        fixed = self.fixed.to(torch.promote_types(self.fixed.dtype, torch.float32))
        turns = fixed if self.frequencies is None else turns_of(fixed, self.frequencies)
        return turns.expand(-1, self.heads, -1, -1).contiguous()

    def forward(
        self, queries: Tensor, keys: Tensor, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        turns = self.turns()
        if tokens is not None:  # some of them, (B, n), and so (B, n, h, …)
            turns = turns[tokens]
        return turned(queries, turns), turned(keys, turns)


def turns_of(places: Tensor, omega: Tensor) -> Tensor:
    """Places (N, 2), ω (h, d / 2, 2) → cosine and sine of each angle, (N, h, d / 2, 2)."""
    angles = (places[:, None, None] * omega).sum(-1)  # (N, h, d / 2)
    return torch.stack([angles.cos(), angles.sin()], -1)


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """(a, b) → (a cos − b sin, a sin + b cos) for each pair of x, (B, N, h, d), in ≥ float32."""
    pairs = x.unflatten(-1, (-1, 2)).to(torch.promote_types(x.dtype, turns.dtype))
    if torch.compiler.is_compiling():  # it knows no complex numbers, and fuses these
        a, b = pairs.unbind(-1)
        cos, sin = turns.unbind(-1)
        pairs = torch.stack([a * cos - b * sin, a * sin + b * cos], -1)
    else:  # one pass over memory
        pairs = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(turns))
    return pairs.flatten(-2).to(x.dtype)
