"""Impulse initialisation of the Mixer: its token MLPs are linear maps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

import vitinit
from vitinit.filters import convolution_matrix, impulse_kernel, ordered_offsets
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


def shift(offset: tuple[int, int], size: int = 3) -> Tensor:
    return convolution_matrix(impulse_kernel(offset, size).double(), GRID)


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
    """gain · (GELU(Hx + b) − b), which is nearly Hx where that is more than −b."""
    mlp, matrix = Mlp(TOKENS, hidden).double(), drawn(TOKENS, TOKENS)
    with torch.no_grad():
        write_linear_map(mlp, matrix, gain=gain, linear_bias=bias)
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


@pytest.mark.parametrize("hidden, kind", [(2 * TOKENS, "wide"), (2 * TOKENS - 1, "narrow"),
                                          (TOKENS, "narrow")])
def test_twice_the_tokens_is_where_wide_begins(hidden, kind):
    bias = initialised(hidden).blocks[0].mlp_tokens.fc1.bias
    assert (bias[:TOKENS] == (0.0 if kind == "wide" else 4.0)).all()


def test_fewer_hidden_units_than_tokens_are_refused_before_anything_is_drawn():
    model = vitinit.build_model("mixer_s16", num_classes=7, embed_dim=TOKENS - 1, **SIZES)
    generator = torch.Generator().manual_seed(0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = generator.get_state()
    with pytest.raises(ValueError, match="as tokens, 15, and it has 14; raise tokens_ratio or"):
        vitinit.init_weights(model, "impulse", generator=generator)
    assert torch.equal(generator.get_state(), state)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


# ---------------------------------------------------------------------------------------------
# What is written
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden, used, base", [(WIDE, 2 * TOKENS, "default"), (NARROW, TOKENS, "torch")])
def test_spare_units_keep_the_bases_rows_of_fc1_and_get_zero_columns_in_fc2(hidden, used, base):
    reference, model = initialised(hidden, base), initialised(hidden, base=base)
    for ours, theirs in zip(model.blocks, reference.blocks):
        ours, theirs = ours.mlp_tokens, theirs.mlp_tokens
        assert torch.equal(ours.fc1.weight[used:], theirs.fc1.weight[used:])
        assert torch.equal(ours.fc1.bias[used:], theirs.fc1.bias[used:])
        assert (ours.fc1.weight[used:] != 0).all()   # not dead: fc2's columns can learn
        assert (ours.fc2.weight[:, used:] == 0).all()


@pytest.mark.parametrize("hidden, base", [(WIDE, "torch"), (NARROW, "default")])
def test_the_token_mlps_are_all_that_is_written(hidden, base):
    reference = initialised(hidden, base).state_dict()
    for key, value in initialised(hidden, base=base).state_dict().items():
        assert torch.equal(value, reference[key]) != ("mlp_tokens" in key), key


# ---------------------------------------------------------------------------------------------
# Options
# ---------------------------------------------------------------------------------------------


def found_offsets(model: nn.Module, kernel_size: int = 3) -> list[tuple[int, int]]:
    """The offset of each block, read from the first N rows of fc1."""
    shifts = {offset: shift(offset, kernel_size) for offset in ordered_offsets(kernel_size)}
    return [next(offset for offset, matrix in shifts.items()
                 if torch.equal(matrix, block.mlp_tokens.fc1.weight[:TOKENS]))
            for block in model.blocks]


def test_random_offsets_are_drawn_for_each_block_from_the_generator():
    found = [found_offsets(initialised(WIDE, seed=seed, offsets="random")) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    assert len(set(found[0])) > 2 and found[0] != (2 * ordered_offsets(3))[:11]


@pytest.mark.parametrize("options, message", [
    (dict(kernel_size=0), "kernel_size is 0"),
    (dict(kernel_size=6), "kernel_size is 6, but beyond 5 its outer offsets have no target on the "
                          "3×5 grid"),
    (dict(offsets="spiral"), "offsets is 'spiral'"), (dict(base="zeros"), "base is 'zeros'")])
def test_impossible_options_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        initialised(WIDE, **options)
