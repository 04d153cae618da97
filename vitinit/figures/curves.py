"""How runs went, by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import torch

from ..runs.groups import Group
from .plot import COLOURS, LINES, pyplot, save


def draw_curves(out: Path, groups: Sequence[Group]) -> None:
    """Validation top-1 by epoch, one line a group of runs: mean over seeds, band from the lowest
    to the highest. Epochs without an evaluation are left out."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    for group, colour, line in zip(groups, cycle(COLOURS), cycle(LINES)):
        measured = [[row for row in run.rows if row["val_top1"] is not None]
                    for run in group.runs.values()]
        epochs = [row["epoch"] for row in measured[0]]           # the same for all: one recipe
        tops = torch.tensor([[row["val_top1"] for row in rows] for rows in measured])
        seeds = len(measured)
        axis.plot(epochs, tops.mean(0), color=colour, linestyle=line,
                  marker="." if len(epochs) < 20 else None,      # few: where they were measured
                  label=f"{group.label} ({seeds} seed{'s' * (seeds > 1)})")
        axis.fill_between(epochs, tops.amin(0), tops.amax(0), color=colour, alpha=0.2, linewidth=0)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set(xlabel="epoch", ylabel="validation top-1 (%)",
             title="Top-1 by epoch: mean over seeds, band from lowest to highest")
    axis.title.set_fontsize(11)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9)
    save(figure, out, dpi=130)
