"""Runs read back from their folders, and grouped: what is the same experiment but for the seed.

Only recipe.toml, run.json and metrics.jsonl are read, so a folder may have lost its checkpoints.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..recipe.values import to_toml
from ..train.checkpoint import CheckpointError
from ..train.metrics import METRICS
from .folder import RunFolder

# What the runs of one experiment may differ in: the seed, and where and how pictures are read.
FREE_KEYS = ("run.seed", "data.root", "data.workers", "data.on_device_gib")
NEEDED_KEYS = ("run.seed", "model.name", "init.name", "schedule.epochs", "schedule.cooldown_epochs")


@dataclass(frozen=True)
class Run:
    """What a run's folder says of it."""

    path: Path
    recipe: str                 # the recipe's name, as --recipe gave it
    keys: dict[str, Any]        # "section.key" → value, every option written out
    rows: list[dict[str, Any]]  # metrics.jsonl, one a finished epoch
    starts: list[dict[str, Any]]  # run.json, one a start: command, commit, versions, hardware

    @property
    def seed(self) -> int:
        return self.keys["run.seed"]

    @property
    def epochs(self) -> int:
        """How many the recipe asks for."""
        return self.keys["schedule.epochs"] + self.keys["schedule.cooldown_epochs"]

    @property
    def epochs_done(self) -> int:
        return self.rows[-1]["epoch"] if self.rows else 0

    @property
    def finished(self) -> bool:
        return self.epochs_done == self.epochs

    @property
    def experiment(self) -> dict[str, Any]:
        """The keys that tell experiments apart."""
        return {key: value for key, value in self.keys.items() if key not in FREE_KEYS}


@dataclass(frozen=True)
class Group:
    """The runs of one experiment by their seeds, in ascending order."""

    label: str
    runs: dict[int, Run]


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one: {"init": {"options": {"base": "torch"}}} → {"init.options.base": …}."""
    keys = {}
    for name, value in table.items():
        keys |= (flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else
                 {f"{prefix}{name}": value})
    return keys


def read_run(path: Path) -> Run:
    """The run in the folder `path`, finished or not.

    Raises CheckpointError if it is no run's folder or one of its files cannot be understood.
    """
    folder = RunFolder(path)
    if not folder.recipe.is_file():
        raise CheckpointError(f"{path}: not a run's folder, there is no recipe.toml in it")
    file = folder.recipe
    try:
        keys = flat(tomllib.loads(file.read_text(encoding="utf-8")))
        file = folder.info
        starts = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
        file = folder.metrics.path
        rows = folder.metrics.rows()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None
    except ValueError as error:                      # TOML's, JSON's and Unicode's
        raise CheckpointError(f"{file}: not what a run writes: {error}") from None
    for key in NEEDED_KEYS:
        if key not in keys:
            raise CheckpointError(f"{folder.recipe}: lacks the key '{key}', so it is no run's")
    for number, row in enumerate(rows, 1):
        missing = [name for name in METRICS if name not in row]
        if missing:
            raise CheckpointError(f"{file}: line {number} lacks '{missing[0]}', so it is no run's")
    return Run(path, _recipe_name(starts), keys, rows, starts)


def _recipe_name(starts: list[dict[str, Any]]) -> str:
    """The name of the recipe that the first start names; recipe.toml does not hold it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe", default="recipe")
    words = starts[0]["command"][1:] if starts else []
    return Path(parser.parse_known_args(words)[0].recipe).stem


# ---------------------------------------------------------------------------------------------
# Grouping
# ---------------------------------------------------------------------------------------------


def finished_groups(folders: Sequence[Path]) -> tuple[list[Group], list[str]]:
    """The finished runs in these folders as groups, and a line for each that is not finished.

    Raises CheckpointError as `read_run` and `group_runs` do, or if no run is finished.
    """
    runs = [read_run(folder) for folder in folders]
    unfinished = [f"left out, not finished: {run.path}, {run.epochs_done} of {run.epochs} epochs"
                  for run in runs if not run.finished]
    if len(unfinished) == len(runs):
        raise CheckpointError(f"none of the runs is finished; {'; '.join(unfinished)}")
    return group_runs([run for run in runs if run.finished]), unfinished


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs by experiment, in the order in which each experiment comes first.

    Raises CheckpointError if two runs of an experiment have the same seed.
    """
    groups: list[dict[int, Run]] = []
    for run in runs:
        members = next((group for group in groups
                        if next(iter(group.values())).experiment == run.experiment), None)
        if members is None:
            groups.append({run.seed: run})
        elif run.seed in members:
            raise CheckpointError(f"{run.path}: the same experiment and seed {run.seed} as "
                                  f"{members[run.seed].path}; expected one run a seed")
        else:
            members[run.seed] = run
    return [Group(label, dict(sorted(members.items())))
            for label, members in zip(_labels([next(iter(g.values())) for g in groups]), groups)]


def _labels(firsts: list[Run]) -> list[str]:
    """Init, then the keys that set a group apart from others of the same recipe, one run a group.

    The recipe's name stands in front where there are several. Options are compared only among
    groups whose model or init has the same name, since others have other options.
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
        labels.append(", ".join(parts))
    return labels
