"""Ctrl-C and its kin: how a run is asked to end, and where it does."""

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

# A terminal's Ctrl-C and its closing; what launchers send; what SLURM sends before a time limit.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
SECOND_SECONDS = 1.0            # a Ctrl-C that comes sooner is the first one, seen twice


class Interrupted(BaseException):
    """Somebody asked the run to end. Not an Exception, as little as KeyboardInterrupt is."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number                         # of the signal


class StopRequest:
    """What signals ask for. A context, which gives the signals back as they were.

    Until `defer` a signal raises Interrupted, wherever the program is: there is nothing to save yet.
    After it a signal is only remembered, for the run to end where its state is whole, but for
    stretches marked `at_once`, such as waiting for data, which may take for ever.

    A second Ctrl-C ends the program on the spot, whatever it hangs in. Signals that were ignored
    when the program began, as under nohup, stay ignored.
    """

    def __init__(self, *, second_seconds: float = SECOND_SECONDS) -> None:
        self.number = 0                              # of the first signal that came; 0: none
        self.raises = True
        self.second_seconds = second_seconds

    def __enter__(self) -> StopRequest:
        self.handlers = {number: signal.signal(number, self._remember) for number in STOP_SIGNALS
                         if signal.getsignal(number) is not signal.SIG_IGN}
        # Handlers run in the main thread, between two steps of Python. Bytes of a pipe are read by
        # a thread of its own even while the main one hangs in somebody's library.
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
        os.close(self.writer)                        # so the thread reads an end, and ends

    def defer(self) -> None:
        """From here on a signal is remembered."""
        self.raises = False

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A stretch that a signal ends by Interrupted, even one that came before it."""
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
        """A finaliser, or what Python does around a fork, swallows Interrupted; it is remembered."""
        if not isinstance(what.exc_value, Interrupted):
            self.old_hook(what)

    def _watch(self, reader: int) -> None:
        first = None                                 # when the first signal came
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
