"""The figure `curves`: top-1 by epoch, QUANTITIES by step, or last top-1 by a key of the recipe."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from ...base.messages import counted
from ...runs.folder import RunFolder
from ...train.metrics import MEASURES
from .groups import Group, Groups, experiment, text_of
from .plot import FigureError, Line, Look, add_legend, looks_of, pyplot, save, subplots
from .records import RunRecord, columns_of

if TYPE_CHECKING:
    import matplotlib

POINTS = 400  # points per line, at most; longer lines average neighbours
NUMBER_OF_IMAGES = "training images"  # as run.json calls their number
SUBSET = ("data.images_per_class", "data.subset")
# Of metrics.jsonl; and of steps.jsonl.
EPOCHS = {
    "val_top1": "validation top-1 (%)",
    "ema_top1": "top-1 of the moving average (%)",
    "val_map": "validation mAP (%)",
    "ema_map": "mAP of the moving average (%)",
    "val_loss": "validation loss",
    "train_loss": "training loss",
}
QUANTITIES = {"loss": "training loss", "lr": "learning rate", "grad_norm": "gradient norm"}


class Band(NamedTuple):
    """The curve of a group of runs: one row of values per seed."""

    label: str  # of the group, such as "impulse (3 seeds)"
    colour: str
    line: Line
    across: Tensor  # (points,), epochs or steps
    values: Tensor  # (seeds, points) float64; NaN where one was not measured
    joined: int  # how many epochs or recorded steps are one point


def by_epoch(groups: Groups, metric: str) -> Iterator[Band]:
    """A metric of metrics.jsonl by epoch, of groups that have it, where all their seeds have it."""
    for group, look in zip(groups, looks(groups)):
        curves = []
        for run in group.runs.values():
            epochs, values = run.columns["epoch"], run.columns[metric]
            curves.append((epochs[~values.mask], values.compressed()))
        curve = band(group, look, curves)
        if len(curve.across):
            yield curve


def by_step(groups: Groups, keys: Iterable[str] = tuple(QUANTITIES)) -> dict[str, list[Band]]:
    """What steps.jsonl has under these keys, by step, a band per group. Only steps that all seeds of
    a group have reached have a point. Raises FigureError for a group without a recorded step that
    all seeds share.
    """
    bands: dict[str, list[Band]] = {key: [] for key in keys}
    for group, look in zip(groups, looks(groups)):
        recorded = []
        for run in group.runs.values():
            rows = RunFolder(run.path).steps.rows()
            recorded.append(columns_of(rows, "step", bands))
        for key in bands:
            curves = [(columns["step"], columns[key].filled(math.nan)) for columns in recorded]
            curve = band(group, look, curves)
            if not len(curve.across):
                raise FigureError(
                    f"{group.first.path.name}: no steps on record to draw; steps.jsonl has a "
                    "line from the tenth on, and is in no archive"
                )
            bands[key].append(curve)
    return bands


def joined(values: Tensor, count: int) -> Tensor:
    """The means of `count` neighbours each in the last dimension, without NaN."""
    return torch.stack([part.double().nanmean(-1) for part in values.split(count, -1)], -1)


def band(group: Group, look: Look, curves: Sequence[tuple[ndarray, ndarray]]) -> Band:
    """The band of a group, each of whose seeds has epochs or steps, ascending, and values at these.
    Where all have more than POINTS in common, equally many neighbours are joined in one point, their
    mean without NaN.
    """
    shared = reduce(np.intersect1d, [places for places, _ in curves])
    values = [values[np.isin(places, shared)] for places, values in curves]
    across, rows = torch.from_numpy(shared), torch.from_numpy(np.stack(values))
    count = math.ceil(len(shared) / POINTS)
    if count > 1:
        across, rows = joined(across, count), joined(rows, count)
    label = f"{group.in_words()} ({counted(len(rows), 'seed')})"
    return Band(label, *look, across, rows, count)


def joined_in_words(bands: Iterable[Band]) -> str:
    """How many epochs or recorded steps are one point of these curves: ", 25 to a point", or ""."""
    most = max((curve.joined for curve in bands), default=1)
    return f", {most:,} to a point" if most > 1 else ""


def looks(groups: Groups) -> list[Look]:
    return looks_of([group.first.keys["init.name"] for group in groups])


def draw_curves(out: Path, groups: Groups) -> None:
    """Draw the first of EPOCHS that was measured by epoch, a line per group: mean over seeds, in a
    band, their range. Raises FigureError if no epoch of a group is on record of all its seeds.
    """
    for metric in EPOCHS:
        bands = list(by_epoch(groups, metric))
        if bands:
            break
    else:
        raise FigureError(f"{groups[0].label}: no epoch on record, of all its seeds, to draw")
    heading = {"val_top1": "Top-1", "val_map": "mAP"}.get(metric, "Loss")
    figure, [[axis]] = subplots(1, 1, 6.4, 3.8)
    draw_bands(axis, bands)
    axis.locator_params(axis="x", integer=True, min_n_ticks=1)  # 1 alone for one epoch
    axis.set(xlabel="epoch", ylabel=EPOCHS[metric])
    finish(figure, out, groups, f"{heading} by epoch{joined_in_words(bands)}")


def draw_steps(out: Path, groups: Groups) -> None:
    """Draw the quantities of `by_step`, which may raise FigureError, as `draw_curves` top-1."""
    bands = by_step(groups)
    figure, [axes] = subplots(1, len(QUANTITIES), 7.6, 3.2)
    for axis, (key, words) in zip(axes, QUANTITIES.items()):
        draw_bands(axis, bands[key])
        axis.set_xlabel("step")
        axis.set_title(words, fontsize=10)
        axis.locator_params(axis="x", nbins=4)
    axis.set_yscale("log")  # of the last: gradient norms are far higher at the start
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(pyplot().matplotlib.ticker.LogFormatter())
    finish(figure, out, groups, f"Every tenth step{joined_in_words(bands['loss'])}")


def draw_bands(axis: matplotlib.axes.Axes, bands: Iterable[Band]) -> None:
    """Draw each mean over seeds as a line and, of two or more, the range as an area."""
    for label, colour, line, across, values, _ in bands:
        axis.plot(
            across,
            values.mean(0),
            color=colour,
            linestyle=line,
            label=label,
            marker="." if len(across) < 30 else None,
        )
        if len(values) > 1:
            axis.fill_between(
                across, values.amin(0), values.amax(0), color=colour, alpha=0.2, linewidth=0
            )


def draw_across(out: Path, groups: Groups, key: str) -> None:
    """Draw the last top-1 by the value of a numerical key of the recipe, on a logarithmic axis.

    key: or IMAGES, the number of training images on record, which SUBSET's keys and the set decide.
    A line of `lines_across`, which may raise FigureError, goes through the means over seeds; where
    there are several, a bar reaches from the lowest to the highest.
    """
    lines = lines_across(groups, key)
    figure, [[axis]] = subplots(1, 1, 6.4, 3.8)
    firsts = [next(iter(line.values())) for line in lines]
    hidden = (key, *SUBSET) if key == NUMBER_OF_IMAGES else (key,)
    for line, first, (colour, dashes) in zip(lines, firsts, looks(firsts)):
        tops = [group.last(group.scores["model"]).values() for group in line.values()]
        means = [sum(values) / len(values) for values in tops]
        below = [mean - min(values) for mean, values in zip(means, tops)]
        above = [max(values) - mean for mean, values in zip(means, tops)]
        axis.errorbar(
            list(line),
            means,
            yerr=[below, above],
            color=colour,
            linestyle=dashes,
            marker="o",
            markersize=5,
            capsize=4,
            label=first.in_words(hidden),
        )
    values = sorted({value for line in lines for value in line})
    axis.set_xscale("log", base=2)
    axis.set_xticks(values, [f"{value:,}" for value in values], minor=False)
    words = key.rpartition(".")[2].replace("_", " ")
    drawn = [group for line in lines for group in line.values()]
    score = MEASURES[drawn[0].first.score]
    axis.set(xlabel=words, ylabel=f"last validation {score} (%)")
    finish(figure, out, drawn, f"Validation {score} by {words}", spread="bar")


def lines_across(groups: Groups, key: str) -> list[dict[float, Group]]:
    """The lines of `draw_across`: groups that differ in the key alone, by its value, ascending.

    Raises FigureError if no line has two points, or if a point has two groups.
    """
    lines: dict[str, dict[float, Group]] = defaultdict(dict)
    for group in groups:
        settings = experiment(group.first)
        if key == NUMBER_OF_IMAGES:
            for name in SUBSET:
                settings.pop(name, None)
            settings[key] = training_images(group.first)
        value = settings.pop(key, None)
        if type(value) not in (int, float) or value <= 0:
            raise FigureError(
                f"{key} is {value!r} in {group.label}; expected a key of the recipe "
                "with a number above 0"
            )
        line = lines[text_of(settings)]
        if line.setdefault(value, group) is not group:
            raise FigureError(
                f"{line[value].label} and {group.label} are alike but for the code; "
                "expected the runs of one of them"
            )
        if not group.last(group.scores["model"]):
            raise FigureError(f"{group.label}: has no top-1 on record")
    several = [dict(sorted(line.items())) for line in lines.values() if len(line) > 1]
    if not several:
        raise FigureError(f"no two of these groups differ in {key} alone")
    return several


def training_images(run: RunRecord) -> int:
    """How many images a run was trained on. Older records do not state it, but their recipes do if
    they ask for a part of the images.
    """
    recorded = run.starts[-1].get("data", {}).get(NUMBER_OF_IMAGES) if run.starts else None
    return recorded or run.keys["data.images_per_class"] * run.keys["data.num_classes"]


def finish(
    figure: matplotlib.figure.Figure,
    out: Path,
    groups: Groups,
    heading: str,
    *,
    spread: str = "band",
) -> None:
    """Add grids, the legend and a heading, which names the bands or bars if there are any; save."""
    if any(len(group.runs) > 1 for group in groups):
        heading += f": mean over seeds, {spread} from lowest to highest"
    for axis in figure.axes:
        axis.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    add_legend(figure, dict(zip(labels, handles)))
    save(figure, out, heading)
