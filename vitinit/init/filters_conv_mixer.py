"""The other filters that arXiv 2401.12511 compares with impulses in a ConvMixer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..filters import convolution_matrix, random_kernel
from ..models.conv_mixer import ConvMixer, DenseMixing, DepthwiseConv
from .baseline import draw_base

ENERGY = 1 / 3          # Σ w² of a filter that PyTorch draws, on average: k² cells of variance 1/3k²


@torch.no_grad()
def filters_conv_mixer(model: ConvMixer, *, generator: torch.Generator,
                       base: Literal["default", "torch"] = "default",
                       kind: Literal["random", "box", "gaussian", "permutation"] = "random",
                       cells: int = 2,
                       sigma: float = 1.0) -> None:
    """Depthwise filters of one kind, at the scale of the paper's code: Σ w² = ⅓ each.

    | tensor (every block)       | value                                                        |
    |----------------------------|--------------------------------------------------------------|
    | blocks.i.0.fn.0.weight     | see kind                                                     |
    | everything else            | as `base` drew it                                            |

    kind: "random": uniform on ±1/k, what PyTorch draws. "box": `cells` cells drawn without
        replacement hold the same value, the others 0; with all k² of them every filter is the mean.
        "gaussian": exp(−‖δ − c‖² / 2σ²) around a cell c drawn at random; all of a block have one
        factor in common, so that only their mean energy is ⅓. (The code's σ is our σ².)
        "permutation": √⅓ times a random permutation of the places, which no kernel can be, so that
        the model must have `dense_filters`. There the other kinds are their convolution matrices.
    cells: of "box". sigma: of "gaussian", in cells.

    With `train_filters = false` in the model they stay what they are. Impulses are init `impulse`,
    softmax filters the model's `softmax_filters`. Raises ValueError for values out of range.
    """
    size = model.kernel_size
    if kind not in ("random", "box", "gaussian", "permutation"):
        raise ValueError(f'kind is {kind!r}, expected "random", "box", "gaussian" or "permutation"')
    if not 1 <= cells <= size**2 or not sigma > 0:
        raise ValueError(f"cells is {cells} and sigma {sigma}; expected 1 ≤ cells ≤ {size**2}, the "
                         "cells of the model's kernel, and sigma > 0")
    first = model.depthwise(model.blocks[0])
    if kind != "random" and getattr(first, "softmax", False):
        raise ValueError(f'kind is "{kind}", and a softmax would make something else of such filters; '
                         "set softmax_filters = false")
    if kind == "permutation" and not isinstance(first, DenseMixing):
        raise ValueError('kind is "permutation", which is no convolution; set dense_filters = true')
    draw_base(model, base, generator)
    draw = {"random": lambda: random_kernel(size, generator=generator),
            "box": lambda: scattered_box(size, cells, generator=generator),
            "gaussian": lambda: placed_gaussian(size, sigma, generator=generator)}
    for block in model.blocks:
        mixing = model.depthwise(block)
        filters = range(len(mixing.weight))
        if kind == "permutation":
            places = mixing.weight.shape[1]
            for number in filters:
                order = torch.randperm(places, generator=generator)
                mixing.weight[number] = ENERGY ** 0.5 * torch.eye(places)[order]
            continue
        kernels = torch.stack([draw[kind]() for _ in filters])           # (F, k, k)
        if kind == "gaussian":
            kernels *= (ENERGY / kernels.square().sum((1, 2)).mean()) ** 0.5
        write_kernels(mixing, kernels, model.grid)


def write_kernels(mixing: DepthwiseConv | DenseMixing, kernels: Tensor,
                  grid: tuple[int, int]) -> None:
    """kernels, (F, k, k), as the filters of a block; in dense ones, as their matrices on `grid`."""
    if isinstance(mixing, DenseMixing):
        mixing.weight.copy_(torch.stack([convolution_matrix(kernel, grid) for kernel in kernels]))
    else:
        mixing.weight.copy_(kernels[:, None])


def scattered_box(size: int, cells: int, *, generator: torch.Generator) -> Tensor:
    """(size, size): `cells` cells at random share the energy ⅓."""
    kernel = torch.zeros(size**2)
    kernel[torch.randperm(size**2, generator=generator)[:cells]] = (ENERGY / cells) ** 0.5
    return kernel.view(size, size)


def placed_gaussian(size: int, sigma: float, *, generator: torch.Generator) -> Tensor:
    """(size, size): a Gaussian of height 1 around a random cell."""
    centre = torch.randint(size, (2,), generator=generator)
    axes = (torch.arange(size) - centre[:, None]).square()               # (2, size)
    return (-(axes[0][:, None] + axes[1]) / (2.0 * sigma**2)).exp()
