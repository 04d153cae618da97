"""A lock that lets only one process at a time write to a run's folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from ..messages import OneLineError


class Occupied(OneLineError):
    """Another process has the lock on the folder, or the folder cannot be written."""


class RunLock:
    """Locks a run's folder for this process, from `take` until the `with` block ends.

    It is a record lock (fcntl.lockf) on the file run.lock. The kernel releases it however the
    process ends, also on a network file system. Unlike a lock of flock, it is not inherited by a
    forked loader worker that outlives its parent. A process loses a record lock as soon as it
    closes the file, even through another handle; therefore the file is opened only here, and only
    once. The file stays behind and names the process that took the lock last.
    """

    def __init__(self) -> None:
        self._file: TextIO | None = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def take(self, folder: Path, say: Callable[[str], None]) -> None:
        """Lock the folder; raise Occupied, which names the holder, if another process has the lock.

        If the file system has no locks, `say` is called with a warning and the folder stays
        unlocked.
        """
        if self._file is not None:
            return
        try:
            file = open(folder / "run.lock", "a+", encoding="utf-8", errors="replace")
        except OSError as error:
            raise Occupied(f"{folder}: cannot be written: {error.strerror}") from None
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            with file:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    file.seek(0)
                    raise Occupied(
                        f"{folder}: another run is writing here ({file.read(200).strip()}); wait "
                        "until it ends, or end it, or choose another --out-dir") from None
            say(f"lock    {folder}: this file system has no locks ({error.strerror}), so nothing "
                "keeps a second run out")
            return
        self._file = file
        since = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n")
            file.flush()
        except OSError:                              # the disk is full; the lock holds nevertheless
            pass
