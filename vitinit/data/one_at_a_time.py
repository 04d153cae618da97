"""A lock file: one process at a time downloads into a folder, also where several machines share it."""

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
    """Wait for a lock and hold it during the `with` block.

    All processes on all machines that share the disk see the lock. If a process dies, its lock is
    released. The lock file exists only while a process holds the lock or waits for it. If the file
    system cannot lock files, `say` is called with one line and the block runs without a lock. If no
    file can be created in the folder, no lock is needed, because nothing can be downloaded into it.
    """
    descriptor = locked(lock_file, say) if fcntl is not None else None
    try:
        yield
    finally:
        if descriptor is not None:
            lock_file.unlink(missing_ok=True)        # while locked; waiting processes open it again
            os.close(descriptor)


def locked(lock_file: Path, say: Callable[[str], object]) -> int | None:
    """Wait for the lock; the descriptor of the locked file, or None if nothing can be locked."""
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
            # The process that held the lock has removed its file. What is locked now must be the
            # file that other processes find under this name.
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
    """Whether `path` still names the file that was opened as `descriptor`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
