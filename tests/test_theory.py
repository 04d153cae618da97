"""What fixed filters can express (arXiv 2401.12511, §3; 2505.19985, §4), by construction.

Spatial mixing acts on each channel with a matrix of its own, channel mixing combines the results:

    T(X) = [H₁ x₁, …, H_D x_D] T_C.

A set of mixing matrices is *M–k spanned* if k disjoint parts of it each span the same M-dimensional
space W. Proposition 1: if X has rank k and the set is M–k spanned, then for all other matrices in W
and any channel mixer there is a T_C that gives the same output. So fixed shifts express whatever
learned f×f filters could, given D ≥ k f² channels; box filters, all alike, do not.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import vitinit
from vitinit.filters import convolution_matrix, impulse_kernel, ordered_offsets, random_kernel
from vitinit.models import MODELS

GRID, TOKENS = (5, 7), 35       # more tokens than k f² in all that follows


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def drawn_tokens(channels: int, rank: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """X = B A, (N, D) of that rank, and its factors B (N, rank) and A (rank, D)."""
    basis, coefficients = drawn(TOKENS, rank, seed=seed), drawn(rank, channels, seed=seed + 1)
    return basis @ coefficients, basis, coefficients


def kernels_of(kind: str, count: int, size: int) -> Tensor:
    """(count, f, f): one filter per channel."""
    if kind == "random":
        draws = generator(7)
        return torch.stack([random_kernel(size, generator=draws) for _ in range(count)]).double()
    if kind == "box":
        return torch.full((count, size, size), size**-2.0, dtype=torch.float64)
    offsets = ordered_offsets(size)
    return torch.stack([impulse_kernel(offsets[channel % size**2], size)
                        for channel in range(count)]).double()


def spatially_mixed(tokens: Tensor, kernels: Tensor) -> Tensor:
    """[H₁ x₁, …, H_D x_D], (N, D)."""
    matrices = torch.stack([convolution_matrix(kernel, GRID) for kernel in kernels])
    return torch.einsum("cnm, mc -> nc", matrices, tokens)


def times_spanned(vectors: Tensor) -> tuple[int, int]:
    """(M, k): disjoint subsets are picked greedily, each a basis of the span of all vectors."""
    whole = int(torch.linalg.matrix_rank(vectors))
    left, times = list(vectors), 0
    while len(left) >= whole:
        basis, rest = [], []
        for vector in left:
            longer = torch.stack([*basis, vector])
            (basis if torch.linalg.matrix_rank(longer) == len(longer) else rest).append(vector)
        if len(basis) < whole:
            break
        left, times = rest, times + 1
    return whole, times


def channel_system(coefficients: Tensor, kernels: Tensor) -> Tensor:
    """(k·f², D): the matrix of the linear system for T_C.

    Column c is a_c ⊗ h_c, with a_c from A and h_c the filter: Σ_c t_c H_c x_c = Σ_j (Σ_c t_c a_jc
    H_c) b_j, so t is right if each of the k sums in brackets is right, tap by tap.
    """
    return torch.einsum("jc, cm -> jmc", coefficients, kernels.flatten(1)).flatten(0, 1)


def wanted_taps(coefficients: Tensor, kernels: Tensor, mixer: Tensor) -> Tensor:
    """(k·f², E): these sums for the transformer that is to be matched, one column per output."""
    return channel_system(coefficients, kernels) @ mixer


def worst_column(found: Tensor, target: Tensor) -> float:
    return ((found - target).norm(dim=0) / target.norm(dim=0)).max().item()


def best_effort(mixed: Tensor, target: Tensor) -> float:
    """The relative error of the best T_C."""
    return worst_column(mixed @ torch.linalg.lstsq(mixed, target, driver="gelsd").solution, target)


# ---------------------------------------------------------------------------------------------
# Which filters are M–k spanned
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, times", [(2, 5), (3, 3)])
@pytest.mark.parametrize("kind", ["random", "impulse"])
def test_random_and_impulse_filters_span_all_convolutions_k_times(kind, size, times):
    """Corollaries 1 and 2: k f² filters suffice, one fewer does not."""
    kernels = kernels_of(kind, times * size**2, size)
    matrices = torch.stack([convolution_matrix(kernel, GRID) for kernel in kernels])
    assert times_spanned(matrices.flatten(1)) == (size**2, times)
    assert times_spanned(matrices[1:].flatten(1)) != (size**2, times)
    assert torch.linalg.matrix_rank(matrices[1:size**2].flatten(1)) == size**2 - 1


def test_box_filters_span_one_dimension_however_many():
    """Corollary 3."""
    kernels = kernels_of("box", 27, 3)
    matrices = torch.stack([convolution_matrix(kernel, GRID) for kernel in kernels])
    assert times_spanned(matrices.flatten(1)) == (1, 27)


# ---------------------------------------------------------------------------------------------
# Proposition 1
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, rank", [(3, 3), (2, 7), (5, 1)])
@pytest.mark.parametrize("kind", ["random", "impulse"])
def test_a_channel_mixer_replaces_any_other_filters(kind, size, rank):
    """D = k f² channels, other filters and another channel mixer: T_C is one linear solve."""
    channels = rank * size**2
    tokens, _, coefficients = drawn_tokens(channels, rank)
    assert torch.linalg.matrix_rank(tokens) == rank
    ours, theirs = kernels_of(kind, channels, size), drawn(channels, size, size, seed=3)
    mixer = drawn(channels, 11, seed=4)
    target = spatially_mixed(tokens, theirs) @ mixer

    system = channel_system(coefficients, ours)      # (D, D)
    found = torch.linalg.solve(system, wanted_taps(coefficients, theirs, mixer))
    assert worst_column(spatially_mixed(tokens, ours) @ found, target) < 1e-9


@pytest.mark.parametrize("kind", ["random", "impulse"])
@pytest.mark.parametrize("size, rank", [(3, 2), (2, 7)])
def test_one_channel_fewer_is_too_few(kind, size, rank):
    """The k f² vectors H b_j are independent on this grid, and D channels reach D of them."""
    needed = rank * size**2
    for channels, enough in ((needed, True), (needed - 1, False)):
        tokens, basis, _ = drawn_tokens(channels, rank)
        # The target is one that wants every tap of every direction: Σ_j G_j b_j, G_j random.
        directions = torch.cat([spatially_mixed(basis, kernel.expand(rank, -1, -1))
                                for kernel in drawn(size**2, size, size, seed=3)], dim=1)
        target = directions @ drawn(needed, 11, seed=4)
        assert torch.linalg.matrix_rank(directions) == needed
        error = best_effort(spatially_mixed(tokens, kernels_of(kind, channels, size)), target)
        assert error < 1e-9 if enough else error > 1e-2


@pytest.mark.parametrize("channels", [18, 180])
def test_with_box_filters_the_best_mixer_leaves_most_of_the_target(channels):
    """Their outputs span only k dimensions, one per direction of X, and not k f²."""
    tokens, _, coefficients = drawn_tokens(channels, 2)
    target = spatially_mixed(tokens, drawn(channels, 3, 3, seed=3)) @ drawn(channels, 11, seed=4)
    boxes = kernels_of("box", channels, 3)
    assert torch.linalg.matrix_rank(channel_system(coefficients, boxes)) == 2
    mixed = spatially_mixed(tokens, boxes)
    assert torch.linalg.matrix_rank(mixed) == 2
    assert best_effort(mixed, target) > 0.5
    assert best_effort(spatially_mixed(tokens, kernels_of("impulse", channels, 3)), target) < 1e-9


@torch.no_grad()
def test_a_convmixers_frozen_impulses_express_another_ones_filters():
    """The same through the layers of the model: depthwise as initialised, pointwise solved for."""
    models = []
    for name, seed in (("impulse", 0), ("torch", 1)):
        model = vitinit.build_model("convmixer_256_8", num_classes=7, image_size=(20, 28),
                                    patch_size=4, embed_dim=27, depth=1, kernel_size=3).double()
        vitinit.init_weights(model, name, generator=generator(seed))
        models.append(model.blocks[0])
    (ours, pointwise, *_), (theirs, target, *_) = models
    ours, theirs = ours.fn[0], theirs.fn[0]
    theirs.bias.zero_()
    tokens, _, coefficients = drawn_tokens(27, 3)
    maps = tokens.T.view(1, 27, *GRID)
    taps = wanted_taps(coefficients, theirs.weight[:, 0], target.weight[:, :, 0, 0].T)
    system = channel_system(coefficients, ours.weight[:, 0])
    pointwise.weight[:, :, 0, 0] = torch.linalg.solve(system, taps).T
    pointwise.bias.copy_(target.bias)
    torch.testing.assert_close(pointwise(ours(maps)), target(theirs(maps)), rtol=0, atol=1e-9)


# ---------------------------------------------------------------------------------------------
# How many heads a 3×3 convolution needs
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, heads, spanned", [("vit_tiny", 3, 3), ("vit_small", 6, 6),
                                                  ("vit_base", 12, 9)])
def test_nine_heads_express_every_3x3_kernel_and_fewer_only_their_own_taps(name, heads, spanned):
    """The best sum of the heads' shifts is the kernel without the taps that no head has."""
    family, sizes = MODELS[name]
    assert family == "vit" and sizes["num_heads"] == heads
    offsets = [ordered_offsets(3)[head % 9] for head in range(heads)]
    shifts = torch.stack([convolution_matrix(impulse_kernel(offset, 3).double(), GRID).flatten()
                          for offset in offsets])    # (h, N²)
    assert torch.linalg.matrix_rank(shifts) == spanned
    kernel = drawn(3, 3)
    wanted = convolution_matrix(kernel, GRID).flatten()
    taps = torch.linalg.lstsq(shifts.T, wanted, driver="gelsd").solution
    reached = kernel.clone()
    for row, column in set(ordered_offsets(3)) - set(offsets):
        reached[row + 1, column + 1] = 0.0
    torch.testing.assert_close(shifts.T @ taps, convolution_matrix(reached, GRID).flatten(),
                               rtol=0, atol=1e-12)
    missing = (wanted - shifts.T @ taps).norm() / wanted.norm()
    assert missing < 1e-12 if spanned == 9 else missing > 0.2
