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


def test_a_map_that_the_position_embedding_can_express_is_recovered():
    """With more directions than the map's rank nothing but the scale is lost."""
    positions = layer_normalised(drawn(TOKENS, DIM))
    wanted = drawn(DIM, 3, seed=1) @ drawn(3, DIM, seed=2)
    maps = positions @ wanted @ positions.T
    query, key = query_key_factors(maps[None], position_basis(positions, DIM - 1), 11, norm=1.0)
    logits = (positions @ query[0].T) @ (positions @ key[0].T).T
    torch.testing.assert_close(logits / logits.norm(), maps / maps.norm(), rtol=0, atol=1e-10)


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
