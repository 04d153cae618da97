"""Plotting that all figures share: matplotlib's setup, colours, panels of lines, grids of maps.

The colours can be told apart by colour-blind readers.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from PIL import Image
from torch import Tensor

from ..messages import OneLineError, in_brief
from ..train.checkpoint import written_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")   # Okabe and Ito's
LINES = ("-", "--", "-.", ":")
SEQUENTIAL = "cividis"          # colour map for values from 0 up
OVERLAY = "viridis"             # the same over a grey photograph, since cividis contains greys
DIVERGING = "RdBu_r"            # blue below 0, white at 0, red above; ColorBrewer lists it as safe
LEVELS = 63                     # colours in a map: odd, so that 0 is white; more make larger files
DPI = 100
LETTER = 0.07                   # width of a letter in inches, in a legend of 8 points


class FigureError(OneLineError):
    """A figure cannot be drawn as requested; the message is one line."""


def pyplot() -> ModuleType:
    """matplotlib.pyplot with the Agg backend, which needs no display.

    Raises SystemExit with a one-line message if matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("vitinit.figures needs matplotlib: pip install 'vitinit[figures]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def save(figure: Figure, out: Path, dpi: int = DPI, *, colours: int | None = None) -> None:
    """Write a figure as a PNG file and close it, since pyplot would keep it in memory otherwise.

    colours: reduce it to so many. Raises FigureError if it is too large for matplotlib, and
    CheckpointError if the file cannot be written; one that was there then stays.
    """
    drawn = io.BytesIO()
    try:
        figure.savefig(drawn, dpi=dpi, format="png")
    except ValueError as error:                      # a side is longer than 65,535 pixels
        raise FigureError(f"{out}: cannot be drawn: {in_brief(error)}") from None
    finally:
        pyplot().close(figure)
    if colours is not None:
        few = Image.open(drawn).convert("RGB").quantize(colours, dither=Image.Dither.NONE)
        few.save(drawn := io.BytesIO(), format="png", optimize=True)
    with written_atomically(out) as file:
        file.write(drawn.getvalue())


# ---------------------------------------------------------------------------------------------
# Panels of lines
# ---------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A line of a panel: values at x = 0, 1, 2, …"""

    values: Tensor              # (points,); NaN is not drawn
    label: str                  # give lines of the same label the same look in all panels
    colour: str
    style: str = "-"
    marker: str = "o"


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Assign a colour to each distinct name, in order; from the seventh on, colours repeat."""
    return dict(zip(dict.fromkeys(names), cycle(COLOURS)))


def draw_panels(out: Path, panels: dict[str, list[Line]], *, across: str, down: str, heading: str,
                top: float | None = None) -> None:
    """Draw panels of lines side by side with a shared vertical scale and a shared legend.

    panels: title → lines. across, down: labels of the horizontal and the vertical axis.
    top: upper end of the vertical scale, which starts at 0; None: the largest value.
    """
    width = max(7.6, 3.1 * len(panels) + 1.2)        # inches
    figure, axes = pyplot().subplots(1, len(panels), squeeze=False, sharey=True, layout="constrained",
                                     figsize=(width, 4.2))
    legend = {}
    for axis, (title, lines) in zip(axes[0], panels.items()):
        for line in lines:
            legend[line.label], = axis.plot(line.values, color=line.colour, linestyle=line.style,
                                            marker=line.marker, markersize=3, label=line.label)
        axis.set(title=title, xlabel=across, xticks=range(max(len(line.values) for line in lines)))
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel(down)
    # All panels share this scale. With a `top`, a margin of 2 % keeps markers at both ends whole.
    axes[0, 0].set_ylim((0.0, None) if top is None else (-0.02 * top, 1.02 * top))
    columns = int(width / (LETTER * max(map(len, legend)) + 0.6))    # 0.6 inch: the line's sample
    figure.legend(legend.values(), legend, loc="outside lower center", fontsize=8,
                  ncols=min(max(columns, 1), 4))
    figure.suptitle(heading, fontsize=11)
    save(figure, out)


# ---------------------------------------------------------------------------------------------
# Grids of maps
# ---------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A row of a grid: maps side by side with one colour scale."""

    label: str
    maps: Tensor                # (columns, height, width)
    unit: str                   # label of the colour bar
    down: str                   # label of the vertical axis
    across: str                 # label of the horizontal axis
    diverging: bool             # colours are centred at 0, else they start at 0
    centred: bool = False       # axes count from the centre of a map, as a kernel's offsets do
    peak: float = 0.0           # absolute value at which colours end; 0: the largest in the row


def draw_grid(out: Path, rows: list[Row], titles: list[str], heading: str,
              side: float = 1.3) -> None:
    """Draw a grid of maps with one colour bar per row.

    titles: of the columns. side: width and height of a map in inches.
    """
    plt = pyplot()
    figure, axes = plt.subplots(len(rows), len(titles), squeeze=False, layout="constrained",
                                figsize=(side * len(titles) + 2.0, (side + .35) * len(rows) + .6))
    for number, (line, row) in enumerate(zip(axes, rows)):
        largest = row.maps.abs().max().item() or 1.0     # 1 if all values are 0: no empty scale
        peak = row.peak or largest
        cut = "neither" if peak >= largest else "both" if row.diverging else "max"
        look = dict(cmap=plt.get_cmap(DIVERGING if row.diverging else SEQUENTIAL, LEVELS),
                    vmin=-peak if row.diverging else 0.0, vmax=peak)
        for axis in line[len(row.maps):]:            # this row has fewer maps than another
            axis.set_axis_off()
        for column, (axis, values) in enumerate(zip(line, row.maps)):
            height, width = values.shape
            up, left = ((height - 1) // 2, (width - 1) // 2) if row.centred else (0, 0)
            # A map with more entries than pixels is averaged; "nearest" would skip entries.
            fine = height > side * DPI
            image = axis.imshow(values.numpy(), **look, interpolation_stage="data",
                                interpolation="antialiased" if fine else "nearest", extent=(
                                    -left - .5, width - left - .5, height - up - .5, -up - .5))
            axis.tick_params(labelsize=6)
            axis.locator_params(nbins=4, integer=True)
            if column:
                axis.set_yticklabels([])
            if number == 0:
                axis.set_title(titles[column], fontsize=9)
            # If the next row has the same horizontal axis, its label serves for both.
            if number + 1 == len(rows) or rows[number + 1].across != row.across:
                axis.set_xlabel(row.across, fontsize=8)
        line[0].set_ylabel(f"{row.label}\n{row.down}", fontsize=8)
        bar = figure.colorbar(image, ax=list(line), label=row.unit, shrink=0.9, pad=0.01,
                              extend=cut)
        bar.ax.tick_params(labelsize=7)
    figure.suptitle(heading, fontsize=11)
    # Maps of noise hardly compress. 256 colours, enough for two colour maps and text, make the file
    # about four times smaller.
    save(figure, out, colours=256)
