"""How runs went: top-1 by epoch; loss, learning rate and gradient norm by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..runs.groups import Group, read_steps
from .plot import COLOURS, LINES, FigureError, pyplot, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 400                    # of a line, at most; more are averaged, neighbours merged
QUANTITIES = {"loss": "training loss", "lr": "learning rate", "grad_norm": "gradient norm"}


def draw_curves(out: Path, groups: Sequence[Group]) -> None:
    """Validation top-1 by epoch, one line per group of runs: mean over seeds, band from the lowest
    to the highest. Epochs without an evaluation are left out."""
    figure, axis = pyplot().subplots(figsize=(6.4, 3.8), layout="constrained")
    for group, colour, line in zip(groups, cycle(COLOURS), cycle(LINES)):
        measured = [[row for row in run.rows if row["val_top1"] is not None]
                    for run in group.runs.values()]
        epochs = [row["epoch"] for row in measured[0]]           # the same for all: one recipe
        tops = torch.tensor([[row["val_top1"] for row in rows] for rows in measured])
        draw_band(axis, epochs, tops, colour, line, named(group))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(xlabel="epoch", ylabel="validation top-1 (%)",
             title="Top-1 by epoch: mean over seeds, band from lowest to highest")
    axis.title.set_fontsize(11)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9)
    save(figure, out, dpi=130)


def draw_steps(out: Path, groups: Sequence[Group]) -> None:
    """What steps.jsonl holds, a panel per quantity, one line per group as above.

    Of seeds that are not equally far, as many steps are drawn as all have. A line of more than
    POINTS rows is averaged, so many neighbours to a point.
    """
    figure, axes = pyplot().subplots(1, len(QUANTITIES), figsize=(11.0, 3.6), layout="constrained")
    most = 1
    for group, colour, line in zip(groups, cycle(COLOURS), cycle(LINES)):
        by_seed = [by_step(read_steps(run)) for run in group.runs.values()]
        steps = [step for step in by_seed[0] if all(step in rows for rows in by_seed)]
        if not steps:
            raise FigureError(f"{next(iter(group.runs.values())).path}: no steps on record to draw; "
                              "steps.jsonl has a line from the tenth on, in runs of this version")
        merged = -(-len(steps) // POINTS)
        most = max(most, merged)
        for axis, key in zip(axes, QUANTITIES):
            values = torch.tensor([[rows[step][key] for step in steps] for rows in by_seed],
                                  dtype=torch.float64)
            draw_band(axis, averaged(torch.tensor(steps)[None], merged)[0],
                      averaged(values, merged), colour, line, named(group))
    for axis, words in zip(axes, QUANTITIES.values()):
        axis.set(xlabel="step", title=words)
        axis.grid(alpha=0.3)
    axes[-1].set_yscale("log")                       # the first steps' are far above the others'
    axes[0].legend(fontsize=9)
    apart = f"every tenth step, {most} of them to a point" if most > 1 else "every tenth step"
    figure.suptitle(f"{apart[0].upper()}{apart[1:]}: mean over seeds, band from lowest to highest",
                    fontsize=11)
    save(figure, out, dpi=130)


def named(group: Group) -> str:
    return f"{group.label} ({len(group.runs)} seed{'s' * (len(group.runs) > 1)})"


def draw_band(axis: Axes, across: Sequence[int] | Tensor, values: Tensor, colour: str, line: str,
              label: str) -> None:
    """values: (seeds, points); NaN is not drawn."""
    axis.plot(across, values.mean(0), color=colour, linestyle=line, label=label,
              marker="." if len(across) < 20 else None)          # few: where they were measured
    axis.fill_between(across, values.amin(0), values.amax(0), color=colour, alpha=0.2, linewidth=0)


def by_step(rows: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """step → what is drawn of it; NaN where it was not measured, as where fp16 overflowed."""
    return {row["step"]: {key: float("nan") if row[key] is None else row[key] for key in QUANTITIES}
            for row in rows}


def averaged(values: Tensor, merged: int) -> Tensor:
    """(rows, columns) → (rows, ⌈columns / merged⌉): means of so many neighbours, NaN left out."""
    return torch.stack([part.double().nanmean(1) for part in values.split(merged, dim=1)], dim=1)
