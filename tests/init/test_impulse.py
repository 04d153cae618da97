"""Impulse initialisation: the transcription, and the convolution that the attention starts as."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.nn.functional import layer_norm

import vitinit
from vitinit.filters import (convolution_matrix, head_offsets, impulse_kernel, ordered_offsets,
                             shift_targets)
from vitinit.init.impulse import default_rank
from vitinit.init.layout import layout_of
from vitinit.mixing import mixing_matrices, target_mass
from vitinit.models.attention import attention_weights


def built(name: str = "vit_tiny", image_size=224, **sizes):
    return vitinit.build_model(name, num_classes=10, image_size=image_size, **sizes)


def initialised(model, seed: int = 0, **options):
    vitinit.init_weights(model, "impulse", generator=torch.Generator().manual_seed(seed),
                         **options)
    return model


def position_attention(model, block: int = 0) -> torch.Tensor:
    """The attention matrices on the position embedding alone, (h, N, N), with 1/√d as in the model."""
    positions, attention = layout_of(model).normalised_positions(), model.blocks[block].attn
    return attention_weights(positions @ attention.q_weight.mT,
                             positions @ attention.k_weight.mT).detach()


def cut_normal(shape: tuple[int, ...], std: float, generator: torch.Generator) -> torch.Tensor:
    """A float64 normal whose values beyond ±2 are drawn again, one after another in one array."""
    values = torch.zeros(shape, dtype=torch.float64).normal_(std=std, generator=generator).numpy()
    while (abs(values) > 2).any():
        again = torch.zeros(shape, dtype=torch.float64).normal_(std=std, generator=generator).numpy()
        values[abs(values) > 2] = again[abs(values) > 2]
    return torch.from_numpy(values)


def test_query_key_products_equal_a_direct_transcription():
    """Algorithm 1 with the additions of the released code, formula by formula, from the same draws."""
    sizes = dict(patch_size=4, embed_dim=46, depth=2, num_heads=2)
    model = initialised(built(image_size=(20, 28), **sizes).double(), seed=5, value_init="base",
                        rank=23)
    generator = torch.Generator().manual_seed(5)
    reference = built(image_size=(20, 28), **sizes).double()
    vitinit.init_weights(reference, "default", generator=generator)
    positions = 18 * reference.pos_embed.detach()[0, 1:]
    variance = positions.var(1, correction=0, keepdim=True)
    positions = (positions - positions.mean(1, keepdim=True)) / (variance + 1e-6).sqrt()
    left, values, right = torch.linalg.svd(positions.T @ positions)
    inverse = right.T[:, :23] @ torch.diag(1 / values[:23]) @ left[:, :23].T @ positions.T
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


# Mass on the target token, on the position embedding alone, seed 0: (centre, mean of the other heads).
# There is no universal threshold: the more directions of the position embedding a head can hold, the
# sharper the map, until there are so many that noise covers it.
@pytest.mark.parametrize("name, image_size, sizes, centre, shifted", [
    ("vit_tiny", 224, dict(num_heads=1, depth=1), 0.81, None),
    ("vit_small", 224, dict(num_heads=2, depth=1), 0.984, 0.902),
    ("vit_tiny", 32, dict(patch_size=4, embed_dim=64, num_heads=1, depth=1), 0.994, None),
    ("vit_tiny", 224, dict(depth=1), 0.997, 0.79),
    ("vit_small", 224, dict(depth=1), 1.0, 0.975),
    ("vit_tiny", 32, dict(patch_size=2), 0.993, 0.53),
    ("vit_tiny", 32, dict(patch_size=4, embed_dim=96, pool="mean"), 1.0, 0.994),
])
def test_heads_attend_to_their_targets(name, image_size, sizes, centre, shifted):
    model = initialised(built(name, image_size, **sizes))
    heads = model.blocks[0].attn.num_heads
    offsets = [ordered_offsets(3)[head % 9] for head in range(heads)]
    mass = target_mass(position_attention(model), offsets, model.grid)
    assert mass[0].item() == pytest.approx(centre, abs=0.02)
    others = mass[[head for head in range(heads) if head % 9]]
    assert (shifted is None) == (len(others) == 0)
    assert shifted is None or others.mean().item() == pytest.approx(shifted, abs=0.04)


def test_the_attention_of_an_initialised_layer_is_a_convolution():
    """Mixing z, of unit variance, by attention equals conv2d with the head's impulse. Measured: at most
    .0066 on average over the tokens that have a target; any other offset gives about 1."""
    model = initialised(built(image_size=32, patch_size=4, embed_dim=96, num_heads=3, depth=1))
    weights = position_attention(model)
    z = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    for head, offset in enumerate([(0, 0), (-1, 0), (0, 1)]):
        for other in ordered_offsets(3):
            kernel = impulse_kernel(other, 3)[None, None]
            expected = torch.nn.functional.conv2d(z[None, None], kernel, padding=1).flatten()
            rows = torch.nn.functional.conv2d(torch.ones(1, 1, 8, 8), kernel, padding=1).flatten() == 1
            error = (weights[head] @ z.flatten() - expected)[rows].abs().mean()
            assert error < 0.02 if other == offset else error > 0.5, (head, other)


def test_random_offsets_differ_between_blocks_and_follow_the_generator():
    sizes = dict(patch_size=4, embed_dim=198, num_heads=6, depth=2)
    model = initialised(built(image_size=32, **sizes), offsets="random")
    found = []
    for block in range(2):
        weights = position_attention(model, block)
        masses = torch.stack([target_mass(weights, [cell] * 6, model.grid)
                              for cell in ordered_offsets(3)])            # (9, h)
        assert masses.max(0).values.min() > 0.6      # every head has one clear offset
        found.append(masses.argmax(0).tolist())
    assert found[0] != found[1]
    again = initialised(built(image_size=32, **sizes), offsets="random")
    assert torch.equal(again.blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.weight)


@pytest.mark.parametrize("num_heads, kernel_size, before", [
    (5, 3, 5), (11, 3, 22), (3, 2, 7)])
def test_rotating_offsets_count_all_heads_before_round_the_kernel(num_heads, kernel_size, before):
    cells, generator = ordered_offsets(kernel_size), torch.Generator()
    state = generator.get_state()
    found = head_offsets(num_heads, cells, "rotating", generator, first=before)
    assert found == [cells[(before + head) % kernel_size**2] for head in range(num_heads)]
    ordered = head_offsets(num_heads, cells, "ordered", generator, first=before)
    assert ordered == [cells[head % kernel_size**2] for head in range(num_heads)]
    assert torch.equal(generator.get_state(), state)


def test_rotating_offsets_go_on_in_the_next_block_where_the_last_one_stopped():
    """Three blocks of five heads; in block 0 the ordered weights, to the bit."""
    sizes = dict(image_size=(20, 28), patch_size=4, embed_dim=155, num_heads=5, depth=3)
    model, ordered = (initialised(built(**sizes), offsets=offsets)
                      for offsets in ("rotating", "ordered"))
    for block in range(3):
        offsets = [ordered_offsets(3)[(5 * block + head) % 9] for head in range(5)]
        assert target_mass(position_attention(model, block), offsets, (5, 7)).min() > 0.9
        weight, other = (net.blocks[block].attn.qkv.weight for net in (model, ordered))
        assert torch.equal(weight, other) == (block == 0)


@pytest.mark.parametrize("value_init", ["mimetic"])
def test_real_images_leave_the_first_blocks_map_where_their_patches_are_faint(value_init):
    """The same through a forward pass; patches of large content swamp the position embedding."""
    model = initialised(built(image_size=32, patch_size=4, embed_dim=96, depth=2, pool="mean"),
                        value_init=value_init)
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    mass = [target_mass(mixing_matrices(model, loudness * images, blocks=[0])[0],
                        ordered_offsets(3)[:3], model.grid).mean() for loudness in (0.1, 1.0, 10.0)]
    assert mass[0] > 0.99 > mass[1] > mass[2]


def test_a_small_grid_limits_the_rank_and_leaves_the_rest_zero():
    model = initialised(built(image_size=12, patch_size=4, embed_dim=66, num_heads=2, depth=1))
    query = model.blocks[0].attn.q_weight[1]         # (33, 66), of rank 9: the grid has 9 tokens
    assert torch.linalg.matrix_rank(query) == 9
    assert (query[9:] == 0).all() and query.isfinite().all()


def test_the_class_tokens_position_is_left_out_of_the_solve_but_scaled():
    model = initialised(built(image_size=32, patch_size=4, embed_dim=96, depth=1))
    base = built(image_size=32, patch_size=4, embed_dim=96, depth=1)
    vitinit.init_weights(base, "default", generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.pos_embed, base.pos_embed * 18)
    torch.testing.assert_close(layout_of(model).normalised_positions(),
                               layer_norm(model.pos_embed[0, 1:], (96,), eps=1e-6))


@pytest.mark.parametrize("head, offset", [(1, (-1, 0)), (2, (0, 1))])
def test_rows_without_a_target_are_noise(head, offset):
    """In border rows of a shifted head, whose target is off the grid, attention is on no one token.

    Measured: the largest share is .10 and .14 there, .78 and .79 elsewhere.
    """
    model = initialised(built(depth=1))
    largest = position_attention(model)[head].amax(1)    # (N,)
    lost = shift_targets(offset, (14, 14)) < 0
    assert lost.sum() == 14
    assert largest[lost].mean() < 0.2 and largest[lost].max() < 0.5 < 0.7 < largest[~lost].mean()


@pytest.mark.parametrize("alpha, beta", [(0.6, -0.2)])
def test_values_and_projections_multiply_to_the_noisy_identity(alpha, beta):
    """x @ V.T @ proj.T = x @ (αZ − βI), with the Z that is drawn after the block's noise."""
    sizes = dict(image_size=(20, 28), patch_size=4, embed_dim=57, depth=2, num_heads=3)
    model = initialised(built(**sizes).double(), seed=3, value_alpha=alpha, value_beta=beta)
    generator = torch.Generator().manual_seed(3)
    vitinit.init_weights(built(**sizes).double(), "default", generator=generator)
    for block in model.blocks:
        cut_normal((3, 35, 35), 0.6, generator)
        bound = 3**0.5 / 57**0.5
        drawn = torch.empty(57, 57, dtype=torch.float64).uniform_(-bound * alpha, bound * alpha,
                                                                   generator=generator)
        product = block.attn.proj.weight @ block.attn.v_weight.flatten(0, 1)
        torch.testing.assert_close(product.T.detach(), drawn - beta * torch.eye(57).double(),
                                   rtol=0, atol=1e-8)


def test_so_many_directions_that_every_map_is_uniform_are_refused_with_what_would_help():
    model = built(num_heads=1, depth=1)
    with pytest.raises(ValueError, match=r"at best 0.0057 .* 0.0051 is uniform; use .* qk_norm, or"):
        initialised(model, rank=192)


@pytest.mark.parametrize("tokens, dim, rank", [
    (196, 192, 64), (196, 768, 98), (64, 96, 32), (1, 2, 1)])
def test_the_default_rank(tokens, dim, rank):
    assert default_rank(tokens, dim) == rank


def test_sincos_position_embeddings_are_refused_with_the_reason():
    model = built(image_size=224, pos_embed="sincos")
    with pytest.raises(ValueError, match=r"numerical rank is \d+ for 196 tokens.*uniform.*learned"):
        initialised(model)


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


def test_a_learned_embedding_that_cannot_tell_tokens_apart_is_refused():
    model = built(image_size=32, patch_size=4, embed_dim=96)
    with pytest.raises(ValueError, match="numerical rank is 0 for 64 tokens"):
        initialised(model, pos_embed_scale=0.0)


@pytest.mark.parametrize("options, message", [
    (dict(kernel_size=0), "kernel_size is 0"),
    (dict(kernel_size=17), "kernel_size is 17, but beyond 15 its outer offsets have no target"),
    (dict(base="zeros"), "base is 'zeros'"),
    (dict(offsets="spiral"), "offsets is 'spiral'"), (dict(value_init="x"), "value_init is 'x'"),
    (dict(rank=-1), "rank is -1"), (dict(qk_norm=0.0), "qk_norm 0.0"),
    (dict(noise_std=-1.0), "noise_std -1.0"), (dict(value_alpha=float("nan")), "value_alpha nan")])
def test_impossible_options_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        initialised(built(image_size=32, patch_size=4, embed_dim=96, depth=1), **options)
