"""Decide which run train.py does: a new one, or one to go on with.

    --out-dir F                 a new run; F may hold nothing that a run writes
    --out-dir F --resume auto   goes on with F's run; a new one if F holds none; done if it is finished
    --resume F                  goes on with F's run; done if it is finished

A run goes on as it began: by its own recipe, of which only what describes the machine may change,
and with the same images. Results are never overwritten.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import __version__
from ..recipe.files import (Override, RecipeError, fresh_recipe, from_dict, overrides, with_data)
from ..recipe.sections import MACHINE_KEYS, Recipe
from ..recipe.values import to_toml
from ..train.checkpoint import CheckpointError
from ..train.distributed import Processes
from ..train.engine import normalises_over_images
from .folder import RunFolder, RunLock
from .records import Run, keys_of, read_run

NEW, GO_ON, DONE = range(3)             # what to do in a folder; all processes do the largest
# Keys that may differ between the processes of a run, and those that may change on resume.
OF_A_PROCESS = ("data.root", "data.workers", "data.on_device_gib", "eval.cache_gib")
# Where the teacher is may change; that it is the same one, its digest among the data's facts says.
MAY_CHANGE = ("data.root", "distill.teacher", "distill.weights", *MACHINE_KEYS)


class Chosen(NamedTuple):
    """The run that train.py is to do."""

    folder: RunFolder
    saved: dict[str, Any] | None        # the checkpoint to resume from; None for a new run
    recipe: Recipe
    data_root: str                      # the folder of the data; recipe.data.root is as it was written


# ---------------------------------------------------------------------------------------------
# Which run
# ---------------------------------------------------------------------------------------------


def choose_run(args: argparse.Namespace, processes: Processes, recipes: Path, lock: RunLock,
               say: Callable[[str], None]) -> Chosen | None:
    """The run to train; None if it is finished already.

    recipes: the folder in which recipes are found by name. Raises the same OneLineError on all
    processes.
    """
    if args.dry_run and args.resume not in (None, "auto"):
        raise RecipeError("--dry-run and --resume exclude each other; --dry-run shows a new run")
    recipe = None
    if args.resume in (None, "auto"):
        recipe = processes.on_all(lambda: fresh_recipe(
            args.recipe, init=args.init, seed=args.seed, data_dir=args.data_dir, sets=args.set,
            recipes=recipes, say=say))
        folder = RunFolder(args.out_dir or Path("runs") /
                           f"{recipe.name}-{recipe.init.name}-s{recipe.run.seed}")
    else:
        folder = RunFolder(Path(args.resume))

    def task() -> int:
        """The main process's view of the disk decides for all processes."""
        if not processes.is_main or args.dry_run:
            return NEW
        if args.resume is None:
            require_new(folder)
            return NEW
        if folder.path.is_dir():
            lock.take(folder.path, say)
        return task_in(folder, recipe, say)
    decided = processes.maximum(processes.on_all(task))
    if decided == DONE:
        return None
    if decided == NEW:
        return Chosen(folder, None, recipe, recipe.data.root)
    chosen = processes.on_all(lambda: resumed_run(args, folder, say))
    step = chosen.saved.get("step", -1)
    latest = processes.maximum(step)
    processes.on_all(lambda: require_same_step(folder, step, latest))
    return chosen


def require_new(folder: RunFolder) -> None:
    """Raise CheckpointError if the folder already holds a run, which says whether it is finished."""
    run = None
    if folder.holds_checkpoint():
        with suppress(CheckpointError):              # of a damaged record; the checkpoint decides
            run = read_run(folder.path)
    if run is not None and run.finished:
        raise CheckpointError(f"{folder.path}: already holds a run that is finished, after "
                              f"{run.epochs} epoch(s); {new_run(folder)}")
    folder.require_unused()


def task_in(folder: RunFolder, recipe: Recipe | None, say: Callable[[str], None]) -> int:
    """What to do in a folder by --resume: NEW, GO_ON, or DONE, after `say` has been told so.

    recipe: the one that the command line asks for; None if --resume names the folder. Raises
    CheckpointError where nothing can go on and a new run would overwrite results, or another run.
    """
    if folder.holds_checkpoint() or recipe is None and not folder.path.is_dir():
        return GO_ON                                 # without the folder, reading it says so
    results = folder.results()
    if not results and recipe is None:
        raise CheckpointError(f"{folder.path}: holds no checkpoint to go on from yet; the command "
                              "that started it, with --resume auto, starts it again")
    if not results and not folder.recipe.exists():
        return NEW
    run = read_run(folder.path)
    if recipe is not None:
        require_same_recipe(run, recipe)
    if not results:
        return NEW
    if not run.finished:
        raise CheckpointError(f"{folder.path}: holds {', '.join(results)} of {len(run.rows)} of "
                              f"{run.epochs} epochs but no last.pt to go on from; start anew in "
                              "another --out-dir, or move this folder away")
    say(f"done    {folder.path}: all {run.epochs} epochs, by its metrics.jsonl; no last.pt is left")
    return DONE


def new_run(folder: RunFolder) -> str:
    """How a new run starts from the weights of the run in this folder, for error messages."""
    return ("a new one needs another --out-dir, and starts from its weights with "
            f"--set init.checkpoint={folder.path}")


def require_same_step(folder: RunFolder, own_step: int, latest: int) -> None:
    """Raise CheckpointError if this process read an older checkpoint than another process did."""
    if own_step != latest:
        raise CheckpointError(f"{folder.read_from}: is of step {own_step} here, and of step {latest} "
                              "on another process; expected a folder that all machines share")


# ---------------------------------------------------------------------------------------------
# A run goes on as it began
# ---------------------------------------------------------------------------------------------


def settings(recipe: Recipe) -> dict[str, str]:
    """What all processes of a run must have in common before its data is opened, by name."""
    keys = {key: to_toml(value) for key, value in keys_of(recipe.as_dict()).items()
            if key not in OF_A_PROCESS}
    return keys | {"the version of torch": torch.__version__, "the version of vitinit": __version__}


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The keys that differ between two recipes and may not change, in order.

    Of a model or init by another name only the name counts, since its options are others.
    """
    renamed = tuple(f"{title}.options." for title in ("model", "init")
                    if before.get(f"{title}.name") != after.get(f"{title}.name"))
    return [key for key in dict.fromkeys([*after, *before]) if before.get(key) != after.get(key)
            and key not in MAY_CHANGE and not (renamed and key.startswith(renamed))]


def require_same_recipe(run: Run, recipe: Recipe) -> None:
    """Raise CheckpointError, naming the first key that differs, if the run is by another recipe."""
    asked = keys_of(recipe.as_dict())
    if not asked["data.num_classes"]:                # as many as the run's data set had
        asked["data.num_classes"] = run.keys.get("data.num_classes")
    for key in differing(run.keys, asked):
        before, now = (to_toml(keys[key]) if key in keys else "not set" for keys in (run.keys, asked))
        raise CheckpointError(f"{run.path}: holds another run, its {key} is {before} and not {now}; "
                              "choose another --out-dir")


def continued(stored: Recipe, changes: Sequence[Override], source: str
              ) -> tuple[Recipe, list[str]]:
    """The recipe to resume with, and a phrase for each forbidden change by the command line.

    stored: the recipe in the run's checkpoint. changes: the overrides of the command line. source:
    where `stored` is from, for error messages.

    The overrides are applied to the stored recipe, as they were to the recipe's file when the run
    began. Repeating the original command line therefore changes nothing, even where it sets a key
    twice or sets a whole table. Raises RecipeError for a key that the recipe does not have.
    """
    names = {"model.name": stored.model.name, "init.name": stored.init.name}
    last = {change.key: change for change in changes}
    wrong = [f"{last[key].text} differs from the run's {key} = {to_toml(name)}"
             for key, name in names.items() if key in last and last[key].value != name]
    if wrong:                                        # another one has other options
        return stored, wrong
    wanted = from_dict(stored.as_dict(), source, changes)
    if not wanted.data.num_classes:                  # the run knows how many the data set had
        wanted = with_data(wanted, num_classes=stored.data.num_classes)
    before, after = keys_of(stored.as_dict()), keys_of(wanted.as_dict())
    for key in differing(before, after):
        text = next(change.text for change in reversed(changes)
                    if f"{key}.".startswith(f"{change.key}."))
        wrong.append(f"{text} differs from the run's {key} = {to_toml(before[key])}")
    return wanted, wrong


def require_same_micro_batch_size(model: nn.Module, now: int, saved: Mapping[str, Any] | None
                                  ) -> None:
    """Raise RecipeError if a model with BatchNorm would resume with another micro-batch size.

    now: the micro-batch size. saved: the checkpoint to resume from; None for a new run.
    """
    before = (saved or {}).get("micro_batch", now)
    if now != before and normalises_over_images(model):
        raise RecipeError(f"this run's BatchNorm has seen micro-batches of {before} images, and they "
                          f"would have {now} now; go on with as many processes and the same "
                          "optim.max_batch_per_process as before")


def require_same_data(folder: RunFolder, saved: Mapping[str, Any], classes: Sequence[str],
                      now: Mapping[str, Any]) -> None:
    """Raise RecipeError if a run would go on with other images than it began with.

    saved: the checkpoint to resume from. classes: the names of the classes now. now: what
    `record_start` is about to be given as `data`.
    """
    began, advice = folder.data_of(0), "a run goes on with the images and the teacher that it began with"
    for number, (before, name) in enumerate(zip(saved.get("classes", classes), classes)):
        if before != name:
            raise RecipeError(f"{now['root']}: class {number} is '{name}', and was '{before}' when "
                              f"{folder.path} began; {advice}")
    for key, value in now.items():
        before = began.get(key, "none" if key == "teacher" else value)   # once there were no teachers
        if key != "root" and before != value:
            what = "distill.teacher" if key == "teacher" else f"{now['root']}: has {key}"
            raise RecipeError(f"{what} {value}, and it was {before} when {folder.path} began; {advice}")


def resumed_run(args: argparse.Namespace, folder: RunFolder, say: Callable[[str], None]) -> Chosen:
    """Read the run's last checkpoint and its recipe, which the command line may hardly change.

    Raises RecipeError if the command line asks for another recipe (see `continued`), and
    CheckpointError if one of the run's files cannot be read. say: prints notes about what is done.
    """
    if args.out_dir is not None and args.out_dir.resolve() != folder.path.resolve():
        raise RecipeError(f"--out-dir {args.out_dir} differs from --resume {folder.path}; a run "
                          "goes on in its own folder")
    folder.starts()                                  # read the files that training appends to, so
    folder.metrics.rows()                            # that a broken one is an error now, not later
    folder.steps.rows()
    state = folder.load_last(say=say)
    source = str(folder.read_from)
    stored = from_dict(state["recipe"], source)
    recipe, wrong = continued(stored, overrides(init=args.init, seed=args.seed, sets=args.set,
                                                data_dir=args.data_dir), source)
    if args.recipe is not None and Path(args.recipe).stem != stored.name:
        wrong.insert(0, f"--recipe {args.recipe} differs from the run's recipe {stored.name}")
    if wrong:
        raise RecipeError(f"--resume {folder.path}: {'; '.join(wrong)}; a run goes on as it began; "
                          f"{new_run(folder)}")
    # A relative path was relative to the folder in which the run was started then.
    root = folder.data_root() if recipe.data.root == stored.data.root else None
    return Chosen(folder, state, recipe, recipe.data.root if root is None else root)
