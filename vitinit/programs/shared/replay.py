"""Train a run that is on record again, and compare its rows with those on record.

On the same kind of machine, with the same packages, threads and images, a run is a function of its
recipe, so the rows are the same to the bit. Elsewhere sums are added in another order, and a
replay is as good as another seed; then it is compared with the seeds that are on record.
`vitinit compare --replay` is the program.
"""

import math
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...base.files import CheckpointError
from ...base.messages import shortened, warn
from ...data.images import DataError
from ...data.sources import fingerprint
from ...recipe.files import load_recipe, overrides
from ...recipe.sections import Recipe
from ...run import Run
from ...runs.data import open_sets
from ...runs.folder import RunFolder
from ...train.metrics import MEASURES, OF_SEVERAL
from .groups import commit, experiment
from .records import RunRecord
from .results import RECORDED, t_interval, table

# What the recipe determines in a row of metrics.jsonl; the others are times and memory.
COMPARED = (
    "lr",
    "train_loss",
    "val_loss",
    "val_top1",
    "val_top5",
    "val_balanced",
    "ema_top1",
    "ema_top5",
    *OF_SEVERAL,
    "skipped_steps",
)


def replay(
    runs: Sequence[RunRecord],
    name: str,
    *,
    folder: Path,
    data_dir: str | None,
    sets: Sequence[str],
    epochs: int,
    trust_teacher: bool,
    imports: Sequence[str] = (),
) -> tuple[str, bool]:
    """Train the run called `name` of these again, in `folder`, and go on there if that was begun.

    runs: all those on record, among which are the other seeds of the run. sets: texts such as
        "data.name=cifar10", for images that are elsewhere. epochs: how many from the start; 0: all.
    trust_teacher, imports: as of `Run`; whoever wrote an archive cannot say them.
    Returns the comparison as Markdown, and whether it holds: equal to the bit, or within what
    another seed would be expected to have. Raises CheckpointError if there is no such run, and as
    `Run.train` does.
    """
    named = [run for run in runs if run.path.name == name]
    if not named:
        names = [run.path.name for run in runs]
        raise CheckpointError(f"--replay {name}: no such run is on record, but {shortened(names)}")
    if len(named) > 1:
        paths = [str(run.path) for run in named]
        raise CheckpointError(f"--replay {name}: which of {shortened(paths)}? Give one of them")
    record = named[0]
    if not record.done:
        raise CheckpointError(f"--replay {name}: no epoch of it is on record")
    if RunFolder(folder).metrics.count() >= (epochs or record.epochs):
        raise CheckpointError(
            f"{folder}: is such a replay already, perhaps by other code; expected another --out"
        )
    with tempfile.TemporaryDirectory() as holder:
        # The name is from run.json, which anybody may have written.
        recipe = Path(holder, re.sub(r"[^\w.-]", "_", f"{record.recipe}.toml"))
        recipe.write_bytes(record.files["recipe.toml"])
        warn_of_other_images(record, load_recipe(recipe, overrides(data_dir=data_dir, sets=sets)))
        again = Run(
            recipe,
            out_dir=folder,
            resume="auto",
            data_dir=data_dir,
            overrides=sets,
            trust_teacher=trust_teacher,
            imports=imports,
            first_epochs=epochs or record.epochs,
        ).train()
    seeds = {
        run.seed: run
        for run in runs
        if experiment(run) == experiment(record) and commit(run) == commit(record)
    } | {record.seed: record}
    return against_record(record, again.rows, again.folder.starts(), list(seeds.values()))


def warn_of_other_images(record: RunRecord, recipe: Recipe) -> None:
    """Warn, before it takes its time, if the recipe's images are not those of the record. Images
    that are not there yet are not compared: training fetches them, or says what is wrong.
    """
    data = recipe.data
    with suppress(DataError):
        _, train_set, val_set = open_sets(recipe)
        now = "".join(fingerprint(source, data.root) for source in (train_set, val_set))
        then = record.began.get("data", {}).get("files and labels")
        if then not in (None, now):  # older records have none
            warn(
                f"{record.path.name} was trained and measured on other images, by their names, "
                "classes and number"
            )


def against_record(
    record: RunRecord,
    rows: Sequence[dict[str, Any]],
    starts: Sequence[dict[str, Any]],
    seeds: Sequence[RunRecord],
) -> tuple[str, bool]:
    """`replay`'s comparison. rows, starts: of the run that was trained again. seeds: the record and
    those that differ from it in the seed alone.
    """
    # What both have: a run that is evaluated every fifth epoch has no top-1 in between.
    values = []
    for then, now in zip(record.rows, rows):
        known = [key for key in COMPARED if None not in (then[key], now.get(key))]
        values.append({key: (then[key], now[key]) for key in known})
    done = len(values)
    text = f"{table_of_both(rows, values)}\n\n{other_machine(record, starts)}\n"
    if all(then == now for both in values for then, now in both.values()):
        return f"{text}equal to the bit: all results of epochs 1 to {done}\n", True
    key = next(key for key in ("val_top1", "val_map", "train_loss") if key in values[-1])
    then, now = values[-1][key]
    text += f"apart: {key} {then:.4f} then, {now:.4f} now, after epoch {done}"
    lasts = [run.rows[done - 1][key] for run in seeds if run.done >= done]
    on_record = [last for last in lasts if last is not None]
    if len(on_record) < 2:
        return f"{text}; one seed is on record, so no interval\n", False
    mean, half = t_interval(on_record)
    half *= math.sqrt(len(on_record) + 1)  # of another seed, and not of the mean
    holds = abs(now - mean) <= half
    verdict = "within" if holds else "not within"
    text += (
        f"; another seed would be expected within {mean:.4f} ± {half:.4f} "
        f"({len(on_record)} seeds, 95 %): it is {verdict}\n"
    )
    return text, holds


def table_of_both(
    rows: Sequence[dict[str, Any]], values: Sequence[dict[str, tuple[float, float]]]
) -> str:
    """Loss and score by epoch, then and now. values: of each row, what both runs have."""
    score = "map" if any("val_map" in both for both in values) else "top1"
    cells = []
    for row, both in zip(rows, values):
        losses = [f"{loss:.6f}" for loss in both.get("train_loss", ())] or ["–", "–"]
        shares = [f"{share:.2f}" for share in both.get(f"val_{score}", ())] or ["–", "–"]
        cells.append([str(row["epoch"]), *losses, *shares])
    return table(["epoch", "loss then", "now", f"{MEASURES[score]} then", "now"], cells)


def other_machine(record: RunRecord, starts: Sequence[dict[str, Any]]) -> str:
    """How the machine and the code differ from those of the record, in words."""
    others = dict.fromkeys(
        f"{words} {record.began.get(key, 'unknown')} then, {start[key]} now"
        for key, words in RECORDED.items()
        for start in starts
        if record.began.get(key) != start[key]
    )
    return "; ".join(others) or "the same kind of machine and the same code"
