"""Kinds of depthwise filters: their shape, their energy or covariance, and that nothing else is touched.

Dense filters are matrices, of kernels or permutations.
"""

from __future__ import annotations

import math

import pytest
import torch

import vitinit
from vitinit.filters import gaussian_kernel, impulse_kernel, kernel_offsets, random_kernel
from vitinit.init.filters_conv_mixer import (axis_covariance, correlated_kernel, filters_conv_mixer,
                                             placed_gaussian, scattered_box, symmetric_root)


def conv_mixer(width: int = 1009, kernel_size: int = 5, **options) -> torch.nn.Module:
    return vitinit.build_model("convmixer_256_8", num_classes=3, image_size=6, embed_dim=width,
                               depth=1, kernel_size=kernel_size, **options)


def filters(model: torch.nn.Module, seed: int = 0, **options) -> torch.Tensor:
    """(F, k, k) of the first block."""
    vitinit.init_weights(model, "filters", generator=torch.Generator().manual_seed(seed), **options)
    return model.depthwise(model.blocks[0]).weight.detach()[:, 0]


@pytest.mark.parametrize("kind", ["random", "box", "gaussian"])
@pytest.mark.parametrize("kernel_size", [3, 8])
def test_every_kind_has_the_energy_of_pytorchs_draw(kind, kernel_size):
    """Mean Σ w² = ⅓; for 1,009 uniform filters of 9 cells its standard error is .003."""
    energies = filters(conv_mixer(kernel_size=kernel_size), kind=kind).square().sum((1, 2))
    assert energies.mean().item() == pytest.approx(1 / 3, abs=0.012 if kind == "random" else 1e-5)
    if kind == "box":
        assert torch.allclose(energies, torch.tensor(1 / 3))


@pytest.mark.parametrize("cells", [1, 2, 7, 25])
def test_a_box_is_the_given_number_of_equal_cells_anywhere(cells):
    kernels = filters(conv_mixer(), kind="box", cells=cells)
    assert ((kernels > 0).sum((1, 2)) == cells).all()
    assert torch.allclose(kernels[kernels > 0], torch.tensor(math.sqrt(1 / (3 * cells))))
    used = (kernels > 0).float().mean(0)
    share = cells / 25
    assert abs(used - share).max() < 4.5 * math.sqrt(share * (1 - share) / 1009) + 1e-6


def test_a_box_of_all_cells_is_a_multiple_of_the_mean():
    """So all filters of a block are the same: the subject of corollary 3 of arXiv 2401.12511."""
    kernels = filters(conv_mixer(17), kind="box", cells=25)
    assert torch.linalg.matrix_rank(kernels.flatten(1)) == 1


def test_a_gaussian_is_centred_on_a_cell_and_has_the_wanted_width():
    kernels = filters(conv_mixer(), kind="gaussian", sigma=1.3)
    peaks = kernels.flatten(1).argmax(1)
    assert set(peaks.tolist()) == set(range(25))
    central = kernels[peaks == 12][0]                # around the middle cell: filters.py's Gaussian
    torch.testing.assert_close(central / central.sum(), gaussian_kernel(5, 1.3))


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


@pytest.mark.parametrize("kind", ["random", "box", "gaussian", "covariance"])
def test_only_the_depthwise_weights_differ_from_the_base(kind):
    model, base = conv_mixer(17), conv_mixer(17)
    filters(model, kind=kind)
    vitinit.init_weights(base, "default", generator=torch.Generator().manual_seed(0))
    for name, value in base.state_dict().items():
        same = torch.equal(value, model.state_dict()[name])
        assert same != (name == "blocks.0.0.fn.0.weight"), name


def test_shared_filters_are_drawn_once_each():
    assert filters(conv_mixer(17, num_filters=3), kind="box").shape == (3, 5, 5)


@pytest.mark.parametrize("options, message", [
    (dict(kind="boxes"), "kind is 'boxes'"), (dict(cells=0), "cells is 0"),
    (dict(cells=26), "expected 1 ≤ cells ≤ 25"), (dict(sigma=0.0), "sigma 0.0"),
    (dict(length_scale=0.0), "length_scale is 0.0, expected length_scale > 0"),
    (dict(envelope_width=-2.0), "envelope_width is -2.0, expected envelope_width > 0"),
    (dict(kind="permutation"), "which is no convolution; set dense_filters = true")])
def test_what_cannot_be_is_refused_in_one_line_before_anything_is_drawn(options, message):
    model, generator = conv_mixer(17), torch.Generator().manual_seed(0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = generator.get_state()
    with pytest.raises(ValueError, match=message) as error:
        vitinit.init_weights(model, "filters", generator=generator, **options)
    assert "\n" not in str(error.value)
    assert torch.equal(generator.get_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# Filters with a covariance ---------------------------------------------------------------------

SCALES = dict(length_scale=1.3, envelope_width=1.7)


def covariance(size: int, length_scale: float, envelope_width: float) -> torch.Tensor:
    """Σ, (k², k²), cell by cell from its formula, scaled to trace ⅓: the reference."""
    offsets = kernel_offsets(size)
    entries = [[math.exp(-((py - qy)**2 + (px - qx)**2) / (2 * length_scale**2)
                         - (py**2 + px**2 + qy**2 + qx**2) / (2 * envelope_width**2))
                for qy, qx in offsets] for py, px in offsets]
    matrix = torch.tensor(entries, dtype=torch.float64)
    return matrix / (3 * matrix.trace())


@pytest.mark.parametrize("size", [1, 4, 5, 7])       # of even size, too, whose centre is no middle
def test_the_covariance_of_rows_times_that_of_columns_is_the_formula(size):
    axis = axis_covariance(size, **SCALES)
    both = torch.kron(axis, axis)
    torch.testing.assert_close(both, covariance(size, **SCALES), rtol=1e-12, atol=0)
    assert torch.equal(both, both.T) and both.trace().item() == pytest.approx(1 / 3, rel=1e-12)
    assert torch.linalg.eigvalsh(both).min() > -1e-16


@pytest.mark.parametrize("length_scale", [0.1, 1.3, 1e6])                # the last one is singular
def test_the_root_is_symmetric_positive_and_squares_to_the_covariance(length_scale):
    axis = axis_covariance(7, length_scale, 1.7)
    root = symmetric_root(axis)
    torch.testing.assert_close(root @ root, axis, rtol=0, atol=1e-15)
    torch.testing.assert_close(root, root.T, rtol=0, atol=1e-15)
    assert torch.linalg.eigvalsh(root).min() > -1e-15


def test_filters_have_mean_zero_and_the_covariance_of_the_formula():
    """In standard errors: 350 numbers of 1,009 filters stay below 4.5; a wrong scale gives tens."""
    kernels = filters(conv_mixer(), kind="covariance", **SCALES).double().flatten(1)   # (F, 25)
    expected, count = covariance(5, **SCALES), len(kernels)
    variances = expected.diagonal()
    found = kernels.T @ kernels / count              # about the mean 0 of the formula
    error = ((expected.square() + variances[:, None] * variances) / count).sqrt()
    assert ((found - expected) / error).abs().max() < 4.5
    assert (kernels.mean(0) / (variances / count).sqrt()).abs().max() < 4.5
    energy_error = (2 * expected.square().sum() / count).sqrt()
    assert abs(kernels.square().sum(1).mean() - 1 / 3) < 4.5 * energy_error
    for other in (dict(SCALES, length_scale=2.6), dict(SCALES, envelope_width=3.4)):
        wrong = (kernels.T @ kernels / count - covariance(5, **other)) / error
        assert wrong.abs().max() > 9                 # so that the bound can fail


def test_a_small_length_scale_makes_cells_independent():
    torch.testing.assert_close(axis_covariance(5, 1e-3, 1e6), torch.eye(5).double() / (5 * 3**0.5),
                               rtol=1e-9, atol=0)
    assert torch.equal(axis_covariance(5, 1e-3, 1.7), axis_covariance(5, 1e-3, 1.7).diagonal().diag())


def test_a_large_length_scale_makes_all_filters_multiples_of_the_envelope():
    kernels = filters(conv_mixer(17), kind="covariance", length_scale=1e6, envelope_width=1.7)
    envelope = gaussian_kernel(5, 1.7)
    torch.testing.assert_close(kernels / kernels[:, 2:3, 2:3], (envelope / envelope[2, 2]).expand(17, 5, 5),
                               rtol=1e-3, atol=0)
    assert kernels[:, 2, 2].std() > 0.1


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_a_narrow_envelope_leaves_the_centre_alone(size):
    kernels = filters(conv_mixer(17, size), kind="covariance", envelope_width=1e-3)
    centre = impulse_kernel((0, 0), size).bool()
    assert (kernels[:, ~centre] == 0).all() and (kernels[:, centre] != 0).all()


# Dense filters ---------------------------------------------------------------------------------

PLACES = 35


def small(kernel_size: int = 3, **options) -> torch.nn.Module:
    """A grid of 5×7, 11 channels."""
    return vitinit.build_model("convmixer_256_8", num_classes=3, image_size=(10, 21),
                               patch_size=(2, 3), embed_dim=11, depth=2, kernel_size=kernel_size,
                               **options).double().eval()


def dense(seed: int = 0, name: str = "filters", num_filters: int = 0, kernel_size: int = 3,
          **options) -> torch.nn.Module:
    model = small(kernel_size, dense_filters=True, num_filters=num_filters)
    vitinit.init_weights(model, name, generator=torch.Generator().manual_seed(seed), **options)
    return model


def matrices(model: torch.nn.Module) -> list[torch.Tensor]:
    """(F, N, N) of every block."""
    return [model.depthwise(block).weight.detach() for block in model.blocks]


def drawn_kernels(kind: str, size: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """(count, size, size), for the defaults of the kinds' options."""
    draw = {"random": lambda: random_kernel(size, generator=generator),
            "box": lambda: scattered_box(size, 2, generator=generator),
            "gaussian": lambda: placed_gaussian(size, 1.0, generator=generator),
            "covariance": lambda: correlated_kernel(symmetric_root(axis_covariance(size, 1.0, 2.0)),
                                                    generator=generator)}[kind]
    kernels = torch.stack([draw() for _ in range(count)])
    if kind == "gaussian":
        kernels = kernels / (3 * kernels.square().sum() / count).sqrt()
    return kernels


@torch.no_grad()
@pytest.mark.parametrize("kind", ["random", "box", "gaussian", "covariance"])
@pytest.mark.parametrize("num_filters", [0, 3])
@pytest.mark.parametrize("kernel_size", [3, 4])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_a_dense_model_equals_the_convolutional_one_with_the_kernels_drawn(kind, num_filters,
                                                                           kernel_size):
    model = dense(3, kind=kind, num_filters=num_filters, kernel_size=kernel_size)
    generator = torch.Generator().manual_seed(3)
    vitinit.init_weights(dense(num_filters=num_filters), "default", generator=generator)
    state = dict(model.state_dict())
    for block in range(2):
        kernels = drawn_kernels(kind, kernel_size, num_filters or 11, generator)
        state[f"blocks.{block}.0.fn.0.weight"] = kernels[:, None]
    convolutional = small(kernel_size, num_filters=num_filters)
    convolutional.load_state_dict(state)
    images = torch.randn(2, 3, 10, 21, generator=torch.Generator().manual_seed(1)).double()
    logits = model(images)
    assert logits.std() > 0.01                       # not a comparison of zeros
    torch.testing.assert_close(logits, convolutional(images), rtol=0, atol=1e-6)
    x = torch.randn(2, 11, 5, 7, generator=torch.Generator().manual_seed(2)).double()
    for ours, theirs in zip(model.blocks, convolutional.blocks):
        torch.testing.assert_close(model.depthwise(ours)(x), model.depthwise(theirs)(x),
                                   rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_filters, count", [(0, 11), (3, 3)])
def test_permutations_have_one_entry_of_root_a_third_in_every_row_and_column(num_filters, count):
    for weight in matrices(dense(kind="permutation", num_filters=num_filters)):
        assert weight.shape == (count, PLACES, PLACES)
        entries = weight != 0
        assert (entries.sum(1) == 1).all() and (entries.sum(2) == 1).all()
        torch.testing.assert_close(weight[entries], torch.full((count * PLACES,), 3**-0.5).double(),
                                   rtol=1e-6, atol=0)


def test_permutations_differ_from_filter_to_filter_and_block_to_block():
    first, second = matrices(dense(kind="permutation"))
    orders = {tuple(matrix.argmax(1).tolist()) for matrix in torch.cat([first, second])}
    assert len(orders) == 22
    # And they move tokens anywhere: in 22 · 35 draws all displacements but the rarest occur.
    moves = {(target // 7 - token // 7, target % 7 - token % 7)
             for order in orders for token, target in enumerate(order)}
    assert len(moves) > 0.85 * 9 * 13


def test_the_generator_alone_decides_on_permutations():
    first, again, other = (matrices(dense(seed, kind="permutation"))[1] for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("base", ["default", "torch"])
@pytest.mark.parametrize("kind", ["random", "box", "gaussian", "covariance", "permutation"])
def test_only_the_dense_weights_differ_from_the_base(kind, base):
    """The biases, too, are the base's."""
    reference = dense(name=base).state_dict()
    for name, value in dense(kind=kind, base=base).state_dict().items():
        written = name.endswith("0.fn.0.weight")
        assert torch.equal(value, reference[name]) != written, name


@pytest.mark.parametrize("kind", ["box", "gaussian", "covariance", "permutation"])
def test_a_softmax_takes_no_filters_but_random_ones(kind):
    model = vitinit.build_model("convmixer_256_8", num_classes=3, image_size=8, patch_size=2,
                                embed_dim=5, depth=1, kernel_size=3, softmax_filters=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(ValueError, match=f'kind is "{kind}", and a softmax') as caught:
        filters_conv_mixer(model, generator=generator, kind=kind)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    filters_conv_mixer(model, generator=generator, kind="random")
