"""Mimetic initialisation: the products are the paper's."""

import pytest
import torch
from small_models import built, seeded

import vitinit
from vitinit.init.mimetic import noisy_identity
from vitinit.models.attention import Attention


def drawn(family: str, **options) -> tuple[torch.nn.Module, torch.Generator]:
    """The model after the init; the generator that drew it, after the base's draws alone."""
    sizes = {"head_dim": options.pop("head_dim")} if "head_dim" in options else {}
    model, base = (built(family, **sizes).double() for _ in range(2))
    vitinit.init_weights(model, "mimetic", generator=seeded(3), **options)
    generator = seeded(3)
    vitinit.init_weights(base, "default", generator=generator)
    return model, generator


def best(drawn: torch.Tensor, rank: int) -> torch.Tensor:
    u, s, vh = torch.linalg.svd(drawn)
    return (u[:, :rank] * s[:rank]) @ vh[:rank]


def test_all_products_of_a_swin_are_those_of_the_matrices_that_were_drawn(held_against):
    """In every block of every stage, each of its own width: per head the rank-d part of αZ + βI;
    then αZ − βI in full."""
    model, generator = drawn("swin", qk_alpha=0.6, qk_beta=0.5, value_alpha=0.3, value_beta=0.2)
    for attention in (layer for layer in model.modules() if isinstance(layer, Attention)):
        dim, width = attention.proj.in_features, attention.head_dim
        query, key, value = attention.qkv.weight.detach().chunk(3)  # each (C, C)
        for head in range(attention.num_heads):
            rows = slice(head * width, (head + 1) * width)
            expected = best(noisy_identity(dim, 0.6, 0.5, query, generator), width)
            torch.testing.assert_close(query[rows].T @ key[rows], expected, rtol=0, atol=1e-8)
            held_against(query[rows].T @ key[rows], expected)
        expected = noisy_identity(dim, 0.3, -0.2, query, generator)
        found = (attention.proj.weight.detach() @ value).T
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)
        held_against(found, expected)


@pytest.mark.parametrize("reads, size, head_dim", [("content", 68, 11), ("free", 35, 41)])
def test_a_simple_vits_products_are_the_best_low_rank_parts_of_what_is_drawn(
    reads, size, head_dim, held_against
):
    model, generator = drawn(f"simple_vit, {reads}", head_dim=head_dim, qk_alpha=0.6, qk_beta=0.5)
    for block in model.blocks:
        query, key = block.attn.factors  # (h, C or N, d)
        assert query.shape == key.shape == (4, size, head_dim)
        for one, other in zip(query.detach(), key.detach()):
            matrix = noisy_identity(size, 0.6, 0.5, torch.empty(0).double(), generator)
            torch.testing.assert_close(one @ other.T, best(matrix, head_dim), rtol=0, atol=1e-8)
            held_against(one @ other.T, best(matrix, head_dim))


@pytest.mark.parametrize("reads, size, head_dim", [("content", 68, 71), ("free", 35, 41)])
def test_a_simple_vits_noise_is_uniform_on_the_interval_of_the_papers_code(reads, size, head_dim):
    """arXiv 2401.12511's: 0.7 √(1/n) (2 rand − 1) + 0.7 I, here in full, since d ≥ n."""
    model, _ = drawn(f"simple_vit, {reads}", head_dim=head_dim)
    for query, key in (block.attn.factors for block in model.blocks):
        noise = (query @ key.mT).detach() - 0.7 * torch.eye(size, dtype=torch.float64)
        bound = 0.7 * (1 / size) ** 0.5
        assert 0.99 * bound < noise.abs().max() <= bound * (1 + 1e-8)
        assert noise.square().mean().item() == pytest.approx(bound**2 / 3, rel=0.05)


def test_untransposed_values_are_the_factors_as_the_released_code_stores_them():
    """qkv.weight's V rows are U√S and proj.weight √S Wᵀ: as numpy, not nn.Linear, reads them."""
    ours, papers = (
        [block.attn for block in drawn("vit", value_init=how)[0].blocks]
        for how in ("untransposed", "mimetic")
    )
    for one, other in zip(ours, papers):
        stored = one.v_weight.flatten(0, 1) @ one.proj.weight
        theirs = other.v_weight.flatten(0, 1).T @ other.proj.weight.T
        torch.testing.assert_close(stored, theirs, rtol=0, atol=1e-8)  # αZ − βI
        assert torch.equal(one.qkv.weight[: 2 * 54], other.qkv.weight[: 2 * 54])
