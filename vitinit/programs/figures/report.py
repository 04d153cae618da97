"""The page `report`: one HTML file about one run or several; report.html is its template."""

import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from ...base.files import CheckpointError
from ...base.messages import OneLineError, ProgressBar
from ...base.values import to_toml
from ...data.images import DataError
from ...data.sources import ImageFiles
from ...recipe.absent import MEANT
from ...recipe.files import load_recipe
from ...runs.data import evaluation_batches, own_set, require_same_images
from ...runs.load import open_saved
from ...train.device import this_device
from ...train.loop import autocast
from ...train.metrics import balanced_accuracy
from ..shared.curves import EPOCHS, QUANTITIES, Band, by_epoch, by_step
from ..shared.groups import Group, group_runs
from ..shared.plot import FigureError, as_png, rounded
from ..shared.records import RunRecord, read_runs
from ..shared.results import class_scores, compare_runs, origin, paired, t_interval
from .page import write_page

MISTAKES = 24  # shown
SIDE = 96  # pixels of a mistake's longer side, at most
DASHES = {"-": "", "--": "6 4", "-.": "8 3 2 3", ":": "2 3"}  # matplotlib's lines in SVG


def write_report(
    out: Path, runs: Sequence[Path], *, data_dir: str | None, images: int, weights: str
) -> None:
    """Write the report of the runs at these paths, finished or not.

    data_dir: the folder of their data set, if not the recipe's. images: the most validation images
    that each is judged on, evenly chosen; 0: none. weights: "model" or "ema".
    Raises CheckpointError if there is no run at a path.
    """
    records = read_runs(runs)
    groups = group_runs(records)
    curves, notes = panels(groups)
    unfinished = [
        f"{run.path.name} is not finished: {len(run.rows)} of {run.epochs} epochs so far."
        for run in records
        if not run.finished
    ]
    comparison = None
    if len(records) > max(1, len(unfinished)):
        compared, text = compare_runs(records)
        intervals = [
            {
                "label": group.in_words(),
                "weights": name,
                "by_seed": rounded([*by_seed.values()]),
                "interval": rounded(t_interval([*by_seed.values()])) if len(by_seed) > 1 else None,
            }
            for group, name, by_seed in paired(compared)
            if by_seed
        ]
        comparison = {"text": text, "base": compared[0].in_words(), "intervals": intervals}
    write_page(
        out,
        "report.html",
        {
            "recipes": list(dict.fromkeys(run.recipe for run in records)),
            "notes": unfinished + notes,
            "curves": curves,
            "comparison": comparison,
            "origin": origin(groups),
            "runs": [
                run_view(
                    run, group, data_dir=data_dir, images=images, weights=weights, folder=out.parent
                )
                for group in groups
                for run in group.runs.values()
            ],
        },
    )


def panels(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], list[str]]:
    """The panels of curves, and a line about those by step where there are none, or only means."""
    titles, notes = dict(EPOCHS), []  # of panels by epoch
    try:
        bands, merged = by_step(groups)
        del titles["train_loss"]  # which is drawn by step
        if merged > 1:
            notes.append(f"A point of the curves by step is the mean of {merged} recorded steps.")
    except FigureError as error:
        bands, titles["lr"] = {}, QUANTITIES["lr"]
        notes.append(f"{error}; loss and learning rate are drawn by epoch")
    drawn = [panel(words, "epoch", by_epoch(groups, key)) for key, words in titles.items()]
    drawn += [
        panel(QUANTITIES[key], "step", lines) | {"log": key == "grad_norm"}
        for key, lines in bands.items()
    ]
    return [curves for curves in drawn if curves["lines"]], notes


def panel(title: str, across: str, bands: Sequence[Band]) -> dict[str, Any]:
    """A panel of `meta`: for each group the mean over seeds, and the range of two or more."""
    lines = []
    for label, colour, line, places, values in bands:
        dash = DASHES[line] if isinstance(line, str) else " ".join(map(str, line[1]))
        several = len(values) > 1
        lines.append(
            {
                "label": label,
                "colour": colour,
                "dash": dash,
                "x": places.tolist(),
                "mean": rounded(values.mean(0).tolist()),
                "low": rounded(values.amin(0).tolist()) if several else None,
                "high": rounded(values.amax(0).tolist()) if several else None,
            }
        )
    return {"title": title, "across": across, "lines": lines, "log": False}


def run_view(
    run: RunRecord, group: Group, *, data_dir: str | None, images: int, weights: str, folder: Path
) -> dict[str, Any]:
    judged, note = None, "" if images else "left out, as --images 0 asks"
    try:
        judged = judge(run.path, data_dir, images, weights, folder) if images else None
    except OneLineError as error:
        note = str(error)
    changes: list[list[str]] | str
    try:
        source, used = load_recipe(run.source).keys, MEANT | run.keys
        changes = [
            [key, *(to_toml(keys[key]) if key in keys else "–" for keys in (source, used))]
            for key in source | run.keys
            if source.get(key) != used.get(key)
        ]
    except OneLineError as error:
        changes = str(error)
    starts = [
        {
            key: str(start.get(key, "unknown"))
            for key in ("time", "device", "processes", "torch", "python", "git_commit")
        }
        | {
            "command": " ".join(
                map(
                    str, start.get("command") or ["in Python:", to_toml(start.get("arguments", {}))]
                )
            )
        }
        for start in run.starts
    ]
    return {
        "name": run.path.name,
        "group": group.label,
        "seed": run.seed,
        "facts": facts(run),
        "recipe": run.recipe,
        "toml": run.files["recipe.toml"].decode(),
        "changes": changes,
        "finished": run.finished,
        "starts": starts,
        "judged": judged,
        "note": note,
    }


def facts(run: RunRecord) -> list[tuple[str, str]]:
    """The numbers of a run that stand above all others, in words."""
    last = "last" if run.finished else "so far"
    numbers = [
        ("epochs" if run.finished else "epochs, not finished", f"{len(run.rows)} of {run.epochs}")
    ]
    for metric, words in (("val_top1", "top-1"), ("ema_top1", "EMA top-1")):
        if values := run.measured(metric):
            numbers += [
                (f"{words}, {last}", f"{values[-1]:.2f} %"),
                (f"{words}, best epoch", f"{max(values):.2f} %"),
            ]
    if run.rows:
        spent = sum(filter(math.isfinite, run.measured("seconds")))
        minutes, seconds = divmod(round(spent), 60)
        numbers.append(
            (
                "training",
                f"{minutes // 60} h {minutes % 60:02} min"
                if minutes >= 60
                else f"{minutes} min {seconds:02} s",
            )
        )
    for key, words, form, summarise in (
        ("images_per_second", "images/s, median", "{:,.0f}", statistics.median),
        ("waiting", "waiting for data", "{:.0%}", statistics.median),
        ("peak_memory_gib", "peak memory", "{:.2f} GiB", max),
    ):
        if values := run.measured(key):
            numbers.append((words, form.format(summarise(values)).replace("%", " %")))
    return numbers


@torch.no_grad()
def judge(
    path: Path, data_dir: str | None, images: int, weights: str, folder: Path = Path()
) -> dict[str, Any]:
    """How a run's model does on its validation images: who is taken for whom, and the mistakes,
    whose links lead from `folder` to their files.

    Raises CheckpointError without weights or classes, and DataError if the images are not at hand
    or have other classes than the model.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: an archive holds no weights")
    saved = open_saved(path)
    if not saved.recipe.task.kind.learns_classes:
        raise CheckpointError(f"{path}: learned no classes")
    recipe = saved.recipe if data_dir is None else saved.recipe.with_data(root=data_dir)
    data_set = own_set(recipe.data)
    require_same_images(data_set, source := data_set.open(), path)
    classes, number = list(source.classes), len(source.classes)
    if list(saved.classes or classes) != classes or number != recipe.data.num_classes:
        raise DataError(f"{data_set}: its classes are not those of {saved.name}")
    device = this_device()
    model, judged = saved.model(weights).eval().to(device), []
    batches = evaluation_batches(
        recipe, source, saved.size, device, world_size=math.ceil(len(source) / images)
    )  # every n-th image
    with ProgressBar(
        f"validate {saved.name}", len(batches), items=batches, scale=batches.batch_size
    ) as bar:
        for inputs, of_images in bar:
            with autocast(device, recipe.engine.amp):
                logits = model(inputs)  # (B, K)
            judged.append([part.cpu() for part in (*logits.float().softmax(1).max(1), of_images)])
    shares, guesses, labels = map(torch.cat, zip(*judged))  # (n,) each
    pairs, counts = (labels * number + guesses).unique(return_counts=True)
    wrong = (guesses != labels).nonzero()[:, 0]
    surest = wrong[shares[wrong].sort(descending=True, stable=True).indices[:MISTAKES]]
    hits, totals, taken = (
        part.bincount(minlength=number).tolist()
        for part in (labels[guesses == labels], labels, guesses)
    )
    numbers = batches.views.indices  # of the judged images in the source
    paths = source.paths if isinstance(source, ImageFiles) else None
    return {
        "classes": classes,
        "images": len(labels),
        "of": len(source),
        "weights": weights,
        "set": data_set.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "scores": [rounded([*score]) for score in class_scores(hits, totals, taken)],
        "balanced_accuracy": rounded(balanced_accuracy(hits, totals)),
        "pairs": [
            [*divmod(pair, number), count] for pair, count in zip(pairs.tolist(), counts.tolist())
        ],
        "mistakes": [
            {
                "source": as_png(batches.views[index][0], SIDE),
                "truth": int(labels[index]),
                "guess": int(guesses[index]),
                "share": rounded(shares[index].item()),
                "file": paths[numbers[index]] if paths else f"image {numbers[index]}",
                "link": paths and address(paths[numbers[index]], folder),
            }
            for index in surest.tolist()
        ],
    }


def address(path: str, folder: Path) -> str:
    """The address of a file as seen from a page in `folder`, so that both can move together."""
    return quote(os.fsencode(os.path.relpath(path, folder)))
