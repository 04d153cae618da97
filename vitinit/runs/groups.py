"""Read runs back from folders and archives, and group those that differ in nothing but the seed.

Only recipe.toml, run.json and metrics.jsonl are read; the checkpoints may have been deleted.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.datasets import IN_MEMORY
from ..messages import in_brief
from ..recipe.resolve import with_defaults
from ..recipe.sections import MACHINE_KEYS, Recipe
from ..recipe.upgrade import processes_of, upgraded
from ..recipe.values import describe, shown, to_toml
from ..train.checkpoint import CheckpointError
from ..train.metrics import StepRow
from .archive import Place, opened
from .folder import RunFolder
from .records import LATER, METRICS

# The keys in which runs of one experiment may differ: seed, folder of the data, and machine.
FREE_KEYS = ("run.seed", "data.root", *MACHINE_KEYS)
NEEDED_KEYS = {"run.seed": int, "model.name": str, "init.name": str, "schedule.epochs": int,
               "schedule.cooldown_epochs": int}
NEEDED_OF_START = {"command": list, "git_commit": str, "torch": str, "python": str,
                   "processes": int, "device": str}
FINITE = ("val_top1", "val_top5", "ema_top1", "ema_top5", "seconds")    # never infinite or NaN


@dataclass(frozen=True)
class Run:
    """A run, as the text files in its folder describe it."""

    path: Path                  # of the folder; in an archive, runs.tar.xz/<name>
    recipe: str                 # the recipe's name, as --recipe gave it
    keys: dict[str, Any]        # "section.key" → value, every option written out
    rows: list[dict[str, Any]]  # metrics.jsonl: one row per finished epoch; missing keys are None
    starts: list[dict[str, Any]]  # run.json: per start, its command, commit, versions, hardware

    @property
    def seed(self) -> int:
        """Recipe key run.seed."""
        return self.keys["run.seed"]

    @property
    def commit(self) -> str:
        """The first digits of the commit that the run began with; "unknown" without run.json."""
        return self.starts[0]["git_commit"][:7] if self.starts else "unknown"

    @property
    def epochs(self) -> int:
        """The number of epochs that the recipe asks for, cool-down included."""
        return self.keys["schedule.epochs"] + self.keys["schedule.cooldown_epochs"]

    @property
    def epochs_done(self) -> int:
        """The number of finished epochs on record."""
        return len(self.rows)

    @property
    def finished(self) -> bool:
        """Whether all epochs are done and on record."""
        return self.epochs_done == self.epochs

    @property
    def experiment(self) -> dict[str, Any]:
        """The keys, with their values, that distinguish one experiment from another."""
        return {key: value for key, value in self.keys.items() if not is_free(key, self.keys)}

    def measured(self, metric: str) -> list[float]:
        """The values of a metric in the epochs that were evaluated; [] for the EMA of a run without."""
        return [row[metric] for row in self.rows if row[metric] is not None]

    def departure(self, recipe: Recipe) -> str | None:
        """The first difference, in words, from a run of `recipe`; None if there is no difference.

        A different seed counts; other differences that one experiment allows do not.
        """
        expected = keys_of(with_defaults(recipe.as_dict()))
        if not expected["data.num_classes"]:         # as many as the run's data set had
            expected["data.num_classes"] = self.keys.get("data.num_classes")
        for key in dict.fromkeys([*expected, *self.keys]):
            if self.keys.get(key) != expected.get(key) and (
                    key == "run.seed" or not is_free(key, self.keys)):
                return (f"{self.path}: holds another run, its {key} is {shown(self.keys.get(key))} "
                        f"and not {shown(expected.get(key))}")
        return None


@dataclass(frozen=True)
class Group:
    """The runs of one experiment."""

    label: str                  # what distinguishes it from the other groups, in words
    runs: dict[int, Run]        # seed → run, in ascending order of the seeds

    def last(self, metric: str) -> dict[int, float]:
        """Seed → the metric's last value, for the runs that have any."""
        values = {seed: run.measured(metric) for seed, run in self.runs.items()}
        return {seed: by_epoch[-1] for seed, by_epoch in values.items() if by_epoch}


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables: {"init": {"options": {"base": "torch"}}} → {"init.options.base": …}."""
    keys = {}
    for name, value in table.items():
        keys |= (flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else
                 {f"{prefix}{name}": value})
    return keys


def keys_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten the result of `Recipe.as_dict`; the recipe's name and version are left out."""
    return flat({title: body for title, body in recipe.items() if title not in ("name", "version")})


def is_free(key: str, keys: Mapping[str, Any]) -> bool:
    """Whether runs that differ in `key` alone count as the same experiment. keys: of one of them."""
    if key == "optim.max_batch_per_process":         # it matters to a ConvMixer's BatchNorm
        return not str(keys["model.name"]).startswith("convmixer_")
    if key == "mix.group":
        return not keys.get("mix.probability") or not (keys.get("mix.mixup_alpha") or
                                                       keys.get("mix.cutmix_alpha"))
    if key.startswith("optim.muon_"):
        return keys.get("optim.name") != "muon"
    if key == "data.apply_exif_orientation":         # of image files
        return keys.get("data.name") in IN_MEMORY
    return key in FREE_KEYS


def read_run(path: Path) -> Run:
    """Read the run in the folder `path`, finished or not.

    A recipe of an earlier version is upgraded to the current keys. Raises CheckpointError if the
    folder is not that of a run, or if one of its files is not what a run writes.
    """
    folder = RunFolder(path)
    if not os.path.isfile(folder.recipe):
        raise CheckpointError(f"{path}: not a run's folder, there is no recipe.toml in it")
    try:
        table = upgraded(tomllib.loads(folder.recipe.read_text(encoding="utf-8")),
                         processes=processes_of(path))
        keys = flat(with_defaults(table))
    except OSError as error:
        raise CheckpointError(f"{folder.recipe}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:    # TOML's, Unicode's, and an upgrade's
        raise CheckpointError(f"{folder.recipe}: not what a run writes: {in_brief(error)}"
                              ) from None
    for key, kind in NEEDED_KEYS.items():
        if key not in keys:
            raise CheckpointError(f"{folder.recipe}: lacks the key '{key}', so it is no run's")
        if type(keys[key]) is not kind:
            raise CheckpointError(f"{folder.recipe}: {key} is {shown(keys[key])}, expected "
                                  f"{describe(kind)}")
    starts, rows = folder.starts(), folder.metrics.rows()
    for number, start in enumerate(starts, 1):
        for key, kind in NEEDED_OF_START.items():
            if not isinstance(start.get(key), kind):
                raise CheckpointError(f"{folder.info}: start {number} lacks '{key}', so it is no "
                                      "run's")
    for number, row in enumerate(rows, 1):
        for name in METRICS:
            problem = _problem(name, row)
            if problem:
                raise CheckpointError(f"{folder.metrics.path}: line {number} {problem}, so it is no "
                                      "run's")
    rows = [dict.fromkeys(METRICS) | row for row in rows]
    return Run(path, _recipe_name(starts), keys, rows, starts)


def read_at(place: Place) -> Run:
    """Read the run at a place in an archive or outside; errors name the path that the user knows."""
    try:
        return dataclasses.replace(read_run(place.folder), path=place.path)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(str(place.folder), str(place.path))) from None


def read_steps(run: Run) -> list[dict[str, Any]]:
    """The rows of steps.jsonl, one per ten steps; see StepRow for the keys.

    The list is empty for a run of an earlier version, which had no such file. Raises
    CheckpointError as `read_run` does.
    """
    lines = RunFolder(run.path).steps
    rows = lines.rows()
    for number, row in enumerate(rows, 1):
        for name in StepRow._fields:
            problem = _problem(name, row)
            if problem:
                raise CheckpointError(f"{lines.path}: line {number} {problem}, so it is no run's")
    return rows


def _problem(name: str, row: Mapping[str, Any]) -> str | None:
    """What is wrong with row[name], in words; None if it is a number, or null for "not measured"."""
    if name not in row:
        return None if name in LATER else f"lacks '{name}'"
    value = row[name]
    if value is None:
        return "has no 'seconds'" if name == "seconds" else None
    if type(value) not in (int, float) or name in FINITE and not math.isfinite(value):
        return f"has {shown(value)} for '{name}'"
    return None


def _recipe_name(starts: list[dict[str, Any]]) -> str:
    """The recipe's name, from the command of the first start, since recipe.toml does not state it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe", default="recipe")
    words = list(map(str, starts[0]["command"][1:])) if starts else []
    return Path(parser.parse_known_args(words)[0].recipe).stem


# ---------------------------------------------------------------------------------------------
# Grouping
# ---------------------------------------------------------------------------------------------


def finished_groups(paths: Sequence[Path]) -> tuple[list[Group], list[str]]:
    """Group the finished runs at these paths; also return one line per unfinished run.

    paths: run folders, archives of runs, or archives with a pattern; see `archive.opened`. Raises
    CheckpointError as `opened`, `finished_runs` and `group_runs` do.
    """
    with opened(paths) as places:
        runs, unfinished = finished_runs([read_at(place) for place in places])
    return group_runs(runs), unfinished


def finished_runs(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """The finished ones of these runs, and one line for each of the others.

    Raises CheckpointError if no run is finished.
    """
    unfinished = []
    for run in runs:
        if not run.finished:
            ended = run.rows and run.rows[-1]["epoch"] == run.epochs
            why = "lines of its metrics.jsonl are lost" if ended else "not finished"
            unfinished.append(f"left out, {why}: {run.path}, {run.epochs_done} of {run.epochs} epochs")
    if len(unfinished) == len(runs):
        raise CheckpointError(f"none of the runs is finished; {'; '.join(unfinished)}")
    return [run for run in runs if run.finished], unfinished


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group the runs by experiment. The groups are in the order of their first runs.

    Runs of one experiment of which two have the same seed are grouped by the commit that they began
    with, too, since other code may do something else by the same recipe. Raises CheckpointError if
    two runs have all of these in common.
    """
    keys = [experiment_key(run) for run in runs]
    seeds = Counter((key, run.seed) for key, run in zip(keys, runs))
    repeated = {key for (key, _), count in seeds.items() if count > 1}
    groups: dict[tuple[str, str], dict[int, Run]] = {}
    for key, run in zip(keys, runs):
        members = groups.setdefault((key, run.commit if key in repeated else ""), {})
        if run.seed in members:
            raise CheckpointError(f"{run.path}: the same experiment and seed {run.seed} as "
                                  f"{members[run.seed].path}; expected one run per seed and commit")
        members[run.seed] = run
    firsts = [next(iter(members.values())) for members in groups.values()]
    return [Group(label, dict(sorted(members.items())))
            for label, members in zip(_labels(firsts), groups.values())]


def experiment_key(run: Run) -> str:
    """A text that two runs share if they are of one experiment; 1 and 1.0 are the same value."""
    return repr(sorted((key, float(value) if type(value) is int else value)
                       for key, value in run.experiment.items()))


def _labels(firsts: list[Run]) -> list[str]:
    """One label per group; `firsts` has one run of each.

    A label is the name of the init, followed by the keys in which the group differs from other
    groups of the same recipe; the recipe's name comes first if there are several recipes. Options
    of a model or an init are compared only with groups whose model or init has the same name, since
    others have different options.
    """
    labels = []
    for run in firsts:
        rivals = [other for other in firsts if other.recipe == run.recipe]
        parts = [run.recipe] if len(rivals) < len(firsts) else []
        parts.append(run.keys["init.name"])
        for key in dict.fromkeys(key for rival in rivals for key in rival.experiment):
            section, *_, last = key.split(".")
            compared = [rival for rival in rivals if key != f"{section}.options.{last}" or
                        rival.keys[f"{section}.name"] == run.keys[f"{section}.name"]]
            value = run.keys.get(key)
            if key != "init.name" and any(rival.keys.get(key) != value for rival in compared):
                parts.append(f"without {key}" if value is None else f"{key} = {to_toml(value)}")
        if sum(rival.experiment == run.experiment for rival in rivals) > 1:
            parts.append(f"commit {run.commit}")
        labels.append(", ".join(parts))
    return labels
