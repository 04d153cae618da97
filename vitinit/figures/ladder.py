"""The figure `ladder`: groups of runs one below the other, each a step away from the one above it."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..runs.groups import Group
from .plot import COLOURS, FigureError, pyplot, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAR, DOT = COLOURS[5], COLOURS[0]       # light and dark blue: light and dark grey when printed so
WIDTH = 7.2                     # of the figure in inches
RUNG, LINE = 0.34, 0.13         # height in inches of a rung, and of each further line of its name
NAME = 42                       # most letters in a line of a name
BAR_HEIGHT = 0.62               # share of a rung
COLUMNS = {"seeds": 34, "mean": 76, "step": 120}    # right ends of numbers, in points from the bars' end


def draw_ladder(out: Path, groups: Sequence[Group], labels: Sequence[str] = ()) -> None:
    """Draw one horizontal bar per group, from the first at the top to the last at the bottom.

    A bar is the mean over seeds of validation top-1 after the last epoch, and each dot is one seed.
    Beside it stand the number of seeds, the mean, and the step: its difference from the mean of the
    rung above.

    labels: a name for each rung; () for those by which the groups differ. Raises FigureError for
    another number of names, and for a group without evaluations.
    """
    if labels and len(labels) != len(groups):
        raise FigureError(f"{len(labels)} name(s) by --label for {len(groups)} rung(s), expected one for "
                          f"each: {'; '.join(group.label for group in groups)}")
    tops = [last_top1(group) for group in groups]
    means = list(map(statistics.fmean, tops))
    names = list(map(in_lines, labels or [group.label for group in groups]))
    lines = max(name.count("\n") for name in names)
    height = (RUNG + LINE * lines) * len(groups)
    figure, axis = pyplot().subplots(figsize=(WIDTH, height + 1.1), layout="constrained")

    rungs = range(len(groups))
    axis.barh(rungs, means, height=BAR_HEIGHT, color=BAR, alpha=0.5)
    for rung, by_seed in zip(rungs, tops):
        # Seeds stand one below the other, so that equal ones can be told apart.
        down = [rung + BAR_HEIGHT * ((place + 0.5) / len(by_seed) - 0.5) for place in range(len(by_seed))]
        axis.plot(by_seed, down, "o", color=DOT, markersize=3.5)
        step = signed(means[rung] - means[rung - 1]) if rung else ""
        write(axis, rung, [str(len(by_seed)), f"{means[rung]:.2f}", step])
    write(axis, -0.65, list(COLUMNS), color="0.35")

    axis.set(xlabel="validation top-1 after the last epoch (%)", xlim=(0.0, None),
             ylim=(len(groups) - 0.5, -0.5))
    axis.set_yticks(rungs, names)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(labelsize=9)
    axis.grid(axis="x", color="0.85", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    save(figure, out, dpi=150)


def write(axis: Axes, rung: float, cells: Sequence[str], color: str = "black") -> None:
    """Write cells right of the axes, at the height of a rung, each ending where its column does."""
    for right, cell in zip(COLUMNS.values(), cells):
        axis.annotate(cell, (1.0, rung), xycoords=axis.get_yaxis_transform(), xytext=(right, 0),
                      textcoords="offset points", ha="right", va="center", fontsize=9, color=color,
                      annotation_clip=False)


def last_top1(group: Group) -> list[float]:
    """Validation top-1 of the last epoch, by seed. Raises FigureError for a group without any."""
    tops = list(group.last("val_top1").values())
    if not tops:
        raise FigureError(f"{next(iter(group.runs.values())).path}: no evaluation on record to draw")
    return tops


def in_lines(name: str) -> str:
    """A name in lines of at most NAME letters; "key = value" is not broken, and $ begins no formula."""
    whole = name.replace(" = ", "\u00a0=\u00a0")     # no-break spaces
    return "\n".join(textwrap.wrap(whole, NAME, break_on_hyphens=False)).replace("$", r"\$")


def signed(value: float) -> str:
    """A difference with its sign, "+1.50" or "−1.50", with the minus sign of print."""
    return f"{value:+.2f}".replace("-", "−")
