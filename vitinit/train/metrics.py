"""Where a run is: the state of the running epoch, and what the terminal shows of it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

from tqdm import tqdm

from ..messages import OneLineError

PLAIN_LINE_SECONDS = 30.0       # between two progress lines where there is no terminal
T = TypeVar("T")


class StepRow(NamedTuple):
    """One step as it went. All but the last two are the same however often a run was interrupted."""

    step: int                   # steps done, this one included
    loss: float                 # of this step, the mean over its global batch
    lr: float
    grad_norm: float | None     # over all weights, before clipping; None where fp16 overflowed
    scale: float | None         # of the loss, under which this step was taken; None without fp16
    images_per_second: float    # of all processes since the row before, or since the epoch went on
    waiting: float              # share of that time in which the training loop waited for data


class Diverged(OneLineError):
    """The loss or a weight became infinite or NaN; the message names the step."""

    status = 1                  # the recipe is sound, its training is not


@dataclass
class Progress:
    """Where a run is. It travels in every checkpoint, so that a resumed epoch adds up."""

    step: int = 0               # global batches seen since the start, skipped ones included
    epochs: int = 0             # finished, their evaluation included
    epoch_steps: int = 0        # steps of the running epoch
    loss_sum: float = 0.0       # of the running epoch
    seconds: float = 0.0        # of the running epoch, training alone
    waiting_seconds: float = 0.0    # of these, those in which the training loop waited for data
    skipped_steps: int = 0      # since the start; steps whose gradients overflowed in fp16
    best: float | None = None   # the best value so far of what checkpoint.best_by names
    note = ""                   # the last loss in words, for people; not saved

    def add_losses(self, losses: list[float]) -> None:
        """Count steps in; raises Diverged, naming the first step that is to blame."""
        for loss in losses:
            if not math.isfinite(loss):
                raise Diverged(f"the loss of step {self.step} is {loss}")
            self.loss_sum += loss
            self.epoch_steps += 1
            self.step += 1
            self.note = f"loss {loss:.3f}"

    def improves(self, value: float | None, by: str) -> bool:
        """Whether `value` of the metric `by` is the best so far, which it then becomes.

        NaN and infinity are never best, since nothing could be better than NaN later.
        """
        if value is None or not math.isfinite(value):
            return False
        better = (self.best is None or math.isnan(self.best)     # as a run of earlier days had it
                  or (value < self.best if by == "val_loss" else value > self.best))
        if better:
            self.best = value
        return better

    def finish_epoch(self) -> None:
        self.epochs += 1
        self.epoch_steps, self.loss_sum, self.seconds, self.waiting_seconds = 0, 0.0, 0.0, 0.0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)


class ProgressBar:
    """tqdm on a terminal; elsewhere a plain line now and then; nothing if not `shown`."""

    def __init__(self, what: str, total: int, *, initial: int = 0, shown: bool = True) -> None:
        self.what, self.total, self.done, self.shown = what, total, initial, shown
        self.terminal = shown and sys.stderr.isatty()
        self.bar = tqdm(desc=what, total=total, initial=initial, disable=not self.terminal,
                        leave=False, dynamic_ncols=True)
        self.started = self.last_line = time.monotonic()
        self.initial = initial

    def advance(self, note: str = "") -> None:
        self.done += 1
        if self.terminal:
            self.bar.set_postfix_str(note, refresh=False)
            self.bar.update()
            return
        now = time.monotonic()
        if self.shown and now - self.last_line >= PLAIN_LINE_SECONDS and self.done < self.total:
            left = (now - self.started) / (self.done - self.initial) * (self.total - self.done)
            print(", ".join(filter(None, [f"{self.what}: {self.done}/{self.total}", note,
                                          f"{left:.0f} s left"])), flush=True)
            self.last_line = now

    def over(self, items: Iterable[T], note: Callable[[], str] = lambda: "") -> Iterator[T]:
        """The items, each counted once it has been worked on."""
        for item in items:
            yield item
            self.advance(note())

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()
