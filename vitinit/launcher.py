"""Programs that run for long, one at a time or several side by side, and what signals mean to them."""

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

LOOK_EVERY = 1.0                # seconds between two looks at what runs
T = TypeVar("T")


class Launcher:
    """Runs programs and hands each signal to stop on to all that are running, once.

    A program gets a session of its own, because a terminal sends Ctrl-C to all programs of a
    session, and the one that is handed on would come on top.
    """

    def __init__(self) -> None:
        self.stopped_by = 0                          # the signal's number
        self.running: set[subprocess.Popen] = set()
        # Held where `running` changes; a signal may find its own thread there.
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
                # Of a closed terminal and a time limit it hears as of SIGTERM, which every torchrun
                # knows.
                process.send_signal(number if number == signal.SIGINT else signal.SIGTERM)

    def run(self, command: list[str], *, environment: Mapping[str, str] | None = None,
            log: Path | None = None) -> str | None:
        """None if the program ended well, else its error in a line; it waits until then.

        environment: what it has beyond this program's own. log: a file that what it prints is
        appended to; None: it is passed on.
        """
        error = ""
        # Else torchrun would kill what has not saved its checkpoint after 30 s.
        surroundings = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600", **os.environ, **(environment or {})}
        with ExitStack() as open_files:
            kept = log and open_files.enter_context(open(log, "a", encoding="utf-8"))
            with self.lock:
                if self.stopped_by:
                    return "stopped before it started"
                process = subprocess.Popen(command, stdout=kept or None, stderr=subprocess.PIPE,
                                           text=True, errors="replace", env=surroundings,
                                           start_new_session=True)
                self.running.add(process)
            for line in open_files.enter_context(process).stderr:
                (kept or sys.stderr).write(line)
                (kept or sys.stderr).flush()
                # Of all that torchrun prints after a failure, train.py's own line says why.
                if line.strip() and not error.startswith("train.py: "):
                    error = line
            status = process.wait()
        with self.lock:
            self.running.remove(process)
        return None if status == 0 else error.strip() or f"ended with status {status}"


class SideBySide(Generic[T]):
    """Several jobs at a time, each in a place of its own, until all are done or a signal came."""

    def __init__(self, launcher: Launcher, work: Callable[[T, int], str | None]) -> None:
        """work: (a job, its place, from 0) → None, or its error in a line; it calls `launcher.run`."""
        self.launcher, self.work = launcher, work
        self.waiting: queue.SimpleQueue[T] = queue.SimpleQueue()
        self.at: dict[int, T] = {}                   # by place: what runs there now
        self.ended: list[tuple[T, str | None]] = []  # jobs and their errors, as they ended

    def run(self, jobs: Sequence[T], places: int, look: Callable[[], None]) -> None:
        """look: called about every second while anything runs, and once at the end."""
        for job in jobs:
            self.waiting.put(job)
        threads = [threading.Thread(target=self._serve, args=[place], daemon=True)
                   for place in range(min(places, len(jobs)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            # A signal's handler runs in the main thread, between two looks.
            while thread.is_alive():
                thread.join(LOOK_EVERY)
                look()
        look()

    def _serve(self, place: int) -> None:
        while not self.launcher.stopped_by:
            try:
                job = self.waiting.get_nowait()
            except queue.Empty:
                return
            self.at[place] = job
            try:
                error = self.work(job, place)
            except OSError as problem:               # a log that cannot be written, say
                error = f"{problem.filename}: {problem.strerror}"
            self.ended.append((job, error))
            del self.at[place]


def shares(jobs: int, processes: int, threads: int | None) -> list[dict[str, str]]:
    """What each of the `jobs` side by side has of the machine, as variables of its environment.

    Each of its processes has a GPU; jobs of one process may share one, where there are fewer.
    threads: of the CPU, for each process; None: what the machine has, shared out, and for one job
        alone whatever torch takes. Raises RecipeError where there are too few GPUs.
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
        gpus[(place * processes + number) % len(gpus)] for number in range(processes))}
        for place in range(jobs)]
