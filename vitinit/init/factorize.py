"""From a wanted token-to-token map to the weights that produce it.

`mimetic` and `impulse` end in a factorisation. A map over channels, (D, D), is split into two factors
of inner width r; a map over tokens, (N, N), first has to be pulled back through the position embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

STEEPEST = 1e3          # logits beyond which an attention mass counts as out of reach
BISECTIONS = 60         # more than the bits of a double


def smallest_reaching(reached: Callable[[float], bool], largest: float) -> float | None:
    """The smallest number up to `largest` that `reached` says yes to; None if not even that one.

    By bisection: `reached` must say yes to whatever is larger, as a target's mass grows with the
    scale of the logits.
    """
    if not reached(largest):
        return None
    low, high = 0.0, largest
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def balanced_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best rank-`rank` approximation U S Vᵀ as (left, right) = (U √S, V √S), left @ rightᵀ.

    matrix: (..., n, n). Returns two of (..., n, rank), singular values in falling order.

    It goes through the eigenvectors of MᵀM, which on large matrices costs half of an SVD. Then
    left = M V / √S, so that left @ rightᵀ = M V Vᵀ is as exact as V is orthogonal; only the balance
    of singular values below √eps · S₀ is blurred, and those below that are given to `right` alone.
    """
    squares, vectors = torch.linalg.eigh(matrix.mT @ matrix)             # rising order
    vectors = vectors[..., -rank:].flip(-1)                              # (..., n, r), falling
    values = squares[..., -rank:].flip(-1).clamp_min(0.0).sqrt()         # (..., r)
    floor = values[..., :1] * torch.finfo(matrix.dtype).eps ** 0.5
    roots = values.clamp_min(floor.clamp_min(torch.finfo(matrix.dtype).tiny)).sqrt()
    return matrix @ vectors / roots[..., None, :], vectors * roots[..., None, :]


@dataclass(frozen=True)
class PositionBasis:
    """The part of a position embedding that can be inverted.

    With X = LayerNorm(P), (N, D), and XᵀX = W diag(s) Wᵀ, it keeps the `rank` largest eigenvalues:
    `directions` W is (D, rank), orthonormal; `inverse` is diag(1/s) Wᵀ Xᵀ, (rank, N), so that
    W @ inverse is the pseudo-inverse of X at that rank.
    """

    directions: Tensor
    inverse: Tensor


def position_basis(positions: Tensor, rank: int) -> PositionBasis:
    """positions: (N, D), after LayerNorm. rank: how many directions to keep, at most the numerical rank.

    Truncation is what makes the method work: LayerNorm's rows sum to zero, so XᵀX is singular, and
    at full rank the noise of the small directions drowns the map (arXiv 2505.19985, released code).
    """
    # The SVD of X gives s and W without squaring the condition number.
    _, values, directions = torch.linalg.svd(positions, full_matrices=False)
    values, directions = values[:rank], directions[:rank].mT             # (r,), (D, r)
    return PositionBasis(directions, (positions @ directions / values**2).mT)


def numerical_rank(positions: Tensor) -> int:
    """Singular values above max(N, D) · eps · the largest, as numpy and torch count them."""
    return int(torch.linalg.matrix_rank(positions))


def query_key_factors(maps: Tensor, basis: PositionBasis, width: int,
                      norm: float) -> tuple[Tensor, Tensor]:
    """Q, K, each (..., width, D) as weights have it, for which X Qᵀ K Xᵀ is nearest to `maps` at the
    basis' rank.

    maps: (..., N, N). Algorithm 1 of arXiv 2505.19985: M̂ = X⁺ M X⁺ᵀ = U S Vᵀ, Qᵀ = U√S, Kᵀ = V√S,
    each divided by its Frobenius norm and multiplied by `norm`. As M̂ = W C Wᵀ with orthonormal W,
    the SVD is that of the (rank, rank) core C. Rows beyond the rank are zero.
    """
    core = basis.inverse @ maps @ basis.inverse.mT                       # (..., r, r)
    left, values, right = torch.linalg.svd(core)
    roots = values[..., None, :width].sqrt()
    query = basis.directions @ (left[..., :width] * roots)               # (..., D, ≤ width)
    key = basis.directions @ (right.mT[..., :width] * roots)
    padding = (0, width - query.shape[-1])
    return tuple(torch.nn.functional.pad(
        norm * factor / torch.linalg.matrix_norm(factor, keepdim=True), padding).mT
        for factor in (query, key))
