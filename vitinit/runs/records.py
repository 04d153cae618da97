"""A run read back from its small text files.

Only recipe.toml, run.json and metrics.jsonl are read; the checkpoints may have been deleted. A
record's recipe is a plain table that is not checked, so records of any version can be read.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..messages import in_brief
from ..train.checkpoint import CheckpointError
from ..train.distill import NO_TEACHER
from ..train.metrics import METRICS
from .folder import in_one_line, parse_lines, parse_starts

FILES = ("metrics.jsonl", "recipe.toml", "run.json")
NEEDED_KEYS = {"run.seed": int, "model.name": str, "init.name": str, "schedule.epochs": int,
               "schedule.cooldown_epochs": int}


@dataclass(frozen=True)
class Run:
    """A run, as the text files in its folder describe it."""

    path: Path                  # of the folder; in an archive, runs.tar.xz/<name>
    recipe: str                 # the recipe's name, as --recipe gave it
    keys: dict[str, Any]        # "section.key" → value, every option written out
    rows: list[dict[str, Any]]  # metrics.jsonl: one row per finished epoch; missing keys are None
    starts: list[dict[str, Any]]  # run.json: per start, its command, commit, versions, hardware
    files: Mapping[str, bytes]  # the contents of those of FILES that there are

    @property
    def seed(self) -> int:
        """Recipe key run.seed."""
        return self.keys["run.seed"]

    @property
    def epochs(self) -> int:
        """The number of epochs that the recipe asks for, cool-down included."""
        return self.keys["schedule.epochs"] + self.keys["schedule.cooldown_epochs"]

    @property
    def finished(self) -> bool:
        """Whether all epochs are done and on record."""
        return len(self.rows) == self.epochs

    def measured(self, metric: str) -> list[float]:
        """The values of a metric in the epochs that were evaluated; [] for the EMA of a run without."""
        return [row[metric] for row in self.rows if row[metric] is not None]


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables: {"init": {"options": {"base": "torch"}}} → {"init.options.base": …}."""
    keys = {}
    for name, value in table.items():
        keys |= (flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else
                 {f"{prefix}{name}": value})
    return keys


def keys_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a recipe's table of sections; the recipe's name and version are left out."""
    sections = {"distill": NO_TEACHER} | dict(recipe)    # records from before there were teachers
    return flat({title: body for title, body in sections.items() if title not in ("name", "version")})


def read_run(path: Path) -> Run:
    """Read the run in the folder `path`, finished or not. Raises CheckpointError as `parse_run` does."""
    files = {}
    for name in FILES:
        if (path / name).is_file():
            with in_one_line(path / name, "read"):
                files[name] = (path / name).read_bytes()
    return parse_run(path, files)


def parse_run(path: Path, files: Mapping[str, bytes]) -> Run:
    """The run whose FILES have these contents; `path` is where errors say that it is.

    Raises CheckpointError if there is no recipe.toml, or if a file is not what a run writes.
    """
    if "recipe.toml" not in files:
        raise CheckpointError(f"{path}: not a run's folder, there is no recipe.toml in it")
    try:
        keys = keys_of(tomllib.loads(files["recipe.toml"].decode()))
    except (ValueError, RecursionError) as error:    # TOML's and Unicode's
        raise CheckpointError(f"{path / 'recipe.toml'}: not what a run writes: {in_brief(error)}"
                              ) from None
    for key, kind in NEEDED_KEYS.items():
        if type(keys.get(key)) is not kind:
            raise CheckpointError(f"{path / 'recipe.toml'}: {key} is {in_brief(keys.get(key))}, "
                                  f"expected a value of type {kind.__name__}")
    starts = parse_starts(files.get("run.json", b"[]"), path / "run.json")
    rows = [dict.fromkeys(METRICS) | row for row in
            parse_lines(files.get("metrics.jsonl", b""), path / "metrics.jsonl", "epoch")]
    for row in rows:
        for name in METRICS:
            if not isinstance(row[name], (int, float, type(None))):
                raise CheckpointError(f"{path / 'metrics.jsonl'}: epoch {row['epoch']} has "
                                      f"{in_brief(row[name])} for '{name}', expected a number")
    return Run(path, _recipe_name(starts), keys, rows, starts, files)


def _recipe_name(starts: Sequence[Mapping[str, Any]]) -> str:
    """The recipe's name, from the command of the first start, since recipe.toml does not state it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe", default="recipe")
    words = list(map(str, starts[0].get("command", [])))[1:] if starts else []
    return Path(parser.parse_known_args(words)[0].recipe).stem
