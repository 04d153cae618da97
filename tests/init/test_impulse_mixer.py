"""Impulse initialisation of the Mixer: its token MLPs are linear maps, and these are shifts."""

from __future__ import annotations

import pytest
import torch
from redrawn import drawn
from small_models import built, seeded
from torch.nn.functional import gelu

import vitinit
from vitinit.filters import ordered_offsets, shift_matrix
from vitinit.init.impulse_mixer import write_linear_map
from vitinit.mixing import mixing_matrices
from vitinit.models.layers import Mlp

TOKENS = 15


@pytest.mark.parametrize("hidden, bias, gain", [(30, 4.0, 1.0), (37, 4.0, -0.75),
                                                (15, 4.0, 1.0), (23, 8.0, -0.75)])
def test_a_token_mlp_is_the_given_map_exactly_or_through_gelus_nearly_linear_part(hidden, bias,
                                                                                  gain):
    """gain · (GELU(Hx + b) − b) with fewer than twice as many hidden units as tokens.

    Surplus units are not dead: they keep their inputs, so that their outputs can be learnt.
    """
    mlp, matrix = Mlp(TOKENS, hidden).double(), drawn(TOKENS, TOKENS)
    used = TOKENS * (2 if hidden >= 2 * TOKENS else 1)
    surplus = [tensor[used:].clone() for tensor in mlp.fc1.parameters()]
    with torch.no_grad():
        write_linear_map(mlp, matrix, gain=gain, linear_bias=bias)
    assert all(map(torch.equal, surplus, [tensor[used:] for tensor in mlp.fc1.parameters()]))
    x = 10.0 * drawn(7, TOKENS, seed=2)
    wanted = x @ matrix.T if used > TOKENS else gelu(x @ matrix.T + bias) - bias
    torch.testing.assert_close(mlp(x).detach(), gain * wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("family, bias, distance", [("mixer", 4.0, 1e-9),
                                                    ("mixer, narrow", 8.0, 5e-4)])
def test_each_block_mixes_tokens_as_the_shift_whose_turn_it_is(family, bias, distance):
    """In all channels, and past the edge nothing is read. GELU′(x + 8) − 1 is at most 5e-4 for the
    x that LayerNorm makes, of which some reach −4."""
    model = built(family, depth=11).double().eval()
    vitinit.init_weights(model, "impulse", generator=seeded(), linear_bias=bias)
    found = mixing_matrices(model, drawn(2, 3, 20, 28), heads=[0, 1, 2])
    for block, matrices in found.items():
        wanted = shift_matrix(ordered_offsets(3)[block % 9], (5, 7))
        assert (matrices - wanted).abs().sum(-1).max() / 2 <= distance
