"""Functions that tests call in processes of their own, which find them by this module's name."""

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitinit.__main__ import PROGRAMS
from vitinit.base.table import find
from vitinit.run import Run


def start(program: str, words: Sequence[object]) -> int:
    """A program with these words; its exit status."""
    return find(PROGRAMS[program].main)([*map(str, words)], f"vitinit {program}")


def start_in(folder: Path, program: str, words: Sequence[object]) -> int:
    os.chdir(folder)
    return start(program, words)


def train(folder: Path, method: str, parts: list[str], changes: Mapping[str, Any]) -> None:
    """Train with these parts, in worker processes that are started by this method."""
    multiprocessing.set_start_method(method, force=True)
    Run("quickstart", imports=parts, out_dir=folder, overrides=changes).train()
