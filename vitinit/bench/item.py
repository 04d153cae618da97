"""The parts of `bench all`: items (checks and measurements), their conditions, and goals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]            # a row of an item's results: column name → number or short text


class Skipped(Exception):
    """An item does not apply to this machine; the message says why."""


@dataclass(frozen=True)
class Conditions:
    """The conditions under which an item runs."""

    device: str                 # "cuda" or "cpu"
    scratch: Path               # an empty folder for the item's files; it is removed afterwards
    photographs: Path | None = None     # folder of image files; None: photographs are drawn

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def torch_device(self) -> torch.device:
        """The device with its index, so that it equals the `device` of tensors on it."""
        return torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")


@dataclass(frozen=True)
class Goal:
    """A bound that a measured number should satisfy on a GPU.

    It applies to one column of an item's rows: to all rows with that column, or to those that also
    have the values in `where`.
    """

    column: str
    at_least: float = -math.inf
    at_most: float = math.inf
    where: tuple[tuple[str, Any], ...] = ()      # (column, value) pairs

    def __str__(self) -> str:
        bound = f"≥ {self.at_least:g}" if self.at_least > -math.inf else f"≤ {self.at_most:g}"
        rows = ", ".join(f"{name} {value}" for name, value in self.where)
        return f"{self.column} {bound}" + (f" ({rows})" if rows else "")

    def values(self, rows: list[Row]) -> list[float]:
        """The numbers in `rows` to which the goal applies."""
        return [row[self.column] for row in rows if isinstance(row.get(self.column), (int, float))
                and all(row.get(name) == value for name, value in self.where)]

    def met_by(self, value: float) -> bool:
        return self.at_least <= value <= self.at_most


@dataclass(frozen=True)
class Item:
    """One check or measurement.

    function: returns rows of results. It raises AssertionError if a check fails, and Skipped if the
        item does not apply here. It must be importable, since another process runs it.
    seconds: about how long it takes on a GPU and on a CPU.
    alone: whether it needs a process of its own, so that other items affect neither its peak memory
        nor a compiler's caches.
    goals: bounds that its numbers should satisfy on a GPU.
    """

    name: str
    kind: str                   # "check", "speed" or "run"
    function: Callable[[Conditions], list[Row]]
    seconds: tuple[int, int] = (10, 10)
    alone: bool = False
    goals: tuple[Goal, ...] = ()

    @property
    def what(self) -> str:
        """What the item does: the first line of its function's docstring, without the full stop."""
        text = getattr(self.function, "func", self.function).__doc__ or ""
        return text.strip().splitlines()[0].rstrip(".") if text.strip() else self.name

    def expected(self, device: str) -> int:
        """About how many seconds it takes on "cuda" or "cpu"."""
        return self.seconds[0 if device == "cuda" else 1]

    def limit(self, device: str) -> int:
        """The number of seconds after which it counts as hanging."""
        return 60 + 4 * self.expected(device)
