"""What every figure needs: matplotlib, colours that the colour-blind tell apart, panels of lines and
grids of maps."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from PIL import Image
from torch import Tensor

from ..messages import OneLineError, in_brief

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")   # Okabe and Ito's
LINES = ("-", "--", "-.", ":")
SEQUENTIAL = "cividis"          # from 0 up
OVERLAY = "viridis"             # the same over a grey photograph; cividis has greys of its own
DIVERGING = "RdBu_r"            # blue below 0, white, red above; ColorBrewer lists it as safe
LEVELS = 63                     # of colour in a map, odd, so that 0 is white; more cost space
DPI = 100
LETTER = 0.07                   # inches across, in a legend of 8 points


class FigureError(OneLineError):
    """What is asked of a figure and cannot be drawn, in one line."""


def pyplot() -> ModuleType:
    """matplotlib without a display; one clear line where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("vitinit.figures needs matplotlib: pip install 'vitinit[figures]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def save(figure: Figure, out: Path, dpi: int = DPI) -> None:
    """A PNG file; the figure is closed, since pyplot would keep it in memory."""
    try:
        figure.savefig(out, dpi=dpi, format="png")
    except ValueError as error:                      # matplotlib's limit is 65,535 pixels a side
        raise FigureError(f"{out}: cannot be drawn: {in_brief(error)}") from None
    finally:
        pyplot().close(figure)


# ---------------------------------------------------------------------------------------------
# Panels of lines
# ---------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """One value for each of 0, 1, 2, …"""

    values: Tensor              # (points,); NaN is not drawn
    label: str                  # lines of one label look alike in all panels
    colour: str
    style: str = "-"
    marker: str = "o"


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name, in their order; from the seventh on they start again."""
    return dict(zip(dict.fromkeys(names), cycle(COLOURS)))


def draw_panels(out: Path, panels: dict[str, list[Line]], *, across: str, down: str, heading: str,
                top: float | None = None) -> None:
    """Panels side by side, on one scale from 0 to `top` (None: as far as lines reach)."""
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
    # Of all panels, which share it; with a `top`, a little more shows markers at both ends whole.
    axes[0, 0].set_ylim((0.0, None) if top is None else (-0.02 * top, 1.02 * top))
    columns = int(width / (LETTER * max(map(len, legend)) + 0.6))        # 0.6: a line's sample
    figure.legend(legend.values(), legend, loc="outside lower center", fontsize=8,
                  ncols=min(max(columns, 1), 4))
    figure.suptitle(heading, fontsize=11)
    save(figure, out)


# ---------------------------------------------------------------------------------------------
# Grids of maps
# ---------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """Maps side by side on one colour scale."""

    label: str
    maps: Tensor                # (columns, height, width)
    unit: str                   # what the colour bar measures
    down: str                   # what an axis counts
    across: str
    diverging: bool             # colours centred at 0; else from 0 up
    centred: bool = False       # axes count from the middle, as a kernel's offsets do
    peak: float = 0.0           # where colours end; 0: at the largest value


def draw_grid(out: Path, rows: list[Row], titles: list[str], heading: str,
              side: float = 1.3) -> None:
    """One figure of all rows, each map `side` inches wide, with a colour bar a row."""
    plt = pyplot()
    figure, axes = plt.subplots(len(rows), len(titles), squeeze=False, layout="constrained",
                                figsize=(side * len(titles) + 2.0, (side + .35) * len(rows) + .6))
    for number, (line, row) in enumerate(zip(axes, rows)):
        largest = row.maps.abs().max().item() or 1.0     # of zeros alone, a scale of some width
        peak = row.peak or largest
        cut = "neither" if peak >= largest else "both" if row.diverging else "max"
        look = dict(cmap=plt.get_cmap(DIVERGING if row.diverging else SEQUENTIAL, LEVELS),
                    vmin=-peak if row.diverging else 0.0, vmax=peak)
        for axis in line[len(row.maps):]:            # a row of fewer heads than another
            axis.set_axis_off()
        for column, (axis, values) in enumerate(zip(line, row.maps)):
            height, width = values.shape
            up, left = ((height - 1) // 2, (width - 1) // 2) if row.centred else (0, 0)
            # Finer than the screen, entries are averaged instead of left out here and there.
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
            # Where the next row counts the same, its labels serve for both.
            if number + 1 == len(rows) or rows[number + 1].across != row.across:
                axis.set_xlabel(row.across, fontsize=8)
        line[0].set_ylabel(f"{row.label}\n{row.down}", fontsize=8)
        bar = figure.colorbar(image, ax=list(line), label=row.unit, shrink=0.9, pad=0.01,
                              extend=cut)
        bar.ax.tick_params(labelsize=7)
    figure.suptitle(heading, fontsize=11)
    save(figure, out)
    # Noise hardly compresses; 256 colours, enough for two maps and their text, quarter it.
    Image.open(out).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        out, format="png", optimize=True)
