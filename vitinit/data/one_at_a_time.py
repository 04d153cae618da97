"""One process at a time downloads into a folder, whichever machines share it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:                                  # not on Windows
    fcntl = None


@contextmanager
def one_at_a_time(lock_file: Path, say: Callable[[str], object]) -> Iterator[None]:
    """Holds a lock that processes on all machines see which share the disk; waits for it first.

    A process that dies leaves the lock to the next. The file is there only as long as somebody
    holds or awaits it. Where no file can be locked, `say` gets one line and work goes on without; a
    folder in which no file can be made needs no lock, because nothing can be downloaded into it.
    """
    descriptor = locked(lock_file, say) if fcntl is not None else None
    try:
        yield
    finally:
        if descriptor is not None:
            lock_file.unlink(missing_ok=True)        # while locked: those who wait look for it again
            os.close(descriptor)


def locked(lock_file: Path, say: Callable[[str], object]) -> int | None:
    """A descriptor of the locked file; None if there is nothing to lock."""
    waiting = False
    while True:
        try:
            lock_file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            return None
        try:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):   # POSIX allows both for a lock held elsewhere
                if not waiting:
                    say(f"{lock_file.parent}: waiting for another process that downloads into it")
                waiting = True
                fcntl.lockf(descriptor, fcntl.LOCK_EX)
            # Whoever held it has removed the file: what is locked now must be what others find.
            if same_file(descriptor, lock_file):
                return descriptor
            os.close(descriptor)
        except OSError as error:
            os.close(descriptor)
            lock_file.unlink(missing_ok=True)
            say(f"{lock_file.parent}: files cannot be locked there ({error.strerror}); make sure "
                "that no second process downloads into it")
            return None
        except BaseException:                        # Ctrl-C while waiting
            os.close(descriptor)
            raise


def same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
