"""Stochastic depth and sin-cos position embeddings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vitinit.models.layers import add_branch, draw_drop_path, sincos_position_embedding


def test_drop_path_scales_are_zero_or_the_inverse_survival_rate_with_mean_one():
    drop_path = draw_drop_path([0.0, 0.2, 0.5], 20_011, np.random.default_rng(0))
    assert drop_path.shape == (3, 20_011) and drop_path.dtype == torch.float32
    assert (drop_path[0] == 1).all()
    assert set(drop_path[1].unique().tolist()) == {0.0, 1.25}
    assert (drop_path == 0).double().mean(1).tolist() == pytest.approx([0, .2, .5], abs=.01)
    assert drop_path.mean(1).tolist() == pytest.approx([1, 1, 1], abs=.02)


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
