"""How long each init takes, beside a literal transcription of the paper's formulas."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..filters import convolution_matrix, impulse_kernel, ordered_offsets
from ..init import init_weights
from ..init.impulse import normalised_positions
from ..models import build_model
from ..train.device import describe_device
from .item import Row
from .timing import best_seconds, best_seconds_each


def transcribed_impulse(model: torch.nn.Module) -> None:
    """Compute Q and K of impulse initialisation literally by the formulas of arXiv 2505.19985.

    This is what the fast implementation is compared with. It takes one pseudo-inverse per block and
    one full SVD of a D×D matrix per head. The result is discarded.
    """
    positions = normalised_positions(model).detach()
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


def init_seconds(name: str, *, repeats: int = 3) -> list[Row]:
    """Seconds that each init of a model takes on the CPU.

    Each is the best of `repeats` calls; the transcription is called once. The time of the position
    embedding, Q and K alone is that of the init with `value_init="base"` minus that of its base.
    All have the base "default", and `deep_impulse` one mass for all blocks.
    """
    model = build_model(name, num_classes=1000, image_size=224)

    def one(init: str, **options) -> Callable[[], object]:
        return lambda: init_weights(model, init, generator=torch.Generator().manual_seed(0), **options)
    exact = dict(base="default", target_mass=0.9)
    seconds = best_seconds_each({
        "base": one("default"), "impulse": one("impulse"), "deep_impulse": one("deep_impulse", **exact),
        "impulse over base": one("impulse", value_init="base"),
        "deep_impulse over base": one("deep_impulse", value_init="base", **exact),
        "mimetic": one("mimetic")}, repeats)
    slow = best_seconds(lambda: transcribed_impulse(model), repeats=1)
    return [{"init": name, "s": found} for name, found in [
        ("base 'default' alone", seconds["base"]),
        ("impulse, pos_embed and all Q, K", seconds["impulse over base"] - seconds["base"]),
        ("the same transcribed (D×D SVDs), once", slow),
        ("impulse, whole call with mimetic V, proj", seconds["impulse"]),
        ("deep_impulse, pos_embed and all Q, K", seconds["deep_impulse over base"] - seconds["base"]),
        ("deep_impulse, whole call", seconds["deep_impulse"]),
        ("mimetic, whole call", seconds["mimetic"])]]


def bench_init(name: str) -> None:
    """Print what `init_seconds` measures for a model."""
    rows = init_seconds(name)
    print(f"{name} on {describe_device(torch.device('cpu'))}, best of three")
    for row in rows:
        note = f", {row['s'] / rows[1]['s']:.0f} times as long" if "D×D" in row["init"] else ""
        print(f"{row['init']:41} {row['s']:7.3f} s{note}")
