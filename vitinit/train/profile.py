"""Some steps of training under torch's profiler, which changes nothing about them.

    done … first − 1: warm-up │ first … first + count − 1: under the profiler │ the rest: as ever
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from ..messages import OneLineError, in_brief
from .checkpoint import CheckpointError, written_atomically
from .distributed import Processes

WARMUP_STEPS = 10               # before the first under the profiler, if the run is that long
MOST_PROFILED = 100             # steps; each takes up to some MB of the trace
LARGEST = 10                    # operations that are named
LONGEST_NAME = 80               # characters; a CUDA kernel's has hundreds
T = TypeVar("T")


def first_profiled(count: int, *, done: int, per_epoch: int, total: int) -> int:
    """The first of `count` steps that lie within one epoch, so that no evaluation is among them.

    done: how many steps the run has behind it. WARMUP_STEPS more come first, or as many as leave
        room. per_epoch, total: steps of an epoch and of the run. OneLineError where there is none.
    """
    room = min(per_epoch, total - done)
    if count > room:
        raise OneLineError(f"--profile {count}: expected at most {room}, the steps "
                           f"{'of an epoch' if room == per_epoch else 'that the run has left'}")
    first = done + WARMUP_STEPS
    if first % per_epoch + count > per_epoch:        # it would reach into the next epoch
        first += per_epoch - first % per_epoch
    return min(first, total - count)


class StepProfiler:
    """Writes the trace of `count` steps of a run into its folder; count = 0: of none.

    done, per_epoch, total: steps that are behind, of an epoch, and of the run. All processes cut
    their epochs alike, and the main one looks. OneLineError where the run has not so many steps.
    """

    def __init__(self, count: int, *, done: int, per_epoch: int, total: int, folder: Path,
                 processes: Processes, say: Callable[[str], None]) -> None:
        self.count, self.folder, self.processes, self.say = count, folder, processes, say
        self.first = first_profiled(count, done=done, per_epoch=per_epoch, total=total)

    def parts(self, steps: Iterable[T], numbers: range) -> Iterator[Iterator[T]]:
        """The steps of an epoch, whose numbers these are, in parts to be worked on one by one."""
        steps = iter(steps)
        if self.count and self.first in numbers:
            yield islice(steps, self.first - numbers.start)
            if self.processes.is_main:
                with self._profiler() as profiler:
                    yield islice(steps, self.count)
                self._report(profiler)
            else:
                yield islice(steps, self.count)
        yield steps

    def _profiler(self) -> torch.profiler.profile:
        activities = [ProfilerActivity.CPU]
        if self.processes.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        else:                                        # it reports as an error that it finds no GPU
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        return torch.profiler.profile(activities=activities, acc_events=True)

    def _report(self, profiler: torch.profiler.profile) -> None:
        """The trace, and a line for each of the largest; what the disk refuses costs no training."""
        path = self.folder / f"profile_{self.first:06d}.json.gz"
        try:
            write_trace(profiler, path)
        except CheckpointError as error:
            self.say(f"warning {error}")
        on = "GPU" if self.processes.device.type == "cuda" else "CPU"
        self.say("\n".join([f"profile {self.count} step(s) from step {self.first:,} on, {path}; by "
                            f"time of their own on the {on}:",
                            *largest(profiler, self.count, self.processes.device)]))


def write_trace(profiler: torch.profiler.profile, path: Path) -> None:
    """Chrome's trace format, compressed; CheckpointError if it cannot be written."""
    with tempfile.TemporaryDirectory() as folder, written_atomically(path) as file:
        plain = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(plain)
        with open(plain, "rb") as trace, gzip.open(file, "wb") as packed:
            shutil.copyfileobj(trace, packed)


def largest(profiler: torch.profiler.profile, steps: int, device: torch.device) -> list[str]:
    """A line for each of the operations that take the most time of their own, without what they call.

    On a GPU these are its kernels and copies, whatever the host does meanwhile.
    """
    events = list(profiler.key_averages())
    if device.type == "cuda":
        own = [(event.self_device_time_total, event) for event in events
               if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    else:
        own = [(event.self_cpu_time_total, event) for event in events]
    whole = sum(time for time, _ in own) or 1.0                          # microseconds
    return [f"{100 * time / whole:8.1f} %  {time / steps / 1e3:10.3f} ms a step in "
            f"{event.count / steps:.4g} call(s): {in_brief(event.key, LONGEST_NAME)}"
            for time, event in sorted(own, key=lambda pair: -pair[0])[:LARGEST]]
