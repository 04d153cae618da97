"""What figures and pages share: the look of each init, legends, heat, grids of maps, templates."""

from __future__ import annotations

import base64
import io
import math
import os
import textwrap
import warnings
import zlib
from collections.abc import Sequence
from itertools import groupby, product
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from ...base.files import written_atomically
from ...base.messages import OneLineError, in_brief, shortened, warn

if TYPE_CHECKING:
    import matplotlib
    from matplotlib.figure import Figure

Line = str | tuple[int, tuple[int, ...]]
Look = tuple[str, Line]  # a colour and a line, as matplotlib takes them
# Each init has one colour and one line in every picture, here and in the lessons. The colours are
# those of Okabe and Ito, which colour-blind readers can tell apart.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK = "#E69F00", "#56B4E9", "#000000"
PALETTE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
LOOKS: dict[str, Look] = {
    "default": (BLUE, "-"),
    "torch": (SKY, "--"),
    "lecun": (BLACK, "--"),
    "mimetic": (GREEN, "--"),
    "impulse": (VERMILION, "-."),
    "deep_impulse": (PURPLE, (0, (6, 1))),
    "norm_matched": (ORANGE, ":"),
    "impulse_gd": (VERMILION, ":"),
    "filters": (SKY, "-."),
    "whitened": (ORANGE, "-"),
}
OTHER = (BLACK, "-")  # an init that is not in the table
LINES = ("-", ":", "-.", "--")
SEQUENTIAL = "cividis"  # colour map for values from 0 up
OVERLAY = "viridis"  # the same over a grey photograph, since cividis contains greys
DIVERGING = "RdBu_r"  # blue below 0, white at 0, red above; ColorBrewer lists it as safe
HEAT = 0.7  # opacity of heat over a photograph
LEVELS = 63  # colours in a map: odd, so that 0 is white; more make larger files
DPI = 264  # 6.4 inches, the narrowest figure, are twice as wide as a page of GitHub shows them
LETTER, LINE = 0.07, 0.17  # width of a letter and height of a line of 8 points, in inches
FONT = "DejaVu Sans"  # comes with matplotlib
COLOURS = 64  # of a colour map in a page


class FigureError(OneLineError):
    """A figure cannot be drawn as requested; the message is one line."""


def pyplot() -> ModuleType:
    """matplotlib.pyplot without a display; SystemExit in one line if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit(
            "vitinit figures needs matplotlib: pip install 'vitinit[figures]'"
        ) from None
    matplotlib.rcdefaults()  # else a file of this folder may ask for LaTeX
    if "inline" not in os.environ.get("MPLBACKEND", ""):  # a notebook, which shows what it draws
        matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def subplots(
    rows: int, columns: int, width: float, height: float, **options: Any
) -> tuple[Figure, np.ndarray]:
    """A figure of some inches with panels: their axes are in rows, also if there is one."""
    options |= {"figsize": (width, height), "squeeze": False, "layout": "constrained"}
    return pyplot().subplots(rows, columns, **options)


def save(figure: Figure, out: Path, heading: str) -> None:
    """Write a figure with its heading as a PNG file and close it, or pyplot would keep it.

    Raises FigureError if it is too large for matplotlib, and FileError if the file cannot be
    written; one that was there then stays.
    """
    figure.suptitle(heading, fontsize=11, wrap=True)
    drawn = io.BytesIO()
    try:
        texts = figure.findobj(pyplot().Text)
        for text in texts:
            text.set_text(as_drawn(text.get_text()))
        families = families_for("".join(text.get_text() for text in texts))
        for text in texts:
            text.set_fontfamily(families)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # `families_for` has said so
            figure.savefig(drawn, dpi=DPI, format="png")
    except ValueError as error:  # a side longer than 65,535 pixels, values beyond all axes
        raise FigureError(f"{out}: cannot be drawn: {in_brief(error)}") from None
    finally:
        pyplot().close(figure)
    with written_atomically(out) as file:
        # Written again, a file has two thirds of the bytes, without an alpha channel.
        Image.open(drawn).convert("RGB").save(file, format="png", optimize=True)


def as_drawn(text: str) -> str:
    """A text for matplotlib, in which there may be the name of a file: not in UTF-8, or with a $,
    which would begin a formula.
    """
    return text.encode(errors="backslashreplace").decode().replace("$", r"\$")


def families_for(text: str) -> list[str]:
    """matplotlib's own font, and installed ones for the letters that it lacks, such as Chinese ones.
    Letters that no font has are drawn as boxes; a line says so.
    """
    from matplotlib.font_manager import findfont, fontManager

    families = [FONT]
    lacking = set(filter(str.isprintable, text)) - letters_in(findfont(FONT))
    if not lacking:
        return families
    had = {
        entry.name: lacking & letters_in(entry.fname)
        for entry in fontManager.ttflist
        if not entry.name.startswith("Last Resort")  # which has a box for each letter
    }
    # The one that has most comes first, so that a name is not drawn in several where one has it all.
    for family in sorted(had, key=lambda name: -len(had[name])):
        if had[family] & lacking:
            families.append(family)
            lacking -= had[family]
    if lacking:
        warn(
            f"no installed font has {shortened(sorted(lacking))}: boxes are drawn; of Chinese, "
            "Japanese and Korean a font such as Noto Sans CJK has all"
        )
    return families


def letters_in(font: str) -> set[str]:
    """What a font file has glyphs for; nothing, if it is gone or damaged."""
    from matplotlib.font_manager import get_font

    try:
        return set(map(chr, get_font(font).get_charmap()))
    except (OSError, RuntimeError):
        return set()


def looks_of(inits: Sequence[str]) -> list[Look]:
    """A colour and line for each init. One that comes again keeps its colour and takes a line that
    is free in it; once there is none, it takes another colour."""
    firsts = [LOOKS.get(init, OTHER) for init in inits]
    looks: list[Look] = []
    for look in firsts:
        if look in looks:
            others = product((look[0], *PALETTE), LINES)
            look = next((other for other in others if other not in firsts + looks), look)
        looks.append(look)
    return looks


def add_legend(figure: Figure, handles: dict) -> None:
    """Add a legend below the panels, where it hides nothing. handles: label → line."""
    letters = int(figure.get_figwidth() / LETTER)  # in one row
    labels = [textwrap.fill(label, letters - 12) for label in handles]
    longest = max(map(len, handles)) + 9  # a line before a label takes 9
    abreast = min(max(letters // longest, 1), 4)
    rows = math.ceil(len(labels) / abreast)
    breaks = [label.count("\n") for label in labels]
    lines = sum(1 + max(breaks[row::rows]) for row in range(rows))
    figure.set_figheight(figure.get_figheight() + max(lines - 4, 0) * LINE)
    figure.legend(
        handles.values(),
        labels,
        loc="outside lower center",
        fontsize=8,
        handlelength=3,
        ncols=math.ceil(len(labels) / rows),  # rows of equal length
    )


def pixels(image: Tensor) -> np.ndarray:
    """An image (3, H, W) as Pillow and matplotlib take it, (H, W, 3): of more channels the first
    three, and of fewer the first, in grey.
    """
    if len(image) < 3:
        image = image[:1].expand(3, -1, -1)
    return image[:3].permute(1, 2, 0).numpy()


def draw_heat(
    axis: matplotlib.axes.Axes, image: Tensor, heat: Tensor, scale: matplotlib.colors.Normalize
) -> matplotlib.image.AxesImage:
    """Draw heat (rows, columns) over an image (3, H, W) uint8 in grey; return the heat's layer."""
    grey = Image.fromarray(pixels(image)).convert("L")
    extent = (0, grey.width, grey.height, 0)  # the same for both layers
    axis.imshow(grey, cmap="gray", vmin=0, vmax=255, extent=extent)
    return axis.imshow(
        heat.numpy(), cmap=OVERLAY, norm=scale, alpha=HEAT, extent=extent, interpolation="nearest"
    )


class RowOfMaps(NamedTuple):
    """A row of a grid: maps side by side, one for each head."""

    label: str
    maps: Tensor  # (columns, height, width)
    unit: str  # label of the colour bar; neighbouring rows of one unit share it
    down: str  # label of the vertical axis
    across: str  # label of the horizontal axis
    diverging: bool  # colours are centred at 0, else they start at 0
    centred: bool = False  # axes count from the centre of a map, as a kernel's offsets do
    peak: float = 0.0  # absolute value at which colours may end; 0: the row's largest


def draw_grid(out: Path, rows: list[RowOfMaps], heads: Sequence[int] | None, heading: str) -> None:
    """Draw maps by head (None: all); neighbouring rows of one unit share a scale and colour bar."""
    titles = [f"head {head}" for head in heads or range(max(len(row.maps) for row in rows))]
    side = min(1.3, max(0.72, 6.5 / len(titles)))  # inches of a map
    width, height = side * len(titles) + 1.7, (side + 0.1) * len(rows) + 0.9
    figure, axes = subplots(len(rows), len(titles), width, height)
    for _, lines in groupby(zip(axes, rows), key=lambda line: line[1].unit):
        draw_rows(figure, list(lines), side)
    for axis, title in zip(axes[0], titles):
        axis.set_title(title, fontsize=9)
    save(figure, out, heading)


def draw_rows(figure: Figure, lines: Sequence[tuple[np.ndarray, RowOfMaps]], side: float) -> None:
    """Draw rows of one unit, each on a line of axes, whose maps are `side` inches large."""
    low_axes, last = lines[-1]
    largest = max(row.maps.abs().max().item() for _, row in lines)
    peak = max(row.peak or row.maps.abs().max().item() for _, row in lines) or 1.0
    extend = "both" if last.diverging else "max"  # the bar, where entries are beyond the peak
    colour_map = pyplot().get_cmap(DIVERGING if last.diverging else SEQUENTIAL, LEVELS)
    for line, row in lines:
        for axis in line[len(row.maps) :]:  # this row has fewer maps than another
            axis.set_axis_off()
        height, width = row.maps.shape[1:]
        up, left = ((height - 1) // 2, (width - 1) // 2) if row.centred else (0, 0)
        # A map with more entries than pixels is averaged; "nearest" would skip entries.
        interpolation = "antialiased" if height > side * DPI else "nearest"
        for axis, values in zip(line, row.maps):
            image = axis.imshow(
                values.numpy(),
                cmap=colour_map,
                vmin=-peak if row.diverging else 0.0,
                vmax=peak,
                interpolation_stage="data",
                interpolation=interpolation,
                extent=(-left - 0.5, width - left - 0.5, height - up - 0.5, -up - 0.5),
            )
            axis.locator_params(nbins=4, integer=True)
            axis.tick_params(labelsize=7, labelleft=axis is line[0], labelbottom=row is last)
        line[0].set_ylabel(f"{row.label}\n{row.down}", fontsize=8)
    columns = len(last.maps)
    low_axes[columns // 2].set_xlabel(last.across, x=columns % 2 / 2, fontsize=8)  # in the middle
    bar = figure.colorbar(
        image,
        ax=[axis for line, _ in lines for axis in line],
        label=last.unit,
        shrink=0.9,
        pad=0.01,
        aspect=20 * len(lines),
        extend="neither" if peak >= largest else extend,
    )
    bar.ax.tick_params(labelsize=7)


def packed(levels: bytes) -> str:
    """Bytes as a page reads them back: deflated, in base64."""
    return base64.b64encode(zlib.compress(levels, 9)).decode("ascii")


def rounded(value: Any) -> Any:
    """Numbers with four digits, in tensors and lists of any depth; None for those that JSON does
    not know.
    """
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [*map(rounded, value)]
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None


def as_png(view: Tensor, side: int = 2**16) -> str:
    """A view (3, H, W) uint8, made smaller if over `side` pixels, as an address inside a page."""
    file, image = io.BytesIO(), Image.fromarray(pixels(view))
    image.thumbnail((side, side))
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def colours(name: str) -> list[list[int]]:
    """A colour map of matplotlib as COLOURS triples of red, green and blue from 0 to 255."""
    return pyplot().get_cmap(name)(np.linspace(0, 1, COLOURS), bytes=True)[:, :3].tolist()
