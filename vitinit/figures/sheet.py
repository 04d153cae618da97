"""A contact sheet: images with what a model takes them for, and where it looks."""

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
COLUMNS = 10                    # tiles in a row, at most
SIDE = 1.25                     # inches of an image
LONGEST = 22                    # characters of a class' name


class Tile(NamedTuple):
    """One image on the sheet."""

    view: Tensor                # (3, H, W) uint8
    heat: Tensor | None         # (rows, columns): the attention on each patch
    truth: str | None           # the class that its folder names
    guess: str
    share: float                # its probability


def require_attention(trained: Trained) -> None:
    """FigureError for a family without attention."""
    if not isinstance(trained.model, (VisionTransformer, SimpleViT, SwinTransformer)):
        raise FigureError(f"--attention: a {type(trained.model).__name__} has no attention; expected "
                          "a ViT, a SimpleViT or a Swin")


@torch.no_grad()
def attended(trained: Trained, view: Tensor) -> Tensor:
    """Where the last block looks on one view, (rows, columns) of its grid, mean over heads.

    view: (3, H, W) uint8. The attention of the class token, or of all patch tokens in the mean, on
    each patch token.
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
    """All tiles in rows, each with its guess below: blue if right, vermilion if wrong, else grey.

    With heat, the image stands above the same image in grey under its heat.
    """
    if not tiles:
        raise FigureError(f"{out}: no image could be read, so there is nothing to draw")
    plt = pyplot()
    columns = min(COLUMNS, len(tiles))
    storeys = 2 if tiles[0].heat is not None else 1
    rows = math.ceil(len(tiles) / columns)
    figure, axes = plt.subplots(storeys * rows, columns, squeeze=False, layout="constrained", figsize=(
        SIDE * columns + 0.3, (storeys * SIDE + 0.35) * rows + 0.5))
    for axis in axes.flat:
        axis.set_axis_off()
    for number, tile in enumerate(tiles):
        row, column = divmod(number, columns)
        height, width = tile.view.shape[1:]
        extent = (0, width, height, 0)               # one frame for both layers
        upper, lower = axes[storeys * row, column], axes[storeys * row + storeys - 1, column]
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
    """A class' name as far as there is room below an image."""
    return name if len(name) <= LONGEST else name[:LONGEST - 1] + "…"
