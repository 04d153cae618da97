"""The page `report`: one HTML file about one run or several; report.html is its template."""

import math
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

import torch
from torch import Tensor

from ...base.files import CheckpointError
from ...base.messages import OneLineError, ProgressBar
from ...base.values import to_toml
from ...data.images import DataError
from ...data.sources import ImageFiles
from ...runs.data import evaluation_batches
from ...runs.load import open_saved
from ...tasks.multi_label import evaluation_of
from ...train.device import this_device
from ...train.metrics import MEASURES, balanced_accuracy
from ...watch.attention import BY_BLOCK
from ...watch.verdict import chosen_weights
from ..shared.calibration import calibration_error, reliability
from ..shared.curves import EPOCHS, QUANTITIES, Band, by_epoch, by_step, joined_in_words
from ..shared.evaluated import own_set, require_same_images
from ..shared.groups import Group, Groups, group_runs
from ..shared.guesses import all_logits
from ..shared.plot import LINES, FigureError, as_png, rounded
from ..shared.records import Json, RunRecord, read_runs
from ..shared.results import class_scores, compare_runs, origin, paired, t_interval
from .page import write_page

MISTAKES = 24  # shown
SIDE = 96  # pixels of a mistake's longer side, at most
# Of each start.
STATED = ("time", "device", "processes", "torch", "python", "vitinit", "git_commit")
COSTS = (
    ("images_per_second", "images/s, median", "{:,.0f}", statistics.median),
    ("waiting", "host waiting", "{:.0%}", statistics.median),
    ("peak_memory_gib", "peak memory", "{:.2f} GiB", max),
)  # key of a row, and how it is shown
DASHES = {"-": "", "--": "6 4", "-.": "8 3 2 3", ":": "2 3"}  # matplotlib's lines in SVG


def write_report(
    out: Path, runs: Sequence[Path], *, data_dir: str | None, images: int, weights: str
) -> None:
    """Write the report of the runs at these paths, finished or not.

    data_dir: the folder of their data set, if not the recipe's. images: the most validation images
    that each is judged on, evenly chosen; 0: none. weights: "model", "ema", or "best", those of the
    best epoch by its own record.
    Raises CheckpointError if there is no run at a path.
    """
    records = read_runs(runs)
    groups = group_runs(records)
    curves, notes = panels(groups)
    unfinished = [
        f"{run.path.name} is not finished: {run.done} of {run.epochs} epochs so far."
        for run in records
        if not run.finished
    ]
    good = records[0].good() if len(records) == 1 else []
    comparison = None
    if len(records) > max(1, len(unfinished)):
        compared, text = compare_runs(records)
        intervals = []
        for group, name, by_seed in paired(compared):
            values = list(by_seed.values())
            interval = t_interval(values) if len(values) > 1 else None
            view = {"label": group.in_words(), "weights": name, "by_seed": rounded(values)}
            if values:
                intervals.append(view | {"interval": rounded(interval)})
        comparison = {
            "text": text,
            "base": compared[0].in_words(),
            "score": MEASURES[compared[0].first.score],
            "intervals": intervals,
        }
    views = []
    for group in groups:
        for run in group.runs.values():
            view = run_view(run, group)
            if not images:
                view["note"] = "left out, as --images 0 asks"
            else:
                try:
                    view["judged"] = judge(run.path, data_dir, images, weights, out.parent)
                except OneLineError as error:
                    view["note"] = str(error)
            views.append(view)
    meta = {
        "recipes": list(dict.fromkeys(run.recipe for run in records)),
        "notes": good + unfinished + notes,
        "curves": curves,
        "comparison": comparison,
        "origin": origin(groups),
        "runs": views,
    }
    write_page(out, "report.html", meta)


def panels(groups: Groups) -> tuple[list[Json], list[str]]:
    """The panels of curves, and lines about those by step where there are none, and about means."""
    titles, notes = dict(EPOCHS), []  # of panels by epoch
    depth = max(group.first.keys.get("model.options.depth", 1) for group in groups)
    blocks = sorted({0, depth // 2, depth - 1})  # of what `train.py --log attention` records
    watched = [f"{key}/{block}" for key in BY_BLOCK for block in blocks]
    try:
        bands = by_step(groups, [*QUANTITIES, *watched])
        del titles["train_loss"]  # which is drawn by step
    except FigureError as error:
        bands = {}
        titles["lr"] = QUANTITIES["lr"]
        notes.append(f"{error}; loss and learning rate are drawn by epoch")
    drawn = []
    for key, words in titles.items():
        lines = list(by_epoch(groups, key))
        drawn.append(panel(words + joined_in_words(lines), "epoch", lines))
    for key, words in QUANTITIES.items():
        lines = bands.get(key, [])
        words += joined_in_words(lines)
        drawn.append(panel(words, "step", lines) | {"log": key == "grad_norm"})
    for key, words in BY_BLOCK.items():
        lines = []
        for block, line in zip(blocks, LINES):
            for curve in bands.get(f"{key}/{block}", []):
                if curve.values.isfinite().any():
                    label = f"{curve.label}, block {block}"
                    lines.append(curve._replace(label=label, line=line))
        words += joined_in_words(lines)
        drawn.append(panel(words, "step", lines))
    return [curves for curves in drawn if curves["lines"]], notes


def panel(title: str, across: str, bands: Iterable[Band]) -> Json:
    """A panel of `meta`: for each group the mean over seeds, and the range of two or more."""
    lines = []
    for label, colour, line, places, values, _ in bands:
        view = {
            "label": label,
            "colour": colour,
            "dash": DASHES[line] if isinstance(line, str) else " ".join(map(str, line[1])),
            "x": places.tolist(),
            "mean": rounded(values.mean(0)),
        }
        if len(values) > 1:
            view["low"] = rounded(values.amin(0))
            view["high"] = rounded(values.amax(0))
        lines.append(view)
    return {"title": title, "across": across, "lines": lines, "log": False}


def run_view(run: RunRecord, group: Group) -> Json:
    """A run of `meta`, except for how its model is judged."""
    starts = []
    for start in run.starts:
        words = start.get("command") or ["in Python:", to_toml(start.get("arguments", {}))]
        stated = {key: str(start.get(key, "unknown")) for key in STATED}
        starts.append(stated | {"command": " ".join(map(str, words))})
    return {
        "name": run.path.name,
        "group": group.label,
        "seed": run.seed,
        "facts": facts(run),
        "recipe": run.recipe,
        "toml": run.files["recipe.toml"].decode(),
        "changes": run.changes(),
        "finished": run.finished,
        "starts": starts,
        "judged": None,
        "note": "",
    }


def facts(run: RunRecord) -> list[tuple[str, str]]:
    """The numbers of a run that stand above all others, in words."""
    if run.finished:
        title, last = "epochs", "last"
    else:
        title, last = "epochs, not finished", "so far"
    numbers = [(title, f"{run.done:,} of {run.epochs:,}")]
    score = MEASURES[run.score]
    for metric, words in (f"val_{run.score}", score), (f"ema_{run.score}", f"EMA {score}"):
        if values := run.measured(metric):
            numbers.append((f"{words}, {last}", f"{values[-1]:.2f} %"))
            numbers.append((f"{words}, best epoch", f"{max(values):.2f} %"))
    if run.done:
        spent = sum(filter(math.isfinite, run.measured("seconds")))
        minutes, seconds = divmod(round(spent), 60)
        time = f"{minutes} min {seconds:02} s"
        if minutes >= 60:
            time = f"{minutes // 60} h {minutes % 60:02} min"
        numbers.append(("training", time))
    for key, words, form, summarise in COSTS:
        if values := run.measured(key):
            numbers.append((words, form.format(summarise(values)).replace("%", " %")))
    return numbers


def judge(
    path: Path, data_dir: str | None, images: int, weights: str, folder: Path = Path()
) -> Json:
    """How a run's model does on its validation images: its classes, and the mistakes, whose links
    lead from `folder` to their files; and, if an image has one label, who is taken for whom.

    Raises CheckpointError without weights or classes, and DataError if the images are not at hand
    or have other classes than the model.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: an archive holds no weights")
    file, weights, best = chosen_weights(path, weights)
    saved = open_saved(file)
    if not saved.recipe.task.kind.learns_classes:
        raise CheckpointError(f"{path}: learned no classes")
    recipe = saved.recipe.with_data(root=data_dir) if data_dir else saved.recipe
    known = tuple(saved.classes or ())
    data_set = own_set(recipe.data)._replace(order=known)
    source = data_set.open().in_order(known)
    require_same_images(data_set, source, path)
    classes = list(source.classes)
    number = len(classes)
    if list(saved.classes or classes) != classes or number != recipe.data.num_classes:
        raise DataError(f"{data_set}: its classes are not those of {saved.name}")
    device = this_device()
    model = saved.model(weights).eval().to(device)
    every = math.ceil(len(source) / images)  # so many-th image is judged
    batches = evaluation_batches(recipe, source, saved.size, device, world_size=every)
    with ProgressBar(
        f"validate {saved.name}", len(batches), items=batches, scale=batches.batch_size
    ) as bar:
        logits, labels = all_logits(model, bar, recipe.engine.amp)
    if source.several_labels:
        found, mistakes = several_judged(
            logits, labels.bool(), recipe.task.options["threshold"], classes
        )
    else:
        temperature = saved.temperature(weights)
        probabilities = recipe.loss.probabilities(logits / temperature)
        found, mistakes = one_judged(probabilities, labels, classes)
        found["temperature"] = rounded(temperature)
    for mistake in mistakes:
        index = mistake.pop("index")
        place = batches.views.indices[index]  # in the source
        image = source.paths[place] if isinstance(source, ImageFiles) else None
        mistake |= {
            "source": as_png(batches.views[index][0], SIDE),
            "file": image or f"image {place}",
            "link": address(image, folder) if image and os.path.exists(image) else None,
        }
    return found | {
        "numbers": [[words, rounded(value)] for words, value in found["numbers"].items()],
        "scores": rounded(found["scores"]),
        "classes": classes,
        "images": len(labels),
        "of": len(source),
        "weights": weights,
        "epoch": best and best.row["epoch"],  # None: the last one
        "set": data_set.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "mistakes": mistakes,
    }


def one_judged(
    probabilities: Tensor, labels: Tensor, classes: Sequence[str]
) -> tuple[Json, list[Json]]:
    """The part of `judge` that images with one label have, and the most confident mistakes, each
    with the index of its image. probabilities: (n, K); labels: (n,).
    """
    shares, guesses = probabilities.max(1)  # (n,) each
    pairs, counts = torch.stack([labels, guesses], 1).unique(dim=0, return_counts=True)
    right = labels[guesses == labels]
    hits, totals, taken = (
        part.bincount(minlength=len(classes)).tolist() for part in (right, labels, guesses)
    )
    wrong = (guesses != labels).nonzero()[:, 0]
    surest = wrong[shares[wrong].sort(descending=True, stable=True).indices[:MISTAKES]]
    mistakes = [
        {
            "index": index,
            "truth": classes[int(labels[index])],
            "guess": classes[int(guesses[index])],
            "share": rounded(shares[index]),
        }
        for index in surest.tolist()
    ]
    bins = reliability(probabilities, labels)
    found = {
        "numbers": {
            "top-1, judged here": 100.0 * sum(hits) / len(labels),
            "expected calibration error": calibration_error(bins),
            "balanced accuracy": balanced_accuracy(hits, totals),
        },
        "totals": totals,
        "scores": class_scores(hits, totals, taken),
        "columns": ["precision", "recall", "F1"],
        "pairs": torch.column_stack([pairs, counts]).tolist(),
        "reliability": [
            [int(images), rounded(sure / images), rounded(right / images)] if images else None
            for images, sure, right in bins.T.tolist()
        ],
    }
    return found, mistakes


def several_judged(
    logits: Tensor, truths: Tensor, threshold: float, classes: Sequence[str]
) -> tuple[Json, list[Json]]:
    """As `one_judged`, of images with several labels, (n, K) bool. A mistake is of one class."""
    result = evaluation_of(logits, truths, threshold)
    hits, totals, taken = result.class_hits, result.class_images, result.class_guesses
    scores = [
        [*of_class, None if precision is None else 100.0 * precision]
        for of_class, precision in zip(class_scores(hits, totals, taken), result.precisions)
    ]
    shares = logits.sigmoid()
    chosen = shares >= threshold
    sureness = torch.where(chosen, shares, 1.0 - shares).masked_fill(chosen == truths, -1.0)
    wrong = min(MISTAKES, int((chosen != truths).sum()))
    mistakes = []
    for place in sureness.flatten().sort(descending=True, stable=True).indices[:wrong].tolist():
        index, number = divmod(place, len(classes))
        labels = [name for name, is_one in zip(classes, truths[index]) if is_one]
        mistakes.append(
            {
                "index": index,
                "truth": ", ".join(labels) or "none of these",
                "guess": classes[number] if chosen[index, number] else f"not {classes[number]}",
                "share": rounded(sureness[index, number]),
            }
        )
    found = {
        "numbers": {
            f"{MEASURES[key]}, judged here": value for key, value in result.measures.items()
        },
        "totals": totals,
        "scores": scores,
        "columns": ["precision", "recall", "F1", "average precision"],
    }
    return found, mistakes


def address(path: str, folder: Path) -> str:
    """The address of a file as seen from a page in `folder`, so that both can move together."""
    return quote(os.fsencode(os.path.relpath(path, folder)))
