"""The report of `bench all`, report.json and report.md, which is rewritten after every item."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..messages import OneLineError, in_brief
from ..runs.markdown import table
from ..train.checkpoint import write_text_atomically
from .item import Item, Row
from .worker import CUT_SHORT, FAILED, PASSED, SKIPPED, Outcome

NO_VALUE = "–"


class Record:
    """The report in a folder: read from report.json if that exists, else empty.

    calls: the machine and the versions of each call of `bench all` on this report, oldest first.
    outcomes: name of an item → its outcome.
    Raises OneLineError if report.json cannot be read or is not a report.
    """

    def __init__(self, folder: Path) -> None:
        self.json, self.page = folder / "report.json", folder / "report.md"
        self.calls: list[dict[str, Any]] = []
        self.outcomes: dict[str, Outcome] = {}
        self.call_of: dict[str, int] = {}            # name → index of the call that ran the item
        folder.mkdir(parents=True, exist_ok=True)
        if self.json.exists():
            self._read()

    def _read(self) -> None:
        try:
            state = json.loads(self.json.read_text(encoding="utf-8"))
            self.calls = list(state["calls"])
            for name, found in state["items"].items():
                self.call_of[name] = found.pop("call")
                self.outcomes[name] = Outcome(**found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise OneLineError(f"{self.json}: not what bench all writes ({in_brief(error)}); move it "
                               "away or choose another --out") from None

    def begin(self, machine: dict[str, Any]) -> None:
        """Start a call of `bench all` on this machine.

        Raises OneLineError if the report is of another device, since it may hold only one.
        """
        for call in self.calls[-1:]:
            if call["device"] != machine["device"]:
                raise OneLineError(f"{self.json} is of {call['device']}, and this is "
                                   f"{machine['device']}; choose another --out")
        self.calls.append(machine)

    def is_over(self, name: str, *, again: bool) -> bool:
        """Whether an item has a final outcome; `again`: a failure does not count as one."""
        status = self.outcomes[name].status if name in self.outcomes else CUT_SHORT
        return status in ((PASSED, SKIPPED) if again else (PASSED, SKIPPED, FAILED))

    def add(self, item: Item, outcome: Outcome, items: Sequence[Item]) -> None:
        """Add an item's outcome and write the report. items: all items, in order."""
        self.outcomes[item.name] = outcome
        self.call_of[item.name] = len(self.calls) - 1
        self.write(items)

    def write(self, items: Sequence[Item]) -> None:
        """Write report.json and report.md, each atomically."""
        found = {name: {"call": self.call_of[name], **dataclasses.asdict(outcome)}
                 for name, outcome in self.outcomes.items()}
        write_text_atomically(json.dumps({"calls": self.calls, "items": found}, indent=1,
                                         default=str) + "\n", self.json)
        write_text_atomically(page(self, items), self.page)


# ---------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------


def page(record: Record, items: Sequence[Item]) -> str:
    """The text of report.md."""
    machine = record.calls[-1] if record.calls else {}
    counts = [f"{number} {status}" for status in (PASSED, FAILED, SKIPPED, CUT_SHORT)
              if (number := sum(o.status == status for o in record.outcomes.values()))]
    missing = [item.name for item in items if item.name not in record.outcomes]
    parts = ["# What vitinit does on this machine",
             "\n".join(f"- {name}: {value}" for name, value in machine.items()),
             f"{', '.join(counts)}; {len(missing)} not run yet"
             + (f": {', '.join(missing)}" if missing else "") + "."]
    on_cpu = machine.get("device", "").startswith("CPU")
    if on_cpu:
        parts.append("There is no GPU here: a check that compares devices compares one path on the CPU "
                     "with another one, or the same with itself.")
    goals = list(_goals(record, items))
    if goals and not on_cpu:
        parts += ["## Goals of a GPU", table(["goal", "item", "found", ""], goals)]
    checks = [item for item in items if item.kind == "check" and item.name in record.outcomes]
    if checks:
        parts += ["## Is it right?", table(
            ["check", "result", "s", "found"], [_line(item, record) for item in checks])]
    for kind, heading in (("speed", "## How fast is it?"), ("run", "## A short run")):
        chosen = [item for item in items if item.kind == kind and item.name in record.outcomes]
        parts += [heading] if chosen else []
        for item in chosen:
            parts += _section(item, record.outcomes[item.name])
    return "\n\n".join(parts) + "\n"


def _goals(record: Record, items: Sequence[Item]) -> Iterator[Sequence[str]]:
    """A table row for each goal: the goal, its item, the best number found, whether it is met."""
    for item in items:
        rows = record.outcomes[item.name].rows if item.name in record.outcomes else []
        for goal in item.goals:
            values = goal.values(rows)
            if not values:
                yield [str(goal), item.name, NO_VALUE, "unmeasured"]
                continue
            best = max(values) if goal.at_most == math.inf else min(values)
            yield [str(goal), item.name, cell(best), "met" if goal.met_by(best) else "missed"]


def _line(item: Item, record: Record) -> Sequence[str]:
    """A check's table row: name and docstring, status, seconds, what was found or went wrong."""
    outcome = record.outcomes[item.name]
    return [f"{item.name}: {item.what}", outcome.status, f"{outcome.seconds:.0f}",
            outcome.words or in_short(outcome.rows) or NO_VALUE]


def in_short(rows: Sequence[Row]) -> str:
    """Rows in one line: one row in full; of several, their number and each column's maximum."""
    if len(rows) == 1:
        return ", ".join(f"{name} {cell(value)}" for name, value in rows[0].items())
    columns = {name: [row[name] for row in rows if name in row] for row in rows for name in row}
    return ", ".join([f"{len(rows)} rows"] + [
        f"{name} ≤ {cell(max(values))}" for name, values in columns.items()
        if all(isinstance(value, (int, float)) for value in values)]) if rows else ""


def _section(item: Item, outcome: Outcome) -> list[str]:
    """A measurement's section: heading, table of its rows, and how long it took."""
    heading = f"### {item.name}: {item.what}"
    if outcome.status != PASSED:
        return [heading, f"{outcome.status}: {outcome.words}"]
    return [heading, row_table(outcome.rows), f"({outcome.seconds:.0f} s)"]


def row_table(rows: Sequence[Row]) -> str:
    """A Markdown table with every column that any of the rows has."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return table(columns, [[cell(row.get(column)) for column in columns] for row in rows])


def cell(value: Any) -> str:
    """A value as text: floats with three significant digits, from 1000 on and integers in full."""
    if value is None:
        return NO_VALUE
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if math.isfinite(value) else str(value)
