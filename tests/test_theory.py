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


@pytest.mark.parametrize("kind, size, times", [("random", 2, 5), ("impulse", 3, 3)])
def test_random_and_impulse_filters_span_all_convolutions_k_times(kind, size, times):
    """Corollaries 1 and 2: k f² filters suffice, one fewer does not. Corollary 3: boxes never do."""
    kernels = kernels_of(kind, times * size**2, size)
    matrices = torch.stack([convolution_matrix(kernel, GRID) for kernel in kernels])
    assert times_spanned(matrices.flatten(1)) == (size**2, times)
    assert times_spanned(matrices[1:].flatten(1)) != (size**2, times)
    boxes = torch.stack([convolution_matrix(kernel, GRID) for kernel in kernels_of("box", 11, size)])
    assert times_spanned(boxes.flatten(1)) == (1, 11)


# ---------------------------------------------------------------------------------------------
# Proposition 1
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, size, rank", [("random", 3, 2), ("impulse", 2, 7)])
def test_a_channel_mixer_replaces_any_other_filters_unless_one_channel_is_missing(kind, size, rank):
    """D = k f² channels, other filters and another channel mixer: T_C is one linear solve.

    The target with one channel fewer wants every tap of every direction: Σ_j G_j b_j, G_j random.
    """
    needed = rank * size**2
    for channels in (needed, needed - 1):
        tokens, basis, coefficients = drawn_tokens(channels, rank)
        ours, mixer = kernels_of(kind, channels, size), drawn(needed, 11, seed=4)
        if channels == needed:
            theirs = drawn(channels, size, size, seed=3)
            target = spatially_mixed(tokens, theirs) @ mixer
            found = torch.linalg.solve(channel_system(coefficients, ours),
                                       wanted_taps(coefficients, theirs, mixer))
            assert worst_column(spatially_mixed(tokens, ours) @ found, target) < 1e-9
        else:
            target = torch.cat([spatially_mixed(basis, kernel.expand(rank, -1, -1))
                                for kernel in drawn(size**2, size, size, seed=3)], dim=1) @ mixer
            assert best_effort(spatially_mixed(tokens, ours), target) > 1e-2


def test_with_box_filters_the_best_mixer_leaves_most_of_the_target():
    """Their outputs span only k dimensions, one per direction of X, and not k f²."""
    tokens, _, _ = drawn_tokens(180, 2)
    target = spatially_mixed(tokens, drawn(180, 3, 3, seed=3)) @ drawn(180, 11, seed=4)
    mixed = spatially_mixed(tokens, kernels_of("box", 180, 3))
    assert torch.linalg.matrix_rank(mixed) == 2
    assert best_effort(mixed, target) > 0.5
    assert best_effort(spatially_mixed(tokens, kernels_of("impulse", 180, 3)), target) < 1e-9


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
