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

from ..messages import in_brief
from ..mixing import block_grids, mixing_matrices
from ..runs.trained import Trained
from .plot import BLUE, VERMILION, FigureError, draw_heat, pyplot, save

UNKNOWN = "0.35"                # a grey, where the true class is not known
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
    model, grids = trained.model, block_grids(trained.model)
    last, patches = len(grids) - 1, grids[-1][0] * grids[-1][1]
    weights = mixing_matrices(model, trained.inputs(view[None]), blocks=[last])[last][0]
    by_class_token = model.family == "vit" and model.pool == "class"
    rows = weights[:, :1] if by_class_token else weights[:, -patches:]   # (h, queries, N)
    return rows[..., -patches:].mean((0, 1)).view(grids[-1]).cpu()


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
    heats = [tile.heat * tile.heat.numel() for tile in tiles if tile.heat is not None]
    every = torch.cat([heat.flatten() for heat in heats] or [torch.zeros(1)])
    top = max(STRONG, every.quantile(0.99).item())   # one bright patch does not darken all others
    columns, stacked = min(COLUMNS, len(tiles)), 2 if heats else 1       # images of a tile
    rows = math.ceil(len(tiles) / columns)
    beside = 1.2 if heats else 0.5                   # inches: the heading, and a colour bar
    figure, axes = plt.subplots(
        stacked * rows, columns, squeeze=False, layout="constrained",
        figsize=(SIDE * columns + 0.3, (stacked * SIDE + 0.47) * rows + beside))
    for axis in axes.flat:
        axis.set_axis_off()
    for number, tile in enumerate(tiles):
        row, column = divmod(number, columns)
        upper, lower = axes[stacked * row, column], axes[stacked * (row + 1) - 1, column]
        upper.imshow(tile.view.permute(1, 2, 0).numpy())
        if heats:
            layer = draw_heat(lower, tile.view, heats[number], plt.Normalize(0.0, top))
        words, colour = f"{in_brief(tile.guess, LONGEST)} {100 * tile.share:.0f} %", UNKNOWN
        if tile.truth == tile.guess:
            colour = BLUE
        elif tile.truth is not None:
            words, colour = f"{words}\nis {in_brief(tile.truth, LONGEST)}", VERMILION
        below = dict(transform=lower.transAxes, ha="center", va="top")
        file = "/".join(Path(tile.path).absolute().parts[-2:])           # with its folder
        file = file if len(file) <= LONGEST else "…" + file[1 - LONGEST:]
        lower.text(0.5, -0.03, file, fontsize=6, color=UNKNOWN, **below)
        lower.text(0.5, -0.13, words, fontsize=7, color=colour, **below)
    if heats:
        bar = figure.colorbar(layer, ax=list(axes.flat), location="bottom", aspect=40, pad=0.01,
                              shrink=min(1.0, 4 / columns),
                              extend="max" if every.max() > top else "neither")
        bar.set_label("attention on a patch,\n1: the same on all", fontsize=8)
        bar.ax.tick_params(labelsize=7)
    save(figure, out, heading)
