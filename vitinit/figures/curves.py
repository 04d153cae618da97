"""How runs went, by epoch."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import torch

from .plot import COLOURS, LINES, pyplot


def draw_curves(out: Path, runs: list[Path]) -> None:
    """Validation top-1 by epoch, one line a recipe and init: mean over seeds, band from the lowest
    to the highest."""
    plt = pyplot()
    groups: dict[str, list[list[dict]]] = defaultdict(list)
    for run in runs:
        try:
            recipe = torch.load(run / "last.pt", weights_only=True, mmap=True)["recipe"]
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        except OSError as error:
            raise SystemExit(f"{error.filename}: not a finished run's file ({error.strerror})"
                             ) from None
        groups[f"{recipe['name']}, {recipe['init']['name']}"].append(
            [row for row in rows if row["val_top1"] is not None])
    figure, axis = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    for number, (label, members) in enumerate(groups.items()):
        epochs = [row["epoch"] for row in min(members, key=len)]
        tops = torch.tensor([[row["val_top1"] for row in rows[:len(epochs)]] for rows in members])
        colour = COLOURS[number % len(COLOURS)]
        axis.plot(epochs, tops.mean(0), color=colour, linestyle=LINES[number % len(LINES)],
                  label=f"{label} ({len(members)} seed{'s' * (len(members) > 1)})")
        axis.fill_between(epochs, tops.amin(0), tops.amax(0), color=colour, alpha=0.2, linewidth=0)
    axis.set(xlabel="epoch", ylabel="validation top-1 (%)", title="Top-1 by epoch")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(out, dpi=130)
