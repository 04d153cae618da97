"""Worker processes of a loader: how they start, how they treat signals, and when they end.

Python starts them in one of three ways (start methods), all of which give the same batches:

    fork          copies of the training process; the default on Linux before Python 3.14
    forkserver    copies of a server process that has imported the modules; the default from 3.14 on
    spawn         new processes, each of which imports all modules again
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

GRACE_SECONDS = 60          # how long a worker lives on after a SIGTERM
FILES_PER_WORKER = 8        # open files of the training process per worker: both ends of its queue and
                            # two pipes that show whether it is alive, and the same once more for a
                            # worker of the evaluation loader
OTHER_FILES = 256           # open files that the training process may need for everything else


def expect_workers(number: int) -> None:
    """Prepare this process for `number` workers; called before they start.

    Raises DataError if they need more open files than this process may have.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and OTHER_FILES + FILES_PER_WORKER * number > limit:
        raise DataError(f"data.workers = {number} need more than the {limit} files that this process "
                        f"may have open (ulimit -n); expected at most "
                        f"{max(0, (limit - OTHER_FILES) // FILES_PER_WORKER)}")
    if number:
        atexit.unregister(end_workers)               # so that it is registered only once
        atexit.register(end_workers)
    start_fork_server(number)


def start_fork_server(workers: int) -> None:
    """If workers are started by a fork server, start the server and let it import their modules.

    Otherwise each worker would import torch and this package itself. The server imports while this
    process goes on, so it should be started early. Workers need the modules of this package that
    this process has imported by now.
    """
    if workers and multiprocessing.get_start_method() == "forkserver":
        package = __name__.partition(".")[0]
        forkserver.set_forkserver_preload(["__main__", *(
            name for name in sys.modules
            if name.partition(".")[0] == package and not name.endswith(".__main__"))])
        forkserver.ensure_running()


def end_workers() -> None:
    """Kill the workers of loaders that are still open when the program exits.

    multiprocessing would send them a SIGTERM, which they ignore for a while, and wait for them.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)    # torch's handler would report a crash
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def begin_work(worker: int) -> None:
    """What each worker does first (torch's `worker_init_fn`). Its number, `worker`, is not used.

    It ignores the signals that ask a run to end, which often reach all of its processes: the
    training process decides what to do. After a SIGTERM a worker lives on for GRACE_SECONDS, so
    that the training process can finish its step and write a checkpoint.
    """
    sys.excepthook = unless_the_parent_left
    signal.set_wakeup_fd(-1)                         # a forked worker inherits the parent's
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(GRACE_SECONDS))
    threading.Thread(target=end_with_parent, daemon=True).start()


def unless_the_parent_left(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print an uncaught error of a worker, unless it comes from a connection to a parent that is gone.

    A thread of the worker sends batches to the parent, which may end in the meantime.
    """
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)


def end_with_parent() -> None:
    """Wait until the training process ends, however it ends, then end this worker.

    torch's own check does not suffice: it watches the process that the worker was forked from, and
    a fork server lives on for as long as its workers do.
    """
    multiprocessing.parent_process().join()
    os._exit(1)
