"""Inits of Mixers and ConvMixers: linear token MLPs, shifts, and the filters of other kinds."""

import math

import pytest
import torch
from small_models import built, drawn, seeded
from torch.nn.functional import gelu

import vitinit
from vitinit.init.mixers import placed_gaussian, write_linear_map
from vitinit.mixing import mixing_matrices
from vitinit.mixing.filters import convolution_matrix, ordered_offsets, shift_matrix
from vitinit.models.layers import Mlp

TOKENS = 15


@pytest.mark.parametrize(
    "hidden, bias, gain", [(30, 4.0, 1.0), (37, 4.0, -0.75), (15, 4.0, 1.0), (23, 8.0, -0.75)]
)
def test_a_token_mlp_is_the_given_map_exactly_or_through_gelus_near_linear_part(
    hidden, bias, gain, held_against
):
    """gain · (GELU(Hx + b) − b) with fewer than twice as many hidden units as tokens.
    Surplus units are not dead: they keep their inputs, so that their outputs can be learnt."""
    mlp, matrix = Mlp(TOKENS, hidden).double(), drawn(TOKENS, TOKENS)
    used = TOKENS * (2 if hidden >= 2 * TOKENS else 1)
    surplus = [tensor[used:].clone() for tensor in mlp.fc1.parameters()]
    with torch.no_grad():
        write_linear_map(mlp, matrix, gain=gain, linear_bias=bias)
    assert all(map(torch.equal, surplus, [tensor[used:] for tensor in mlp.fc1.parameters()]))
    x = 10.0 * drawn(7, TOKENS, seed=2)
    wanted = x @ matrix.T if used > TOKENS else gelu(x @ matrix.T + bias) - bias
    torch.testing.assert_close(mlp(x).detach(), gain * wanted, rtol=0, atol=1e-11)
    held_against(mlp(x), gain * wanted, cases=7)


@pytest.mark.parametrize(
    "family, bias, distance", [("mixer", 4.0, 1e-9), ("mixer, narrow", 8.0, 5e-4)]
)
def test_each_block_mixes_tokens_as_the_shift_whose_turn_it_is(family, bias, distance):
    """In all channels, and past the edge nothing is read. GELU′(x + 8) − 1 is at most 5e-4 for the
    x that LayerNorm makes, of which some reach −4."""
    model = built(family, depth=11).double().eval()
    vitinit.init_weights(model, "impulse", generator=seeded(), linear_bias=bias)
    found = mixing_matrices(model, drawn(2, 3, 20, 28), heads=[0, 1, 2])
    for block, matrices in found.items():
        wanted = shift_matrix(ordered_offsets(3)[block % 9], (5, 7))
        assert (matrices - wanted).abs().sum(-1).max() / 2 <= distance


@pytest.mark.parametrize(
    "size, kernel_size, num_filters, gain",
    [(3, 0, 0, 3**-0.5), (4, 0, 0, 1.0), (5, 3, 7, -2.0), (7, 2, 0, 1.0)],
)
def test_each_filter_reads_one_neighbour_in_order_of_offsets(size, kernel_size, num_filters, gain):
    """Even kernels, too: a smaller kernel's offsets are the same cells in the larger one."""
    model = vitinit.build_model(
        "convmixer_256_8",
        num_classes=7,
        image_size=(20, 28),
        patch_size=4,
        embed_dim=31,
        depth=2,
        kernel_size=size,
        num_filters=num_filters,
    )
    vitinit.init_weights(
        model,
        "impulse",
        generator=torch.Generator().manual_seed(0),
        gain=gain,
        kernel_size=kernel_size,
    )
    offsets = ordered_offsets(kernel_size or size)
    for block in model.blocks:  # alike in every block
        kernels = model.depthwise(block).weight.detach()[:, 0]
        assert len(kernels) == (num_filters or 31)
        for number, kernel in enumerate(kernels):
            wanted = gain * shift_matrix(offsets[number % len(offsets)], (5, 7))
            torch.testing.assert_close(convolution_matrix(kernel, (5, 7)), wanted)


def conv_mixer(width: int = 1009, kernel_size: int = 5, **options) -> torch.nn.Module:
    return vitinit.build_model(
        "convmixer_256_8",
        num_classes=3,
        image_size=6,
        embed_dim=width,
        depth=1,
        kernel_size=kernel_size,
        **options,
    )


def filters(model: torch.nn.Module, seed: int = 0, **options) -> torch.Tensor:
    """(F, k, k) of the first block."""
    vitinit.init_weights(model, "filters", generator=torch.Generator().manual_seed(seed), **options)
    return model.depthwise(model.blocks[0]).weight.detach()[:, 0]


@pytest.mark.parametrize("kind, kernel_size", [("random", 3), ("box", 8), ("gaussian", 8)])
def test_every_kind_has_the_energy_of_pytorchs_draw(kind, kernel_size):
    """Mean Σ w² = ⅓; for 1,009 uniform filters of 9 cells its standard error is .003."""
    energies = filters(conv_mixer(kernel_size=kernel_size), kind=kind).square().sum((1, 2))
    assert energies.mean().item() == pytest.approx(1 / 3, abs=0.012 if kind == "random" else 1e-5)
    if kind == "box":
        assert torch.allclose(energies, torch.tensor(1 / 3))


@pytest.mark.parametrize("cells", [2, 25])
def test_a_box_is_the_given_number_of_equal_cells_anywhere(cells):
    kernels = filters(conv_mixer(), kind="box", cells=cells)
    assert ((kernels > 0).sum((1, 2)) == cells).all()
    assert torch.allclose(kernels[kernels > 0], torch.tensor(math.sqrt(1 / (3 * cells))))
    used = (kernels > 0).float().mean(0)
    share = cells / 25
    assert abs(used - share).max() < 4.5 * math.sqrt(share * (1 - share) / 1009) + 1e-6


def test_random_filters_are_uniform_within_one_over_k_and_a_placed_gaussian_is_its_formula():
    kernels = filters(conv_mixer(), kind="random")
    assert kernels.abs().max() <= 0.2 and kernels.abs().max() > 0.199
    assert kernels.var().item() == pytest.approx(0.04 / 3, rel=0.03)
    for seed in range(7):
        kernel = placed_gaussian(5, 0.7, generator=torch.Generator().manual_seed(seed))
        row, column = divmod(int(kernel.argmax()), 5)
        for y in range(5):
            for x in range(5):
                square = (y - row) ** 2 + (x - column) ** 2
                expected = math.exp(-square / (2 * 0.49))
                assert kernel[y, x].item() == pytest.approx(expected, abs=1e-7)
