"""A run: from a recipe to its last checkpoint. programs/train.py starts one from a command line.

    run = vitinit.Run("quickstart", init="impulse", out_dir="runs/mine")
    run.train()
    run.rows[-1]["val_top1"], run.state.model, run.folder.path

`Run.train` is read from top to bottom: recipe → data → task → model and init → optimiser → folder →
loop. The loop itself is in train/loop.py; what it calls to evaluate and save, in runs/keeper.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from .base.messages import OneLineError
from .data.pipeline import Data
from .models.layers import Classifier
from .recipe.files import RecipeError, overrides as recipe_changes
from .recipe.sections import Recipe
from .runs.data import facts_of, open_data, read_images
from .runs.folder import RunFolder
from .runs.imports import import_parts
from .runs.keeper import RunKeeper, begin_folder
from .runs.model import build, trained_model
from .runs.resume import Request, RunLock, choose_run, require_same_data
from .runs.start import (
    draw_weights,
    drop_path_of,
    fetch_weights,
    model_to_train,
    new_state,
    objective_of,
    open_task,
    restore,
    shifts_of,
)
from .runs.summary import at_a_glance, rehearsal, start_lines
from .runs.watching import BY_DEFAULT, Watchers
from .tasks import Task
from .train import distributed
from .train.distributed import Processes
from .train.interruption import StopRequest
from .train.loop import Training, train_epochs
from .train.optim import LearningRate
from .train.state import TrainState


class Run:
    """One run: a new one, or one that goes on. Before `train` nothing but `imports` is read.

    Under torchrun every process makes the same one. Outside of the main thread, signals are left
    to the program that has the main thread. It has the attributes of its `result`, too.
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
        quiet: bool = False,
        log: Sequence[str] = (),
        trust_teacher: bool = False,
        imports: Sequence[str | os.PathLike] = (),
        objective: Callable[..., Tensor] | None = None,
        first_epochs: int | None = None,
        command: list[str] | None = None,
    ) -> None:
        """State which run is meant.

        Args:
            recipe: a name in recipes/, or the path of a .toml file.
            init, seed, data_dir: replace the recipe's init.name, run.seed and data.root.
            out_dir: the run's folder; default: runs/<recipe>-<init>-s<seed>.
            resume: the folder of a run to go on with; "auto": the one in `out_dir`, if any.
            overrides: values for keys of the recipe, such as {"schedule.epochs": 3}, or a list of
                texts such as "schedule.epochs=3".
            verbose: print all that start.txt in the folder will say, not only the main lines.
            quiet: print nothing but the bar, and what goes wrong.
            log: "tensorboard", "wandb" or both, which get the rows as they are written.
            trust_teacher: read a teacher that is a program (.pt2), which can execute any code.
            imports: files (.py) or modules of one's own, imported before anything else, which
                register inits, models, data sets or tasks; see `import_parts`.
            objective: a loss in place of the task's; see `Task.loss` in tasks/.
            first_epochs: stop after so many epochs; the learning rate goes by all of the recipe's.
            command: the words of the command line that asks for the run, for its record.

        Raises RecipeError for what cannot be a key, and loggers that are not installed; OneLineError
        for what cannot be imported.
        """
        parts = import_parts([imports] if isinstance(imports, str) else imports)
        root = None if data_dir is None else os.fspath(data_dir)
        changes = recipe_changes(init=init, seed=seed, data_dir=root, sets=overrides)
        folder = None if out_dir is None else Path(out_dir)
        loggers = [log] if isinstance(log, str) else log
        if first_epochs is not None and first_epochs < 1:
            raise RecipeError(
                f"first_epochs is {first_epochs}; expected at least 1, or None for all"
            )
        self.request = Request(recipe, changes, folder, resume, command, first_epochs, parts)
        self.watchers = Watchers([*BY_DEFAULT, *loggers])
        self.verbose, self.quiet = verbose, quiet
        self.trust_teacher = trust_teacher
        self.objective = objective
        self.result = Result()

    def __repr__(self) -> str:
        return f"Run of {self.request.recipe or self.request.resume}: {self.result!r}"

    def train(self) -> Result:
        """Do the run, or what is left of it; return what it gives. Raises a OneLineError, such as
        RecipeError, DataError or CheckpointError, for what the user can mend; Diverged if the loss
        or a weight is not finite; Interrupted after a signal, once the run is saved.
        """
        with distributed.joined() as processes, RunLock() as lock:
            # The recipe: of a new run, or of one that goes on from what it saved.
            folder, choice = choose_run(self.request, processes, lock)
            if choice is None:
                self.result = FinishedBefore(folder)
                processes.say(self.result.in_words())
                return self.result
            resumed = choice.saved is not None
            if not resumed:
                fetch_weights(choice.recipe, processes)

            # The data: the images, and this process's batches of them.
            data = open_data(
                choice.recipe, processes, strided=choice.strided, classes=choice.classes
            )
            recipe = choice.recipe.with_data(num_classes=len(data.classes))

            # The task: labels, what a teacher says of the images, or their hidden patches.
            task = open_task(recipe, data.classes, processes, self.objective, self.trust_teacher)
            facts = facts_of(recipe, data, task, self.objective, processes)
            if choice.saved is not None:
                require_same_data(folder, choice.saved, data.classes, facts, processes)

            # The model, as its constructor draws it, and its init.
            classifier = build(recipe)
            model = trained_model(task, classifier, recipe)  # the classifier, or what holds it
            self.watchers.require_model(model)
            notes: list[str] = []
            if not resumed:
                notes = draw_weights(
                    model, classifier, recipe, task, processes, data.train_set, self.watchers
                )

            # The optimiser, with the loss scale and the moving average; perhaps what was saved.
            written = recipe.with_data(root=choice.written_root).as_dict()
            about = {"recipe": written, "classes": data.classes}  # in every checkpoint
            state = new_state(model, recipe, processes, about)
            peak_lr = recipe.optim.peak_lr
            learning_rate = LearningRate(recipe.schedule, peak_lr, data.steps_per_epoch)
            if choice.saved is not None:
                restore(state, choice.saved, folder.read_from, learning_rate)
            del choice  # or its tensors would take their memory twice

            with StopRequest() as stop:  # from here on, what was trained is saved
                # What the loop is given.
                forward = model_to_train(state, recipe, processes)
                training = self._training(
                    recipe, data, task, state, forward, learning_rate, processes, stop
                )

                # The folder, and what the terminal shows.
                start = start_lines(
                    recipe, data, task, training, notes, folder, self.watchers, resumed=resumed
                )
                begin_folder(
                    folder, lock, self.request, recipe, training, facts, start, resumed=resumed
                )
                self._show(start, processes, f"in {folder.start}")
                self.result = TrainedHere(folder, recipe, data, state)

                # The loop.
                keeper = RunKeeper(
                    folder, lock, recipe, data, task, training, self.watchers, quiet=self.quiet
                )
                with keeper.ending():
                    train_epochs(training, keeper, keeper.meter())
                    keeper.say_done()
                # They hold the group of the processes, which ends with this block.
                del forward, training, keeper
        return self.result

    def rehearse(self, *, read: bool = False) -> bool:
        """Build everything, print it and run one forward pass; write nothing. read: also decode all
        images, and list those that cannot be. Returns False if there are any.
        """
        if self.request.resume not in (None, "auto"):
            raise RecipeError(
                "--dry-run and --resume exclude each other; --dry-run shows a new run"
            )
        with distributed.joined() as processes:
            folder, choice = choose_run(self.request, processes, RunLock(), dry_run=True)
            assert choice is not None  # a new run is never done
            data = open_data(choice.recipe, processes, dry_run=True)
            recipe = choice.recipe.with_data(num_classes=len(data.classes))
            task = open_task(recipe, data.classes, processes, self.objective, self.trust_teacher)
            facts_of(recipe, data, task, self.objective, processes, dry_run=True)
            if read and read_images(recipe, data, processes):
                return False
            classifier = build(recipe)
            model = trained_model(task, classifier, recipe)
            self.watchers.require_model(model)
            notes = draw_weights(
                model, classifier, recipe, task, processes, data.train_set, self.watchers
            )
            state = new_state(model, recipe, processes)
            peak_lr = recipe.optim.peak_lr
            learning_rate = LearningRate(recipe.schedule, peak_lr, data.steps_per_epoch)
            forward, stop = model_to_train(state, recipe, processes), StopRequest()
            training = self._training(
                recipe, data, task, state, forward, learning_rate, processes, stop
            )
            start = start_lines(
                recipe, data, task, training, notes, folder, self.watchers, resumed=False
            )
            self._show(start, processes, "by --verbose")
            processes.say(rehearsal(recipe, data, state, task))
        return True

    def _training(
        self,
        recipe: Recipe,
        data: Data,
        task: Task,
        state: TrainState,
        forward: nn.Module,
        learning_rate: LearningRate,
        processes: Processes,
        stop: StopRequest,
    ) -> Training:
        """All that the loop is given. forward: the state's model, as it is called."""
        classifier = cast(Classifier, state.model)
        epochs = recipe.schedule.total_epochs
        if self.request.first_epochs is not None:
            epochs = min(epochs, self.request.first_epochs)
        return Training(
            state=state,
            forward=forward,
            steps=data.train_batches.steps,
            loss=self.objective or objective_of(recipe, data, task, processes),
            learning_rate=learning_rate,
            drop_path=drop_path_of(classifier, recipe),
            processes=processes,
            stop=stop,
            epochs=epochs,
            amp=recipe.engine.amp,
            clip_norm=recipe.optim.clip_norm,
            save_every=recipe.checkpoint.every_steps,
            mixing=shifts_of(classifier, recipe, state.progress.epochs),
        )

    def _show(self, start: Sequence[str], processes: Processes, elsewhere: str) -> None:
        """Print what a terminal shows of the start. elsewhere: where all of it is."""
        if self.quiet:
            return
        for line in start if self.verbose else at_a_glance(start, elsewhere):
            processes.say(line)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl: a row per finished epoch; [] before `train`."""
        return self.result.rows

    @property
    def folder(self) -> RunFolder:
        return self.result.folder

    @property
    def recipe(self) -> Recipe:
        return self.result.recipe

    @property
    def data(self) -> Data:
        return self.result.data

    @property
    def state(self) -> TrainState:
        return self.result.state


class NoResult(OneLineError, AttributeError):
    """A run is asked for what it does not have."""


class Result:
    """What a run gives. This one is of a run that has not begun: no rows, and nothing else."""

    folder: RunFolder
    recipe: Recipe  # with every option resolved
    data: Data  # the opened images, and their batches
    state: TrainState  # with the trained model, on its device

    @property
    def rows(self) -> list[dict[str, Any]]:
        return []

    def __repr__(self) -> str:
        return "not begun"

    def __getattr__(self, name: str) -> Any:
        raise NoResult(f"{name}: this run has not begun; its train() begins it")


@dataclass(frozen=True, repr=False)
class FinishedBefore(Result):
    """What a run gives that was complete before, and has no checkpoint left: its files."""

    folder: RunFolder

    def __repr__(self) -> str:
        """For a notebook: which run it is, where, and how good it is so far."""
        recipe, about = getattr(self, "recipe", None), f"in {self.folder.path}"
        if recipe is not None:
            about = f"init {recipe.init.name}, seed {recipe.run.seed}, {about}"
        return "\n".join([about, *Watchers(["verdict"]).tell("finished", self.folder)])

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self.folder.metrics.rows())

    def in_words(self) -> str:
        """The line that tells so."""
        return f"done    {self.folder.path}: all epochs, by its metrics.jsonl; no last.pt is left"

    def __getattr__(self, name: str) -> Any:
        if "folder" not in vars(self):  # while it is copied or unpickled
            raise AttributeError(name)
        raise NoResult(f"{name}: {self.folder.path} has metrics alone, as the run was done before")


@dataclass(frozen=True, repr=False)
class TrainedHere(FinishedBefore):
    """What a run gives that trains in this process: all there is."""

    recipe: Recipe
    data: Data
    state: TrainState
