"""The folder of one run: everything needed to repeat it, continue it and read its numbers.

    recipe.toml       the recipe with every option resolved; `--recipe <this file>` repeats the run
    run.json          commands, versions, git commit, hardware
    metrics.jsonl     one line an epoch
    last.pt, best.pt  checkpoints; last.pt is what --resume reads
    epoch_0007.pt     the epochs that checkpoint.keep_epochs names; 0 is the initialised model
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ..train.checkpoint import CheckpointError, load, save_atomically, write_text_atomically
from ..train.metrics import MetricsFile


class RunFolder:
    """Paths and files of one run; all writing is atomic. Only the main process writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last, self.best = path / "last.pt", path / "best.pt"
        self.recipe, self.info = path / "recipe.toml", path / "run.json"
        self.metrics = MetricsFile(path / "metrics.jsonl")

    def create(self, recipe_toml: str, *, again: bool = False) -> None:
        """Make the folder of a new run; raises CheckpointError if it holds one already.

        A folder with a recipe but no last.pt is a run that ended before its first one. Nothing is
        lost by starting there again; its lines of metrics go, where it has any, if `again`.
        """
        if again and not self.last.exists():
            self.metrics.path.unlink(missing_ok=True)
        if self.last.exists() or self.metrics.path.exists():
            raise CheckpointError(f"{self.path}: already holds a run; continue it with --resume "
                                  f"{self.path}, or choose another --out-dir")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text_atomically(recipe_toml, self.recipe)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {error.strerror}") from None

    def record_start(self, repository: Path, *, processes: int, device: str) -> None:
        """Append to run.json how the run was started or continued."""
        starts = json.loads(self.info.read_text()) if self.info.exists() else []
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

    def kept(self, epoch: int) -> Path:
        return self.path / f"epoch_{epoch:04d}.pt"

    def save(self, state: dict[str, Any], path: Path) -> None:
        save_atomically(state, path)

    def load_last(self, *, mmap: bool = False) -> dict[str, Any]:
        """last.pt; raises CheckpointError if there is none, or no run's. mmap: see `load`."""
        if not self.path.is_dir():
            raise CheckpointError(f"--resume {self.path}: no such run folder")
        state = load(self.last, mmap=mmap)
        if not {"model", "optimizer", "progress", "recipe"} <= state.keys():
            raise CheckpointError(f"{self.last}: not a training checkpoint, it cannot be resumed")
        return state


def checkpoint_file(path: Path) -> Path:
    """A checkpoint, or the last one of a run by its folder."""
    return RunFolder(path).last if path.is_dir() else path


def git_commit(repository: Path) -> str:
    """The commit of the code, with "+changes" if files differ from it; "unknown" outside of git."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(repository), *arguments], check=True, text=True,
                              capture_output=True, timeout=10).stdout.strip()
    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
