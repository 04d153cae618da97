"""One writer for a run's folder."""

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
    """The folder is another process', or cannot be locked at all."""


class RunLock:
    """Holds a run's folder for this process, from `take` until the `with` block ends.

    A record lock (fcntl.lockf) on the file run.lock: the kernel gives it back however the process
    ends, on a network file system, too, and a forked loader worker that outlives its parent does
    not keep it, as it would one of flock. The file stays, and says who took it last. A process
    loses the lock as soon as it closes the file anywhere, so it is opened here alone, and once.
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
        """Raises Occupied, which names the holder, if another process has the folder.

        `say` is told where the file system has no locks; then there is none.
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
        except OSError:                              # a full disk: the lock holds all the same
            pass
