"""Mimetic initialisation: the products are the paper's."""

from __future__ import annotations

import pytest
import torch

import vitinit
from vitinit.init.mimetic import noisy_identity

DIM, HEADS = 51, 3


@pytest.fixture
def block() -> torch.nn.Module:
    model = vitinit.build_model("vit_tiny", num_classes=7, image_size=32, patch_size=4,
                                embed_dim=DIM, depth=2, num_heads=HEADS).double()
    vitinit.init_weights(model, "mimetic", generator=torch.Generator().manual_seed(0))
    return model.blocks[1]


def test_noisy_identity_has_the_stated_moments():
    matrix = noisy_identity(401, 0.7, 0.4, torch.empty(0, dtype=torch.float64),
                            torch.Generator().manual_seed(0))
    noise = (matrix - 0.4 * torch.eye(401)) / 0.7
    assert noise.var().item() == pytest.approx(1 / 401, rel=0.02)
    assert noise.mean().item() == pytest.approx(0, abs=1e-3)
    assert noise.abs().max().item() <= (3 / 401) ** 0.5  # uniform: no tails


def test_attention_as_the_identity_maps_tokens_by_minus_beta(block):
    """x @ V.T @ proj.T = x @ (αZ − βI): the diagonal is −β on average, and its noise is α²/D."""
    attention = block.attn
    values = attention.v_weight.flatten(0, 1)
    product = (attention.proj.weight @ values).T.detach()
    assert product.diagonal().mean().item() == pytest.approx(-0.4, abs=0.04)
    off_diagonal = product[~torch.eye(DIM, dtype=torch.bool)]
    assert off_diagonal.std().item() == pytest.approx(0.4 / DIM**0.5, rel=0.05)


def test_query_key_products_are_the_best_low_rank_part_of_the_noisy_identity():
    """Re-draw the matrices from the same generator and cut them by a direct SVD."""
    model = vitinit.build_model("vit_tiny", num_classes=7, image_size=32, patch_size=4,
                                embed_dim=DIM, depth=1, num_heads=HEADS).double()
    vitinit.init_weights(model, "mimetic", generator=torch.Generator().manual_seed(3))
    attention = model.blocks[0].attn
    generator = torch.Generator().manual_seed(3)
    other = vitinit.build_model("vit_tiny", num_classes=7, image_size=32, patch_size=4,
                                embed_dim=DIM, depth=1, num_heads=HEADS).double()
    vitinit.init_weights(other, "default", generator=generator)           # the base's draws
    for head in range(HEADS):
        u, s, vh = torch.linalg.svd(noisy_identity(DIM, 0.7, 0.7, torch.empty(0).double(),
                                                   generator))
        rank = DIM // HEADS
        expected = (u[:, :rank] * s[:rank]) @ vh[:rank]
        actual = attention.q_weight[head].T @ attention.k_weight[head]
        torch.testing.assert_close(actual.detach(), expected, rtol=0, atol=1e-8)


def test_the_first_heads_values_carry_the_most(block):
    energy = block.attn.v_weight.square().sum((1, 2))
    assert energy[0] > energy[1] > energy[2]
