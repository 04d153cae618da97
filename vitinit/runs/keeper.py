"""Writes a run's folder: its start, rows and checkpoints (last.pt, best.pt); evaluates its epochs."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..base.files import write_text_atomically
from ..base.messages import say, warn
from ..data.images import DataError
from ..data.pipeline import Data
from ..recipe.sections import Recipe
from ..tasks import Task
from ..train.device import describe_device, forget_peak, memory_for
from ..train.interruption import Interrupted
from ..train.loop import Keeper, Training, check_finite
from ..train.meter import StepMeter
from ..train.metrics import (
    Diverged,
    Evaluation,
    Pace,
    StepRow,
    epoch_line,
    metrics_row,
    training_flops,
)
from ..train.state import TrainState
from .data import validation_bar
from .folder import Lines, RunFolder
from .model import compiled
from .resume import Request, RunLock
from .watching import Watchers


def begin_folder(
    folder: RunFolder,
    lock: RunLock,
    request: Request,
    recipe: Recipe,
    training: Training,
    facts: Mapping[str, Any],
    start: Sequence[str],
    *,
    resumed: bool,
) -> None:
    """Lock the folder, and write what it holds before the first step. In a resumed run, lines that
    are newer than its checkpoint are removed. facts: about the data. start: the lines of start.txt.

    Raises CheckpointError, on all processes, if the folder cannot be used.
    """
    state, processes = training.state, training.processes
    progress = state.progress
    with processes.together():
        if not processes.is_main:
            return
        folder.make()
        lock.take(folder.path)
        if resumed:
            folder.tidy(epochs=progress.epochs, steps=progress.step)
        else:
            folder.require_unused(starts_again=request.resume is not None)
            write_text_atomically(recipe.as_toml(), folder.recipe)
        folder.record_start(
            recipe.name,
            request.as_dict(),
            request.command,
            request.imports,
            processes=processes.world_size,
            data=facts,
            device=describe_device(processes.device),
            resumed=resumed,
        )
        write_text_atomically("\n".join([*start, ""]), folder.start)
        # The checkpoint comes last: from when it is there, a run goes on by the files above.
        if not resumed:
            folder.save(state.state_dict(), folder.last)
        if progress.step == 0 and 0 in recipe.checkpoint.keep_epochs:
            folder.save(state.weights(), folder.kept(0))


class RunKeeper(Keeper):
    """Keeps what is trained in the run's folder, evaluates it, and tells the watchers.

    Its methods are called on all processes; the main one alone writes.
    """

    def __init__(
        self,
        folder: RunFolder,
        lock: RunLock,
        recipe: Recipe,
        data: Data,
        task: Task,
        training: Training,
        watchers: Watchers,
        *,
        quiet: bool = False,
    ) -> None:
        """quiet: a row is told by the bar alone, and nothing at the end."""
        self.folder, self.lock = folder, lock
        self.recipe, self.data, self.task = recipe, data, task
        self.training, self.watchers, self.quiet = training, watchers, quiet
        self.models = models_to_measure(training.state, recipe)
        self.flops = training_flops(
            training.state.model,
            data.plan.micro_batch_size,
            recipe.data.image_size,
            recipe.data.channels,
        )

    def meter(self) -> StepMeter:
        """What measures the run, and calls this keeper."""
        return StepMeter(
            self.training.state.progress,
            self.training.processes,
            epochs=self.training.epochs,
            steps_per_epoch=self.data.steps_per_epoch,
            global_batch=self.recipe.optim.global_batch,
            on_row=self.add_row,
            on_paces=self.tell_paces,
            one_bar=self.quiet,
        )

    def save(self) -> None:
        """Write last.pt; all processes wait until the main one has written it."""
        state, processes = self.training.state, self.training.processes
        check_finite(state, processes)
        with processes.together():
            if processes.is_main:
                self.lock.keep()
                self.folder.save(state.state_dict(), self.folder.last)

    def end_epoch(self, epoch: int) -> None:
        """Evaluate and save, where the recipe says so, and append a line to metrics.jsonl."""
        recipe, training = self.recipe, self.training
        state, processes = training.state, training.processes
        progress, is_last = state.progress, epoch == training.epochs
        save_due = is_last or epoch % recipe.checkpoint.every_epochs == 0
        every = recipe.eval.every_epochs
        evaluation_due = every > 0 and (is_last or epoch % every == 0)
        evaluations = []
        if evaluation_due and len(self.data.val_set) > 0:
            if save_due:
                self.save()  # the epoch is to be evaluated: an error then loses no training
            evaluations = self.evaluate()
        row = metrics_row(
            progress,
            evaluations,
            lr=training.learning_rate(progress.step - 1),
            flops=self.flops,
            global_batch=recipe.optim.global_batch,
            processes=processes,
        )
        progress.finish_epoch()
        if not (self.quiet and sys.stderr.isatty()):  # where there is a bar
            processes.say(epoch_line(row, training.epochs))
        best_by = recipe.checkpoint.best_by
        is_best = progress.improves(row.get(best_by), best_by)
        with processes.together():
            if processes.is_main:
                # If the run dies before last.pt is written, resuming removes the line of metrics.
                self.append(self.folder.metrics, row)
                if is_best:
                    self.folder.save(state.weights(), self.folder.best)
                if epoch in recipe.checkpoint.keep_epochs:
                    self.folder.save(state.weights(), self.folder.kept(epoch))
        if save_due:
            self.save()  # the epoch is finished

    def evaluate(self) -> list[Evaluation]:
        """Measure the model and its moving average on all validation images."""
        training, batches = self.training, self.data.val_batches
        processes = training.processes
        processes.share(*self.models)
        bar = validation_bar(batches, "validate", processes)
        with bar, memory_for("eval.batch_size", batches.batch_size):
            return self.task.measure(
                self.models,
                bar,
                loss=training.loss,
                amp=training.amp,
                processes=processes,
                stop=training.stop,
            )

    def append(self, lines: Lines, row: Mapping[str, Any]) -> None:
        """By the main process: append a row to a file of the folder, and tell the watchers."""
        self.lock.keep()
        lines.append(row)
        self.tell("row", lines, row)

    def add_row(self, row: StepRow) -> None:
        """Append a row to steps.jsonl, with what watchers measure for it."""
        state, processes = self.training.state, self.training.processes
        with processes.together():
            if processes.is_main:
                entries = row._asdict()
                self.tell("measured", entries, state.model, self.recipe, self.data.train_set)
                self.append(self.folder.steps, entries)

    def tell_paces(self, paces: Sequence[Pace]) -> None:
        """Warn of what the run waits for. paces: of the first steps of each process."""
        processes = self.training.processes
        if processes.is_main:
            for line in self.watchers.tell("paced", paces, self.recipe, processes):
                warn(line)

    def tell(self, event: str, *facts: Any) -> None:
        """By the main process: tell the watchers, and print what they answer."""
        for line in self.watchers.tell(event, *facts):
            self.training.processes.say(line)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """A context for the training, of which watchers are told the start and any end. If it
        diverges, the error gives advice; if it is stopped, the run is saved.
        """
        training, micro_batch_size = self.training, self.data.plan.micro_batch_size
        processes = training.processes
        forget_peak(processes.device)
        if processes.is_main:
            step = training.state.progress.step
            self.tell("started", self.folder, step, self.data.steps_per_epoch)
        try:
            with memory_for("optim.max_batch_per_process", micro_batch_size), self.saving():
                yield
        except Diverged as diverged:
            advice = self.task.fault(processes) or (
                f"; {self.folder.last} is from before, but would go the same way again: start anew "
                "with a lower optim.base_lr, say, or optim.clip_norm"
            )
            raise Diverged(f"{diverged}{advice}") from None
        finally:
            if processes.is_main:
                self.tell("ended")

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A context after which a run that was stopped between two steps, by a signal or by data
        that cannot be read, is saved, and prints how to go on.
        """
        progress, processes = self.training.state.progress, self.training.processes
        try:
            yield
        except Interrupted as ended:
            self.save()
            why = f"{ended} after step {progress.step:,};"
            processes.say(f"{why} go on with --resume {self.folder.in_commands}")
            raise
        except DataError:
            self.save()
            if processes.is_main:
                self.folder.forget_sizes()
            why = f"the run is safe at step {progress.step:,}; once that is mended,"
            processes.say(f"{why} go on with --resume {self.folder.in_commands}")
            raise

    def say_done(self) -> None:
        """By the main process: print how good the run is, and what can be done with it."""
        if self.quiet or not self.training.processes.is_main:
            return
        good = self.watchers.tell("finished", self.folder)
        path = self.folder.in_commands
        steps = f"vitinit figures report {path} --out report.html", self.task.next_step(path)
        for title, lines in (("done", good), ("next", steps)):
            say(f"{title:8}" + "\n        ".join(lines))


def models_to_measure(state: TrainState, recipe: Recipe) -> list[nn.Module]:
    """What is evaluated: the state's model and, if there is one, its moving average. They share
    its weights, and call no other process.
    """
    models = [state.model]
    if state.ema is not None:
        models.append(state.ema.model)
    return [compiled(model, recipe.engine) for model in models]
