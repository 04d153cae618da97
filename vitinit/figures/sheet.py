"""A contact sheet: images with the class that a model predicts and, on demand, its attention.

`python -m vitinit.predict --sheet` draws it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..mixing import block_grids, mixing_matrices
from ..models import SimpleViT, SwinTransformer, VisionTransformer
from ..runs.trained import Trained, as_input
from .attention import HEAT, LUMA
from .plot import COLOURS, OVERLAY, FigureError, pyplot, save

RIGHT, WRONG, UNKNOWN = COLOURS[0], COLOURS[1], "0.35"      # blue, vermilion, grey
COLUMNS = 10                    # tiles per row, at most
SIDE = 1.25                     # width and height of an image in inches
LONGEST = 22                    # characters shown of a class name, at most


class Tile(NamedTuple):
    """One image on the sheet."""

    view: Tensor                # (3, H, W) uint8, the image as the model sees it
    heat: Tensor | None         # (rows, columns), the attention on each patch; None: not shown
    truth: str | None           # the class that the image's folder names; None: unknown
    guess: str                  # the predicted class
    share: float                # its probability


def require_attention(trained: Trained) -> None:
    """Raise FigureError if the model's family has no attention."""
    if not isinstance(trained.model, (VisionTransformer, SimpleViT, SwinTransformer)):
        raise FigureError(f"--attention: a {type(trained.model).__name__} has no attention; expected "
                          "a ViT, a SimpleViT or a Swin")


@torch.no_grad()
def attended(trained: Trained, view: Tensor) -> Tensor:
    """The last block's attention on each patch token, (rows, columns), as the mean over heads.

    The query is the class token if the model pools by it; else the mean over all patch tokens as
    queries is taken. view: (3, H, W) uint8.
    """
    model, grid = trained.model, block_grids(trained.model)[-1]
    last = len(block_grids(model)) - 1
    inputs = as_input(view[None].to(trained.device), trained.recipe)
    weights = mixing_matrices(model, inputs, blocks=[last])[last][0]     # (h, N, N)
    patches = grid[0] * grid[1]
    by_class_token = isinstance(model, VisionTransformer) and model.pool == "class"
    rows = weights[:, :1] if by_class_token else weights[:, -patches:]   # (h, queries, N)
    return rows[..., -patches:].mean((0, 1)).view(grid).cpu()


def draw_sheet(out: Path, tiles: Sequence[Tile], *, heading: str) -> None:
    """Draw all tiles in rows, each with its guess below the image.

    The guess is blue if right, vermilion if wrong, and grey if the true class is unknown. Tiles
    with heat show the image, and below it the same image in grey under the heat; either all tiles
    have heat or none. Raises FigureError if there are no tiles.
    """
    if not tiles:
        raise FigureError(f"{out}: no image could be read, so there is nothing to draw")
    plt = pyplot()
    columns = min(COLUMNS, len(tiles))
    images_per_tile = 2 if tiles[0].heat is not None else 1
    rows = math.ceil(len(tiles) / columns)
    figure, axes = plt.subplots(
        images_per_tile * rows, columns, squeeze=False, layout="constrained",
        figsize=(SIDE * columns + 0.3, (images_per_tile * SIDE + 0.35) * rows + 0.5))
    for axis in axes.flat:
        axis.set_axis_off()
    for number, tile in enumerate(tiles):
        row, column = divmod(number, columns)
        height, width = tile.view.shape[1:]
        extent = (0, width, height, 0)               # one frame for both layers
        upper, lower = (axes[line, column] for line in (
            images_per_tile * row, images_per_tile * (row + 1) - 1))
        upper.imshow(tile.view.permute(1, 2, 0).numpy(), extent=extent)
        if tile.heat is not None:
            grey = sum(share * plane.float() for share, plane in zip(LUMA, tile.view))
            lower.imshow(grey.numpy(), cmap="gray", vmin=0, vmax=255, extent=extent)
            lower.imshow(tile.heat.numpy(), cmap=OVERLAY, vmin=0, vmax=tile.heat.max().item(),
                         alpha=HEAT, extent=extent, interpolation="nearest")
        words = f"{shortened(tile.guess)} {100 * tile.share:.0f} %"
        colour = UNKNOWN
        if tile.truth is not None:
            colour = RIGHT if tile.guess == tile.truth else WRONG
            if tile.guess != tile.truth:
                words += f"\nis {shortened(tile.truth)}"
        lower.text(0.5, -0.03, words, transform=lower.transAxes, ha="center", va="top", fontsize=7,
                   color=colour)
    figure.suptitle(heading, fontsize=10)
    save(figure, out)


def shortened(name: str) -> str:
    """A class name, cut to the LONGEST characters that fit below an image."""
    return name if len(name) <= LONGEST else name[:LONGEST - 1] + "…"
