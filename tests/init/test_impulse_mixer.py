"""Impulse initialisation of the Mixer: its token MLPs are linear maps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

import vitinit
from vitinit.init.impulse_mixer import write_linear_map
from vitinit.models.layers import Mlp

GRID, TOKENS = (3, 5), 15
SIZES = dict(image_size=(12, 20), patch_size=4, depth=11, tokens_ratio=1.0, channels_ratio=1.0)
WIDE, NARROW = 37, 23           # hidden units: seven and eight more than are needed


def initialised(hidden: int, name: str = "impulse", seed: int = 0, **options) -> nn.Module:
    model = vitinit.build_model("mixer_s16", num_classes=7, embed_dim=hidden, **SIZES).double()
    vitinit.init_weights(model, name, generator=torch.Generator().manual_seed(seed), **options)
    return model


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def nodes() -> tuple[Tensor, Tensor]:
    """Points and weights with which Σ w f(x) is the mean of f under a standard normal."""
    x = torch.linspace(-13.0, 13.0, 5201, dtype=torch.float64)
    weights = torch.exp(-x.square() / 2)
    return x, weights / weights.sum()


# ---------------------------------------------------------------------------------------------
# What the token MLP computes
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden, gain", [(2 * TOKENS, 1.0), (WIDE, -0.75)])
def test_with_twice_as_many_hidden_units_as_tokens_any_linear_map_is_exact(hidden, gain):
    """With surplus units, too, and for any linear_bias."""
    mlp, matrix = Mlp(TOKENS, hidden).double(), drawn(TOKENS, TOKENS)
    with torch.no_grad():
        write_linear_map(mlp, matrix, gain=gain, linear_bias=4.0)
    x = 10.0 * drawn(7, TOKENS, seed=2)
    torch.testing.assert_close(mlp(x).detach(), gain * x @ matrix.T, rtol=0, atol=1e-11)


@pytest.mark.parametrize("hidden, bias, gain", [(TOKENS, 4.0, 1.0), (NARROW, 8.0, -0.75)])
def test_with_fewer_hidden_units_the_map_goes_through_gelus_nearly_linear_part(hidden, bias, gain):
    """gain · (GELU(Hx + b) − b), which is nearly Hx where that is more than −b.

    Surplus units are not dead: they keep their inputs, so that their outputs can be learnt.
    """
    mlp, matrix = Mlp(TOKENS, hidden).double(), drawn(TOKENS, TOKENS)
    surplus = [tensor[TOKENS:].clone() for tensor in mlp.fc1.parameters()]
    with torch.no_grad():
        write_linear_map(mlp, matrix, gain=gain, linear_bias=bias)
    assert all(map(torch.equal, surplus, [tensor[TOKENS:] for tensor in mlp.fc1.parameters()]))
    x = 10.0 * drawn(7, TOKENS, seed=2)
    expected = gain * (gelu(x @ matrix.T + bias) - bias)
    torch.testing.assert_close(mlp(x).detach(), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("bias, stated, measured", [(4.0, 1.5e-2, 1.5145e-2),
                                                    (8.0, 6e-6, 6.277e-6)])
def test_the_narrow_error_on_standard_normal_tokens_is_the_integral(nodes, bias, stated, measured):
    """√E[((x + b)(Φ(x + b) − 1))²], as GELU(x + b) − b − x = (x + b)(Φ(x + b) − 1).

    Integrated, not drawn: at b = 8 nearly all of it comes from x ≈ −5.3, one draw in ten million.
    """
    x, weights = nodes
    integral = (weights * ((x + bias) * torch.special.ndtr(-(x + bias))).square()).sum().sqrt()
    block = initialised(NARROW, linear_bias=bias).blocks[1]              # looks up
    tokens = x[:, None, None].expand(-1, TOKENS, 1)                      # (nodes, N, 1)
    error = (block.token_mixing(tokens).detach() - tokens)[:, 5:, 0]     # all but the first row
    rms = (weights[:, None] * error.square()).sum(0).sqrt()
    torch.testing.assert_close(rms, integral.expand(10), rtol=1e-6, atol=0)
    assert integral.item() == pytest.approx(measured, rel=1e-3)
    assert integral.item() == pytest.approx(stated, rel=0.05)            # as the docstring has it
