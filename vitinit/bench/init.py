"""How long each init takes, beside a literal transcription of the paper's formulas."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from ..filters import convolution_matrix, impulse_kernel, ordered_offsets
from ..init import init_weights
from ..init.layout import layout_of
from ..models import build_model
from .report import Row
from .timing import clock_of, interleave, times_as_fast


def transcribed_impulse(model: torch.nn.Module) -> None:
    """Compute Q and K of impulse initialisation literally by the formulas of arXiv 2505.19985.

    This is what the fast implementation is compared with. It takes one pseudo-inverse per block and
    one full SVD of a D×D matrix per head. The result is discarded.
    """
    positions = layout_of(model).normalised_positions()
    for block in model.blocks:
        attention = block.attn
        left, values, right = torch.linalg.svd(positions.T @ positions)
        rank = attention.head_dim
        inverse = right.T[:, :rank] / values[:rank] @ left[:, :rank].T @ positions.T
        for head in range(attention.num_heads):
            offset = ordered_offsets(3)[head % 9]
            impulses = convolution_matrix(impulse_kernel(offset, 3), model.grid)
            maps = 1000.0 * impulses + torch.randn(impulses.shape) * (impulses == 0)
            torch.linalg.svd(inverse @ maps @ inverse.T)


def init_rows(name: str, image_size: int = 224) -> list[Row]:
    """Seconds that each init of a model takes, on one core of the CPU."""
    model = build_model(name, num_classes=1000, image_size=image_size)

    def one(init: str, **options: str) -> Callable[[], object]:
        return lambda: init_weights(model, init, generator=torch.Generator().manual_seed(0),
                                    **options)
    clock = clock_of(torch.device("cpu"))
    one("default")()                                 # draws the position embedding
    began = clock()
    transcribed_impulse(model)
    slow = clock() - began
    seconds = interleave({"default": one("default"), "mimetic": one("mimetic"),
                          "impulse": one("impulse"), "impulse without V and proj":
                          one("impulse", value_init="base"), "deep_impulse": one("deep_impulse")},
                         clock, rounds=3)
    return [{"init": "Q and K of impulse by the paper's formulas, D×D SVDs, once", "s": slow}] + [
        {"init": init, "s": median(found), "× as fast as by the formulas":
         times_as_fast(found, [slow] * len(found)) if init.startswith("impulse") else None}
        for init, found in seconds.items()]
