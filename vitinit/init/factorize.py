"""Factorisations that turn a wanted map into the weights that produce it.

`mimetic` wants a map over channels, (D, D), as the product of two weights of inner width r.
`impulse` wants a map over tokens, (N, N), which must first be expressed in the channels of the
position embedding, by a pseudo-inverse, before it is factorised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

STEEPEST = 1e3          # a mass that needs a larger logit than this counts as out of reach
BISECTIONS = 60         # more than a double has significant bits


def smallest_reaching(reached: Callable[[float], bool], largest: float) -> float | None:
    """The smallest number in [0, largest] for which `reached` is true, or None.

    Returns None if `reached` is false for `largest`. The search is a bisection, so `reached` must
    be monotone: true for all numbers above the smallest for which it is true. An example is whether
    the mass of a target, which grows with the scale of the logits, exceeds a wanted value.
    """
    if not reached(largest):
        return None
    low, high = 0.0, largest
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def balanced_factors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best rank-`rank` approximation U S Vᵀ of a matrix, as the factors U √S and V √S.

    matrix: (..., n, n). Returns (left, right), each (..., n, rank), in decreasing order of singular
        value; the approximation is left @ rightᵀ.

    The factors are computed from the eigenvectors of MᵀM, which for large matrices costs half as
    much as an SVD: left = M V / √S, so that left @ rightᵀ = M V Vᵀ is as exact as V is orthogonal.
    Squaring loses precision only in the balance between the factors: singular values below √eps
    times the largest are not split evenly but go to `right`.
    """
    squares, vectors = torch.linalg.eigh(matrix.mT @ matrix)             # in increasing order
    vectors = vectors[..., -rank:].flip(-1)                              # (..., n, r), decreasing
    values = squares[..., -rank:].flip(-1).clamp_min(0.0).sqrt()         # (..., r)
    floor = values[..., :1] * torch.finfo(matrix.dtype).eps ** 0.5
    roots = values.clamp_min(floor.clamp_min(torch.finfo(matrix.dtype).tiny)).sqrt()
    return matrix @ vectors / roots[..., None, :], vectors * roots[..., None, :]


@dataclass(frozen=True)
class PositionBasis:
    """The part of a position embedding that can be inverted.

    Let X = LayerNorm(P), (N, D), and XᵀX = W diag(s) Wᵀ, cut to the `rank` largest eigenvalues s.
    `directions` is W, (D, rank), with orthonormal columns. `inverse` is diag(1/s) Wᵀ Xᵀ, (rank, N),
    so that W @ inverse is the pseudo-inverse of X at that rank.
    """

    directions: Tensor
    inverse: Tensor


def position_basis(positions: Tensor, rank: int) -> PositionBasis:
    """The basis of the `rank` largest directions of a position embedding.

    positions: (N, D), after LayerNorm. rank: at most the numerical rank.

    The truncation is essential. LayerNorm makes the rows of X sum to zero, so that XᵀX is singular.
    And the smallest directions, each divided by its s, would take most of the norm of Q and K, which
    flattens the map even without noise (lesson 2 shows it). The released code of arXiv 2505.19985
    truncates, too; the paper does not mention it.
    """
    # The SVD of X gives √s and W without squaring the condition number, as XᵀX would.
    _, values, directions = torch.linalg.svd(positions, full_matrices=False)
    values, directions = values[:rank], directions[:rank].mT             # (r,), (D, r)
    return PositionBasis(directions, (positions @ directions / values**2).mT)


def numerical_rank(positions: Tensor) -> int:
    """Number of singular values above max(N, D) · eps · the largest, as numpy and torch count."""
    return int(torch.linalg.matrix_rank(positions))


def query_key_factors(maps: Tensor, basis: PositionBasis, width: int,
                      norm: float) -> tuple[Tensor, Tensor]:
    """Q and K, each (..., width, D), for which X Qᵀ K Xᵀ is nearest to `maps` at the basis' rank.

    maps: (..., N, N). width: rows of Q and K, the head's width; rows beyond the rank are zero.
    norm: the Frobenius norm of Q and of K.

    This is Algorithm 1 of arXiv 2505.19985: M̂ = X⁺ M X⁺ᵀ = U S Vᵀ, Qᵀ = U√S and Kᵀ = V√S, each
    divided by its Frobenius norm and multiplied by `norm`. Since M̂ = W C Wᵀ with orthonormal W, it
    suffices to compute the SVD of the (rank, rank) matrix C.
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
