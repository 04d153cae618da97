"""Convolution kernels, and the matrix by which a kernel acts on a flattened grid.

Everything follows PyTorch's convention for padding "same": conv2d is a cross-correlation, so an f×f
kernel k maps x to

    y[p] = Σ_δ k[δ + (f - 1) // 2] · x[p + δ],        δ = index - (f - 1) // 2 on each axis.

An *impulse* kernel is 1 at a single offset δ = (rows down, columns right) and 0 elsewhere:
y[p] = x[p + δ]. Its matrix is a shift, and the K² shifts of a K×K kernel span all K×K convolutions
(Cordonnier et al., arXiv 1911.03584; arXiv 2505.19985, §4). Grids are (height, width); token n is
in row n // width and column n % width.
"""

from collections.abc import Callable
from itertools import product
from math import prod
from typing import Literal

import torch
from torch import Generator, Tensor

from ..base.messages import times
from ..models.shift import Offset, kernel_offsets, ordered_offsets

Grid = tuple[int, int]  # rows and columns of tokens
Order = Literal["ordered", "random"]  # in which offsets are assigned to heads; see `head_offsets`


def head_offsets(
    num_heads: int, cells: list[Offset], offsets: Order, generator: Generator, *, first: int = 0
) -> list[Offset]:
    """The offset of each head of one block, or of each filter.

    cells: the offsets to assign. offsets: "ordered": head i takes number first + i of the cells,
    modulo their number; "random": one draw per head.
    """
    if offsets == "random":
        return [cells[i] for i in torch.randint(len(cells), (num_heads,), generator=generator)]
    return [cells[head % len(cells)] for head in range(first, first + num_heads)]


def offsets_on_grid(kernel_size: int, grid: Grid) -> list[Offset]:
    """`ordered_offsets`, or ValueError if one of them leads off the grid from every token."""
    largest = 2 * min(grid) - 1
    if kernel_size > largest:
        raise ValueError(
            f"kernel_size is {kernel_size}, but beyond {largest} its outer offsets "
            f"have no target on the {times(grid)} grid"
        )
    return ordered_offsets(kernel_size)


def impulse_kernel(offset: Offset, kernel_size: int) -> Tensor:
    """(kernel_size, kernel_size): 1 at `offset`, else 0; raises ValueError for no such cell."""
    cell = kernel_offsets(kernel_size).index(offset)
    return torch.eye(kernel_size**2)[cell].view(kernel_size, kernel_size)


def neighbours(offset: Offset, grid: Grid, *, circular: bool = False) -> tuple[Tensor, Tensor]:
    """The tokens whose neighbour at `offset` is on the grid, and these neighbours: two (n,) int64.

    circular: wrap around at the borders instead, so that all tokens have one.
    """
    height, width = grid
    rows = torch.arange(height)[:, None] + offset[0]  # (H, 1)
    columns = torch.arange(width) + offset[1]  # (W,)
    if circular:
        rows = rows % height
        columns = columns % width
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    return inside.flatten().nonzero()[:, 0], (rows * width + columns)[inside]


def shift_matrix(offset: Offset, grid: Grid) -> Tensor:
    """The (N, N) matrix of the impulse at `offset`: 1 at each token's neighbour, 0 elsewhere."""
    matrix = torch.zeros(prod(grid), prod(grid))
    matrix[neighbours(offset, grid)] = 1.0
    return matrix


def convolution_matrix(kernel: Tensor, grid: Grid, *, circular: bool = False) -> Tensor:
    """The (N, N) matrix M for which M @ x.flatten() is conv2d(x, kernel) with padding "same".

    kernel: (f_down, f_right). circular: wrap around at the borders instead of padding with zeros.
    """
    matrix = kernel.new_zeros(prod(grid), prod(grid))
    height, width = kernel.shape
    for row, column in product(range(height), range(width)):
        offset = row - (height - 1) // 2, column - (width - 1) // 2
        # += because several cells of a kernel larger than a circular grid fall on the same entry.
        matrix[neighbours(offset, grid, circular=circular)] += kernel[row, column]
    return matrix


def logit_for(mass: float, shape: Tensor, target: int) -> float | None:
    """The smallest logit ℓ for which softmax(ℓ · shape) has the share `mass` at `target`.

    shape: (N,), the logits of one query in units of that at its target, their maximum. The mass
    grows with ℓ. None if 1,000 is not enough.
    """
    return smallest_logit(lambda logit: (logit * shape).softmax(0)[target].item() >= mass)


def smallest_logit(reached: Callable[[float], bool]) -> float | None:
    """The ℓ > 0 from which on `reached(ℓ)` is true, by bisection; None if 1,000 is too small."""
    low = 0.0
    high = 1e3  # a mass that needs a larger logit counts as out of reach
    if not reached(high):
        return None
    for _ in range(60):  # more than a double has significant bits
        middle = 0.5 * (low + high)
        if reached(middle):
            high = middle
        else:
            low = middle
    return high
