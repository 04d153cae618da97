"""The records of a run: one line per epoch in metrics.jsonl, one per ten steps in steps.jsonl.

Both files consist of JSON lines, one object per line. Lines are appended as the run goes on, so
that the files can be read meanwhile.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..messages import in_brief
from ..train.checkpoint import CheckpointError, shortened, write_text_atomically
from ..train.metrics import METRICS, STEPS_PER_ROW

LATER = METRICS[11:]            # keys that runs of earlier versions lack
APART = {"epoch": 1, "step": STEPS_PER_ROW}      # by how much the numbers of a file's lines rise


class JsonLines:
    """A file with one JSON object per line, whose integers under `key` increase from line to line."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one line; CheckpointError if the file cannot be written."""
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {error.strerror}") from None

    def sync(self) -> None:
        """Flush the lines to disk, so that they survive a power failure; nothing if there are none."""
        try:
            with open(self.path, "rb") as file:
                os.fsync(file.fileno())
        except FileNotFoundError:
            pass
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be written: {error.strerror}") from None

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per line; [] if there is no file. Blank lines are skipped.

        Raises CheckpointError, naming the line, for one that is not a JSON object, has no integer
        under `key`, or has one that is not larger than that of the previous line, as happens if two
        runs write to one file.
        """
        rows: list[dict[str, Any]] = []
        for number, line in self._lines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:        # JSON's and Unicode's
                raise self._broken(number, f"is no JSON object ({in_brief(error)})") from None
            if not isinstance(row, dict):
                raise self._broken(number, f"is {in_brief(row)}, expected a JSON object")
            count, before = row.get(self.key), rows[-1][self.key] if rows else 0
            if type(count) is not int:
                raise self._broken(number, f"names no {self.key}")
            if count <= before:
                raise self._broken(number, f"is {self.key} {count} after {self.key} {before}; two "
                                           "runs may have written here")
            rows.append(row)
        return rows

    def cut_back(self, last: int) -> str:
        """Remove the lines with a number under `key` above `last`, where a checkpoint was taken.

        Returns a line that names the numbers up to `last` of which there is no line, or "".
        """
        rows = [row for row in self.rows() if row[self.key] <= last]
        write_text_atomically("".join(json.dumps(row) + "\n" for row in rows), self.path)
        apart = APART[self.key]
        lost = sorted(set(range(apart, last + 1, apart)) - {row[self.key] for row in rows})
        return f"{self.path}: lacks {self.key} {shortened(list(map(str, lost)))}" if lost else ""

    def _broken(self, number: int, problem: str) -> CheckpointError:
        """The error that `problem` makes line `number` unreadable."""
        return CheckpointError(f"{self.path}: line {number} {problem}; mend the file or move it "
                               "away")

    def _lines(self) -> list[tuple[int, bytes]]:
        """The lines with their numbers, from 1; a last line that a crash cut short is left out.

        A last line that lacks nothing but its line break counts.
        """
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from None
        *lines, rest = text.split(b"\n")
        with suppress(ValueError, RecursionError):
            json.loads(rest)
            lines.append(rest)
        return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
