"""What `bench all` is made of: items, the conditions under which they run, and goals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]            # what an item found: names in words → numbers or short words


class Skipped(Exception):
    """This item has nothing to do on this machine; the text says why."""


@dataclass(frozen=True)
class Conditions:
    """Under which an item runs."""

    device: str                 # "cuda" or "cpu"
    scratch: Path               # an empty folder; it is removed afterwards
    photographs: Path | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def place(self) -> torch.device:
        """The device with its number, as tensors on it say where they are."""
        return torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")


@dataclass(frozen=True)
class Goal:
    """What a GPU's figure should reach, by the column that it stands in.

    where: of the rows that have the column, those whose cells are these.
    """

    column: str
    at_least: float = -math.inf
    at_most: float = math.inf
    where: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        bound = f"≥ {self.at_least:g}" if self.at_least > -math.inf else f"≤ {self.at_most:g}"
        rows = ", ".join(f"{name} {value}" for name, value in self.where)
        return f"{self.column} {bound}" + (f" ({rows})" if rows else "")

    def figures(self, rows: list[Row]) -> list[float]:
        """Those that it speaks of."""
        return [row[self.column] for row in rows if isinstance(row.get(self.column), (int, float))
                and all(row.get(name) == value for name, value in self.where)]

    def met_by(self, figure: float) -> bool:
        return self.at_least <= figure <= self.at_most


@dataclass(frozen=True)
class Item:
    """One check or measurement.

    function: a function of a module, since another process runs it. It gives rows of figures, and
        raises AssertionError for what is not as it should be, or Skipped.
    seconds: about as long as it takes on a GPU and on a CPU. alone: nothing runs in its process
        before it, for peak memory and for what compilers keep.
    """

    name: str
    kind: str                   # "check", "speed" or "run"
    function: Callable[[Conditions], list[Row]]
    seconds: tuple[int, int] = (10, 10)
    alone: bool = False
    goals: tuple[Goal, ...] = ()

    @property
    def what(self) -> str:
        """The first line of its docstring."""
        text = getattr(self.function, "func", self.function).__doc__ or ""
        return text.strip().splitlines()[0].rstrip(".") if text.strip() else self.name

    def expected(self, device: str) -> int:
        return self.seconds[0 if device == "cuda" else 1]

    def limit(self, device: str) -> int:
        """Seconds after which it counts as hanging."""
        return 60 + 4 * self.expected(device)
