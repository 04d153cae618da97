"""Other depthwise filters for a ConvMixer, with which arXiv 2401.12511 compares impulses."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..models.conv_mixer import ConvMixer
from .baseline import Base, draw_base

ENERGY = 1 / 3          # expected Σ w² of PyTorch's draw: k² cells of variance 1 / (3 k²)


@torch.no_grad()
def filters_conv_mixer(model: ConvMixer, *, generator: torch.Generator, base: Base = "default",
                       kind: Literal["random", "box", "gaussian"] = "random",
                       cells: int = 2, sigma: float = 1.0) -> None:
    """Draw depthwise filters of one kind, at the scale of the paper's code: Σ w² = ⅓ on average.

    | tensor (every block)       | value                                                        |
    |----------------------------|--------------------------------------------------------------|
    | blocks.i.0.fn.0.weight     | see kind                                                     |
    | everything else            | as `base` drew it                                            |

    kind: one of the following. cells: of "box". sigma: of "gaussian", in cells. (The paper's code
        calls σ² what is σ here.)

    | kind       | filter                                                                       |
    |------------|------------------------------------------------------------------------------|
    | "random"   | uniform on ±1/k, as PyTorch draws filters                                    |
    | "box"      | one value in `cells` cells, drawn without replacement, 0 in the others; with |
    |            |   cells = k² every filter is the mean over its window                        |
    | "gaussian" | exp(−‖δ − c‖² / 2σ²) around a random cell c; all filters of a block are      |
    |            |   multiplied by one factor, so that their mean Σ w² is ⅓                     |

    With the model option `train_filters = false` the filters keep these values. Raises ValueError
    for values out of range.
    """
    size = model.kernel_size
    if not 1 <= cells <= size**2 or not sigma > 0:
        raise ValueError(f"cells is {cells} and sigma {sigma}; expected 1 ≤ cells ≤ {size**2}, the "
                         "cells of the model's kernel, and sigma > 0")
    draw_base(model, base, generator)
    draw = {"random": lambda: (2.0 * torch.rand(size, size, generator=generator) - 1.0) / size,
            "box": lambda: scattered_box(size, cells, generator=generator),
            "gaussian": lambda: placed_gaussian(size, sigma, generator=generator)}[kind]
    for block in model.blocks:
        weight = model.depthwise(block).weight                           # (F, 1, k, k)
        kernels = torch.stack([draw() for _ in range(len(weight))])      # (F, k, k)
        if kind == "gaussian":
            kernels *= (ENERGY / kernels.square().sum((1, 2)).mean()) ** 0.5
        weight.copy_(kernels[:, None])


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
