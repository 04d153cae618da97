"""Ctrl-C and other signals that ask a run to end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from typing import Any

# Sent by Ctrl-C, by launchers, by a terminal that closes, and by SLURM before a time limit.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
SECOND_SECONDS = 1.0            # a Ctrl-C sooner after the first one counts as the same


class Interrupted(BaseException):
    """A signal asked the run to end. Like KeyboardInterrupt, this is not a subclass of Exception.

    It is raised between two steps, by the code that looks at `StopRequest.number`.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number                         # the signal's number


class StopRequest:
    """A context in which the signals in `STOP_SIGNALS` are only remembered, as `number`.

    The program looks at `number` between two steps and two batches, never within one. A second
    Ctrl-C ends the program immediately, even while a library does not return. Signals that were
    ignored when the program started, as under nohup, stay ignored. At the end of the context the
    old handlers return.

    second_seconds: how long after the first signal a Ctrl-C counts as the second.
    """

    def __init__(self, *, second_seconds: float = SECOND_SECONDS) -> None:
        self.number = 0                              # of the first signal that arrived; 0: none
        self.second_seconds = second_seconds

    def __enter__(self) -> StopRequest:
        self.handlers = {number: signal.signal(number, self._remember) for number in STOP_SIGNALS
                         if signal.getsignal(number) is not signal.SIG_IGN}
        # Python runs signal handlers in the main thread, between two bytecode instructions. Python
        # also writes the number of each signal to a pipe; a second thread reads it there even while
        # the main thread is stuck in a library.
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self.old_writer = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.old_writer)
        os.close(self.writer)                        # so the thread reads its end, and ends

    def _remember(self, number: int, frame: Any) -> None:
        self.number = self.number or number

    def _watch(self) -> None:
        """In a thread: read signal numbers from the pipe; a second Ctrl-C ends the process."""
        reader, first = self.reader, None            # the time of the first signal
        while byte := os.read(reader, 1):
            now = time.monotonic()
            if first is None and byte[0] in STOP_SIGNALS:
                first = now
            if byte[0] == signal.SIGINT and now - first > self.second_seconds:
                for child in multiprocessing.active_children():
                    child.kill()
                os.write(2, b"ended at once by a second Ctrl-C\n")
                os._exit(128 + signal.SIGINT)
        os.close(reader)
