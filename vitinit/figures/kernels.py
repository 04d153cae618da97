"""The figures `kernels` and `filters`.

`kernels` shows the mean attention of each head of a fresh ViT by the offset from query to key: the
convolution kernel that the head starts as. `filters` shows kernels that a model has as parameters:
a ConvMixer's depthwise filters and a Swin's relative position bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ..command_line import building
from ..data import shapes
from ..data.augment import normalise
from ..init import init_weights
from ..keys import Stream, keyed_generator
from ..mixing import mean_kernel, mixing_matrices
from ..models import ConvMixer, SwinTransformer, build_model
from .plot import Row, draw_grid, pyplot, save
from .subjects import Subject, require_family, require_indices

RADIUS = 3                      # largest offset in the figure `kernels`, in patches


def example_images(count: int) -> Tensor:
    """The first validation images of the data set `shapes`, (count, 3, 32, 32), normalised."""
    images = [shapes.draw_image(keyed_generator(shapes.SEED, Stream.SHAPES, 1, index))[0]
              for index in range(count)]
    return normalise(torch.stack([torch.from_numpy(p) for p in images]), [0.5] * 3, [0.25] * 3)


def draw_kernels(out: Path, *, inits: list[str], embed_dim: int, num_heads: int, patch_size: int,
                 block: int) -> None:
    """Draw mean attention by offset, with one row per init and one column per head.

    The model is a ViT for 32-pixel images with mean pooling, initialised with seed 0; the mean is
    over 64 images of `shapes` and all query tokens.
    block: the index of the block to show; the model has as many blocks as that takes.
    """
    plt = pyplot()
    images = example_images(64)
    figure, axes = plt.subplots(len(inits), num_heads, squeeze=False, layout="constrained",
                                figsize=(1.35 * num_heads + 1.6, 1.45 * len(inits) + 0.5))
    for number, (row, name) in enumerate(zip(axes, inits)):
        with building("kernels", "model"):
            model = build_model("vit_tiny", num_classes=10, image_size=32, patch_size=patch_size,
                                embed_dim=embed_dim, num_heads=num_heads, depth=block + 1,
                                pool="mean")
            init_weights(model, name, generator=torch.Generator().manual_seed(0))
        weights = mixing_matrices(model, images, blocks=[block])[block]    # (B, h, N, N)
        kernels = mean_kernel(weights, model.grid, RADIUS).mean(0)        # (h, 2r + 1, 2r + 1)
        for head, axis in enumerate(row):
            image = axis.imshow(kernels[head].numpy(), vmin=0, vmax=1, cmap="cividis",
                                extent=(-RADIUS - .5, RADIUS + .5, RADIUS + .5, -RADIUS - .5))
            axis.set(xticks=[-RADIUS, 0, RADIUS], yticks=[-RADIUS, 0, RADIUS])
            axis.tick_params(labelsize=7)
            if number == 0:
                axis.set_title(f"head {head}", fontsize=9)
        row[0].set_ylabel(f"{name}\npatches down", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("patches right", fontsize=8)
    figure.colorbar(image, ax=axes, label="mean attention", shrink=0.8)
    figure.suptitle(f"What each head attends to before training, block {block}", fontsize=11)
    save(figure, out, dpi=130)


def held_kernels(model: nn.Module, block: int, columns: Sequence[int]) -> Tensor:
    """The kernels among a block's parameters, (columns, height, width), by offset.

    Entry [0, 0] belongs to the offset that is farthest up and left.
    block: index, counted through all stages of a Swin.
    columns: for a ConvMixer, channels, whose depthwise filters are returned; for a Swin, heads,
        whose relative position bias is returned by the key's offset from the query.
    Raises FigureError for an index that is out of range.
    """
    if isinstance(model, ConvMixer):
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
        require_family(subject, "filters", ConvMixer, SwinTransformer)
        for block in blocks:
            rows.append(Row(f"{subject.state}\nblock {block}",
                            held_kernels(subject.model, block, columns),
                            "weight" if isinstance(subject.model, ConvMixer) else "bias",
                            "tokens down", "tokens right", diverging=True, centred=True))
    what, column = (("depthwise filters", "channel") if isinstance(subject.model, ConvMixer) else
                    ("bias on attention's logits by offset of the key", "head"))
    draw_grid(out, rows, [f"{column} {number}" for number in columns],
              f"{subject.recipe.name}: {what}")
