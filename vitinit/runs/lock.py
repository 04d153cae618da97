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

    It is a record lock (fcntl.lockf) on the file run.lock. The kernel releases it however the
    process ends, also on a network file system. A process loses a record lock as soon as it closes
    the file, even through another handle; therefore the file is opened only here, and only once.
    The file stays and names the process that took the lock last.

    Somebody may delete that file, and with it the lock. Therefore the folder itself is locked, too
    (fcntl.flock; network file systems do not lock folders). A forked loader worker, which may
    outlive its parent, would keep that lock, so it closes its handle.
    """

    taken = False

    def take(self, folder: Path, say: Say) -> None:
        """Lock the folder; raise CheckpointError, which names the holder, if another process has.

        If the file system has no locks, `say` is called with a warning and the folder stays
        unlocked.
        """
        if self.taken:
            return
        handles, locked = [], 0
        with in_one_line(folder):
            for path, flags in {folder / "run.lock": os.O_RDWR | os.O_CREAT,
                                folder: os.O_RDONLY}.items():
                handles.append(os.open(path, flags, 0o666))
                self.callback(os.close, handles[-1])
        os.register_at_fork(after_in_child=self.close)
        for handle, lock in zip(handles, (fcntl.lockf, fcntl.flock)):
            try:
                lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked += 1
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    continue
                holder = os.pread(handles[0], 200, 0).decode(errors="replace").strip()
                self.close()
                raise CheckpointError(
                    f"{folder}: another run is writing here "
                    f"({holder or 'its run.lock was deleted'}); wait until it ends, or end it, or "
                    "choose another --out-dir") from None
        self.taken = True
        if not locked:
            say(f"lock    {folder}: this file system has no locks, so nothing keeps a second run "
                "out")
        since = datetime.now(UTC).isoformat(timespec="seconds")
        with suppress(OSError):                      # the disk is full; the lock holds nevertheless
            os.ftruncate(handles[0], 0)
            holder = f"process {os.getpid()} on {socket.gethostname()}, since {since}\n"
            os.write(handles[0], holder.encode())
