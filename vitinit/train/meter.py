"""What measures the training loop, from beside it: bars, clocks, rows, and how fast it goes.

The loop tells a `Meter` what happens. No weight depends on it: the loop trains the same with one
that measures nothing. The rows of a run's folder need the times of a `StepMeter`.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..base.messages import ProgressBar
from .distributed import Processes
from .metrics import Pace, Progress, StepRow

T = TypeVar("T")
STEPS_PER_ROW = 10  # steps between two rows of steps.jsonl; a row waits for the device
EARLY_ROWS = 10  # after so many of a start, the run tells how fast it goes,
LEAST_ROWS = 3  # or at the end of an epoch after at least so many


class Update(NamedTuple):
    """What one step did to the weights."""

    lr: float
    grad_norm: Tensor | None  # () on the device, of all weights before clipping; or not measured
    scale: Tensor | None  # () on the device: the loss scale; None without fp16


class Meter:
    """What the loop calls, and when. This one measures nothing."""

    @contextmanager
    def epoch(self, number: int) -> Iterator[None]:
        """A context in which epoch `number`, from 0, is trained."""
        yield

    def loading(self, steps: Iterable[T]) -> Iterable[T]:
        """The steps of an epoch, which are loaded as they are asked for."""
        return steps

    def begin_step(self, step: int) -> None:
        """Step number `step` of the run, from 0, has its images."""

    def wants_norm(self, step: int) -> bool:
        """Whether the norm of this step's gradients is to be computed."""
        return False

    def end_step(self, update: Update) -> None:
        """The step was launched, and is among the progress's losses."""

    def saved(self) -> None:
        """The run has been saved, which took its time."""


class StepMeter(Meter):
    """Measures a run, shows a bar for each epoch, and makes the rows of steps.jsonl."""

    def __init__(
        self,
        progress: Progress,
        processes: Processes,
        *,
        epochs: int,
        steps_per_epoch: int,
        global_batch: int,
        on_row: Callable[[StepRow], object] = lambda row: None,
        on_paces: Callable[[list[Pace]], object] = lambda paces: None,
        one_bar: bool = False,
    ) -> None:
        """epochs: of the whole run. steps_per_epoch: 0 shows no bar. one_bar: it is of all epochs,
        not of each. global_batch: images of a
        step, over all processes. Called on all processes: on_row, with each row; on_paces, once,
        with how fast each process went in the first steps of this start.
        """
        self.progress, self.processes = progress, processes
        self.epochs, self.steps_per_epoch = epochs, steps_per_epoch
        self.global_batch = global_batch
        self.on_row, self.on_paces, self.one_bar = on_row, on_paces, one_bar
        # For the bar: since when, and how many steps.
        self.bar = ProgressBar("", 0, shown=False)
        self.start, self.steps = time.perf_counter(), 0
        # For the rows: where the last one was, and what has been measured since.
        self.at_last_row = progress.epoch_steps, progress.seconds, progress.waiting_seconds
        self.idle_since = self.step_since = self.start
        self.loading_seconds = 0.0
        self.row_due = False
        self.paces: list[Pace] = []  # of this start's first rows
        self.told_paces = False

    @contextmanager
    def epoch(self, number: int) -> Iterator[None]:
        progress = self.progress
        if progress.epoch_steps == 0:
            self.at_last_row = 0, 0.0, 0.0
        self.loading_seconds = 0.0
        progress.clock.start()
        self.idle_since = time.perf_counter()
        before, total = 0, self.steps_per_epoch
        steps_after = (self.epochs - number - 1) * self.steps_per_epoch
        if self.one_bar:
            before, total = number * self.steps_per_epoch, self.epochs * self.steps_per_epoch
        self.bar = ProgressBar(
            f"epoch {number + 1}/{self.epochs}",
            total,
            initial=before + progress.epoch_steps,
            scale=self.global_batch,
            run=None if self.one_bar else (self.start, self.steps, steps_after),
            shown=self.processes.is_main and self.steps_per_epoch > 0,
        )
        with self.bar:
            yield
        # Evaluating is not training. After an exception the clock runs on, until the run is saved.
        progress.clock.stop()
        self.tell_paces(after=LEAST_ROWS)

    def loading(self, steps: Iterable[T]) -> Iterator[T]:
        began = time.perf_counter()
        for step in steps:
            self.loading_seconds += time.perf_counter() - began
            yield step
            began = time.perf_counter()

    def begin_step(self, step: int) -> None:
        self.progress.waiting_seconds += time.perf_counter() - self.idle_since
        self.row_due = (step + 1) % STEPS_PER_ROW == 0
        device = self.processes.device
        if self.row_due and not self.told_paces and device.type == "cuda":
            torch.cuda.synchronize(device)  # this step is measured alone
        self.step_since = time.perf_counter()

    def wants_norm(self, step: int) -> bool:
        return self.row_due

    def end_step(self, update: Update) -> None:
        if self.row_due:
            self.progress.read_losses(self.processes)
            row = self.row(update)
            self.on_row(row)
            self.progress.clock.start()  # what watchers measure for a row is not training
            self.tell_paces(after=EARLY_ROWS)
        self.show_loss()
        self.bar.update()
        self.steps += 1
        self.idle_since = time.perf_counter()

    def show_loss(self) -> None:
        """Let the bar say the mean loss of the epoch so far, without waiting for the device: a CPU
        has computed every step's, of this process's images; another tells every tenth step.
        """
        progress = self.progress
        unread = progress.losses if self.processes.device.type == "cpu" else []
        steps = progress.epoch_steps + len(unread)
        if steps and not self.bar.disable:
            mean = (progress.loss_sum + float(sum(unread))) / steps
            self.bar.set_postfix_str(f"loss {mean:.3f}", refresh=False)

    def saved(self) -> None:
        self.progress.clock.start()  # saving is not training, nor waiting
        self.idle_since = time.perf_counter()

    def row(self, update: Update) -> StepRow:
        """The row of the last step that was read; its rates are those since the previous row."""
        progress = self.progress
        here = progress.epoch_steps, progress.seconds, progress.waiting_seconds
        steps, seconds, waiting = (now - then for now, then in zip(here, self.at_last_row))
        self.at_last_row = here
        if not self.told_paces:
            alone = time.perf_counter() - self.step_since
            loading = self.loading_seconds / seconds
            self.paces.append(Pace(seconds / steps, alone, waiting / seconds, loading))
        self.loading_seconds = 0.0
        assert update.grad_norm is not None  # as `wants_norm` asked for it
        norm = update.grad_norm.item()
        return StepRow(
            step=progress.step,
            loss=progress.last_loss,
            lr=update.lr,
            grad_norm=norm if math.isfinite(norm) else None,
            scale=None if update.scale is None else update.scale.item(),
            images_per_second=steps * self.global_batch / seconds,
            waiting=waiting / seconds,
        )

    def tell_paces(self, *, after: int) -> None:
        """Tell, once, how fast each process goes: the median of at least that many rows."""
        if self.told_paces or len(self.paces) < after:
            return
        self.told_paces = True
        medians = torch.zeros(self.processes.world_size, len(Pace._fields))
        medians[self.processes.rank] = torch.tensor(self.paces).median(dim=0).values
        self.on_paces([Pace(*pace) for pace in self.processes.sum(medians).tolist()])
