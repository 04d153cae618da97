"""The folder of one run: everything needed to repeat it, continue it and read its numbers.

    recipe.toml       the recipe with every option resolved; `--recipe <this file>` repeats the run
    run.json          commands, versions, git commit, hardware
    metrics.jsonl     one line per epoch
    steps.jsonl       one line per ten steps
    last.pt           the checkpoint that --resume reads; there from step 0 on
    previous.pt       the one before it, for the day that last.pt is damaged
    best.pt           the weights of the best epoch
    epoch_0007.pt     those of the epochs that checkpoint.keep_epochs names; 0: as initialised
    profile_000010.json.gz  a trace of some steps from there on, where --profile asked for one
    run.lock          who writes here, see lock.py
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
                                write_text_atomically)
from .records import JsonLines


class RunFolder:
    """Paths and files of one run; all writing is atomic. Only the main process writes.

    Every method raises CheckpointError for what the disk refuses, and for files that are no run's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last, self.previous = path / "last.pt", path / "previous.pt"
        self.best = path / "best.pt"
        self.recipe, self.info = path / "recipe.toml", path / "run.json"
        self.metrics = JsonLines(path / "metrics.jsonl", "epoch")
        self.steps = JsonLines(path / "steps.jsonl", "step")
        self.read_from = self.last                   # where `load_last` found its checkpoint

    def kept(self, epoch: int) -> Path:
        return self.path / f"epoch_{epoch:04d}.pt"

    # What is there ------------------------------------------------------------------------------

    def holds_checkpoint(self) -> bool:
        """Whether there is something to go on from."""
        return os.path.exists(self.last) or os.path.exists(self.previous)

    def results(self) -> list[str]:
        """Names of the files that training left; a recipe and a start on record are none."""
        found = [path.name for path in (self.last, self.previous, self.best)
                 if os.path.exists(path)]
        found += sorted(path.name for pattern in ("epoch_*.pt", "profile_*.json.gz")
                        for path in self.path.glob(pattern))
        found += [lines.path.name for lines in (self.metrics, self.steps)
                  if os.path.exists(lines.path) and os.path.getsize(lines.path)]
        return found

    def require_unused(self, *, starts_again: bool = False) -> None:
        """CheckpointError if anything that a run would write is there already.

        starts_again: what a run leaves before its first checkpoint may be there.
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
        """run.json: how the run was started and continued; none where there is no file yet."""
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

    # Writing ------------------------------------------------------------------------------------

    def make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {error.strerror}") from None

    def record_recipe(self, recipe_toml: str) -> None:
        """recipe.toml; one that is there stays."""
        if not os.path.exists(self.recipe):
            write_text_atomically(recipe_toml, self.recipe)

    def record_start(self, repository: Path, *, processes: int, device: str) -> None:
        """Append to run.json how the run was started or continued."""
        starts = self.starts()
        starts.append({
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": sys.argv,
            "git_commit": git_commit(repository),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "processes": processes,
            "device": device,
        })
        write_text_atomically(json.dumps(starts, indent=2) + "\n", self.info)

    def save(self, state: dict[str, Any], path: Path) -> None:
        """A checkpoint; last.pt becomes previous.pt as it gets a successor."""
        save_atomically(state, path, keep=self.previous if path == self.last else None)

    def tidy(self, *, epochs: int, steps: int) -> None:
        """Before a run goes on from its checkpoint after so many: what is newer than that goes.

        A last.pt that could not be read is kept as damaged.pt, so that it does not become the
        previous one.
        """
        try:
            if self.read_from != self.last and self.last.exists():
                os.replace(self.last, self.path / "damaged.pt")
            for cut_short in self.path.glob("*.partial"):
                cut_short.unlink()
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {error.strerror}") from None
        self.metrics.cut_back(epochs)
        self.steps.cut_back(steps)

    # Reading ------------------------------------------------------------------------------------

    def load_last(self, *, glance: bool = False, say: Callable[[str], None] = lambda line: None
                  ) -> dict[str, Any]:
        """last.pt, or the checkpoint before it if that is damaged or gone, which `say` is told.

        glance: only to see its plain values; tensors stay on disk and are not verified.
        """
        if not self.path.is_dir():
            raise CheckpointError(f"--resume {self.path}: no such run folder")
        try:
            self.read_from = self.last
            return self._load(glance)
        except (NoCheckpoint, Damaged) as error:
            problem = error
        try:
            self.read_from = self.previous
            state = self._load(glance)
        except NoCheckpoint:
            self.read_from = self.last
            raise problem from None
        except Damaged as error:
            self.read_from = self.last
            raise CheckpointError(f"{problem}; and {error}") from None
        say(f"{problem}; going on from {self.previous}")
        return state

    def what_is_left(self) -> str:
        """Of a run that diverged: its last checkpoint, which is from before that."""
        step = self.load_last(glance=True)["progress"]["step"]
        return (f"; {self.read_from} holds the state after {step:,} steps, which would go the same "
                "way again: start anew with a lower optim.base_lr, say, or optim.clip_norm")

    def _load(self, glance: bool) -> dict[str, Any]:
        state = load(self.read_from, mmap=glance, verify=not glance)
        wrong = [part for part in ("model", "optimizer", "progress", "recipe")
                 if not isinstance(state.get(part), Mapping)]
        if wrong:
            raise CheckpointError(f"{self.read_from}: not a training checkpoint, it cannot be "
                                  f"resumed; expected a dictionary '{wrong[0]}' in it")
        return state


def disk_space(model: nn.Module, *, ema: bool, kept: int) -> str:
    """What the checkpoints of a run take, in words. kept: how many epochs it keeps for good."""
    weights = sum(value.nbytes for value in model.state_dict().values()) * (2 if ema else 1)
    moments = 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad)
    whole = weights + moments
    parts = [f"last.pt and previous.pt {_size(whole)} each", f"best.pt {_size(weights)}"]
    parts += [f"{kept} kept epochs {_size(weights)} each"] if kept else []
    # While a file is written, the one that it replaces is there, too.
    return f"{', '.join(parts)}; {_size(3 * whole + (kept + 1) * weights)} at most"


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB" if count < 1000 else f"{count:,.0f} GB"


def checkpoint_file(path: Path) -> Path:
    """A checkpoint, or the last one of a run by its folder."""
    return RunFolder(path).last if os.path.isdir(path) else path


def git_commit(repository: Path) -> str:
    """The commit of the code, with "+changes" if files differ from it; "unknown" outside of git."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(repository), *arguments], check=True, text=True,
                              capture_output=True, timeout=10).stdout.strip()
    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
