"""Kinds of depthwise filters: their shape, their energy, and that nothing else is touched."""

from __future__ import annotations

import math

import pytest
import torch

import vitinit
from vitinit.init.filters_conv_mixer import placed_gaussian


def conv_mixer(width: int = 1009, kernel_size: int = 5, **options) -> torch.nn.Module:
    return vitinit.build_model("convmixer_256_8", num_classes=3, image_size=6, embed_dim=width,
                               depth=1, kernel_size=kernel_size, **options)


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


def test_a_placed_gaussian_is_its_formula():
    for seed in range(7):
        kernel = placed_gaussian(5, 0.7, generator=torch.Generator().manual_seed(seed))
        row, column = divmod(int(kernel.argmax()), 5)
        for y in range(5):
            for x in range(5):
                square = (y - row)**2 + (x - column)**2
                expected = math.exp(-square / (2 * 0.49))
                assert kernel[y, x].item() == pytest.approx(expected, abs=1e-7)


def test_random_filters_are_uniform_within_one_over_k():
    kernels = filters(conv_mixer(), kind="random")
    assert kernels.abs().max() <= 0.2 and kernels.abs().max() > 0.199
    assert kernels.var().item() == pytest.approx(0.04 / 3, rel=0.03)
