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

    Somebody may delete that file, and with it the lock. Therefore the folder itself is locked, too
    (fcntl.flock; network file systems do not lock folders), and forked workers let go of it.
    """

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._folder: int | None = None              # the handle of the folder

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._let_go_of_folder()

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
        if not self._lock_folder(folder):
            file.close()
            raise Occupied(f"{folder}: another run is writing here, and its run.lock was deleted; wait "
                           "until it ends, or end it, or choose another --out-dir")
        self._file = file
        since = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n")
            file.flush()
        except OSError:                              # the disk is full; the lock holds nevertheless
            pass

    def _lock_folder(self, folder: Path) -> bool:
        """Lock the folder itself if the file system can; False if another process has locked it."""
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            return error.errno not in (errno.EACCES, errno.EAGAIN)
        self._folder = handle
        os.register_at_fork(after_in_child=self._let_go_of_folder)
        return True

    def _let_go_of_folder(self) -> None:
        """Close this process's handle of the folder. The lock ends when no process has one."""
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None
