"""The progress of a run: counts and sums over the current epoch, and the terminal's progress bar."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

from tqdm import tqdm

from ..messages import OneLineError

PLAIN_LINE_SECONDS = 30.0       # between two progress lines if standard error is not a terminal
T = TypeVar("T")


class StepRow(NamedTuple):
    """What steps.jsonl records of one step.

    All values but the last two are the same for an interrupted and resumed run as for one that ran
    through.
    """

    step: int                   # number of steps done, including this one
    loss: float                 # mean over the global batch of this step alone
    lr: float
    grad_norm: float | None     # over all weights, before clipping; None where fp16 overflowed
    scale: float | None         # the loss scale of this step; None without fp16
    images_per_second: float    # of all processes since the previous row, or since the epoch began
    waiting: float              # share of that time in which the training loop waited for data


class Diverged(OneLineError):
    """The loss or a weight became infinite or NaN; the message names the step."""

    status = 1                  # exit status: the recipe is valid, but training failed


@dataclass
class Progress:
    """How far a run has come, and the sums of its current epoch.

    Every checkpoint contains it, so that the sums of an epoch that was interrupted are complete.
    """

    step: int = 0               # global batches since the start of the run, skipped steps included
    epochs: int = 0             # epochs finished, including their evaluation
    epoch_steps: int = 0        # steps of the current epoch
    loss_sum: float = 0.0       # over the steps of the current epoch
    seconds: float = 0.0        # spent on training in the current epoch, without evaluation
    waiting_seconds: float = 0.0    # part of `seconds`: the training loop waited for data
    skipped_steps: int = 0      # since the start of the run: gradients overflowed in fp16
    best: float | None = None   # the best value so far of the metric checkpoint.best_by
    note = ""                   # the latest loss as text for the progress bar; not saved

    def add_losses(self, losses: list[float]) -> None:
        """Count one step per loss; raise Diverged, naming the step, for one that is not finite."""
        for loss in losses:
            if not math.isfinite(loss):
                raise Diverged(f"the loss of step {self.step} is {loss}")
            self.loss_sum += loss
            self.epoch_steps += 1
            self.step += 1
            self.note = f"loss {loss:.3f}"

    def improves(self, value: float | None, by: str) -> bool:
        """Whether `value` of the metric `by` is the best so far; if it is, remember it.

        None, NaN and infinity never count as best: no later value would compare as better than NaN.
        """
        if value is None or not math.isfinite(value):
            return False
        better = (self.best is None or math.isnan(self.best)     # as earlier versions may have saved
                  or (value < self.best if by == "val_loss" else value > self.best))
        if better:
            self.best = value
        return better

    def finish_epoch(self) -> None:
        """Count the current epoch as finished and reset its sums."""
        self.epochs += 1
        self.epoch_steps, self.loss_sum, self.seconds, self.waiting_seconds = 0, 0.0, 0.0, 0.0

    def state_dict(self) -> dict[str, Any]:
        """The fields as a dictionary of plain values."""
        return asdict(self)


class ProgressBar:
    """A tqdm bar on a terminal; otherwise a printed line every 30 seconds; nothing if not `shown`.

    what: the words before the bar. total: the number of items. initial: how many of them are done.
    """

    def __init__(self, what: str, total: int, *, initial: int = 0, shown: bool = True) -> None:
        self.what, self.total, self.done, self.shown = what, total, initial, shown
        self.terminal = shown and sys.stderr.isatty()
        self.bar = tqdm(desc=what, total=total, initial=initial, disable=not self.terminal,
                        leave=False, dynamic_ncols=True)
        self.started = self.last_line = time.monotonic()
        self.initial = initial

    def advance(self, note: str = "") -> None:
        """Count one item as done and show `note` beside the bar."""
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
        """Yield the items; each is counted when the next one is requested."""
        for item in items:
            yield item
            self.advance(note())

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()
