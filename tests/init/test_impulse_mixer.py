"""Impulse initialisation of the Mixer: its token MLPs are linear maps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from vitinit.init.impulse_mixer import write_linear_map
from vitinit.models.layers import Mlp

TOKENS = 15


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("hidden, bias, gain", [(30, 4.0, 1.0), (37, 4.0, -0.75),
                                                (15, 4.0, 1.0), (23, 8.0, -0.75)])
def test_a_token_mlp_is_the_given_map_exactly_or_through_gelus_nearly_linear_part(hidden, bias, gain):
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
