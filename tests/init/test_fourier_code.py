"""The Fourier code and the bias channels: waves, shifts, and the logits of the weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vitinit.init.fourier_code import (STEEPEST, extend_to_bias_channels, gaussian_weights,
                                       impulse_weights, rotated_factors, wave_code, waves,
                                       with_bias_channels)

GRIDS = [(8, 8), (14, 14), (16, 16), (5, 7), (7, 5), (6, 11), (1, 13), (4, 1)]


def cells(grid: tuple[int, int]) -> list[tuple[int, int]]:
    """(row, column) of every token."""
    return [(row, column) for row in range(grid[0]) for column in range(grid[1])]


def nearest(step: int, size: int) -> int:
    """A step along a ring of `size` cells, taken the shorter way."""
    return (step + size // 2) % size - size // 2


def logits_written_out(frequencies: Tensor, weights: Tensor, grid: tuple[int, int],
                       offset: tuple[int, int]) -> Tensor:
    """(N, N): Σ w cos(u (Δy − δy) + v (Δx − δx)) for each pair of tokens, term by term."""
    rows = []
    for row, column in cells(grid):
        rows.append([sum(weight * math.cos(u * (y - row - offset[0]) + v * (x - column - offset[1]))
                         for (u, v), weight in zip(frequencies.tolist(), weights.tolist()))
                     for y, x in cells(grid)])
    return torch.tensor(rows, dtype=torch.float64)


# ---------------------------------------------------------------------------------------------
# The waves
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid, count", [
    ((8, 8), 30), ((14, 14), 96), ((16, 16), 126),
    ((5, 7), 17), ((13, 11), 71), ((3, 3), 4),       # (N − 1) / 2 where both sides are odd
    ((1, 7), 3), ((6, 1), 2), ((2, 5), 4), ((2, 4), 2), ((2, 2), 0), ((1, 2), 0), ((1, 1), 0)])
def test_all_waves_of_the_grid_are_there_but_those_without_a_sine(grid, count):
    for period in (1.0, 2.5):
        found = waves(grid, period)
        assert found.shape == (count, 2) and found.dtype == torch.float64


@pytest.mark.parametrize("grid", GRIDS)
def test_columns_are_orthogonal_at_period_one_each_with_a_mean_square_of_a_half(grid):
    code = wave_code(waves(grid), grid)
    tokens = grid[0] * grid[1]
    torch.testing.assert_close(code.T @ code, torch.eye(code.shape[1]).double() * tokens / 2,
                               rtol=0, atol=1e-10)


@pytest.mark.parametrize("period", [1.0, 3.5])
@pytest.mark.parametrize("grid", GRIDS[:3])
def test_all_tokens_have_the_same_norm_as_a_cosine_and_its_sine_make_one(grid, period):
    frequencies = waves(grid, period)
    squares = wave_code(frequencies, grid).square().sum(1)
    torch.testing.assert_close(squares, torch.full_like(squares, len(frequencies)))


@pytest.mark.parametrize("period", [1.0, 3.5])
@pytest.mark.parametrize("grid", GRIDS[:3])
def test_waves_are_whole_numbers_of_turns_of_the_torus_slowest_first(grid, period):
    found = waves(grid, period)
    turns = found * period * torch.tensor(grid) / (2.0 * math.pi)
    torch.testing.assert_close(turns, turns.round(), rtol=0, atol=1e-12)
    assert (turns.round().abs() <= torch.tensor(grid) / 2).all()         # the slow way round
    lengths = found.norm(dim=1)
    assert (lengths.diff() >= -1e-12).all() and (lengths > 0).all()


def test_no_token_has_all_its_cosines_at_their_peak():
    """Without phases the first token's would all be 1, and LayerNorm would subtract most of them."""
    code = wave_code(waves((14, 14))[:31], (14, 14))
    assert code.mean(1).abs().max() < 0.4
    assert code[0].abs().max() > 0.9                 # and yet they are cosines


# ---------------------------------------------------------------------------------------------
# Shifting is turning
# ---------------------------------------------------------------------------------------------


def rotated(code: Tensor, frequencies: Tensor, offset: tuple[int, int]) -> Tensor:
    """Every pair as a complex number cos + i sin, times e^{i (u δy + v δx)}."""
    cosine, sine = code.chunk(2, dim=1)
    angles = frequencies @ torch.tensor(offset, dtype=torch.float64)
    moved = torch.complex(cosine, sine) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([moved.real, moved.imag], dim=1)


@pytest.mark.parametrize("offset", [(0, 1), (2, -3)])
def test_a_circular_shift_of_the_grid_rotates_each_pair_at_period_one(offset):
    grid = (5, 7)
    frequencies = waves(grid)
    code = wave_code(frequencies, grid)
    shifted = code.view(5, 7, -1).roll((-offset[0], -offset[1]), dims=(0, 1)).flatten(0, 1)
    torch.testing.assert_close(rotated(code, frequencies, offset), shifted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("offset, period", [((0, 1), 2.0), ((2, -3), 3.5)])
def test_a_shift_inside_the_grid_rotates_each_pair_at_longer_periods(offset, period):
    grid = (5, 7)
    frequencies = waves(grid, period)
    code = wave_code(frequencies, grid)
    moved = rotated(code, frequencies, offset)
    inside = [(row * 7 + column, (row + offset[0]) * 7 + column + offset[1])
              for row, column in cells(grid)
              if 0 <= row + offset[0] < 5 and 0 <= column + offset[1] < 7]
    here, there = torch.tensor(inside).T
    torch.testing.assert_close(moved[here], code[there], rtol=0, atol=1e-12)
    # Beyond the borders it does not go round, unlike at period 1.
    assert offset == (0, 0) or (moved - code.view(5, 7, -1).roll(
        (-offset[0], -offset[1]), dims=(0, 1)).flatten(0, 1)).abs().max() > 0.1


@pytest.mark.parametrize("offset, period", [((-1, 1), 1.0), ((2, -3), 2.0)])
def test_queries_and_keys_make_the_sum_of_cosines_that_is_written_out(offset, period):
    """A subset in any order, negative weights; columns of waves that are not chosen stay zero."""
    grid, chosen = (4, 5), torch.tensor([6, 0, 3])
    frequencies, weights = waves(grid, period)[:7], torch.tensor([0.7, -1.3, 2.1]).double()
    code = wave_code(frequencies, grid)
    query, key = rotated_factors(frequencies, chosen, weights, offset)
    assert query.shape == key.shape == (6, 14)
    expected = logits_written_out(frequencies[chosen], weights, grid, offset)
    torch.testing.assert_close(code @ query.T @ key @ code.T, expected, rtol=0, atol=1e-12)
    unused = [1, 2, 4, 5, 8, 9, 11, 12]
    assert not query[:, unused].any() and not key[:, unused].any()


# ---------------------------------------------------------------------------------------------
# How large the logits are
# ---------------------------------------------------------------------------------------------


def logits_of(frequencies: Tensor, weights: Tensor, grid: tuple[int, int],
              offset: tuple[int, int] = (0, 0)) -> Tensor:
    """(N, N) from the code, through Q and K."""
    code = wave_code(frequencies, grid)
    query, key = rotated_factors(frequencies, torch.arange(len(frequencies)), weights, offset)
    return code @ query.T @ key @ code.T


@pytest.mark.parametrize("grid, count, mass", [((5, 7), 11, 0.3), ((8, 8), 16, 0.99)])
def test_every_target_on_the_torus_gets_the_mass_and_no_smaller_weights_would_do(grid, count, mass):
    frequencies = waves(grid)[:count]
    weights = impulse_weights(frequencies, grid, 1.0, mass)
    assert weights.shape == (count,) and (weights == weights[0]).all()
    targets = [(row - 1) % grid[0] * grid[1] + (column + 2) % grid[1]
               for row, column in cells(grid)]
    logits = logits_of(frequencies, weights, grid, offset=(-1, 2))
    masses = logits.softmax(1)[range(len(targets)), targets]
    torch.testing.assert_close(masses, torch.full_like(masses, mass), rtol=0, atol=1e-9)
    assert ((0.999 * logits).softmax(1)[range(len(targets)), targets] < mass).all()


@pytest.mark.parametrize("offset, period", [((-1, 0), 1.5), ((2, -3), 3.5)])
def test_at_longer_periods_every_target_on_the_grid_gets_at_least_the_mass(offset, period):
    """A query sees a part of the displacements counted; the one that sees most has little more."""
    grid = (5, 7)
    frequencies = waves(grid, period)
    logits = logits_of(frequencies, impulse_weights(frequencies, grid, period, 0.8), grid, offset)
    pairs = [(row * 7 + column, (row + offset[0]) * 7 + column + offset[1])
             for row, column in cells(grid)
             if 0 <= row + offset[0] < 5 and 0 <= column + offset[1] < 7]
    here, there = torch.tensor(pairs).T
    masses = logits.softmax(1)[here, there]
    assert masses.min() >= 0.8
    assert (0.9 * logits).softmax(1)[here, there].min() < 0.8 + 0.06


# Sums of the weights, which are the logits at the target, measured: few waves need large ones.
@pytest.mark.parametrize("grid, count, peak", [
    ((14, 14), 32, 8.8), ((8, 8), 16, 6.9), ((16, 16), 8, 36.1)])
def test_the_logit_at_the_target_for_a_mass_of_nine_tenths(grid, count, peak):
    weights = impulse_weights(waves(grid)[:count], grid, 1.0, 0.9)
    assert weights.sum().item() == pytest.approx(peak, abs=0.05)


@pytest.mark.parametrize("grid, count, period", [
    ((5, 7), 1, 1.0),            # the only wave is constant along an axis: its peak is a line
    ((16, 16), 8, 8.0)])         # and eight slow ones need more than STEEPEST
def test_a_mass_out_of_reach_is_an_error_of_one_line(grid, count, period):
    frequencies = waves(grid, period)[:count]
    code = wave_code(frequencies, grid)
    steepest = (STEEPEST / count * code @ code.T).softmax(1).diagonal()
    assert steepest.min() < 0.9
    message = (rf"^{count} wave\(s\) cannot give one token of a {grid[0]}×{grid[1]} grid a mass of 0.9; "
               "use more channels, a lower target_mass or")
    with pytest.raises(ValueError, match=message) as error:
        impulse_weights(frequencies, grid, period, 0.9)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------
# Gaussian logits
# ---------------------------------------------------------------------------------------------


# The largest error of a logit, in 1/σ², measured: an even side lacks its alternating signs, and a
# longer period has too few waves for the doubled grid. The last column: the largest logit.
def test_with_fewer_waves_the_gaussian_is_still_the_nearest_by_least_squares():
    """No change of any weight comes nearer: the error is orthogonal to all waves on the torus."""
    frequencies = waves((5, 7))[:6]
    weights = gaussian_weights(frequencies, (5, 7), 1.0, 1.3)
    away = torch.tensor([(nearest(y, 5), nearest(x, 7)) for y, x in cells((5, 7))]).double()
    shapes = (away @ frequencies.T).cos()
    error = shapes @ weights + away.square().sum(1) / (2 * 1.3**2)
    torch.testing.assert_close(shapes.T @ (error - error.mean()), torch.zeros(6).double(),
                               rtol=0, atol=1e-10)
    assert (error - error.mean()).abs().max() > 0.1


# ---------------------------------------------------------------------------------------------
# The bias channels
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix, peak", [(0, 7.3), (2, -2.1)])
def test_bias_channels_subtract_the_peak_and_prefix_queries_are_uniform(prefix, peak):
    generator = torch.Generator().manual_seed(0)
    code, query, key = (torch.randn(rows, 5, dtype=torch.float64, generator=generator)
                        for rows in (11, 3, 3))
    table = with_bias_channels(code, prefix)
    assert table.shape == (prefix + 11, 8)
    first, second = extend_to_bias_channels(query, key, peak)
    assert first.shape == second.shape == (4, 8)
    expected = torch.zeros(prefix + 11, prefix + 11, dtype=torch.float64)
    expected[prefix:, prefix:] = code @ query.T @ key @ code.T - peak
    expected[prefix:, :prefix] = -peak
    torch.testing.assert_close(table @ first.T @ second @ table.T, expected, rtol=0, atol=1e-12)


def test_queries_and_keys_that_read_bias_channels_ignore_what_is_added_to_all_channels():
    """And at the target, how a token is scaled: LayerNorm does both."""
    generator = torch.Generator().manual_seed(0)
    frequencies = waves((5, 7))[:6]
    weights = torch.full((6,), 1.7, dtype=torch.float64)
    query, key = extend_to_bias_channels(
        *rotated_factors(frequencies, torch.arange(6), weights, (0, 0)), peak=weights.sum().item())
    table = with_bias_channels(wave_code(frequencies, (5, 7)), 0)
    shift, scale = torch.randn(2, 35, 1, dtype=torch.float64, generator=generator)
    moved = (table + shift) * scale.exp()
    logits = (table @ query.T @ key @ table.T) * scale.exp() * scale.exp().T
    torch.testing.assert_close(moved @ query.T @ key @ moved.T, logits, rtol=0, atol=1e-9)
    torch.testing.assert_close(logits.diagonal(), torch.zeros(35, dtype=torch.float64), rtol=0,
                               atol=1e-9)
    assert logits.argmax(1).equal(torch.arange(35))
