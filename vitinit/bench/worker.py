"""A process that runs items, so that a crash, a lost GPU or a hang costs one item, not the rest."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ..messages import in_brief
from .item import Conditions, Item, Row, Skipped

SPAWN = multiprocessing.get_context("spawn")     # no fork: CUDA does not survive it
TO_START, TO_LEAVE = 120.0, 10.0     # seconds
PASSED, SKIPPED, FAILED, CUT_SHORT = "passed", "skipped", "failed", "cut short"


@dataclass(frozen=True)
class Outcome:
    """What came of an item."""

    status: str                 # PASSED, SKIPPED, FAILED, or CUT_SHORT where time ran out
    seconds: float
    rows: list[Row] = field(default_factory=list)
    words: str = ""             # why it was skipped or failed, in one line


class Worker:
    """The process, in this one's view. It has a process group of its own: what an item started and
    left running ends with it. And it ends with this process, however that ends."""

    def __init__(self, log: Path) -> None:
        """log: where everything goes that items and the libraries below print."""
        self.connection, theirs = SPAWN.Pipe()
        self.lifeline, their_lifeline = SPAWN.Pipe()
        self.process = SPAWN.Process(target=serve, args=(
            theirs, their_lifeline, log, multiprocessing.get_start_method()))
        self.process.start()
        theirs.close()
        their_lifeline.close()
        with suppress(EOFError):
            self.connection.poll(TO_START) and self.connection.recv()    # it is there

    def run(self, item: Item, conditions: Conditions, seconds: float) -> Outcome:
        """At most `seconds`; after anything but a plain result the process is ended."""
        began = time.perf_counter()

        def spent() -> float:
            return time.perf_counter() - began
        try:
            self.connection.send((item.function, conditions))
            if not self.connection.poll(seconds):
                self.end()
                return Outcome(CUT_SHORT, spent(), words=f"not done after {seconds:.0f} s")
            status, rows, words = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            return Outcome(FAILED, spent(), words="its process ended " + (
                f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"))
        if status == FAILED:
            self.end()                               # a GPU may be lost to it
        return Outcome(status, spent(), rows, words)

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def dismiss(self) -> None:
        """It ends by itself once it has nothing to do, or is ended."""
        self.connection.close()
        self.process.join(TO_LEAVE)
        self.end()

    def end(self) -> None:
        """At once, with all that its items started."""
        for kill in (os.killpg, os.kill):            # it may not have its group yet
            with suppress(ProcessLookupError, PermissionError):
                kill(self.process.pid, signal.SIGKILL)
        self.process.join()


# ---------------------------------------------------------------------------------------------
# In the process
# ---------------------------------------------------------------------------------------------


def serve(connection: Connection, lifeline: Connection, log: Path, start_method: str) -> None:
    """Items one after another, as they come. start_method: of the processes that these start."""
    os.setpgid(0, 0)
    multiprocessing.set_start_method(start_method, force=True)       # else they are spawned, too
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    connection.send("here")
    while True:
        try:
            function, conditions = connection.recv()
        except EOFError:
            return
        connection.send(outcome_of(function, conditions))


def outcome_of(function: Any, conditions: Conditions) -> tuple[str, list[Row], str]:
    """Status, rows and words of one item, run here."""
    print(f"---- {function}", flush=True)
    shutil.rmtree(conditions.scratch, ignore_errors=True)
    conditions.scratch.mkdir(parents=True)
    torch.manual_seed(0)
    try:
        return PASSED, list(function(conditions)), ""
    except Skipped as reason:
        return SKIPPED, [], str(reason)
    except BaseException as error:                   # SystemExit of a program that it ran, too
        traceback.print_exc()
        said = in_brief(error, 300)
        if isinstance(error, AssertionError):
            return FAILED, [], said
        place = traceback.extract_tb(error.__traceback__)[-1]
        return FAILED, [], f"{type(error).__name__}: {said} ({Path(place.filename).name}:" \
                           f"{place.lineno})"
    finally:
        shutil.rmtree(conditions.scratch, ignore_errors=True)
        if torch.cuda.is_initialized():
            with suppress(RuntimeError):
                torch.cuda.empty_cache()


def _end_with_parent(lifeline: Connection) -> None:
    with suppress(EOFError, OSError):
        lifeline.recv()                              # nothing ever comes but the end
    os.killpg(0, signal.SIGKILL)
