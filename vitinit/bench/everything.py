"""`bench all`: run every check and measurement on this machine's device and write one report.

    items, in order of importance → each in a worker process → report.md and report.json

If the time runs out, the same command continues with the items that are left.
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
    """Run the items that have no result yet, and write the report after each.

    items: all items of the report, in the order in which they run. out: folder of the report.
    photographs: folder of image files for the measurements; None: photographs are drawn.
    minutes: time for this call; an item that is expected to take longer than what is left of it is
        not started. only: names of the items to run; empty: all.
    again: repeat items that failed in an earlier call, and all items that `only` names.
    Returns how many of the chosen items have failed, in this call or an earlier one.
    Raises OneLineError for unknown names, a missing folder, a report of another device, and a
    device that does not answer.
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
        workers.kill()                               # an item may be running, as after Ctrl-C
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
    """Run one item, print its outcome and add it to the report.

    deadline: in seconds of time.monotonic. An item that is expected to take longer than until then
    does not run and gets no outcome. An item that exceeds its own time limit has failed; one that
    is stopped at the deadline is only cut short.
    """
    left = deadline - time.monotonic()
    if left < item.expected(conditions.device):
        print(f"{item.name:24} no time left", flush=True)
        return
    limit = item.limit(conditions.device)
    outcome = workers.run(item, conditions, min(left, limit))
    if outcome.status == CUT_SHORT and left > limit:     # it hangs, and would hang again
        outcome = Outcome(FAILED, outcome.seconds, words=outcome.words)
    record.add(item, outcome, items)
    print(f"{item.name:24} {outcome.status:10} {outcome.seconds:6.1f} s  {outcome.words}", flush=True)


class Workers:
    """Runs items in worker processes, of which there is one at a time.

    A new worker is started after a failure, and before and after an item that must be alone.
    """

    def __init__(self, log: Path) -> None:
        """log: file to which the workers append what items print."""
        self.log = log
        self.worker: Worker | None = None
        self.used = False                            # whether this worker has run an item

    def run(self, item: Item, conditions: Conditions, seconds: float) -> Outcome:
        """Run an item for at most `seconds`."""
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
        """Dismiss the worker, which ends when it is idle."""
        if self.worker is not None:
            self.worker.dismiss()
        self.worker, self.used = None, False

    def kill(self) -> None:
        """End the worker now, with whatever it is running."""
        if self.worker is not None:
            self.worker.end()


# ---------------------------------------------------------------------------------------------
# The machine
# ---------------------------------------------------------------------------------------------


def machine(conditions: Conditions) -> list[Row]:
    """The machine and the versions of the software, for the head of the report."""
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
    """The GPU driver's version, or "unknown" if it cannot be found out."""
    try:
        answer = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                                capture_output=True, text=True, timeout=60, check=True)
        return answer.stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def processor() -> str:
    """The CPU's model name, or its architecture if the name cannot be found out."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
