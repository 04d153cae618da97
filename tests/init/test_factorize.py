"""The factorisations against direct transcriptions of their formulas, in float64."""

from __future__ import annotations

import pytest
import torch

from vitinit.init.impulse import position_basis, query_key_factors
from vitinit.init.mimetic import balanced_factors

TOKENS, DIM = 35, 23


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer_normalised(positions: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(positions, positions.shape[-1:], eps=1e-6)


def transcription(positions: torch.Tensor, maps: torch.Tensor, rank: int, width: int,
                  norm: float) -> torch.Tensor:
    """Q Kᵀ by Algorithm 1 of arXiv 2505.19985 as it is stated, with D×D matrices.

    X⁺ = (XᵀX)⁺ Xᵀ, the inverse keeping the `rank` largest singular values; M̂ = X⁺ M X⁺ᵀ = U S Vᵀ;
    Q = (U√S)[:, :width], K = (V√S)[:, :width], each over its Frobenius norm, times `norm`.
    """
    left, values, right = torch.linalg.svd(positions.T @ positions)
    inverse = right.T[:, :rank] @ torch.diag(1 / values[:rank]) @ left[:, :rank].T @ positions.T
    left, values, right = torch.linalg.svd(inverse @ maps @ inverse.T)
    query = left[:, :width] * values[:width].sqrt()
    key = right.T[:, :width] * values[:width].sqrt()
    return (norm * query / query.norm()) @ (norm * key / key.norm()).T


@pytest.mark.parametrize("rank, width", [(11, 11), (7, 11), (22, 11), (5, 3)])
def test_query_key_products_equal_the_transcription(rank, width):
    positions, maps = layer_normalised(drawn(TOKENS, DIM)), drawn(2, TOKENS, TOKENS, seed=1)
    query, key = query_key_factors(maps, position_basis(positions, rank), width, norm=7.0)
    assert query.shape == key.shape == (2, width, DIM)
    for head in range(2):
        expected = transcription(positions, maps[head], rank, width, norm=7.0)
        torch.testing.assert_close(query[head].T @ key[head], expected, rtol=0, atol=1e-8)
        assert query[head].norm().item() == pytest.approx(7.0)
        assert key[head].norm().item() == pytest.approx(7.0)


def test_a_map_that_the_position_embedding_can_express_is_recovered():
    """With more directions than the map's rank nothing but the scale is lost."""
    positions = layer_normalised(drawn(TOKENS, DIM))
    wanted = drawn(DIM, 3, seed=1) @ drawn(3, DIM, seed=2)
    maps = positions @ wanted @ positions.T
    query, key = query_key_factors(maps[None], position_basis(positions, DIM - 1), 11, norm=1.0)
    logits = (positions @ query[0].T) @ (positions @ key[0].T).T
    torch.testing.assert_close(logits / logits.norm(), maps / maps.norm(), rtol=0, atol=1e-10)


def test_the_basis_is_the_truncated_pseudo_inverse():
    positions = layer_normalised(drawn(TOKENS, DIM))
    basis = position_basis(positions, DIM - 1)
    torch.testing.assert_close(basis.directions @ basis.inverse, torch.linalg.pinv(positions),
                               rtol=0, atol=1e-10)


@pytest.mark.parametrize("rank", [1, 7, 23])
def test_balanced_factors_are_the_truncated_svd(rank):
    matrix = drawn(2, 23, 23)
    left, right = balanced_factors(matrix, rank)
    u, s, vh = torch.linalg.svd(matrix)
    expected = (u[..., :rank] * s[..., None, :rank]) @ vh[..., :rank, :]
    torch.testing.assert_close(left @ right.mT, expected, rtol=0, atol=1e-10)
    for factor in (left, right):                     # each carries √S, in falling order
        norms = factor.square().sum(-2)
        torch.testing.assert_close(norms, s[..., :rank], rtol=0, atol=1e-8)


def test_balanced_factors_of_a_singular_matrix_are_finite_and_exact():
    matrix = drawn(23, 5) @ drawn(5, 23, seed=1)
    left, right = balanced_factors(matrix, 23)
    assert left.isfinite().all() and right.isfinite().all()
    torch.testing.assert_close(left @ right.T, matrix, rtol=0, atol=1e-8)
    left, right = balanced_factors(torch.zeros(7, 7), 7)
    assert (left == 0).all() and right.isfinite().all()


def test_factors_wider_than_the_basis_are_padded_with_zeros():
    """As many columns as the head has channels, whatever the rank of the position embedding."""
    positions, maps = layer_normalised(drawn(TOKENS, DIM)), drawn(3, TOKENS, TOKENS, seed=1)
    for factor in query_key_factors(maps, position_basis(positions, 7), 11, norm=2.0):
        assert factor.shape == (3, 11, DIM)
        assert (factor[:, 7:] == 0).all() and (factor[:, :7] != 0).any(-1).all()
