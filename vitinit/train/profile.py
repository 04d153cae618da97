"""Run some training steps under torch's profiler, which does not change their results.

    done … first − 1: warm-up │ first … first + count − 1: profiled │ the rest: not profiled
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from ..messages import OneLineError

WARMUP_STEPS = 10               # before the first profiled step, if the run is long enough
LARGEST = 10                    # operations that are printed


def first_profiled(count: int, *, done: int, per_epoch: int, total: int) -> int:
    """The number of the first step to profile.

    The `count` profiled steps lie within one epoch, so that no evaluation comes between them.
    Before them the run does WARMUP_STEPS steps, or fewer if it would otherwise end too soon.

    done: number of steps the run has already done. per_epoch, total: steps per epoch and in the
    run. Raises OneLineError if the epoch, or what is left of the run, has fewer than `count` steps.
    """
    available = min(per_epoch, total - done)
    if count > available:
        of = "of an epoch" if available == per_epoch else "that the run has left"
        raise OneLineError(f"--profile {count}: expected at most {available}, the steps {of}")
    first = done + WARMUP_STEPS
    if first % per_epoch + count > per_epoch:        # it would reach into the next epoch
        first += per_epoch - first % per_epoch
    return min(first, total - count)


class StepProfiler:
    """Writes the trace of `count` steps of a run, from step `first` on, into `folder`.

    On leaving its context, a trace that is not complete is dropped.
    """

    def __init__(self, count: int, *, done: int, per_epoch: int, total: int, folder: Path,
                 device: torch.device, say: Callable[[str], object] = print) -> None:
        """done, per_epoch, total: see `first_profiled`, which chooses the first step."""
        self.first = first_profiled(count, done=done, per_epoch=per_epoch, total=total)
        self.count, self.folder = count, folder
        self.device, self.say = device, say
        self.running: torch.profiler.profile | None = None

    def begin(self, step: int) -> None:
        """To be called before each step."""
        if step == self.first:
            activities = [ProfilerActivity.CPU]
            if self.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            else:                                    # else it reports the missing GPU as an error
                os.environ.setdefault("KINETO_LOG_LEVEL", "6")
            self.running = torch.profiler.profile(activities=activities, acc_events=True)
            self.running.start()

    def end(self, step: int) -> None:
        """To be called after each step."""
        if self.running is not None and step + 1 == self.first + self.count:
            self.running.stop()
            self._report(self.running)
            self.running = None

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, *error: object) -> None:
        if self.running is not None:
            self.running.stop()

    def _report(self, profiler: torch.profiler.profile) -> None:
        """Write the trace and print torch's table of the largest operations.

        They are sorted by the time spent in themselves, without the operations that they call. If
        the trace cannot be written, a warning is printed and training goes on.
        """
        path = self.folder / f"profile_{self.first:06d}.json.gz"
        try:
            profiler.export_chrome_trace(str(path))
        except OSError as error:
            self.say(f"warning {path}: cannot be written: {error.strerror or error}")
        on = "device" if self.device.type == "cuda" else "cpu"
        table = profiler.key_averages().table(sort_by=f"self_{on}_time_total", row_limit=LARGEST)
        self.say(f"profile {self.count} step(s) from step {self.first:,} on, {path}\n{table}")
