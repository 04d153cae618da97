"""Mimetic initialisation: the products are the paper's."""

from __future__ import annotations

import pytest
import torch

import vitinit
from vitinit.init.mimetic import noisy_identity
from vitinit.models import SimpleViT
from vitinit.models.attention import Attention

DIM, HEADS = 51, 3


def test_untransposed_values_are_the_factors_as_the_released_code_stores_them():
    """qkv.weight's V rows are U√S and proj.weight √S Wᵀ: as numpy, not nn.Linear, reads them."""
    model, paper = (vitinit.build_model("vit_tiny", num_classes=7, image_size=32, patch_size=4,
                                        embed_dim=DIM, depth=2, num_heads=HEADS) for _ in range(2))
    for each, how in ((model, "untransposed"), (paper, "mimetic")):
        vitinit.init_weights(each, "mimetic", generator=torch.Generator().manual_seed(3),
                             value_init=how)
    for block, other in zip(model.blocks, paper.blocks):
        stored = block.attn.v_weight.flatten(0, 1) @ block.attn.proj.weight
        theirs = other.attn.v_weight.flatten(0, 1).T @ other.attn.proj.weight.T
        torch.testing.assert_close(stored, theirs, rtol=0, atol=1e-5)    # αZ − βI
        assert torch.equal(block.attn.qkv.weight[:2 * DIM], other.attn.qkv.weight[:2 * DIM])


# ---------------------------------------------------------------------------------------------
# Swin: the same in every block of every stage, each with its own width
# ---------------------------------------------------------------------------------------------


def swin(name: str = "mimetic", seed: int = 0, **options) -> torch.nn.Module:
    """Stages of 33 and 66 channels; heads of 11 channels in the first, 6 in the second."""
    model = vitinit.build_model("swin_tiny", num_classes=7, image_size=(24, 40), patch_size=2,
                                embed_dim=33, depths=(2, 2), num_heads=(3, 11),
                                window_size=(3, 5)).double()
    vitinit.init_weights(model, name, generator=torch.Generator().manual_seed(seed), **options)
    return model


def test_all_products_of_a_swin_are_those_of_the_matrices_that_were_drawn():
    """Per head the rank-d part of αZ + βI, by a direct SVD; then αZ − βI in full."""
    options = dict(qk_alpha=0.6, qk_beta=0.5, value_alpha=0.3, value_beta=0.2)
    model, generator = swin(seed=3, **options), torch.Generator().manual_seed(3)
    vitinit.init_weights(swin(), "default", generator=generator)         # the base's draws
    for attention in (layer for layer in model.modules() if isinstance(layer, Attention)):
        dim, width = attention.proj.in_features, attention.head_dim
        query, key, value = attention.qkv.weight.detach().chunk(3)       # each (C, C)
        for head in range(attention.num_heads):
            u, s, vh = torch.linalg.svd(noisy_identity(dim, 0.6, 0.5, query, generator))
            rows = slice(head * width, (head + 1) * width)
            torch.testing.assert_close(query[rows].T @ key[rows], (u[:, :width] * s[:width])
                                       @ vh[:width], rtol=0, atol=1e-8)
        expected = noisy_identity(dim, 0.3, -0.2, query, generator)
        torch.testing.assert_close((attention.proj.weight.detach() @ value).T, expected,
                                   rtol=0, atol=1e-8)


# ---------------------------------------------------------------------------------------------
# SimpleViT: Q and K alone; free ones over tokens
# ---------------------------------------------------------------------------------------------


def simple_vit(reads: str, head_dim: int, name: str = "mimetic",
               generator: torch.Generator | None = None, **options) -> SimpleViT:
    """28 channels, 15 tokens."""
    model = vitinit.build_model("simple_vit", num_classes=7, image_size=(6, 15), patch_size=(2, 3),
                                embed_dim=28, depth=2, num_heads=3, head_dim=head_dim, reads=reads,
                                input_pos_embed=reads == "content").double()
    vitinit.init_weights(model, name, generator=generator or torch.Generator().manual_seed(3),
                         **options)
    return model


def queries_and_keys(block: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """(h, C or N, d) each."""
    attention = block.attn
    if attention.reads == "free":
        return attention.query.detach(), attention.key.detach()
    return attention.q_weight.mT.detach(), attention.k_weight.mT.detach()


@pytest.mark.parametrize("reads, head_dim", [("content", 11), ("free", 31)])
def test_a_simple_vits_products_are_the_best_low_rank_parts_of_the_matrices_drawn(reads, head_dim):
    model = simple_vit(reads, head_dim, qk_alpha=0.6, qk_beta=0.5)
    generator = torch.Generator().manual_seed(3)
    simple_vit(reads, head_dim, "default", generator)                    # the base's draws
    size = 15 if reads == "free" else 28
    for query, key in map(queries_and_keys, model.blocks):
        assert query.shape == key.shape == (3, size, head_dim)
        for head in range(3):
            drawn = noisy_identity(size, 0.6, 0.5, torch.empty(0).double(), generator)
            u, s, vh = torch.linalg.svd(drawn)
            expected = (u[:, :head_dim] * s[:head_dim]) @ vh[:head_dim]
            torch.testing.assert_close(query[head] @ key[head].T, expected, rtol=0, atol=1e-8)
