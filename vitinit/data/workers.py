"""Worker processes of a loader: how they start, what they do about signals, when they end.

Python starts them in one of three ways, all of which give the same batches:

    fork          copies of the training process; Linux's way before Python 3.14
    forkserver    copies of a process that has only imported things; Linux's way from 3.14 on
    spawn         programs of their own, which import everything again, each for itself
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import resource
import signal
import sys
import threading
from multiprocessing import forkserver
from typing import Any

from .images import DataError

GRACE_SECONDS = 60          # that a worker outlives a SIGTERM
FILES_A_WORKER = 8          # that the training process holds open: both ends of its queue, two pipes
                            # of its life, and as much for one that waits to evaluate
FILES_BESIDE = 256          # that it may need for all else


# ---------------------------------------------------------------------------------------------
# In the training process
# ---------------------------------------------------------------------------------------------


def expect_workers(number: int) -> None:
    """Before the first of so many starts. DataError if they need too many open files."""
    require_open_files(number)
    if number:
        atexit.unregister(end_workers)               # once is enough
        atexit.register(end_workers)
    start_fork_server(number)


def require_open_files(workers: int) -> None:
    """DataError if so many workers need more open files than this process may have."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most != resource.RLIM_INFINITY and FILES_BESIDE + FILES_A_WORKER * workers > most:
        fits = max(0, (most - FILES_BESIDE) // FILES_A_WORKER)
        raise DataError(f"data.workers = {workers} need more than the {most} files that this process "
                        f"may have open (ulimit -n); expected at most {fits} on this machine of "
                        f"{os.cpu_count()} cores")


def start_fork_server(workers: int) -> None:
    """Let the process that workers will be copies of, if there is to be one, import what they need.

    It does so while this one goes on; the earlier, the better. Else each worker would import torch
    and all of ours by itself. What that is, this program has imported by now.
    """
    if workers == 0 or multiprocessing.get_start_method() != "forkserver":
        return
    ours = __name__.partition(".")[0]
    needed = [name for name in sys.modules
              if name.partition(".")[0] == ours and not name.endswith(".__main__")]
    forkserver.set_forkserver_preload(["__main__", *needed])
    forkserver.ensure_running()


def end_workers() -> None:
    """At exit, end the workers of loaders that were left open.

    multiprocessing would send them a SIGTERM, which they outlive, and wait.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)    # torch's handler takes it for a crash
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


# ---------------------------------------------------------------------------------------------
# In a worker
# ---------------------------------------------------------------------------------------------


def begin_work(worker: int) -> None:
    """What each worker does first; its number does not matter."""
    leave_signals_to_parent()
    threading.Thread(target=end_with_parent, daemon=True).start()


def leave_signals_to_parent() -> None:
    """What asks a run to end often reaches all of its processes; the training process decides.

    So a worker outlives a SIGTERM for a while, to let its parent finish a step and a checkpoint.
    """
    sys.excepthook = unless_the_parent_left
    signal.set_wakeup_fd(-1)                         # the training process'
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(GRACE_SECONDS))


def unless_the_parent_left(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """A worker's thread hands batches over; a run that ends may hang up while it does."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)


def end_with_parent() -> None:
    """A training process that is killed ends nobody, and torch looks only after the process that a
    worker was copied from: with a fork server that one lives on, for the sake of its copies."""
    multiprocessing.parent_process().join()
    os._exit(1)
