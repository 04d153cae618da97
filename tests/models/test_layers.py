"""Patches, stochastic depth and sin-cos position embeddings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vitinit.keys import Stream, keyed_generator
from vitinit.models.layers import (PatchEmbed, add_branch, draw_drop_path, drop_path_rates,
                                   sincos_position_embedding)


def test_patch_embedding_is_a_linear_map_of_each_patch():
    embed = PatchEmbed(image_size=(6, 15), patch_size=(2, 5), embed_dim=7)
    images = torch.randn(3, 3, 6, 15, generator=torch.Generator().manual_seed(0))
    tokens = embed(images)
    assert embed.grid == (3, 3) and tokens.shape == (3, 9, 7)
    row, column = 2, 1
    patch = images[:, :, 2 * row:2 * row + 2, 5 * column:5 * column + 5].flatten(1)
    expected = patch @ embed.proj.weight.flatten(1).T + embed.proj.bias
    torch.testing.assert_close(tokens[:, row * 3 + column], expected)


def test_drop_rates_rise_linearly_over_the_blocks():
    assert drop_path_rates(0.3, 4) == pytest.approx([0, 0, .1, .1, .2, .2, .3, .3])
    assert drop_path_rates(0.3, 3, first=0.3) == (0.3,) * 6


def test_drop_path_scales_are_zero_or_the_inverse_survival_rate_with_mean_one():
    drop_path = draw_drop_path([0.0, 0.2, 0.5], 20_011, np.random.default_rng(0))
    assert drop_path.shape == (3, 20_011) and drop_path.dtype == torch.float32
    assert (drop_path[0] == 1).all()
    assert set(drop_path[1].unique().tolist()) == {0.0, 1.25}
    assert (drop_path == 0).double().mean(1).tolist() == pytest.approx([0, .2, .5], abs=.01)
    assert drop_path.mean(1).tolist() == pytest.approx([1, 1, 1], abs=.02)


def test_drop_path_scales_depend_on_their_key_alone():
    draws = [draw_drop_path([.5] * 3, 13, keyed_generator(7, Stream.DROP_PATH, step))
             for step in (11, 12, 11)]
    assert torch.equal(draws[0], draws[2]) and not torch.equal(draws[0], draws[1])


@pytest.mark.parametrize("shape", [(2, 5), (5, 2, 7), (3, 3, 3)])     # tokens, a map, all equal
def test_a_dropped_branch_leaves_its_image_as_it_was(shape):
    x, branch = torch.ones(3, *shape), torch.full((3, *shape), 10.0)
    y = add_branch(x, branch, torch.tensor([0.0, 1.0, 2.0]))
    for image, value in zip(y, (1.0, 11.0, 21.0)):
        assert torch.equal(image, torch.full(shape, value))
    assert torch.equal(add_branch(x, branch, None), x + branch)


def test_drop_path_scales_do_not_change_a_branchs_precision():
    x = torch.ones(3, 2, 5, dtype=torch.bfloat16)
    assert add_branch(x, x, torch.tensor([0.0, 1.0, 1.25])).dtype == torch.bfloat16


def test_sincos_position_embeddings_are_the_formula():
    positions = sincos_position_embedding((3, 5), dim=28)
    assert positions.shape == (15, 28)
    row, column, channel = 2, 4, 3
    frequency = 10_000 ** (-channel / 7)
    token = positions[row * 5 + column]
    for quarter, value in enumerate((math.sin(column * frequency), math.cos(column * frequency),
                                     math.sin(row * frequency), math.cos(row * frequency))):
        assert token[7 * quarter + channel].item() == pytest.approx(value, abs=1e-6)
