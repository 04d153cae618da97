"""Streams for what is printed that do not take it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

LOST = ("terminal", "disk", "pipe", "closed", "ascii")


@contextmanager
def lost_stream(kind: str) -> Iterator[TextIO]:
    """A terminal that was closed, a full disk, a pipe that nobody reads, a closed file, a strict
    encoding without ×."""
    if kind in ("terminal", "pipe"):
        other, descriptor = os.openpty() if kind == "terminal" else os.pipe()
        stream = open(descriptor, "w")
        os.close(other)
    else:
        stream = open(
            "/dev/full" if kind == "disk" else os.devnull,
            "w",
            encoding="ascii" if kind == "ascii" else None,
        )
    if kind == "closed":
        stream.close()
    yield stream
    with suppress(OSError):
        stream.close()
