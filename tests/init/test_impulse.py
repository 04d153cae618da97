"""Impulse initialisation: the transcription, and the convolution that the attention starts as."""

import sys
from functools import partial

import pytest
import torch
from small_models import written

import vitinit
from vitinit.init.impulse import default_rank
from vitinit.mixing.filters import convolution_matrix, impulse_kernel

initialised = partial(written, "impulse")


def built(name: str = "vit_tiny", image_size=224, **sizes):
    return vitinit.build_model(name, num_classes=10, image_size=image_size, **sizes)


def cut_normal(shape: tuple[int, ...], std: float, generator: torch.Generator) -> torch.Tensor:
    """A float64 normal whose values beyond ±2 are drawn again, one after another in one array."""
    values = torch.zeros(shape, dtype=torch.float64).normal_(std=std, generator=generator).numpy()
    while (abs(values) > 2).any():
        again = torch.zeros(shape, dtype=torch.float64).normal_(std=std, generator=generator)
        values[abs(values) > 2] = again.numpy()[abs(values) > 2]
    return torch.from_numpy(values)


@pytest.mark.parametrize("rank", [23, 7])
def test_query_key_products_equal_a_direct_transcription(rank, held_against):
    """Algorithm 1 with the additions of the released code, written out, from the same draws."""
    sizes = dict(patch_size=4, embed_dim=46, depth=2, num_heads=2)
    model = initialised(
        built(image_size=(20, 28), **sizes).double(), seed=3, value_init="base", rank=rank
    )
    generator = torch.Generator().manual_seed(3)  # of which noise is cut in both blocks
    reference = built(image_size=(20, 28), **sizes).double()
    vitinit.init_weights(reference, "default", generator=generator)
    positions = 18 * reference.pos_embed.detach()[0, 1:]
    variance = positions.var(1, correction=0, keepdim=True)
    positions = (positions - positions.mean(1, keepdim=True)) / (variance + 1e-6).sqrt()
    left, values, right = torch.linalg.svd(positions.T @ positions)
    inverse = right.T[:, :rank] @ torch.diag(1 / values[:rank]) @ left[:, :rank].T @ positions.T
    for block in model.blocks:
        noise = cut_normal((2, 35, 35), 0.6, generator)
        for head, offset in enumerate([(0, 0), (-1, 0)]):
            impulses = convolution_matrix(impulse_kernel(offset, 3).double(), (5, 7))
            target = 1000 * impulses + 3 * noise[head] * (impulses == 0)
            u, s, vh = torch.linalg.svd(inverse @ target @ inverse.T)
            query, key = u[:, :23] * s[:23].sqrt(), vh.T[:, :23] * s[:23].sqrt()
            expected = 49 * (query / query.norm()) @ (key / key.norm()).T
            actual = block.attn.q_weight[head].T @ block.attn.k_weight[head]
            torch.testing.assert_close(actual.detach(), expected, rtol=0, atol=1e-8)
            held_against(actual, expected)


def test_the_rank_is_limited_by_the_width_the_head_and_the_grid():
    for tokens, dim, rank in ((196, 192, 64), (196, 768, 98), (64, 96, 32), (1, 2, 1)):
        assert default_rank(tokens, dim) == rank
    model = initialised(built(image_size=12, patch_size=4, embed_dim=66, num_heads=2, depth=1))
    query = model.blocks[0].attn.q_weight[1]  # (33, 66), of rank 9: the grid has 9 tokens
    assert torch.linalg.matrix_rank(query) == 9
    assert (query[9:] == 0).all() and query.isfinite().all()


def test_a_learned_embedding_that_lacks_directions_is_refused_however_many_it_has(monkeypatch):
    """The same embedding for every second token: 32 directions are many, but not one per token."""
    module = sys.modules["vitinit.init.impulse"]
    draw_base = module.draw_base

    def doubled(model, base, generator):
        draw_base(model, base, generator)
        model.pos_embed[:, 2::2] = model.pos_embed[:, 1::2]

    monkeypatch.setattr(module, "draw_base", doubled)
    with pytest.raises(ValueError, match="numerical rank is 32 for 64 tokens"):
        initialised(built(image_size=32, patch_size=4, embed_dim=96))
