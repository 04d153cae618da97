"""Mixing by fixed shifts: what attention with an impulse at mass 1 computes, without queries and keys.

The control for attention: a block with it has the values and the projection, and learns everything
but where to look.
"""

from itertools import product

import torch
from einops import rearrange
from torch import Tensor, nn

from .layers import Sides, head_width

Offset = tuple[int, int]  # rows down and columns right
# The order in which the released code assigns the cells of a 3×3 kernel to heads: centre, up,
# right, left, down, then the corners (structured-initialization, vision_transformer.py).
RELEASED_ORDER_3X3 = (4, 1, 5, 3, 7, 0, 2, 6, 8)


def kernel_offsets(kernel_size: int) -> list[Offset]:
    """The offset of every cell of a kernel, row-major: [(-1, -1), (-1, 0), …] for 3×3."""
    side = range(-((kernel_size - 1) // 2), kernel_size // 2 + 1)
    return list(product(side, side))


def ordered_offsets(kernel_size: int) -> list[Offset]:
    """The offsets of a kernel in the order in which they are assigned to heads.

    For 3×3 this is the released code's. Others go by distance from the centre, then row-major.
    """
    offsets = kernel_offsets(kernel_size)
    if kernel_size == 3:
        return [offsets[cell] for cell in RELEASED_ORDER_3X3]
    return sorted(offsets, key=lambda offset: offset[0] ** 2 + offset[1] ** 2)  # a stable sort


def moved(values: Tensor, index: Tensor, tokens: Tensor | None) -> Tensor:
    """The values of other tokens, side by side: values (B, N, C), index (h, N) → (B, N, C). Token n
    gets, in the channels of head i, those of token index[i, n]. tokens: None, for all of a grid;
    ValueError if it names some.
    """
    if tokens is not None:
        raise ValueError("shifts move the tokens of a whole grid, and some are hidden here")
    heads = len(index)
    # The values of one head of one token are a row, and rows are moved whole: with one index for each,
    # and not for each channel as `gather` takes, a step of training on a CPU takes up to 9 % less.
    rows = rearrange(values, "b n (h d) -> b (n h) d", h=heads)
    numbers = index * heads + torch.arange(heads, device=index.device)[:, None]
    chosen = rows.index_select(1, rearrange(numbers, "h n -> (n h)"))
    return rearrange(chosen, "b (n h) d -> b n (h d)", h=heads)


class Shift(nn.Module):
    """The value of the token at an offset, for each head another: (B, N, C) → (B, N, C).

    The N tokens are those of the grid, by row, and no others. Where the offset leads off it, the
    value is the nearest token's. In a rotary model it is that of the token whose logit is largest,
    which need not be the nearest: a wave repeats. kernel_size: the heads go through its offsets in
    turn, from number `first`. frequencies: (h, d / 2, 2), of `Rotary`, `between_tokens`; None: the
    model is not rotary.
    """

    index: Tensor  # (h, N), the token whose value each token gets

    def __init__(
        self,
        dim: int,
        grid: Sides,
        *,
        num_heads: int,
        kernel_size: int,
        first: int,
        bias: bool,
        frequencies: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        head_width(dim, num_heads)  # raises ValueError
        self.v = nn.Linear(dim, dim, bias=bias)
        self.proj = nn.Linear(dim, dim)
        offsets = ordered_offsets(kernel_size)
        cells = torch.cartesian_prod(*map(torch.arange, grid)).double()  # (N, 2)
        index = []
        for head in range(num_heads):
            offset = cells.new_tensor(offsets[(first + head) % len(offsets)])
            away = cells - (cells + offset)[:, None]  # (N, N, 2), of each cell from each target
            if frequencies is None:
                nearness = -away.square().sum(-1)
            else:  # the constant part of the logit, up to a factor; see init/impulse_rotary.py
                omega = frequencies[head]
                nearness = (away @ omega.T).cos() @ omega.square().sum(1)
            nearness[(away == 0).all(-1)] = torch.inf  # the target, which others may tie with
            index.append(nearness.argmax(1))
        self.register_buffer("index", torch.stack(index), persistent=False)

    def mixing_weights(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """The matrices that `forward` applies to the values, one for all images: (1, h, N, N)."""
        return nn.functional.one_hot(self.index, x.shape[1]).to(x.dtype)[None]

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        return self.proj(moved(self.v(x), self.index, tokens))
