"""One writer: the lock on a run's folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path

from ..train.checkpoint import CheckpointError
from .folder import Say, in_one_line


class RunLock(ExitStack):
    """Locks a run's folder for this process, from `take` until the `with` block ends.

    It is a record lock (fcntl.lockf) on the file run.lock, which names the process that took it
    last. The kernel releases it however the process ends, also on a network file system, and a
    forked loader worker does not have it. A process loses a record lock as soon as it closes the
    file, even through another handle; therefore the file is opened only here, and only once.
    """

    taken = False

    def take(self, folder: Path, say: Say) -> None:
        """Lock the folder; raise CheckpointError, which names the holder, if another process has.

        If the file system has no locks, `say` is called with a warning and the folder stays
        unlocked.
        """
        if self.taken:
            return
        with in_one_line(folder):
            handle = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT, 0o666)
        self.callback(os.close, handle)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                holder = os.pread(handle, 200, 0).decode(errors="replace").strip()
                raise CheckpointError(f"{folder}: another run is writing here ({holder}); wait "
                                      "until it ends, or end it, or choose another --out-dir"
                                      ) from None
            say(f"lock    {folder}: this file system has no locks, so nothing keeps a second run "
                "out")
        self.taken = True
        since = datetime.now(UTC).isoformat(timespec="seconds")
        with suppress(OSError):                      # the disk is full; the lock holds nevertheless
            os.ftruncate(handle, 0)
            holder = f"process {os.getpid()} on {socket.gethostname()}, since {since}\n"
            os.write(handle, holder.encode())
