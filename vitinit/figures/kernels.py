"""The figures `kernels` and `filters`: what a model mixes tokens with, by offset.

`kernels` shows the mean attention of each head of a ViT or SimpleViT by the offset from query to
key: the convolution kernel that the head starts as. `filters` shows kernels that a model has as
parameters: a ConvMixer's depthwise filters and a Swin's relative position bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor, nn

from ..mixing import mean_kernel, mixing_matrices
from .plot import Row, draw_grid
from .subjects import Subject, chosen_heads, photographs, require_family, require_indices

RADIUS = 3                      # largest offset in the figure `kernels`, in patches


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


def held_kernels(model: nn.Module, block: int, columns: Sequence[int]) -> Tensor:
    """The kernels among a block's parameters, (columns, height, width), by offset.

    Entry [0, 0] belongs to the offset that is farthest up and left.
    block: index, counted through all stages of a Swin.
    columns: for a ConvMixer, channels, whose depthwise filters are returned; for a Swin, heads,
        whose relative position bias is returned by the key's offset from the query.
    Raises FigureError for an index that is out of range.
    """
    if model.family == "conv_mixer":
        require_indices("block", [block], len(model.blocks))
        mixing = model.depthwise(model.blocks[block])
        require_indices("channel", columns, mixing.out_channels)
        return mixing.kernels().detach()[list(columns), 0]
    blocks = [block for stage in model.layers for block in stage.blocks]
    require_indices("block", [block], len(blocks))
    attention = blocks[block].attn
    require_indices("head", columns, attention.num_heads)
    tables = attention.relative_position_bias_table.detach().mT[list(columns)]
    height, width = attention.window
    # The table is indexed by query − key; flipped, it is indexed by key − query.
    return tables.unflatten(1, (2 * height - 1, 2 * width - 1)).flip(1, 2)


def draw_filters(out: Path, subjects: Iterable[Subject], *, blocks: Sequence[int],
                 columns: Sequence[int]) -> None:
    """Draw depthwise filters of ConvMixers by channel, or the position bias of Swins by head.

    There is one row per model and block. columns: the channels or heads.
    """
    rows = []
    for subject in subjects:
        require_family(subject, "filters", "conv_mixer", "swin")
        for block in blocks:
            rows.append(Row(f"{subject.state}\nblock {block}",
                            held_kernels(subject.model, block, columns),
                            "weight" if subject.model.family == "conv_mixer" else "bias",
                            "tokens down", "tokens right", diverging=True, centred=True))
    what, column = (("depthwise filters", "channel") if subject.model.family == "conv_mixer" else
                    ("bias on attention's logits by offset of the key", "head"))
    draw_grid(out, rows, [f"{column} {number}" for number in columns],
              f"{subject.recipe.name}: {what}")
