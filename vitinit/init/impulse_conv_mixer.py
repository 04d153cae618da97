"""Impulse initialisation of a ConvMixer: its depthwise kernels are impulses."""

from __future__ import annotations

from typing import Literal

import torch

from ..filters import head_offsets, impulse_kernel, ordered_offsets
from ..models.conv_mixer import ConvMixer
from .baseline import Base, draw_base


@torch.no_grad()
def impulse_conv_mixer(model: ConvMixer, *, generator: torch.Generator, base: Base = "default",
                       kernel_size: int = 0, offsets: Literal["ordered", "random"] = "ordered",
                       gain: float = 1.0) -> None:
    """Make every depthwise filter an impulse, which picks one neighbour (arXiv 2401.12511, §3).

    | tensor (every block)       | value                                                        |
    |----------------------------|--------------------------------------------------------------|
    | blocks.i.0.fn.0.weight     | gain at the filter's offset, 0 elsewhere                     |
    | blocks.i.0.fn.0.bias       | 0                                                            |
    | everything else            | as `base` drew it                                            |

    kernel_size: of the kernel whose offsets are used, centred in the model's; 0: the model's.
    offsets: "ordered": in turn, the same in every block. "random", as in the paper: one draw per
        filter.
    gain: the value of the impulse. The paper's code uses √⅓, the expected norm of a filter that
        PyTorch draws.

    Raises ValueError for options out of range.
    """
    if gain == 0:
        raise ValueError("gain is 0, so that no filter picks a neighbour; expected another number")
    size = model.kernel_size
    if not 0 <= kernel_size <= size:
        raise ValueError(f"kernel_size is {kernel_size}, expected at most the model's {size}, or 0 "
                         "for that")
    cells = ordered_offsets(kernel_size or size)
    draw_base(model, base, generator)

    for layer in map(model.depthwise, model.blocks):
        targets = head_offsets(len(layer.weight), cells, offsets, generator)
        kernels = torch.stack([gain * impulse_kernel(offset, size) for offset in targets])
        layer.weight.copy_(kernels[:, None])                             # (F, 1, k, k)
        layer.bias.zero_()
