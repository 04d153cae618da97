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
from ..runs.trained import Trained
from .plot import BLUE, VERMILION, FigureError, draw_heat, pyplot, save

RIGHT, WRONG, UNKNOWN = BLUE, VERMILION, "0.35"
COLUMNS = 10                    # tiles per row, at most
SIDE = 1.25                     # width and height of an image in inches
LONGEST = 22                    # characters shown of a class or file name, at most
STRONG = 4.0                    # the scale of attention ends, at least, in multiples of uniform


class Tile(NamedTuple):
    """One image on the sheet."""

    path: str                   # of the image's file
    view: Tensor                # (3, H, W) uint8, the image as the model sees it
    heat: Tensor | None         # (rows, columns), the attention on each patch; None: not shown
    truth: str | None           # the class that the image's folder names; None: unknown
    guess: str                  # the predicted class
    share: float                # its probability


def require_attention(trained: Trained) -> None:
    """Raise FigureError if the model's family has no attention."""
    if trained.model.family not in ("vit", "simple_vit", "swin"):
        raise FigureError(f"--attention: a {type(trained.model).__name__} has no attention; "
                          "expected a ViT, a SimpleViT or a Swin")


@torch.no_grad()
def attended(trained: Trained, view: Tensor) -> Tensor:
    """The last block's attention on each patch token, (rows, columns), as the mean over heads.

    The query is the class token if the model pools by it; else the mean over all patch tokens as
    queries is taken. view: (3, H, W) uint8.
    """
    model, grid = trained.model, block_grids(trained.model)[-1]
    last = len(block_grids(model)) - 1
    inputs = trained.inputs(view[None])
    weights = mixing_matrices(model, inputs, blocks=[last])[last][0]     # (h, N, N)
    patches = grid[0] * grid[1]
    by_class_token = model.family == "vit" and model.pool == "class"
    rows = weights[:, :1] if by_class_token else weights[:, -patches:]   # (h, queries, N)
    return rows[..., -patches:].mean((0, 1)).view(grid).cpu()


def draw_sheet(out: Path, tiles: Sequence[Tile], *, heading: str) -> None:
    """Draw all tiles in rows, each with its file and its guess below the image.

    The guess is blue if right, vermilion if wrong, and grey if the true class is unknown. Tiles
    with heat show the image, and below it the same image in grey under the heat; either all tiles
    have heat or none. All heat has one scale with a colour bar, of multiples of uniform attention;
    it reaches STRONG at least, so that attention without a preference is dark. Raises FigureError
    if there are no tiles.
    """
    if not tiles:
        raise FigureError(f"{out}: no image could be read, so there is nothing to draw")
    plt = pyplot()
    columns = min(COLUMNS, len(tiles))
    heats = [tile.heat * tile.heat.numel() for tile in tiles if tile.heat is not None]
    every = torch.cat([heat.flatten() for heat in heats] or [torch.zeros(1)])
    top = max(STRONG, every.quantile(0.99).item())   # one bright patch does not darken all others
    images_per_tile = 2 if heats else 1
    rows = math.ceil(len(tiles) / columns)
    beside = 1.2 if heats else 0.5                   # inches: the heading, and a colour bar
    figure, axes = plt.subplots(
        images_per_tile * rows, columns, squeeze=False, layout="constrained",
        figsize=(SIDE * columns + 0.3, (images_per_tile * SIDE + 0.47) * rows + beside))
    for axis in axes.flat:
        axis.set_axis_off()
    for number, tile in enumerate(tiles):
        row, column = divmod(number, columns)
        height, width = tile.view.shape[1:]
        upper, lower = (axes[line, column] for line in (
            images_per_tile * row, images_per_tile * (row + 1) - 1))
        upper.imshow(tile.view.permute(1, 2, 0).numpy(), extent=(0, width, height, 0))
        if heats:
            layer = draw_heat(lower, tile.view, heats[number], plt.Normalize(0.0, top))
        words, colour = f"{shortened(tile.guess)} {100 * tile.share:.0f} %", UNKNOWN
        if tile.truth is not None:
            colour = RIGHT if tile.guess == tile.truth else WRONG
            if tile.guess != tile.truth:
                words += f"\nis {shortened(tile.truth)}"
        below = dict(transform=lower.transAxes, ha="center", va="top")
        lower.text(0.5, -0.03, file_name(tile.path), fontsize=6, color=UNKNOWN, **below)
        lower.text(0.5, -0.13, words, fontsize=7, color=colour, **below)
    if heats:
        bar = figure.colorbar(layer, ax=list(axes.flat), location="bottom", aspect=40, pad=0.01,
                              shrink=min(1.0, 4 / columns),
                              extend="max" if every.max() > top else "neither")
        bar.set_label("attention on a patch,\n1: the same on all", fontsize=8)
        bar.ax.tick_params(labelsize=7)
    figure.suptitle(heading, fontsize=10, wrap=True)
    save(figure, out)


def shortened(name: str) -> str:
    """A class name, cut to the LONGEST characters that fit below an image."""
    return name if len(name) <= LONGEST else name[:LONGEST - 1] + "…"


def file_name(path: str) -> str:
    """A file with its folder, or as much of the end of both as fits below an image."""
    name = "/".join(Path(path).absolute().parts[-2:])
    return name if len(name) <= LONGEST else "…" + name[1 - LONGEST:]
