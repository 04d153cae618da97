"""Ctrl-C and other signals that ask a run to end, and the points at which it does."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Sent by Ctrl-C, by launchers, by a terminal that closes, and by SLURM before a time limit.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
SECOND_SECONDS = 1.0            # a Ctrl-C sooner after the first one counts as the same


class Interrupted(BaseException):
    """A signal asked the run to end. Like KeyboardInterrupt, this is not a subclass of Exception."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number                         # the signal's number


class StopRequest:
    """A context that handles the signals in `STOP_SIGNALS`; at its end the old handlers return.

    Before `defer` is called, a signal raises Interrupted wherever the program happens to be, since
    there is nothing to save yet. Afterwards a signal is only remembered, and the run ends at the
    next point between two steps. The exception is code within `at_once`, such as waiting for data,
    which may take arbitrarily long: there a signal raises Interrupted at once.

    A second Ctrl-C ends the program immediately, even while a library does not return. Signals that
    were ignored when the program started, as under nohup, stay ignored.

    second_seconds: how long after the first signal a Ctrl-C counts as the second.
    """

    def __init__(self, *, second_seconds: float = SECOND_SECONDS) -> None:
        self.number = 0                              # of the first signal that arrived; 0: none
        self.raises = True
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
        threading.Thread(target=self._watch, args=(self.reader,), daemon=True).start()
        self.old_hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        sys.unraisablehook = self.old_hook
        signal.set_wakeup_fd(self.old_writer)
        os.close(self.writer)                        # the thread reads the end of the pipe, and ends

    def defer(self) -> None:
        """From now on, remember signals instead of raising Interrupted."""
        self.raises = False

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A context in which a signal raises Interrupted at once, even one that arrived before it."""
        before, self.raises = self.raises, True
        try:
            if self.number:
                raise Interrupted(self.number)
            yield
        finally:
            self.raises = before

    def _remember(self, number: int, frame: Any) -> None:
        self.number = self.number or number
        if self.raises:
            raise Interrupted(self.number)

    def _unraisable(self, what: Any) -> None:
        """Stay silent about an Interrupted that Python could not raise; its signal is remembered.

        Python swallows exceptions that a handler raises within a finaliser or around a fork.
        """
        if not isinstance(what.exc_value, Interrupted):
            self.old_hook(what)

    def _watch(self, reader: int) -> None:
        """In a thread: read signal numbers from the pipe; a second Ctrl-C ends the process."""
        first = None                                 # the time of the first signal
        while byte := os.read(reader, 1):
            if byte[0] not in STOP_SIGNALS:
                continue
            now = time.monotonic()
            first = now if first is None else first
            if byte[0] == signal.SIGINT and now - first > self.second_seconds:
                for child in multiprocessing.active_children():
                    child.kill()
                os.write(2, b"ended at once by a second Ctrl-C\n")
                os._exit(128 + signal.SIGINT)
        os.close(reader)
