"""Start long-running programs, one at a time or several side by side, and pass signals on to them."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Generic, TypeVar

import torch

from .recipe.files import RecipeError
from .train.interruption import STOP_SIGNALS

UPDATE_EVERY = 1.0              # seconds between two updates of the display
T = TypeVar("T")


class Launcher:
    """A context that runs programs, and passes each signal in `STOP_SIGNALS` on to all of them.

    Each program runs in a session of its own. A terminal sends Ctrl-C to all programs of its
    session, so that the program would otherwise receive the signal twice.
    """

    def __init__(self) -> None:
        self.stopped_by = 0                          # number of the latest signal; 0: none
        self.running: set[subprocess.Popen] = set()
        # Held while `running` changes. A signal may interrupt the main thread while it holds the
        # lock, and its handler takes the lock too; hence an RLock.
        self.lock = threading.RLock()

    def __enter__(self) -> Launcher:
        self.handlers = {number: signal.signal(number, self._stop) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: object) -> None:
        with self.lock:
            self.stopped_by = number
            for process in self.running:
                # A closed terminal and a time limit are passed on as SIGTERM, which every version
                # of torchrun handles.
                process.send_signal(number if number == signal.SIGINT else signal.SIGTERM)

    def run(self, command: list[str], *, environment: Mapping[str, str] | None = None,
            log: Path | None = None) -> str | None:
        """Run a program and wait until it ends; return None if it succeeded, else its error.

        environment: variables to set in addition to this program's own. log: a file to which the
        program's output is appended; None: the output is passed through. Raises OSError if the log
        cannot be opened.
        """
        error = ""
        # By default torchrun kills processes that have not ended 30 s after a signal, which may not
        # be enough to save a checkpoint.
        encoding = "utf-8" if log else sys.stderr.encoding or "utf-8"
        variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600", **os.environ,
                     "PYTHONIOENCODING": encoding, **(environment or {})}
        with ExitStack() as open_files:
            log_file = log and open_files.enter_context(open(log, "a", encoding="utf-8"))
            with self.lock:
                if self.stopped_by:
                    return "stopped before it started"
                process = subprocess.Popen(command, stdout=log_file or None, stderr=subprocess.PIPE,
                                           encoding=encoding, errors="replace", env=variables,
                                           start_new_session=True)
                self.running.add(process)
            for line in open_files.enter_context(process).stderr:
                (log_file or sys.stderr).write(line)
                (log_file or sys.stderr).flush()
                # After a failure torchrun prints many lines; the one from train.py has the reason.
                if line.strip() and not error.startswith("train.py: "):
                    error = line
            status = process.wait()
        with self.lock:
            self.running.remove(process)
        return None if status == 0 else error.strip() or f"ended with status {status}"


class SideBySide(Generic[T]):
    """Runs several jobs at a time, each in one of a fixed number of slots.

    It ends when all jobs are done, or when a signal has stopped those that were running.
    """

    def __init__(self, launcher: Launcher, work: Callable[[T, int], str | None]) -> None:
        """work: (job, number of its slot, from 0) → None or an error message; calls `launcher.run`."""
        self.launcher, self.work = launcher, work
        self.waiting: queue.SimpleQueue[T] = queue.SimpleQueue()
        self.slots: dict[int, T] = {}                # slot → the job that runs there now
        self.ended: list[tuple[T, str | None]] = []  # jobs and their errors, in order of ending

    def run(self, jobs: Sequence[T], slots: int, update: Callable[[], None]) -> None:
        """Run all jobs, `slots` at a time.

        update: called about once per second while a job is running, and once at the end.
        """
        for job in jobs:
            self.waiting.put(job)
        threads = [threading.Thread(target=self._serve, args=[slot], daemon=True)
                   for slot in range(min(slots, len(jobs)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            # Signal handlers run in the main thread, between two of these joins.
            while thread.is_alive():
                thread.join(UPDATE_EVERY)
                update()
        update()

    def _serve(self, slot: int) -> None:
        """In a thread: run one waiting job after another in this slot."""
        while not self.launcher.stopped_by:
            try:
                job = self.waiting.get_nowait()
            except queue.Empty:
                return
            self.slots[slot] = job
            try:
                error = self.work(job, slot)
            except OSError as problem:               # for example, a log that cannot be written
                error = f"{problem.filename}: {problem.strerror}"
            self.ended.append((job, error))
            del self.slots[slot]


def shares(jobs: int, processes: int, threads: int | None) -> list[dict[str, str]]:
    """Divide the machine among `jobs` side by side; return the environment variables of each.

    Every process has one GPU. Jobs of a single process share GPUs if there are fewer GPUs than
    jobs.

    processes: per job. threads: CPU threads per process; None: the machine's threads are divided
        among all processes, or, for a single job, torch's default applies.
    Raises RecipeError if jobs of several processes need more GPUs than there are.
    """
    if threads is None and jobs > 1:
        threads = max(1, (os.cpu_count() or 1) // (jobs * processes))
    share = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    if jobs == 1 or not gpus or not torch.cuda.is_available():
        return [share] * jobs
    if processes > 1 and jobs * processes > len(gpus):
        raise RecipeError(f"--jobs {jobs} runs of --nproc {processes} processes need "
                          f"{jobs * processes} GPUs, and {len(gpus)} are visible")
    return [share | {"CUDA_VISIBLE_DEVICES": ",".join(
        gpus[(job * processes + number) % len(gpus)] for number in range(processes))}
        for job in range(jobs)]
