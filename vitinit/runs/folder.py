"""The folder of one run: everything needed to repeat it, resume it and read its results.

    recipe.toml       the recipe with every option resolved; `--recipe <this file>` repeats the run
    run.json          commands, versions, git commit, hardware
    metrics.jsonl     one line per epoch
    steps.jsonl       one line per ten steps
    last.pt           the checkpoint that all programs read; it exists from step 0 on
    previous.pt       one of an earlier step, read if last.pt is damaged or missing
    best.pt           the weights of the best epoch
    epoch_0007.pt     the weights after each epoch in checkpoint.keep_epochs; 0: as initialised
    profile_000010.json.gz  a profiler's trace of some steps, from step 10 on, made by --profile
    run.lock          the process that writes here, see lock.py
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..messages import in_brief
from ..train.checkpoint import (CheckpointError, Damaged, NoCheckpoint, load, save_atomically,
                                sync_folder, write_text_atomically)
from ..train.distributed import warn
from .records import JsonLines

# The weights in a folder that transformers or timm wrote.
FOREIGN_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


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
        self.metrics = JsonLines(path / "metrics.jsonl", "epoch")
        self.steps = JsonLines(path / "steps.jsonl", "step")
        self.read_from = self.last                   # the file that `load_last` has read
        self.step: int | None = None                 # of the checkpoint that was read or written last

    def kept(self, epoch: int) -> Path:
        """The path of the weights after `epoch` epochs, for the epochs that the recipe keeps."""
        return self.path / f"epoch_{epoch:04d}.pt"

    # What is there ------------------------------------------------------------------------------

    def holds_checkpoint(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return os.path.exists(self.last) or os.path.exists(self.previous)

    def results(self) -> list[str]:
        """The names of the files that training has left; recipe.toml and run.json do not count."""
        found = [path.name for path in (self.last, self.previous, self.best)
                 if os.path.exists(path)]
        found += sorted(path.name for pattern in ("epoch_*.pt", "profile_*.json.gz")
                        for path in self.path.glob(pattern))
        found += [lines.path.name for lines in (self.metrics, self.steps)
                  if os.path.exists(lines.path) and os.path.getsize(lines.path)]
        return found

    def require_unused(self, *, starts_again: bool = False) -> None:
        """Raise CheckpointError if the folder already has files that a run writes.

        starts_again: allow those that a run writes before its first checkpoint, recipe.toml and
            run.json.
        """
        if self.holds_checkpoint():
            raise CheckpointError(f"{self.path}: already holds a run; continue it with --resume "
                                  f"{self.path}, or choose another --out-dir")
        found = self.results()
        if found:
            raise CheckpointError(f"{self.path}: already holds {', '.join(found)}; choose another "
                                  "--out-dir")
        found = [path.name for path in (self.recipe, self.info) if os.path.exists(path)]
        if found and not starts_again:
            raise CheckpointError(f"{self.path}: already holds {', '.join(found)}, of a run without "
                                  "a checkpoint if it is one; --resume auto starts that, or choose "
                                  "another --out-dir")

    def starts(self) -> list[dict[str, Any]]:
        """The contents of run.json: one dictionary per start of the run; [] if there is no file."""
        try:
            starts = json.loads(self.info.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.info}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:            # JSON's and Unicode's
            raise CheckpointError(f"{self.info}: not what a run writes ({in_brief(error)}); mend it "
                                  "or move it away") from None
        if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
            raise CheckpointError(f"{self.info}: not what a run writes, expected a list of objects; "
                                  "mend it or move it away")
        return starts

    def data_of(self, start: int) -> Mapping[str, Any]:
        """What `record_start` was given as `data` at this start of the run; {} if unknown.

        start: 0 for the first, −1 for the last. Nothing is raised, since reading a model does not
        depend on it.
        """
        try:
            data = self.starts()[start]["data"]
        except (CheckpointError, LookupError):
            return {}
        return data if isinstance(data, Mapping) else {}

    def data_root(self) -> str | None:
        """The absolute path of the data that the run was last trained on; None if unknown."""
        root = self.data_of(-1).get("root")
        return root if isinstance(root, str) else None

    # Writing ------------------------------------------------------------------------------------

    def make(self) -> None:
        """Create the folder, and those above it, if they do not exist."""
        try:
            new = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            for folder in new:
                sync_folder(folder.parent)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {error.strerror}") from None

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
        starts = self.starts()
        starts.append({
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": sys.argv,
            "git_commit": git_commit(repository),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "processes": processes,
            "device": device,
            "data": dict(data),
        })
        write_text_atomically(json.dumps(starts, indent=2) + "\n", self.info)

    def save(self, state: dict[str, Any], path: Path) -> None:
        """Write a checkpoint. A new last.pt makes the old one previous.pt, if that is of another step.

        An epoch that is evaluated is saved before and after; previous.pt is then of neither. The
        lines of metrics.jsonl and steps.jsonl are on disk before a last.pt that has them behind it.
        """
        if path != self.last:
            save_atomically(state, path)
            return
        for lines in (self.metrics, self.steps):
            lines.sync()
        save_atomically(state, path, keep=None if state.get("step") == self.step else self.previous)
        self.step = state.get("step")

    def tidy(self, *, epochs: int, steps: int, say: Callable[[str], None]) -> None:
        """Remove what is newer than the checkpoint that a run resumes from.

        epochs, steps: how many of them that checkpoint has behind it; later lines of metrics.jsonl
        and steps.jsonl are removed, and so are partly written files. A last.pt that could not be
        read is renamed damaged.pt, so that it does not become previous.pt. Training needs no lines,
        so the run goes on where earlier ones are lost; `say` is called with a line that names them.
        """
        try:
            if self.read_from != self.last and self.last.exists():
                os.replace(self.last, self.path / "damaged.pt")
            for cut_short in self.path.glob("*.partial"):
                cut_short.unlink()
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {error.strerror}") from None
        for lines, last, loss in (
                (self.metrics, epochs, "; without these, comparisons leave the run out"),
                (self.steps, steps, "; its curves by step have a gap")):
            lost = lines.cut_back(last)
            if lost:
                say(f"warning {lost}{loss}")

    # Reading ------------------------------------------------------------------------------------

    def load_last(self, *, glance: bool = False, say: Callable[[str], None] = lambda line: None
                  ) -> dict[str, Any]:
        """The contents of last.pt, or of previous.pt if last.pt is damaged or missing.

        In the second case `say` is called with a line about it. glance: read only plain values; the
        tensors stay on disk, and their checksums are not verified.
        """
        if not self.path.is_dir():
            raise CheckpointError(f"--resume {self.path}: no such run folder")
        state, self.read_from = read_checkpoint(self.path, say=say, mmap=glance, verify=not glance)
        wrong = [part for part in ("model", "optimizer", "progress", "recipe")
                 if not isinstance(state.get(part), Mapping)]
        if wrong:
            raise CheckpointError(f"{self.read_from}: not a training checkpoint, it cannot be "
                                  f"resumed; expected a dictionary '{wrong[0]}' in it")
        self.step = state.get("step")
        return state

    def what_is_left(self) -> str:
        """For the error message of a run that diverged: which good checkpoint it has left."""
        step = self.load_last(glance=True)["progress"]["step"]
        return (f"; {self.read_from} holds the state after {step:,} steps, which would go the same "
                "way again: start anew with a lower optim.base_lr, say, or optim.clip_norm")


def disk_space(model: nn.Module, optimizer: torch.optim.Optimizer, *, ema: bool, kept: int) -> str:
    """The disk space that the checkpoints of a run take, in words.

    Of each weight AdamW stores two moments, Muon one. ema: whether the run has a moving average.
    kept: the number of epochs in checkpoint.keep_epochs.
    """
    weights = sum(value.nbytes for value in model.state_dict().values()) * (2 if ema else 1)
    moments = sum(p.nbytes * (1 if group["muon"] else 2)
                  for group in optimizer.param_groups for p in group["params"])
    state = weights + moments
    parts = [f"last.pt and previous.pt {_size(state)} each", f"best.pt {_size(weights)}"]
    parts += [f"{kept} kept epochs {_size(weights)} each"] if kept else []
    # While last.pt is being written there are three such files.
    return f"{', '.join(parts)}; {_size(3 * state + (kept + 1) * weights)} at most"


def _size(count: float) -> str:
    """A number of bytes with a unit: "23.5 MB"."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB" if count < 1000 else f"{count:,.0f} GB"


def read_checkpoint(path: Path, *, say: Callable[[str], None] = warn, mmap: bool = False,
                    verify: bool = True) -> tuple[dict[str, Any], Path]:
    """The contents of a checkpoint, and the file that they are from.

    path: a checkpoint, or a run folder, which stands for its last.pt; if that is damaged or missing,
    previous.pt is read and `say` is called with a line about it. A folder that transformers or timm
    wrote stands for its file of weights. mmap, verify: see `load`, which raises CheckpointError. So
    does this, naming both files, if both are damaged.
    """
    if not os.path.isdir(path):
        return load(path, mmap=mmap, verify=verify), path
    folder = RunFolder(path)
    try:
        return load(folder.last, mmap=mmap, verify=verify), folder.last
    except (NoCheckpoint, Damaged) as error:
        problem = error
    try:
        state = load(folder.previous, mmap=mmap, verify=verify)
    except NoCheckpoint:
        for file in (path / name for name in FOREIGN_WEIGHTS):
            if file.is_file():
                return load(file, mmap=mmap, verify=verify), file
        split = next(path.glob("*.index.json"), None)
        if split is not None:
            raise CheckpointError(f"{split}: the weights are split over several files; expected one, as "
                                  "save_pretrained(FOLDER, max_shard_size='100GB') writes it") from None
        raise problem from None
    except Damaged as error:
        raise CheckpointError(f"{problem}; and {error}") from None
    say(f"{problem}; going on with {folder.previous}")
    return state, folder.previous


def git_commit(repository: Path) -> str:
    """The commit of the code, "+changes" if a tracked file differs; "unknown" outside of git."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(repository), *arguments], check=True, text=True,
                              capture_output=True, timeout=10).stdout.strip()
    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
