"""Ctrl-C and other signals that ask a run to end."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

# Sent by Ctrl-C, launchers, a terminal that closes, SLURM before a time limit; Windows has two.
STOP_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    if hasattr(signal, name)
)
SECOND_SECONDS = 1.0  # a Ctrl-C sooner after the first one counts as the same


class Interrupted(BaseException):
    """A signal asked the run to end: raised between two steps; no Exception."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number  # the signal's number


class StopRequest:
    """A context in which the signals in `STOP_SIGNALS` are only remembered, as `number`.

    The program looks at `number` between two steps and two batches, never within one. A Ctrl-C more
    than a second after the first signal calls `second`, by default to end at once. Signals ignored
    when the program started, as under nohup, stay ignored, and those that a C library took before
    Python began stay that library's. Outside of the main thread nothing is remembered.
    """

    def __init__(self, second: Callable[[], object] | None = None) -> None:
        self.second = second or _end_at_once
        self.number = 0  # of the first signal that arrived; 0: none
        self.since = 0.0  # when that was

    def __enter__(self) -> Self:
        hears = threading.current_thread() is threading.main_thread()
        self.handlers = {
            number: signal.signal(number, self._remember)
            for number in STOP_SIGNALS
            if hears and signal.getsignal(number) not in (signal.SIG_IGN, None)
        }
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if not self.number:
            self.number, self.since = number, now
        elif number == signal.SIGINT and now - self.since > SECOND_SECONDS:
            self.second()


@contextmanager
def raising_signals() -> Iterator[None]:
    """A context in which Ctrl-C and requests to end raise Interrupted where they would end the
    process at once, so that temporary files go away. Those that are ignored or heard stay so.
    """

    def interrupt(number: int, frame: Any) -> None:
        raise Interrupted(number)

    hears = threading.current_thread() is threading.main_thread()
    numbers = [
        number for number in STOP_SIGNALS if hears and signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _end_at_once() -> None:
    for child in multiprocessing.active_children():
        child.kill()
    os.write(2, b"ended at once by a second Ctrl-C\n")
    os._exit(128 + signal.SIGINT)
