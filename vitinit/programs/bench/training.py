"""What benchmarks share: honest times, and tables."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..shared.results import table

ROUNDS = 7
ResultRow = dict[str, Any]  # a row of results: column → number or short text, None for no value


def interleave(
    actions: Mapping[str, Callable[[], object]], clock: Callable[[], float]
) -> dict[str, list[float]]:
    """The seconds of each action in ROUNDS rounds, by name; a first round does not count.

    The actions run in turn, in every second round in the opposite order, so that what disturbs the
    machine affects all of them alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(ROUNDS + 1):
        for name in list(actions)[:: 1 if number % 2 else -1]:
            began = clock()
            actions[name]()
            if number:
                seconds[name].append(clock() - began)
    return seconds


def times_as_fast(ours: Sequence[float], others: Sequence[float]) -> str:
    """How many times as fast as the other ours is: the median of all rounds, and their range."""
    ratios = [other / our for our, other in zip(ours, others, strict=True)]
    return f"{statistics.median(ratios):.3g} ({min(ratios):.3g} to {max(ratios):.3g})"


def row_table(rows: Sequence[ResultRow]) -> str:
    """A Markdown table with every column in which any of the rows has a value."""
    columns = list(dict.fromkeys(name for row in rows for name in row if row[name] is not None))
    return table(columns, [[cell(row.get(column)) for column in columns] for row in rows])


def cell(value: Any) -> str:
    """A value as text: floats with three significant digits, from 1000 on and integers in full."""
    if value is None:
        return "–"
    if not isinstance(value, (int, float)):
        return str(value)
    full = isinstance(value, int) or 1000 <= abs(value) < math.inf
    return f"{value:,.0f}" if full else f"{value:.3g}"
