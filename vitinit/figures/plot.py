"""What every picture needs: matplotlib, colours that the colour-blind tell apart, grids of maps."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from PIL import Image
from torch import Tensor

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")   # Okabe and Ito's
LINES = ("-", "--", "-.", ":")
SEQUENTIAL = "cividis"          # from 0 up
OVERLAY = "viridis"             # the same over a grey photograph; cividis has greys of its own
DIVERGING = "RdBu_r"            # blue below 0, white, red above; ColorBrewer lists it as safe
LEVELS = 63                     # of colour in a map, odd, so that 0 is white; more cost space
DPI = 100


def pyplot() -> ModuleType:
    """matplotlib without a display; one clear line where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("vitinit.figures needs matplotlib: pip install 'vitinit[figures]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


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
    """One picture of all rows, each map `side` inches wide, with a colour bar a row."""
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
    figure.savefig(out, dpi=DPI, format="png")
    # Noise hardly compresses; 256 colours, enough for two maps and their text, quarter it.
    Image.open(out).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        out, format="png", optimize=True)
