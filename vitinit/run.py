"""A run: from a recipe to its last checkpoint. programs/train.py starts one from a command line.

    run = vitinit.Run("quickstart", init="impulse", out_dir="runs/mine").train()
    run.rows[-1]["val_top1"]; run.state.model; run.folder.path

`Run.train` names the parts in order: recipe → data → model, init and optimiser → folder → loop.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from .base.files import CheckpointError, write_text_atomically
from .base.keys import Stream, keyed_generator
from .base.messages import ProgressBar, counted, in_brief, warn
from .data.images import DataError
from .data.sources import file_sizes, fingerprint, folder_of
from .models.layers import Classifier, draw_drop_path
from .recipe.files import RecipeError, building, overrides as recipe_changes
from .runs.data import open_data, read_images
from .runs.folder import Lines
from .runs.load import fetch, published
from .runs.model import task_of, wrap_models
from .runs.resume import Choice, Request, RunLock, choose_run, require_same_data
from .runs.start import initial_state
from .runs.summary import at_a_glance, cautions, rehearsal, summary
from .runs.watching import BY_DEFAULT, Watchers
from .train import distributed
from .train.device import describe_device, forget_peak, memory_for, peak_gib
from .train.interruption import Interrupted, StopRequest
from .train.loop import read_losses, set_precision, train_epochs, tune_convolutions
from .train.metrics import Diverged, StepRow, epoch_line, metrics_row, paces_of_all, training_flops
from .train.optim import learning_rate, set_learning_rate


class Run:
    """One run: a new one, or one that goes on. Nothing is read or written before `train`.

    Under torchrun every process makes the same one. Outside of the main thread, signals are left
    to the program that has the main thread.

    Once `train` has returned: `recipe`, with every option resolved; `data`, the opened images and
    their batches; `state`, with the trained model on its device; `folder`, with all files; `rows`.
    A run that was finished already, and of which no checkpoint is left, has folder and rows alone.
    """

    def __init__(
        self,
        recipe: str | os.PathLike | None = None,
        *,
        init: str | None = None,
        seed: int | None = None,
        data_dir: str | os.PathLike | None = None,
        out_dir: str | os.PathLike | None = None,
        resume: str | os.PathLike | None = None,
        overrides: Mapping[str, Any] | Sequence[str] = (),
        verbose: bool = False,
        log: Sequence[str] = (),
        trust_teacher: bool = False,
    ) -> None:
        """State which run is meant.

        Args:
            recipe: a name in recipes/, or the path of a .toml file.
            init, seed, data_dir: replace the recipe's init.name, run.seed and data.root.
            out_dir: the run's folder; default: runs/<recipe>-<init>-s<seed>.
            resume: the folder of a run to go on with; "auto": the one in `out_dir`, if any.
            overrides: values for keys of the recipe, such as {"schedule.epochs": 3}, or a list of
                texts such as "schedule.epochs=3".
            verbose: print all of what start.txt in the folder will say, not only the most of it.
            log: "tensorboard", "wandb" or both, which get the rows as they are written.
            trust_teacher: read a teacher that is a program (.pt2), which can execute any code.

        Raises RecipeError for what cannot be a key, and loggers that are not installed.
        """
        changes = recipe_changes(
            init=init,
            seed=seed,
            sets=overrides,
            data_dir=None if data_dir is None else os.fspath(data_dir),
        )
        self.request = Request(recipe, changes, None if out_dir is None else Path(out_dir), resume)
        self.verbose, self.trust_teacher = verbose, trust_teacher
        self.watchers = Watchers([*BY_DEFAULT, *([log] if isinstance(log, str) else log)])
        self.command: list[str] | None = None  # that started it, if one did
        self.objective: Callable[..., Tensor] | None = None  # in place of the task's, if any

    def train(self) -> Run:
        """Do the run, or what is left of it; return it. Raises a OneLineError, such as RecipeError,
        DataError or CheckpointError, for what the user can mend; Diverged if the loss or a weight
        is not finite; Interrupted after a signal, once the run is saved.
        """
        with distributed.joined() as self.processes, RunLock() as self.lock:
            self.folder, choice = choose_run(self.request, self.processes, self.lock)
            if choice is None:
                self.processes.say(
                    f"done    {self.folder.path}: all epochs, by its metrics.jsonl; "
                    "no last.pt is left"
                )
                return self
            facts = self._open_data(choice)  # images and teacher
            self._start_state(choice)  # model, init, optimiser
            del choice  # frees the second copy of its tensors
            with StopRequest() as stop, ExitStack() as ending:  # there is something to save
                self._set_up_folder(facts)
                if self.processes.is_main:
                    ending.callback(self._tell, "ended")
                    self._tell(
                        "started", self.folder, self.state.progress.step, self.steps_per_epoch
                    )
                self._train(stop)
        return self

    def rehearse(self, *, read: bool = False) -> bool:
        """Build everything, print it and run one forward pass; write nothing. read: also decode all
        images, and list those that cannot be. Returns False if there are any.
        """
        with distributed.joined() as self.processes:
            self.folder, choice = choose_run(self.request, self.processes, RunLock(), dry_run=True)
            assert choice is not None  # a new run is never done
            self._open_data(choice, dry_run=True)
            if read and read_images(self.recipe, self.data, self.processes):
                return False
            self._start_state(choice)
            self._say_start("by --verbose")
            self.processes.say(rehearsal(self.recipe, self.data, self.state, self.task))
        return True

    @property
    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl: a row per finished epoch."""
        return self.folder.metrics.rows()

    def _open_data(self, choice: Choice, *, dry_run: bool = False) -> dict[str, Any]:
        """Fetch the weights to start from; open the images, and the teacher of their classes;
        return the facts about both. Raises a OneLineError on all processes if these differ between
        them, or from those that the run began with.
        """
        processes, recipe = self.processes, choice.recipe
        alike = {
            key: value
            for key, value in recipe.keys.items()
            if key not in ("data.root", "data.workers")
        }
        processes.require_equal(
            alike
            | {
                "the version of torch": torch.__version__,
                "the step to go on from": self.folder.step,
            }
        )
        if choice.saved is None and not dry_run and (name := recipe.init.checkpoint):
            with processes.together():
                if processes.local_rank == 0 and (weights := published(name)):
                    fetch(weights)
        with building(f"recipe {recipe.name}", "data"):
            self.data = data = open_data(recipe, processes, dry_run=dry_run, strided=choice.strided)
        self.classes = classes = (
            [*map(str, data.whole_set.classes)] if recipe.task.kind.learns_classes else []
        )
        self.recipe = recipe = recipe.with_data(num_classes=len(classes))
        self.epochs, self.steps = recipe.schedule.total_epochs, data.train_batches.steps
        self.steps_per_epoch = data.train_batches.steps_per_epoch
        self.learning_rate = partial(
            learning_rate,
            schedule=recipe.schedule,
            peak=recipe.optim.peak_lr,
            steps_per_epoch=self.steps_per_epoch,
        )
        self.task = task_of(recipe, classes)
        if recipe.distill.teacher:
            if self.objective is not None:
                raise RecipeError(
                    "distill.teacher is given, and another objective, which would "
                    "not ask it: leave one of them out"
                )
            from .runs.teacher import learn_from_teacher  # here, as only some runs need it

            with processes.together():
                self.task = learn_from_teacher(
                    recipe, classes, processes.device, trusted=self.trust_teacher
                )
        root = recipe.data.root
        facts = {
            "training images": len(data.train_set),
            "validation images": len(data.val_set),
            "files and labels": "".join(
                fingerprint(images, root) for images in (data.train_set, data.val_set)
            ),
            "teacher": self.task.digest,
        }
        if recipe.model.name.startswith("convmixer"):  # whose BatchNorm sees a micro-batch
            facts["images per micro-batch"] = data.plan.micro_batch_size
        facts["strided pairs"] = data.plan.strided
        processes.require_equal(facts)
        if processes.is_main and not dry_run:
            facts |= file_sizes([data.train_set, data.val_set], recipe.run.seed)
        facts["root"] = root and str(folder_of(root).absolute())
        if choice.saved is not None:
            with processes.together():
                require_same_data(self.folder, choice.saved, classes, facts)
        return facts

    def _start_state(self, choice: Choice) -> None:
        """Build the model, from its init or from what is saved, and its optimiser."""
        recipe, data = self.recipe, self.data
        self.state, notes = initial_state(
            recipe,
            self.processes,
            self.task,
            data.train_set,
            choice.saved,
            self.folder.read_from,
            self.watchers,
        )
        self.state.about = {
            "recipe": recipe.with_data(root=choice.written_root).as_dict(),
            "classes": self.classes,
        }
        progress = self.state.progress
        steps = progress.epochs * self.steps_per_epoch + progress.epoch_steps
        if progress.step != steps or progress.epoch_steps and not progress.seconds:
            raise CheckpointError(
                f"{self.folder.read_from}: its progress contradicts itself: "
                f"{in_brief(progress)}, of {self.steps_per_epoch:,} per epoch"
            )
        if step := progress.step:  # for a checkpoint before the next step
            set_learning_rate(self.state.optimizer, self.learning_rate(step - 1))
        set_precision(recipe.engine.tf32)
        tune_convolutions(self.state.model)
        self.start = summary(
            recipe,
            data,
            self.state.model,
            [*notes, *self.task.notes()],
            self.state.optimizer,
            self.learning_rate,
            self.processes,
        )
        seen = []
        if choice.saved is None and self.processes.is_main:
            seen = self.watchers.tell("opened", data, recipe)
        warned = [line for line in seen if line.startswith("warning ")]
        self.start += [line for line in seen if line not in warned]
        self.start.append(
            f"run     {self.folder.path}" + (f", resumed at step {step:,}" if choice.saved else "")
        )
        self.start += [
            *warned,
            *(
                f"warning {line}"
                for line in cautions(
                    recipe, data, cast(Classifier, self.state.model).grid, self.processes.device
                )
            ),
        ]

    def _say_start(self, elsewhere: str) -> None:
        """Print what a terminal shows of the start. elsewhere: where all of it is."""
        for line in self.start if self.verbose else at_a_glance(self.start, elsewhere):
            self.processes.say(line)

    def _set_up_folder(self, facts: Mapping[str, Any]) -> None:
        """Lock the folder, write what it holds before the first step, and say what starts. In a
        resumed run, what is newer than its checkpoint is removed. Raises CheckpointError if the
        folder cannot be used.
        """
        folder, progress, processes = self.folder, self.state.progress, self.processes
        with processes.together():
            if processes.is_main:
                folder.make()
                self.lock.take(folder.path)
                if folder.step is not None:  # of the checkpoint that was read
                    folder.tidy(epochs=progress.epochs, steps=progress.step)
                else:
                    folder.require_unused(starts_again=self.request.resume is not None)
                    write_text_atomically(self.recipe.as_toml(), folder.recipe)
                    folder.save(self.state.state_dict(), folder.last)  # which a restart finds
                if progress.step == 0 and 0 in self.recipe.checkpoint.keep_epochs:
                    folder.save(self.state.weights(), folder.kept(0))
                folder.record_start(
                    self.recipe.name,
                    self.request.as_dict(),
                    self.command,
                    processes=processes.world_size,
                    data=facts,
                    device=describe_device(processes.device),
                )
                write_text_atomically("\n".join([*self.start, ""]), folder.start)
        self._say_start(f"in {folder.start}")

    def _train(self, stop: StopRequest) -> None:
        """Train, evaluate and save until the run ends or is stopped."""
        recipe, progress, plan = self.recipe, self.state.progress, self.data.plan
        processes, self.stop = self.processes, stop
        self.global_batch, self.clip_norm = recipe.optim.global_batch, recipe.optim.clip_norm
        self.amp: str = recipe.engine.amp
        self.save_every = recipe.checkpoint.every_steps
        self.flops = training_flops(self.state.model, plan.micro_batch_size, recipe.data.image_size)
        self.forward, self.measured = wrap_models(self.state, recipe, processes)
        forget_peak(processes.device)
        try:
            with memory_for("optim.max_batch_per_process", plan.micro_batch_size):
                train_epochs(self, processes, stop)
        except (Interrupted, DataError) as ended:  # between two steps
            self.save()
            if processes.is_main and isinstance(ended, DataError):
                self.folder.forget_sizes()
            why = (
                f"the run is safe at step {progress.step:,}; once that is mended,"
                if isinstance(ended, DataError)
                else f"stopped by signal {ended.number} after step {progress.step:,};"
            )
            processes.say(f"{why} go on with --resume {self.folder.path}")
            raise
        except Diverged as diverged:
            fault = self.task.fault(processes)
            advice = (
                f"; {self.folder.last} is from before, but would go the same way again: "
                "start anew with a lower optim.base_lr, say, or optim.clip_norm"
            )
            raise Diverged(f"{diverged}{fault or advice}") from None
        finally:
            del self.forward, self.measured  # which hold the group of the processes
        best = "none" if progress.best is None else f"{progress.best:.2f}"
        path = shlex.quote(str(self.folder.path))
        processes.say(
            f"done    {counted(self.epochs, 'epoch')}, best {recipe.checkpoint.best_by} "
            f"{best}, peak memory {peak_gib(processes.device):.2f} GiB\n"
            f"next    vitinit figures report {path} --out report.html\n"
            f"        {self.task.next_step(path)}"
        )

    def drop_path(self, step: int) -> Tensor | None:
        """The drop-path scales (branches, global batch) of a step; None without drop path, and
        where the blocks are not trained.
        """
        rates = cast(Classifier, self.state.model).drop_path_rates
        if not any(rates) or self.recipe.optim.train == "head":
            return None
        return draw_drop_path(
            rates,
            self.recipe.optim.global_batch,
            keyed_generator(self.recipe.run.seed, Stream.DROP_PATH, step),
        )

    def loss(
        self, forward: nn.Module, images: Tensor, scales: Sequence[Tensor], targets: Tensor
    ) -> Tensor:
        """The loss of a micro-batch: the task's, or the user's own."""
        return (self.objective or self.task.loss)(forward, images, scales, targets)

    def record(self, row: StepRow) -> None:
        with self.processes.together():
            if self.processes.is_main:
                self._append(self.folder.steps, row._asdict())
        self._explain_waiting(rows=10)

    def _explain_waiting(self, *, rows: int) -> None:
        """Say what the run waits for, once, as soon as this start has that many rows of steps."""
        progress, processes = self.state.progress, self.processes
        if progress.paces is None or len(progress.paces) < rows:
            return
        paces, progress.paces = paces_of_all(progress.paces, processes), None
        if processes.is_main:
            for line in self.watchers.tell("paced", paces, self.recipe, processes):
                warn(line)

    def _append(self, lines: Lines, row: Mapping[str, Any]) -> None:
        """Append a row to a file of the folder, and send it on."""
        self.lock.keep()
        lines.append(row)
        self._tell("row", lines, row)

    def _tell(self, event: str, *facts: Any) -> None:
        """Tell the watchers, and print what they answer."""
        for line in self.watchers.tell(event, *facts):
            self.processes.say(line)

    def save(self) -> None:
        """Write last.pt; all processes wait until the main one has written it."""
        read_losses(self.state, self.processes)
        with self.processes.together():
            if self.processes.is_main:
                self.lock.keep()
                self.folder.save(self.state.state_dict(), self.folder.last)

    def finish_epoch(self, epoch: int) -> None:
        """Evaluate and save, where the recipe says so, and append a line to metrics.jsonl."""
        recipe, progress, processes = self.recipe, self.state.progress, self.processes
        self._explain_waiting(rows=3)
        save_due = epoch % recipe.checkpoint.every_epochs == 0 or epoch == self.epochs
        evaluations = []
        if len(self.data.val_set) and (
            epoch % recipe.eval.every_epochs == 0 or epoch == self.epochs
        ):
            if save_due:  # an error in evaluation then loses no training
                self.save()
            processes.share(*self.measured)
            batches = self.data.val_batches
            with (
                ProgressBar(
                    "validate",
                    len(batches),
                    items=batches,
                    shown=processes.is_main,
                    scale=batches.batch_size * processes.world_size,
                ) as bar,
                memory_for("eval.batch_size", batches.batch_size),
            ):
                evaluations = self.task.measure(
                    self.measured,
                    bar,
                    loss=self.loss,
                    amp=self.amp,
                    processes=processes,
                    stop=self.stop,
                )
        row = metrics_row(
            progress,
            evaluations,
            lr=self.learning_rate(progress.step - 1),
            flops=self.flops,
            global_batch=self.global_batch,
            processes=processes,
        )
        progress.finish_epoch()
        processes.say(epoch_line(row, self.epochs))
        best_by, folder = recipe.checkpoint.best_by, self.folder
        is_best = progress.improves(row[best_by], best_by)
        with processes.together():
            if processes.is_main:
                # If the run dies before last.pt is written, resuming removes the line of metrics.
                self._append(folder.metrics, row)
                if is_best:
                    folder.save(self.state.weights(), folder.best)
                if epoch in recipe.checkpoint.keep_epochs:
                    folder.save(self.state.weights(), folder.kept(epoch))
        if save_due:
            self.save()
