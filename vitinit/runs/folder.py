"""The folder of one run: everything needed to repeat it, resume it and read its results.

    recipe.toml       the recipe with every option resolved; `--recipe <this file>` repeats the run
    run.json          commands, versions, git commit, hardware
    start.txt         all that there was to say at the last start, cautions included
    images.txt        what the images were like when the run began
    metrics.jsonl     one line per epoch
    steps.jsonl       one line per ten steps
    last.pt           the checkpoint that all programs read; it exists from step 0 on
    previous.pt       one of an earlier step, read if last.pt is damaged or missing
    best.pt           the weights of the best epoch
    epoch_0007.pt     the weights after each epoch in checkpoint.keep_epochs; 0: as initialised
    run.lock          the process that writes here, see resume.py

Whole files are written by `save_atomically` and `write_text_atomically`, lines by `Lines.append`.
"""

import json
import math
import os
import platform
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ..base.files import (
    RESULTS,
    RUN_FILES,
    CheckpointError,
    FileError,
    in_one_line,
    opened,
    parse_json,
    parse_toml,
    read_bytes,
    sync_folder,
    unique_keys,
    write_text_atomically,
    written_atomically,
)
from ..base.messages import in_brief, warn
from ..base.values import Table, accepted_values, convert, flat, show
from ..data.sources import SIZES
from ..recipe.absent import MEANT_IN_RECIPES
from ..recipe.files import PACKAGE
from ..train.state import progress_of
from .checkpoint import read_checkpoint

LONGEST_LINES = 2**30  # most bytes of metrics.jsonl and steps.jsonl: those of 2·10⁶ epochs
LONGEST_LINE = 2**16  # most bytes of one of their lines, which have a few hundred
# One for all lines: json.loads makes another for each.
ROW = json.JSONDecoder(object_pairs_hook=unique_keys)
# What run.json says of a start, and of its data, that is read again; all else is only shown.
OF_START: Table = {
    "command": tuple[str, ...],
    "git_commit": str,
    "arguments": Mapping[str, Any],
    "imports": Mapping[str, Any],
    "data": Mapping[str, Any],
}
OF_DATA: Table = {
    "root": str,
    "files and labels": str,
    "training images": int,
    "strided pairs": bool,
}
# Keys that all records of runs have, of any version, and programs read.
REQUIRED = {
    "run.seed": int,
    "schedule.epochs": int,
    "schedule.cooldown_epochs": int,
    "init.name": str,
    "init.checkpoint": str,
    "model.name": str,
}


def parse_keys(text: bytes, source: Path) -> Table:
    """The keys of a run's recipe.toml, "section.key" → value, which are not checked, so that those
    of any version are read. Raises CheckpointError if that is no recipe.
    """
    try:
        keys = MEANT_IN_RECIPES | flat(parse_toml(text))
        for key, kind in REQUIRED.items():
            value = keys.get(key)
            if type(value) is not kind:
                raise ValueError(f"{key} is {show(value)}, expected {accepted_values(kind)}")
    except ValueError as error:  # neither TOML nor UTF-8, or no recipe
        raise CheckpointError(f"{source}: not what a run writes: {in_brief(error)}") from None
    keys.pop("version", None)
    return keys


def image_digests(data: Table) -> tuple[str, str]:
    """The digests of training and of validation images in the `data` of run.json, or ""."""
    both = data.get("files and labels", "")
    return both[:16], both[16:]


def parse_lines(lines: Iterable[bytes], source: Path, key: str) -> Iterator[Table]:
    """Yield the objects in JSON lines: of numbers and None, and under `key` one that increases. A
    last line that was cut short is left out; for any other damaged one, CheckpointError names it.
    """
    before = 0
    lines = iter(lines)
    for number, line in enumerate(lines, 1):
        try:
            row = ROW.decode(line.decode())
        except (ValueError, RecursionError):
            row = None
        is_table = isinstance(row, dict)
        if not is_table and not line.rstrip().endswith(b"}") and next(lines, None) is None:
            return  # the last one, cut short
        if not is_table or not _is_row(row, key, before):
            raise CheckpointError(
                f"{source}: line {number} is no JSON object with its {key}, that "
                "increases, and numbers, each key once; mend the file or move it away"
            )
        before = row[key]
        yield row


def _is_row(table: Table, key: str, before: int) -> bool:
    """Whether a table has numbers, and under `key` an integer above `before`."""
    place = table.get(key)
    return type(place) is int and place > before and all(map(is_number, table.values()))


def is_number(value: object) -> bool:
    """Whether it is a number of 64 bits, finite or not, or None."""
    return value is None or type(value) is float or type(value) is int and abs(value) < 2**63


def parse_starts(text: bytes, source: Path) -> list[Table]:
    """The contents of run.json, one dictionary per start; CheckpointError for anything else."""
    try:
        starts = parse_json(text)
        for start in convert(starts, tuple[Mapping[str, Any], ...]):
            _check(start, OF_START)
            _check(start.get("data", {}), OF_DATA)
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{source}: not what a run writes ({in_brief(error)}); mend the file"
        ) from None
    return starts


def _check(table: Table, kinds: Table) -> None:
    for key in kinds.keys() & table.keys():
        convert(table[key], kinds[key])


class Lines:
    """A file of JSON objects, one per line, whose numbers under `key` increase; it grows as the run
    goes on. Every method raises FileError if it cannot be read or written, or is not a run's.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one line; `sync` puts it on disk."""
        with in_one_line(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def sync(self) -> None:
        """Flush the lines to disk, so that they survive a power failure."""
        with in_one_line(self.path), suppress(FileNotFoundError), open(self.path, "rb") as file:
            os.fsync(file.fileno())

    def rows(self) -> Iterator[Table]:
        """Yield a dictionary per line, one at a time: all of a million take a gigabyte. No rows
        if there is no file.
        """
        return parse_lines(self._lines(), self.path, self.key)

    def count(self, last: float = math.inf) -> int:
        """How many rows there are whose number under `key` is not above `last`."""
        return sum(row[self.key] <= last for row in self.rows())

    def cut_back(self, last: int) -> int:
        """Remove the lines whose number under `key` is above `last`; return how many are left."""
        count = self.count(last)
        if self.path.exists():
            size = sum(map(len, self._whole_lines(count)))
            if size != self.path.stat().st_size:
                with written_atomically(self.path) as file:
                    file.writelines(self._whole_lines(count))
        return count

    def _lines(self) -> Iterator[bytes]:
        with in_one_line(self.path, "read"), suppress(FileNotFoundError, NotADirectoryError):
            with opened(self.path, LONGEST_LINES) as file:
                yield from iter(partial(file.readline, LONGEST_LINE), b"")

    def _whole_lines(self, count: int) -> Iterator[bytes]:
        """The first `count` lines, the last of which may lack its end."""
        return (line.rstrip(b"\n") + b"\n" for line in islice(self._lines(), count))


class RunFolder:
    """The files of one run, written atomically, by the main process alone. Every method raises
    FileError if one cannot be read or written, or is not what a run writes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last, self.previous = path / "last.pt", path / "previous.pt"
        self.best = path / "best.pt"
        self.recipe, self.info = path / "recipe.toml", path / "run.json"
        self.start = path / "start.txt"
        self.images = path / "images.txt"
        self.metrics = Lines(path / "metrics.jsonl", "epoch")
        self.steps = Lines(path / "steps.jsonl", "step")
        self.read_from = self.last  # the file that `load_last` has read
        self.step: int | None = None  # of the checkpoint read or written last

    def kept(self, epoch: int) -> Path:
        """The path of the weights after `epoch` epochs, for the epochs that the recipe keeps."""
        return self.path / f"epoch_{epoch:04d}.pt"

    def holds_checkpoint(self) -> bool:
        with in_one_line(self.path, "read"):
            return self.last.exists() or self.previous.exists()

    def results(self) -> list[str]:
        """The names of the files that training has left, but for empty ones."""
        names = []
        for pattern in RESULTS:
            for path in sorted(self.path.glob(pattern)):
                with in_one_line(path, "read"):
                    if path.stat().st_size:
                        names.append(path.name)
        return names

    def require_unused(self, *, starts_again: bool = False) -> None:
        """Raise CheckpointError if the folder already has files that a run writes. starts_again: it
        may have the texts of a start that ended before its first checkpoint, but no results.
        """
        names = self.results()
        if not (starts_again and self.recipe.exists()):
            texts = self.recipe, self.info, self.images, self.start
            names += [path.name for path in texts if path.exists()]
        if names:
            raise CheckpointError(
                f"{self.path}: already holds a run ({', '.join(names)}); --resume auto goes on "
                "with it and overwrites no results; a new one, in another --out-dir, starts from "
                f"its weights with --set init.checkpoint={self.path}"
            )

    def keys(self) -> Table:
        """The keys of recipe.toml, see `parse_keys`."""
        return parse_keys(read_bytes(self.recipe), self.recipe)

    def starts(self) -> list[Table]:
        """The contents of run.json: one dictionary per start of the run; [] if there is no file."""
        return parse_starts(read_bytes(self.info, default=b"[]"), self.info)

    def data_of(self, start: int) -> dict[str, Any]:
        """What `record_start` was given as `data` at this start (0: the first); {} if unknown. Starts
        that ended before the first checkpoint do not count.
        """
        recorded = [begun["data"] for begun in self.starts() if "data" in begun]
        return recorded[start] if recorded else {}

    @property
    def imports(self) -> Mapping[str, str]:
        """The parts of one's own that its last start had imported: name → SHA-256 of the file."""
        *_, last = [{}, *self.starts()]
        return last.get("imports", {})

    @property
    def in_commands(self) -> str:
        """The folder as a printed command names it, which imports these parts again."""
        parts = [f" --import {shlex.quote(name)}" for name in self.imports]
        return shlex.quote(str(self.path)) + "".join(parts)

    def load_last(self, *, glance: bool = False) -> Table:
        """The contents of last.pt; of previous.pt, with a warning, if that is damaged or missing.
        glance: without checksums, and leaving the tensors on disk.
        """
        if not self.path.is_dir():
            raise CheckpointError(f"--resume {self.path}: no such run folder")
        state, self.read_from = read_checkpoint(self.path, mmap=glance, verify=not glance)
        for part in ("model", "optimizer", "progress", "recipe"):
            if not isinstance(state.get(part), Mapping):
                raise CheckpointError(
                    f"{self.read_from}: not a training checkpoint, it cannot be "
                    f"resumed; expected a dictionary '{part}' in it"
                )
        self.step = progress_of(state["progress"], self.read_from).step
        return state

    def make(self) -> None:
        with in_one_line(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            sync_folder(self.path.parent)

    def record_start(
        self,
        recipe: str,
        arguments: Table,
        command: list[str] | None,
        imports: Mapping[str, str],
        *,
        processes: int,
        device: str,
        data: Mapping[str, Any],
        resumed: bool,
    ) -> None:
        """Append to run.json how the run was started or resumed this time. A run that is not resumed
        may have been started before, and ended before its first checkpoint; of such a start the
        data is forgotten, as it may have been another.

        recipe: its name. arguments: what was asked for. command: None if it was started in Python.
        imports: as `imports` returns them.
        data: what the run trains on: the absolute path of its folder as "root", and whatever else
            `require_same_data` is to compare on resume.
        """
        start: Table = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "recipe": recipe,
            "arguments": dict(arguments),
        }
        if command:
            start["command"] = command
        if imports:
            start["imports"] = dict(imports)
        start |= {
            "vitinit": installed_version(),
            "git_commit": git_commit(PACKAGE),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "processes": processes,
            "device": device,
            "data": dict(data),
        }
        earlier = self.starts()
        if not resumed:
            for begun in earlier:
                begun.pop("data", None)
        self._write_starts([*earlier, start])

    def forget_sizes(self) -> None:
        """Remove the sizes of files at this start from run.json: images have to be mended."""
        starts = self.starts()
        starts[-1]["data"].pop(SIZES, None)
        self._write_starts(starts)

    def _write_starts(self, starts: list[Table]) -> None:
        write_text_atomically(json.dumps(starts, indent=2) + "\n", self.info)

    def save(self, state: Table, path: Path) -> None:
        """Write a checkpoint. A new last.pt makes the old one previous.pt, if that is of another
        step and could be read. Lines that a last.pt counts as done are on disk before it.
        """
        if path != self.last:
            save_atomically(state, path)
            return
        self.metrics.sync()
        self.steps.sync()
        is_next = self.read_from == self.last and state["step"] != self.step
        save_atomically(state, path, keep=self.previous if is_next else None)
        self.read_from, self.step = path, state["step"]

    def tidy(self, *, epochs: int, steps: int) -> None:
        """Remove lines that are newer than the checkpoint, which counts these `epochs` and `steps`
        as done, and partly written files. Weights that are newer stay: the run will write those of
        its epochs again, and a warning says so of best.pt. Another names the number of epochs that
        metrics.jsonl has lost.
        """
        with in_one_line(self.path):
            for pattern in RUN_FILES:  # of this version, and of earlier ones
                for name in (f"{pattern}.partial", f"{pattern}.*.partial"):
                    for cut_short in self.path.glob(name):
                        cut_short.unlink()
        rows = self.metrics.cut_back(epochs)
        if rows < epochs:
            warn(
                f"{self.metrics.path}: has {rows} of the {epochs} epochs that the checkpoint "
                "counts as done; the others are lost"
            )
        self.steps.cut_back(steps)
        with suppress(FileError, KeyError, TypeError):  # none that can be read, or no run's
            best, _ = read_checkpoint(self.best, mmap=True, verify=False)
            step = progress_of(best["progress"], self.best).step
            if step > steps:
                warn(
                    f"{self.best}: is of step {step:,}, after the checkpoint's {steps:,}, and in no "
                    "line of metrics.jsonl; it stays until an epoch is better than all before"
                )


def save_atomically(state: Table, path: Path, *, keep: Path | None = None) -> None:
    """Write a checkpoint, and keep the old file at `keep`, as `written_atomically` does."""
    with written_atomically(path, keep=keep) as file:
        torch.save(state, file)


def installed_version() -> str:
    """The version of vitinit that is installed: an installed package has no commit. "unknown" where
    a copy of the repository is not installed.
    """
    try:
        return version("vitinit")
    except PackageNotFoundError:
        return "unknown"


def git_commit(folder: Path) -> str:
    """The commit of the code in a folder, "+changes" if a tracked file of the repository differs;
    "unknown" where git does not track it, as a virtual environment in somebody's repository.
    """
    run = partial(
        subprocess.run, check=True, text=True, capture_output=True, timeout=10, cwd=folder
    )
    describe = "git describe --always --abbrev=40 --exclude=* --dirty=+changes"
    try:
        run("git ls-files --error-unmatch .".split())
        return run(describe.split()).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
