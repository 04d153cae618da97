"""`bench all`: every check and measurement on the device that is here, into one report.

    items, in order of worth → each in a worker process, within the time → report.md, report.json

The same command again goes on where the time ran out.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torchvision

from ..messages import OneLineError
from ..runs.folder import git_commit
from .item import Conditions, Item, Row
from .record import Record
from .worker import CUT_SHORT, FAILED, PASSED, Outcome, Worker

REPOSITORY = Path(__file__).resolve().parents[2]


def bench_all(items: Sequence[Item], out: Path, *, photographs: Path | None, minutes: float,
              only: Sequence[str] = (), again: bool = False) -> int:
    """Runs what is not over yet; returns how many of the chosen items have failed.

    only: names; none: all. again: what failed before runs anew, and of `only` everything.
    """
    deadline = time.monotonic() + 60 * minutes
    unknown = set(only) - {item.name for item in items}
    if unknown:
        raise OneLineError(f"--only {min(unknown)}: there is no such item; --list names them")
    if photographs is not None and not photographs.is_dir():
        raise OneLineError(f"--data-dir {photographs}: no such folder")
    record = Record(out)
    conditions = Conditions("cuda" if torch.cuda.is_available() else "cpu",
                            (out / "scratch").resolve(), photographs and photographs.resolve())
    workers = Workers(out / "log.txt")
    try:
        found = workers.run(Item("machine", "check", machine), conditions, 300)
        if found.status != PASSED:
            raise OneLineError(f"the device does not answer: {found.words} ({workers.log})")
        record.begin(found.rows[0])
        record.write(items)
        print("\n".join(f"{name:12} {value}" for name, value in record.calls[-1].items()), flush=True)
        chosen = [item for item in items if not only or item.name in only]
        for item in chosen:
            if (again and item.name in only) or not record.is_over(item.name, again=again):
                run_within(item, conditions, workers, record, items, deadline)
    except BaseException:
        workers.kill()                               # amid an item, such as by Ctrl-C
        raise
    finally:
        workers.end()
        shutil.rmtree(conditions.scratch, ignore_errors=True)
    left = [item.name for item in chosen if not record.is_over(item.name, again=False)]
    print(f"{record.page}" + (f"; {len(left)} items are left, the same command goes on with them"
                              if left else ""), flush=True)
    return sum(item.name in record.outcomes and record.outcomes[item.name].status == FAILED
               for item in chosen)


def run_within(item: Item, conditions: Conditions, workers: Workers, record: Record,
               items: Sequence[Item], deadline: float) -> None:
    """Run one item, unless it needs more time than is left; say and record what came of it."""
    left = deadline - time.monotonic()
    if left < item.expected(conditions.device):
        print(f"{item.name:24} no time left", flush=True)
        return
    limit = item.limit(conditions.device)
    outcome = workers.run(item, conditions, min(left, limit))
    if outcome.status == CUT_SHORT and left > limit:     # it hangs: another try would, too
        outcome = Outcome(FAILED, outcome.seconds, words=outcome.words)
    record.add(item, outcome, items)
    print(f"{item.name:24} {outcome.status:10} {outcome.seconds:6.1f} s  {outcome.words}", flush=True)


class Workers:
    """One worker at a time; another one after a failure, and for an item that wants to be alone."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.worker: Worker | None = None
        self.used = False

    def run(self, item: Item, conditions: Conditions, seconds: float) -> Outcome:
        if item.alone and self.used:
            self.end()
        if self.worker is None or not self.worker.alive:
            self.worker = Worker(self.log)
        self.used = True
        outcome = self.worker.run(item, conditions, seconds)
        if item.alone:
            self.end()
        return outcome

    def end(self) -> None:
        if self.worker is not None:
            self.worker.dismiss()
        self.worker, self.used = None, False

    def kill(self) -> None:
        if self.worker is not None:
            self.worker.end()


# ---------------------------------------------------------------------------------------------
# The machine
# ---------------------------------------------------------------------------------------------


def machine(conditions: Conditions) -> list[Row]:
    """The machine and the versions, for the report's head."""
    row: dict[str, Any] = {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
                           "commit": git_commit(REPOSITORY)}
    if conditions.on_gpu:
        card = torch.cuda.get_device_properties(0)
        row |= {"device": card.name, "memory": f"{card.total_memory / 2**30:.1f} GiB",
                "driver": driver(), "GPUs": torch.cuda.device_count(), "CUDA": torch.version.cuda}
    else:
        row |= {"device": f"CPU, {torch.get_num_threads()} threads, {platform.machine()}"}
    return [row | {"processor": f"{processor()}, {len(os.sched_getaffinity(0))} cores",
                   "torch": torch.__version__, "torchvision": torchvision.__version__,
                   "python": platform.python_version()}]


def driver() -> str:
    """The GPU driver's version; unknown where there is nobody to ask."""
    try:
        asked = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                               capture_output=True, text=True, timeout=60, check=True)
        return asked.stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def processor() -> str:
    """The CPU's name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
