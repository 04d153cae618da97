"""The folder of one run: everything needed to repeat it, resume it and read its results.

    recipe.toml       the recipe with every option resolved; `--recipe <this file>` repeats the run
    run.json          commands, versions, git commit, hardware
    metrics.jsonl     one line per epoch
    steps.jsonl       one line per ten steps
    last.pt           the checkpoint that all programs read; it exists from step 0 on
    previous.pt       one of an earlier step, read if last.pt is damaged or missing
    best.pt           the weights of the best epoch
    epoch_0007.pt     the weights after each epoch in checkpoint.keep_epochs; 0: as initialised
    run.lock          the process that writes here, see lock.py

Whole files are written by `save_atomically` and `write_text_atomically`, lines by `Lines.append`.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ..messages import in_brief
from ..recipe.files import RECIPES
from ..train.checkpoint import (CheckpointError, Damaged, NoCheckpoint, load, save_atomically,
                                shortened, sync_folder, write_text_atomically)
from ..train.distributed import warn
from ..train.metrics import STEPS_PER_ROW

BOXED = RECIPES / "trained"                          # models that come with the package, by name
# The weights in a folder that transformers or timm wrote.
FOREIGN_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# What training leaves; recipe.toml and run.json do not count.
RESULTS = ("last.pt", "previous.pt", "best.pt", "epoch_*.pt", "metrics.jsonl", "steps.jsonl")
APART = {"epoch": 1, "step": STEPS_PER_ROW}     # by how much the numbers of a file's lines rise
Say = Callable[[str], object]


@contextmanager
def in_one_line(path: Path, verb: str = "written") -> Iterator[None]:
    """A context that turns an error of the disk into CheckpointError, which names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be {verb}: {error.strerror or error}") from None


def read_bytes(path: Path, default: bytes = b"") -> bytes:
    """The contents of a file, or `default` if there is none. Raises CheckpointError."""
    with in_one_line(path, "read"):
        return path.read_bytes() if os.path.lexists(path) else default


def parse_json(text: bytes) -> Any:
    """The value in a text of JSON; None if it is none, or no UTF-8."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def parse_lines(text: bytes, source: Path, key: str) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines; blank lines, and a last one cut short, are left out.

    Raises CheckpointError, naming the line, for one that is not a JSON object, has no integer under
    `key`, or has one that is not larger than that of the previous line, as happens if two runs
    write to one file.
    """
    rows: list[dict[str, Any]] = []
    lines = text.split(b"\n")
    for number, line in enumerate(lines, 1):
        row = parse_json(line)
        if not line.strip() or row is None and number == len(lines):
            continue
        if not isinstance(row, dict) or type(row.get(key)) is not int or (
                rows and row[key] <= rows[-1][key]):
            found = in_brief(line.decode(errors="replace"))
            before = f", larger than {rows[-1][key]} before it" if rows else ""
            raise CheckpointError(f"{source}: line {number} is {found}, expected a JSON object "
                                  f"with its {key}{before}; mend the file or move it away")
        rows.append(row)
    return rows


def parse_starts(text: bytes, source: Path) -> list[dict[str, Any]]:
    """The contents of run.json, one dictionary per start; CheckpointError for anything else."""
    starts = parse_json(text)
    if not isinstance(starts, list) or not set(map(type, starts)) <= {dict}:
        raise CheckpointError(f"{source}: not what a run writes, expected a list of objects; mend "
                              "it or move it away")
    return starts


class Lines:
    """A file with one JSON object per line, whose integers under `key` increase from line to line.

    Lines are appended as the run goes on, so that the file can be read meanwhile. Every method
    raises CheckpointError if the file cannot be read or written, or is not what a run writes.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one line; `sync` puts it on disk."""
        with in_one_line(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def sync(self) -> None:
        """Flush the lines to disk, so that they survive a power failure."""
        if os.path.exists(self.path):
            with in_one_line(self.path), open(self.path, "rb") as file:
                os.fsync(file.fileno())

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per line, see `parse_lines`; [] if there is no file."""
        return parse_lines(read_bytes(self.path), self.path, self.key)

    def cut_back(self, last: int) -> list[str]:
        """Remove the lines with a number under `key` above `last`, where a checkpoint was taken.

        Returns the numbers up to `last` of which there is no line.
        """
        rows = {row[self.key]: row for row in self.rows() if row[self.key] <= last}
        write_text_atomically("".join(json.dumps(row) + "\n" for row in rows.values()), self.path)
        apart = APART[self.key]
        return [str(number) for number in range(apart, last + 1, apart) if number not in rows]


class RunFolder:
    """The paths and files of one run. Files are written atomically, by the main process alone.

    Every method raises CheckpointError if a file cannot be read or written, or is not what a run
    writes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last, self.previous = path / "last.pt", path / "previous.pt"
        self.best = path / "best.pt"
        self.recipe, self.info = path / "recipe.toml", path / "run.json"
        self.metrics = Lines(path / "metrics.jsonl", "epoch")
        self.steps = Lines(path / "steps.jsonl", "step")
        self.read_from = self.last                   # the file that `load_last` has read
        self.step: int | None = None                 # of the checkpoint read or written last

    def kept(self, epoch: int) -> Path:
        """The path of the weights after `epoch` epochs, for the epochs that the recipe keeps."""
        return self.path / f"epoch_{epoch:04d}.pt"

    # What is there ------------------------------------------------------------------------------

    def holds_checkpoint(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return os.path.exists(self.last) or os.path.exists(self.previous)

    def results(self) -> list[str]:
        """The names of the files that training has left; an empty file of lines is none."""
        found = []
        for pattern in RESULTS:
            for path in sorted(self.path.glob(pattern)):
                if path.suffix != ".jsonl" or path.stat().st_size:
                    found.append(path.name)
        return found

    def require_unused(self, *, starts_again: bool = False) -> None:
        """Raise CheckpointError if the folder already has files that a run writes.

        starts_again: allow those that a run writes before its first checkpoint, recipe.toml and
            run.json.
        """
        found = self.results()
        for path in () if starts_again else (self.recipe, self.info):
            found += [path.name] * os.path.exists(path)
        if found:
            raise CheckpointError(
                f"{self.path}: already holds a run ({', '.join(found)}); --resume auto goes on "
                "with it and overwrites no results; a new one, in another --out-dir, starts from "
                f"its weights with --set init.checkpoint={self.path}")

    def starts(self) -> list[dict[str, Any]]:
        """The contents of run.json: one dictionary per start of the run; [] if there is no file."""
        return parse_starts(read_bytes(self.info, b"[]"), self.info)

    def data_of(self, start: int) -> Mapping[str, Any]:
        """What `record_start` was given as `data` at this start of the run; {} if unknown.

        start: 0 for the first, −1 for the last. Nothing is raised, since reading a model does not
        depend on it.
        """
        with suppress(ValueError, LookupError, TypeError):
            return dict(self.starts()[start]["data"])
        return {}

    # Writing ------------------------------------------------------------------------------------

    def make(self) -> None:
        """Create the folder, and those above it, if they do not exist."""
        with in_one_line(self.path):
            folder, changed = self.path, []
            while not folder.exists():
                folder = folder.parent
                changed.append(folder)
            self.path.mkdir(parents=True, exist_ok=True)
            for folder in changed:
                sync_folder(folder)

    def record_recipe(self, recipe_toml: str) -> None:
        """Write recipe.toml, unless there is one."""
        if not os.path.exists(self.recipe):
            write_text_atomically(recipe_toml, self.recipe)

    def record_start(self, repository: Path, *, processes: int, device: str,
                     data: Mapping[str, Any]) -> None:
        """Append to run.json how the run was started or resumed this time.

        data: what the run trains on: the absolute path of its folder as "root", and whatever else
            `require_same_data` is to compare on resume.
        """
        start = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "command": sys.argv,
                 "git_commit": git_commit(repository), "python": platform.python_version(),
                 "torch": torch.__version__, "processes": processes, "device": device,
                 "data": dict(data)}
        write_text_atomically(json.dumps([*self.starts(), start], indent=2) + "\n", self.info)

    def save(self, state: dict[str, Any], path: Path) -> None:
        """Write a checkpoint. A new last.pt makes the old one previous.pt, if of another step.

        An epoch that is evaluated is saved before and after; previous.pt is then of neither. The
        lines of metrics.jsonl and steps.jsonl are on disk before a last.pt that counts them as
        done.
        """
        keep = None
        if path == self.last:
            keep = None if state.get("step") == self.step else self.previous
            for lines in (self.metrics, self.steps):
                lines.sync()
        save_atomically(state, path, keep=keep)
        if path == self.last:
            self.read_from, self.step = path, state.get("step")

    def tidy(self, *, epochs: int, steps: int, say: Say) -> None:
        """Remove what is newer than the checkpoint that a run resumes from.

        epochs, steps: how many of them that checkpoint counts as done; later lines of metrics.jsonl
        and steps.jsonl are removed, and so are partly written files. A last.pt that could not be
        read is renamed damaged.pt, so that it does not become previous.pt. Training needs no lines,
        so the run goes on where earlier ones are lost; `say` is called with a line that names them.
        """
        with in_one_line(self.path):
            if self.read_from != self.last and self.last.exists():
                os.replace(self.last, self.path / "damaged.pt")
            for cut_short in self.path.glob("*.partial"):
                cut_short.unlink()
        for lines, last, loss in (
                (self.metrics, epochs, "without these, comparisons leave the run out"),
                (self.steps, steps, "its curves by step have a gap")):
            if lost := lines.cut_back(last):
                say(f"warning {lines.path}: lacks {lines.key} {shortened(lost)}; {loss}")

    # Reading ------------------------------------------------------------------------------------

    def load_last(self, *, glance: bool = False, say: Say = lambda line: None) -> dict[str, Any]:
        """The contents of last.pt, or of previous.pt if last.pt is damaged or missing.

        In the second case `say` is called with a line about it. glance: read only plain values; the
        tensors stay on disk, and their checksums are not verified.
        """
        if not self.path.is_dir():
            raise CheckpointError(f"--resume {self.path}: no such run folder")
        state, self.read_from = read_checkpoint(self.path, say=say, mmap=glance, verify=not glance)
        for part in ("model", "optimizer", "progress", "recipe"):
            if not isinstance(state.get(part), Mapping):
                raise CheckpointError(f"{self.read_from}: not a training checkpoint, it cannot be "
                                      f"resumed; expected a dictionary '{part}' in it")
        self.step = state.get("step")
        return state

    def what_is_left(self) -> str:
        """For the error message of a run that diverged: which good checkpoint it has left."""
        return (f"; {self.read_from} holds the state after {self.step:,} steps, which would go the "
                "same way again: start anew with a lower optim.base_lr, say, or optim.clip_norm")


def by_name(path: Path) -> Path:
    """The path as it is, or, where nothing exists at a mere name, the model in recipes/trained."""
    boxed = path.parent == Path(".") and not os.path.exists(path) and (BOXED / path).is_dir()
    return BOXED / path if boxed else path


def read_checkpoint(path: Path, *, say: Say = warn, mmap: bool = False, verify: bool = True
                    ) -> tuple[dict[str, Any], Path]:
    """The contents of a checkpoint, and the file that they are from.

    path: a checkpoint, or a run folder, which stands for its last.pt; if that is damaged or
    missing, previous.pt is read and `say` is called with a line about it. A folder that
    transformers or timm wrote stands for its file of weights, and a name at which nothing exists
    for the model of that name in recipes/trained. mmap, verify: see `load`, which raises
    CheckpointError. So does this, naming both files, if both are damaged.
    """
    path = by_name(path)
    files, problems = [path], []
    if os.path.isdir(path):
        files = [path / "last.pt", path / "previous.pt"]
        if not any(map(os.path.exists, files)):
            files = [path / name for name in FOREIGN_WEIGHTS if os.path.exists(path / name)
                     ][:1] or files
    for file in files:
        try:
            state = load(file, mmap=mmap, verify=verify)
        except (NoCheckpoint, Damaged) as error:
            problems.append(error)
            continue
        if problems:
            say(f"{problems[0]}; going on with {file}")
        return state, file
    if len(problems) == 1 or isinstance(problems[-1], NoCheckpoint):
        raise problems[0]
    raise CheckpointError("; and ".join(map(str, problems)))


def git_commit(repository: Path) -> str:
    """The commit of the code, "+changes" if a tracked file differs; "unknown" outside of git."""
    command = ["git", "-C", str(repository), "describe", "--always", "--abbrev=40", "--exclude=*",
               "--dirty=+changes"]
    try:
        return subprocess.run(command, check=True, text=True, capture_output=True,
                              timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
