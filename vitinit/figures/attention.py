"""The figure `attention`: what a query token of a photograph attends to, as heat over the image."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from ..data.images import decode_image
from ..mixing import block_grids, mixing_matrices
from ..models.swin import SwinTransformer
from ..runs.data import as_input, evaluation_view
from .plot import FigureError, draw_heat, pyplot, save
from .subjects import VITS, Subject, indices, unfit


def heat_maps(weights: Tensor, grid: tuple[int, int], query: tuple[int, int]) -> Tensor:
    """The attention of the patch token at `query` on every patch token, (h, rows, columns).

    weights: (h, N, N), attention of one image with prefix tokens (class token, registers) first.
        Prefix tokens are left out, so a map may sum to less than 1.
    grid: rows and columns of patches. query: row and column, counted from 0.
    Raises FigureError if `query` is outside the grid.
    """
    cells, (row, column) = grid[0] * grid[1], query
    if not (0 <= row < grid[0] and 0 <= column < grid[1]):
        raise FigureError(f"query {row},{column} is not on the {grid[0]}×{grid[1]} grid of "
                          "patches")
    return weights[:, -cells:, -cells:][:, row * grid[1] + column].unflatten(-1, grid)


def draw_attention(out: Path, subjects: Iterable[Subject], photograph: Path, *,
                   blocks: Sequence[int], heads: Sequence[int],
                   queries: Sequence[tuple[int, int]]) -> None:
    """Draw one row per model, block and query: the photograph, then one heat map per head.

    The query patch is framed in each. All maps have one scale, which rises with the square root of
    attention, since that may spread over all patches or lie on one. queries: (row, column); if
    empty, the patch in the middle.
    """
    rows = []
    for subject in subjects:
        if not isinstance(subject.model, kinds := (*VITS, SwinTransformer)):
            raise unfit(subject, "attention", kinds)
        grids = block_grids(subject.model)
        blocks = indices("block", blocks, len(grids))
        image = evaluation_view(decode_image(str(photograph)), subject.recipe)      # (3, H, W)
        matrices = mixing_matrices(subject.model, as_input(image[None], subject.recipe),
                                   blocks=blocks)
        for block in blocks:
            weights, grid = matrices[block][0], grids[block]             # (h, N, N)
            weights = weights[indices("head", heads, len(weights))]
            for query in queries or [(grid[0] // 2, grid[1] // 2)]:
                rows.append((f"{subject.state}\nblock {block}", image, grid, query,
                             heat_maps(weights, grid, query)))

    plt = pyplot()
    largest = max(maps.max().item() for *_, maps in rows)
    scale = plt.matplotlib.colors.PowerNorm(0.5, vmin=0.0, vmax=largest)
    figure, axes = plt.subplots(len(rows), len(heads) + 1, squeeze=False, layout="constrained",
                                figsize=(1.9 * (len(heads) + 1) + 1.2, 1.95 * len(rows) + .7))
    for line, (label, image, grid, query, maps) in zip(axes, rows):
        height, width = image.shape[1:]
        down, across = height / grid[0], width / grid[1]                 # a patch in pixels
        line[0].imshow(image.permute(1, 2, 0).numpy(), extent=(0, width, height, 0))
        line[0].set_ylabel(label, fontsize=9)
        for axis, heat in zip(line[1:], maps):
            layer = draw_heat(axis, image, heat, scale)
        for axis in line:
            axis.set(xticks=[], yticks=[])
            corner = (query[1] * across, query[0] * down)
            for colour, thickness in (("black", 2.0), ("white", 0.9)):   # visible on any background
                axis.add_patch(plt.Rectangle(corner, across, down, fill=False, edgecolor=colour,
                                             linewidth=thickness))
    bar = figure.colorbar(layer, ax=list(axes.flat), label="attention", shrink=0.9, pad=0.01)
    bar.ax.tick_params(labelsize=7)
    for axis, title in zip(axes[0], ("photograph, query framed", *(f"head {h}" for h in heads))):
        axis.set_title(title, fontsize=9)
    save(figure, out, subject.heading("what the framed patch attends to"), few_colours="dithered")
