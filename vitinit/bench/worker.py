"""A process that runs items, so that a crash, a lost GPU or a hang ends only one of them."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
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

SPAWN = multiprocessing.get_context("spawn")     # CUDA does not survive a fork
TO_START, TO_LEAVE = 120.0, 10.0     # seconds that a worker has to start and to end
PASSED, SKIPPED, FAILED, CUT_SHORT = "passed", "skipped", "failed", "cut short"


@dataclass(frozen=True)
class Outcome:
    """The outcome of an item."""

    status: str                 # PASSED, SKIPPED, FAILED, or CUT_SHORT if the time ran out
    seconds: float
    rows: list[Row] = field(default_factory=list)
    words: str = ""             # why it was skipped or failed, in one line


class Worker:
    """A handle on a worker process.

    The worker leads a process group of its own, so that processes which an item started and left
    running end with it. It also ends when this process ends, even if this one is killed.
    """

    def __init__(self, log: Path) -> None:
        """Start the process. log: file for all that items and the libraries below them print."""
        self.connection, worker_connection = SPAWN.Pipe()
        self.lifeline, worker_lifeline = SPAWN.Pipe()
        self.process = SPAWN.Process(target=serve, args=(
            worker_connection, worker_lifeline, log, multiprocessing.get_start_method()))
        self.process.start()
        worker_connection.close()
        worker_lifeline.close()
        with suppress(EOFError):
            self.connection.poll(TO_START) and self.connection.recv()    # "here": it has started

    def run(self, item: Item, conditions: Conditions, seconds: float) -> Outcome:
        """Run an item for at most `seconds`.

        The process is ended if the time runs out or the item fails, since its state, or its GPU's,
        can no longer be relied on. A crash of the process is a failure of the item.
        """
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
            self.end()                               # its GPU may be unusable
        return Outcome(status, spent(), rows, words)

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def dismiss(self) -> None:
        """Let the process end, as an idle one does when its connection closes; kill it otherwise."""
        self.connection.close()
        self.process.join(TO_LEAVE)
        self.end()

    def end(self) -> None:
        """Kill the process at once, with all processes that its items started."""
        for kill in (os.killpg, os.kill):            # it may not lead its group yet
            with suppress(ProcessLookupError, PermissionError):
                kill(self.process.pid, signal.SIGKILL)
        self.process.join()


# ---------------------------------------------------------------------------------------------
# In the worker process
# ---------------------------------------------------------------------------------------------


def serve(connection: Connection, lifeline: Connection, log: Path, start_method: str) -> None:
    """Run the items that arrive on `connection`, one after another, and send back their results.

    lifeline: a pipe that closes when the parent process ends. log: file for standard output and
    error. start_method: how processes that items start are to be started.
    """
    os.setpgid(0, 0)
    multiprocessing.set_start_method(start_method, force=True)       # not "spawn", as for this one
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):          # the process may be killed right after a line
        stream.reconfigure(encoding="utf-8", line_buffering=True)
    connection.send("here")
    while True:
        try:
            function, conditions = connection.recv()
        except EOFError:
            return
        connection.send(outcome_of(function, conditions))


def outcome_of(function: Any, conditions: Conditions) -> tuple[str, list[Row], str]:
    """Run one item in this process; return its status, rows and the reason if it did not pass."""
    print(f"---- {function}", flush=True)
    shutil.rmtree(conditions.scratch, ignore_errors=True)
    conditions.scratch.mkdir(parents=True)
    torch.manual_seed(0)
    try:
        return PASSED, list(function(conditions)), ""
    except Skipped as reason:
        return SKIPPED, [], str(reason)
    except BaseException as error:                   # includes SystemExit of a program that it ran
        traceback.print_exc()
        message = in_brief(error, 300)
        if isinstance(error, AssertionError):
            return FAILED, [], message
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return FAILED, [], f"{type(error).__name__}: {message} ({Path(frame.filename).name}:" \
                           f"{frame.lineno})"
    finally:
        shutil.rmtree(conditions.scratch, ignore_errors=True)
        if torch.cuda.is_initialized():
            with suppress(RuntimeError):
                torch.cuda.empty_cache()


def _end_with_parent(lifeline: Connection) -> None:
    """Wait until the parent process has ended, then kill this process group."""
    with suppress(EOFError, OSError):
        lifeline.recv()                              # nothing is sent: this returns on EOF
    os.killpg(0, signal.SIGKILL)
