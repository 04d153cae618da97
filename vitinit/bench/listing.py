"""Seconds until a data set of many files is listed, beside what the disk's own listing takes."""

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
    """Of a tree of empty files in a temporary folder, listed once before; the median of ROUNDS.

    Each way in turn, so that noise meets all alike.
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
    """Prints them."""
    rows = listing_seconds(files, folders)
    print(f"{files:,} files in {folders:,} folders, listed before; s and × scandir, median of {ROUNDS}")
    for row in rows:
        print(f"{row['way']:33} {row['s']:6.3f} {row['× scandir']:6.2f}")


def grow_tree(root: Path, files: int, folders: int) -> None:
    """Files like ImageNet's, spread evenly; none of them holds anything."""
    for number in range(folders):
        (root / f"n{number:08}").mkdir()
    for number in range(files):
        folder = f"n{number % folders:08}"
        (root / folder / f"{folder}_{number}.JPEG").touch()


def scan(root: str) -> int:
    """How many entries two levels of folders hold: the least that any listing has to do."""
    count = 0
    with os.scandir(root) as folders:
        for folder in folders:
            with os.scandir(folder.path) as entries:
                for _ in entries:
                    count += 1
    return count
