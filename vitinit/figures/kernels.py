"""The figure `kernels`: the mean attention of each head of a ViT or SimpleViT by the offset from
query to key, which is the convolution kernel that the head starts as.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ..mixing import mean_kernel, mixing_matrices
from .plot import Row, draw_grid
from .subjects import Subject, chosen_heads, photographs, require_family, require_indices

RADIUS = 3                      # largest offset, in patches


def draw_kernels(out: Path, subjects: Iterable[Subject], *, folder: Path | None, count: int,
                 blocks: Sequence[int], heads: Sequence[int] | None) -> None:
    """Draw mean attention by offset, with one row per model and block and one column per head.

    folder, count: the mean is over `count` images (`photographs`) and all query tokens.
    heads: indices; None: all heads.
    """
    rows, most = [], 0
    for subject in subjects:
        require_family(subject, "kernels")
        require_indices("block", blocks, len(subject.model.blocks))
        images = photographs(folder, count, subject.recipe)
        for block, weights in mixing_matrices(subject.model, images, blocks=blocks).items():
            chosen = chosen_heads(heads, weights.shape[1])               # weights: (B, h, N, N)
            kernel = mean_kernel(weights[:, chosen], subject.model.grid, RADIUS).mean(0)
            rows.append(Row(f"{subject.state}\nblock {block}", kernel, "mean attention",
                            "patches down", "patches right", diverging=False, centred=True))
            most = max(most, len(chosen))
    draw_grid(out, rows, [f"head {head}" for head in heads or range(most)],
              f"{subject.recipe.name}: what each head attends to, mean over {count} images")
