"""Other depthwise filters for a ConvMixer: those with which arXiv 2401.12511 compares impulses, and smooth
random ones.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..filters import convolution_matrix, random_kernel
from ..models.conv_mixer import ConvMixer, DenseMixing, DepthwiseConv
from .baseline import Base, draw_base
from .options import require_positive

KINDS = ("random", "box", "gaussian", "covariance", "permutation")
ENERGY = 1 / 3          # expected Σ w² of PyTorch's draw: k² cells of variance 1 / (3 k²)


@torch.no_grad()
def filters_conv_mixer(model: ConvMixer, *, generator: torch.Generator,
                       base: Base = "default",
                       kind: Literal["random", "box", "gaussian", "covariance",
                                     "permutation"] = "random",
                       cells: int = 2,
                       sigma: float = 1.0,
                       length_scale: float = 1.0,
                       envelope_width: float = 2.0) -> None:
    """Draw depthwise filters of one kind, at the scale of the paper's code: Σ w² = ⅓ on average.

    | tensor (every block)       | value                                                        |
    |----------------------------|--------------------------------------------------------------|
    | blocks.i.0.fn.0.weight     | see kind                                                     |
    | everything else            | as `base` drew it                                            |

    kind: one of the following.
    cells: of "box".
    sigma: of "gaussian", in cells. (The paper's code calls σ² what is σ here.)
    length_scale, envelope_width: of "covariance", in cells; see `axis_covariance`.

    | kind          | filter                                                                    |
    |---------------|---------------------------------------------------------------------------|
    | "random"      | uniform on ±1/k, as PyTorch draws filters                                 |
    | "box"         | one value in `cells` cells, drawn without replacement, 0 in the others;   |
    |               |   with cells = k² every filter is the mean over its window                |
    | "gaussian"    | exp(−‖δ − c‖² / 2σ²) around a random cell c; all filters of a block are   |
    |               |   multiplied by one factor, so that their mean Σ w² is ⅓                  |
    | "covariance"  | normal with mean 0 and a covariance between cells that makes neighbours   |
    |               |   alike, and cells near the centre larger                                 |
    | "permutation" | √⅓ times a random permutation of the tokens                               |

    "covariance" is ours, after the idea of arXiv 2210.03651: a normal with a covariance in closed form that
    resembles the covariance of trained filters. The paper's own formula was not at hand. Ours is the same
    in every block, and its options are not tuned.

    A permutation is not a convolution, so it needs a model with `dense_filters`. In such a model
    the other kinds are written as convolution matrices.

    With the model option `train_filters = false` the filters keep these values. Impulse filters are
    the init `impulse`, softmax filters the model option `softmax_filters`. Raises ValueError for
    values out of range.
    """
    size = model.kernel_size
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, expected one of {', '.join(KINDS)}")
    if not 1 <= cells <= size**2 or not sigma > 0:
        raise ValueError(f"cells is {cells} and sigma {sigma}; expected 1 ≤ cells ≤ {size**2}, the "
                         "cells of the model's kernel, and sigma > 0")
    require_positive(length_scale=length_scale, envelope_width=envelope_width)
    first = model.depthwise(model.blocks[0])
    if kind != "random" and getattr(first, "softmax", False):
        raise ValueError(f'kind is "{kind}", and a softmax would make something else of such filters; '
                         "set softmax_filters = false")
    if kind == "permutation" and not isinstance(first, DenseMixing):
        raise ValueError('kind is "permutation", which is no convolution; set dense_filters = true')
    draw_base(model, base, generator)
    root = symmetric_root(axis_covariance(size, length_scale, envelope_width))
    draw = {"random": lambda: random_kernel(size, generator=generator),
            "box": lambda: scattered_box(size, cells, generator=generator),
            "gaussian": lambda: placed_gaussian(size, sigma, generator=generator),
            "covariance": lambda: correlated_kernel(root, generator=generator)}
    for block in model.blocks:
        mixing = model.depthwise(block)
        filters = range(len(mixing.weight))
        if kind == "permutation":
            tokens = mixing.weight.shape[1]
            for number in filters:
                order = torch.randperm(tokens, generator=generator)
                mixing.weight[number] = ENERGY ** 0.5 * torch.eye(tokens)[order]
            continue
        kernels = torch.stack([draw[kind]() for _ in filters])           # (F, k, k)
        if kind == "gaussian":
            kernels *= (ENERGY / kernels.square().sum((1, 2)).mean()) ** 0.5
        write_kernels(mixing, kernels, model.grid)


def write_kernels(mixing: DepthwiseConv | DenseMixing, kernels: Tensor,
                  grid: tuple[int, int]) -> None:
    """Write kernels, (F, k, k), as filters of a block, or as matrices on `grid` if it is dense."""
    if isinstance(mixing, DenseMixing):
        mixing.weight.copy_(torch.stack([convolution_matrix(kernel, grid) for kernel in kernels]))
    else:
        mixing.weight.copy_(kernels[:, None])


def scattered_box(size: int, cells: int, *, generator: torch.Generator) -> Tensor:
    """(size, size): `cells` cells, chosen at random, with equal values and Σ w² = ⅓ in total."""
    kernel = torch.zeros(size**2)
    kernel[torch.randperm(size**2, generator=generator)[:cells]] = (ENERGY / cells) ** 0.5
    return kernel.view(size, size)


def placed_gaussian(size: int, sigma: float, *, generator: torch.Generator) -> Tensor:
    """(size, size): a Gaussian with peak value 1 around a random cell."""
    centre = torch.randint(size, (2,), generator=generator)
    axes = (torch.arange(size) - centre[:, None]).square()               # (2, size)
    return (-(axes[0][:, None] + axes[1]) / (2.0 * sigma**2)).exp()


def axis_covariance(size: int, length_scale: float, envelope_width: float) -> Tensor:
    """R, (size, size) in float64: the covariance of the cells of a filter along one axis.

    With p and q the rows and columns of two cells, counted from the filter's centre, they have

        Σ[p, q] = c · e(p) · e(q) · exp(−‖p − q‖² / 2s²),   e(p) = exp(−‖p‖² / 2w²),

    where s is length_scale and w envelope_width. The last factor makes cells within about s alike. As a
    function of p − q its Fourier transform is a Gaussian, so it is positive definite (Bochner), and e(p) e(q)
    keeps that. Each factor is one of rows times one of columns, so Σ = R ⊗ R, and c is such that
    E Σ w² = (tr R)² = ⅓. As s → 0, cells are independent; as s → ∞, all filters are multiples of the
    envelope e. A large w gives all cells the same variance; as w → 0 only the centre is left.
    """
    cells = torch.arange(size, dtype=torch.float64) - (size - 1) // 2
    envelope = (-(cells / envelope_width).square() / 2.0).exp()
    likeness = (-((cells[:, None] - cells) / length_scale).square() / 2.0).exp()
    return ENERGY ** 0.5 / envelope.square().sum() * envelope[:, None] * envelope * likeness


def symmetric_root(matrix: Tensor) -> Tensor:
    """The positive semi-definite A with A @ A = matrix, which must be such a matrix, too.

    Unlike a factor of eigenvectors, whose signs are arbitrary, A is unique, so a seed gives the same
    filters on every machine; and unlike Cholesky's it exists for matrices that rounding makes singular.
    """
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=0.0).sqrt() @ vectors.mT


def correlated_kernel(root: Tensor, *, generator: torch.Generator) -> Tensor:
    """(k, k), normal with mean 0 and covariance R ⊗ R over the cells, row by row; root: √R, (k, k)."""
    white = torch.empty_like(root).normal_(generator=generator)          # (k, k)
    return root @ white @ root
