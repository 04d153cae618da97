"""How long it takes to list a data set of many files, beside a bare os.scandir and torchvision."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

from torchvision.datasets import ImageFolder as TorchvisionsImageFolder

from ..data.datasets import ImageFolder
from .item import Row

ROUNDS = 7


def listing_seconds(files: int, folders: int) -> list[Row]:
    """Seconds that three ways take to list `files` empty files in `folders` temporary folders.

    The ways run in turn, so that noise of the machine affects all alike; each row is a median of
    ROUNDS. The kernel has the folders in its cache, since they were just written.
    """
    with tempfile.TemporaryDirectory() as root:
        grow_tree(Path(root), files, folders)
        ways = {"scandir, nothing else": lambda: scan(root),
                "ours: filtered, sorted, as paths": lambda: ImageFolder(Path(root)),
                "torchvision's ImageFolder": lambda: TorchvisionsImageFolder(root)}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, action in ways.items():
                began = time.perf_counter()
                action()
                seconds[name].append(time.perf_counter() - began)
    least = seconds["scandir, nothing else"]
    return [{"way": name, "s": statistics.median(times), "× scandir": statistics.median(
        time / other for time, other in zip(times, least))} for name, times in seconds.items()]


def bench_listing(files: int, folders: int) -> None:
    """Print what `listing_seconds` measures."""
    rows = listing_seconds(files, folders)
    print(f"{files:,} files in {folders:,} folders, listed before; s and × scandir, median of {ROUNDS}")
    for row in rows:
        print(f"{row['way']:33} {row['s']:6.3f} {row['× scandir']:6.2f}")


def grow_tree(root: Path, files: int, folders: int) -> None:
    """Make `folders` folders with `files` empty files in all, with names like ImageNet's."""
    for number in range(folders):
        (root / f"n{number:08}").mkdir()
    for number in range(files):
        folder = f"n{number % folders:08}"
        (root / folder / f"{folder}_{number}.JPEG").touch()


def scan(root: str) -> int:
    """Count the entries of two levels of folders, which is the least that any listing has to do."""
    count = 0
    with os.scandir(root) as folders:
        for folder in folders:
            with os.scandir(folder.path) as entries:
                for _ in entries:
                    count += 1
    return count
