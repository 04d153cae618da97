"""Decide which run train.py does: a new one, or one to resume."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import __version__
from ..recipe.files import Override, RecipeError, from_dict
from ..recipe.resolve import fresh_recipe, overrides, with_defaults, with_num_classes
from ..recipe.sections import MACHINE_KEYS, Recipe
from ..recipe.upgrade import notes, processes_of
from ..recipe.values import nearest, to_toml
from ..train.checkpoint import CheckpointError
from ..train.distributed import Processes
from ..train.engine import normalises_over_images
from .folder import RunFolder
from .groups import keys_of, read_run
from .lock import RunLock

NEW, GO_ON, DONE = range(3)             # what to do in a folder; all processes do the largest


class Chosen(NamedTuple):
    """The run that train.py is to do."""

    folder: RunFolder
    saved: dict[str, Any] | None        # the checkpoint to resume from; None for a new run
    recipe: Recipe
    data_root: str                      # the folder of the data; recipe.data.root is as it was written


# Keys that may differ between the processes of a run.
OF_A_PROCESS = ("data.root", "data.workers", "data.on_device_gib", "eval.cache_gib")


def settings(recipe: Recipe) -> dict[str, str]:
    """What all processes of a run must have in common before its data is opened, by name."""
    keys = {key: to_toml(value) for key, value in keys_of(recipe.as_dict()).items()
            if key not in OF_A_PROCESS}
    return keys | {"the version of torch": torch.__version__, "the version of vitinit": __version__}


# ---------------------------------------------------------------------------------------------
# A run to resume
# ---------------------------------------------------------------------------------------------


def continued(stored: Recipe, changes: Sequence[Override], source: str
              ) -> tuple[Recipe, list[str]]:
    """The recipe to resume with, and a phrase for each forbidden change by the command line.

    stored: the recipe in the run's checkpoint. changes: the overrides of the command line. source:
    where `stored` is from, for error messages.

    The overrides are applied to the stored recipe, as they were to the recipe's file when the run
    began. Repeating the original command line therefore changes nothing, even where it sets a key
    twice or sets a whole table. Only keys that describe the machine (`MACHINE_KEYS`) and data.root
    may change. Raises RecipeError for a key that the recipe does not have.
    """
    wanted = from_dict(stored.as_dict(), source, changes)
    if not wanted.data.num_classes:                  # the run knows how many the data set had
        wanted = with_num_classes(wanted, stored.data.num_classes)
    before, after = (keys_of(with_defaults(recipe.as_dict())) for recipe in (stored, wanted))
    renamed = [title for title in ("model", "init")
               if before[f"{title}.name"] != after[f"{title}.name"]]
    wrong = []
    for key in dict.fromkeys([*after, *before]):
        section, *_, last = key.split(".")
        if before.get(key) == after.get(key) or key in ("data.root", *MACHINE_KEYS) or (
                section in renamed and last != "name"):          # another name has other options
            continue
        text = next((change.text for change in reversed(changes)
                     if f"{key}.".startswith(f"{change.key}.")), "the command line")
        if key not in before:
            known = [other.rpartition(".")[2] for other in before
                     if other.startswith(f"{section}.options.")]
            raise RecipeError(f"{text}: there is no '{last}'{nearest(last, known)}")
        wrong.append(f"{text} differs from the run's {key} = {to_toml(before[key])}")
    return wanted, wrong


def old_micro_batch_size(recipe: Recipe, processes: int) -> int:
    """The micro-batch size of a run whose checkpoints, of earlier versions, do not record it.

    It was the largest divisor of a process's share of the global batch that
    optim.max_batch_per_process allowed.
    """
    share = max(recipe.optim.global_batch // processes, 1)
    return next(size for size in range(min(recipe.optim.max_batch_per_process, share), 0, -1)
                if share % size == 0)


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
    `record_start` is about to be given as `data`. What earlier versions did not record is not
    compared.
    """
    began, advice = folder.data_of(0), "a run goes on with the images that it began with"
    for number, (before, name) in enumerate(zip(saved.get("classes") or classes, classes)):
        if before != name:
            raise RecipeError(f"{now['root']}: class {number} is '{name}', and was '{before}' when "
                              f"{folder.path} began; {advice}")
    for key, value in now.items():
        if key != "root" and began.get(key, value) != value:
            raise RecipeError(f"{now['root']}: has {key} {value}, and it was {began[key]} when "
                              f"{folder.path} began; {advice}")


def resumed_run(args: argparse.Namespace, folder: RunFolder, say: Callable[[str], None]) -> Chosen:
    """Read the run's last checkpoint and its recipe, which the command line may hardly change.

    Raises RecipeError if the command line asks for another recipe (see `continued`), and
    CheckpointError if one of the run's files cannot be read. say: prints notes about what is done.
    """
    if args.dry_run:
        raise RecipeError("--dry-run and --resume exclude each other; --dry-run shows a new run")
    if args.out_dir is not None and args.out_dir.resolve() != folder.path.resolve():
        raise RecipeError(f"--out-dir {args.out_dir} differs from --resume {folder.path}; a run "
                          "goes on in its own folder")
    folder.starts()                                  # read the files that training appends to, so
    folder.metrics.rows()                            # that a broken one is an error now, not later
    folder.steps.rows()
    state = folder.load_last(say=say)
    source, processes = str(folder.read_from), processes_of(folder.path)
    stored = from_dict(state["recipe"], source, processes=processes)
    recipe, wrong = continued(stored, overrides(init=args.init, seed=args.seed, sets=args.set,
                                                data_dir=args.data_dir), source)
    if args.recipe is not None and Path(args.recipe).stem != stored.name:
        wrong.insert(0, f"--recipe {args.recipe} differs from the run's recipe {stored.name}")
    if wrong:
        raise RecipeError(f"--resume {folder.path}: {'; '.join(wrong)}; a run goes on as it began; "
                          f"{new_run(folder)}")
    for note in notes(state["recipe"]):
        say(f"note    {note}")
    # A relative path was relative to the folder in which the run was started then.
    root = folder.data_root() if recipe.data.root == stored.data.root else None
    return Chosen(folder, {"micro_batch": old_micro_batch_size(stored, processes)} | state, recipe,
                  recipe.data.root if root is None else root)


# ---------------------------------------------------------------------------------------------
# Which run
# ---------------------------------------------------------------------------------------------


def left_without_checkpoint(folder: RunFolder, recipe: Recipe | None) -> str | None:
    """A line that says that the run in a folder without last.pt is finished; None for no run.

    recipe: the one that the command line asks for, if any. Raises CheckpointError if the folder has
    results of an unfinished run, or of a run by another recipe: these are not overwritten.
    """
    results = folder.results()
    if not results and recipe is None:
        raise CheckpointError(f"{folder.path}: holds no checkpoint to go on from yet; the command "
                              "that started it, with --resume auto, starts it again")
    if not results and not folder.recipe.exists():
        return None
    run = read_run(folder.path)
    other = run.departure(recipe) if recipe is not None else None
    if other:
        raise CheckpointError(f"{other}; choose another --out-dir")
    if not results:
        return None
    if not run.finished:
        raise CheckpointError(f"{folder.path}: holds {', '.join(results)} of {run.epochs_done} of "
                              f"{run.epochs} epochs but no last.pt to go on from; start anew in "
                              "another --out-dir, or move this folder away")
    return f"done    {folder.path}: all {run.epochs} epochs, by its metrics.jsonl; no last.pt is left"


def new_run(folder: RunFolder) -> str:
    """How a new run starts from the weights of the run in this folder, for error messages."""
    return ("a new one needs another --out-dir, and starts from its weights with "
            f"--set init.checkpoint={folder.path}")


def require_unfinished(folder: RunFolder) -> None:
    """Raise CheckpointError if the folder holds a finished run: there is nothing to go on with."""
    try:
        run = read_run(folder.path) if folder.holds_checkpoint() else None
    except CheckpointError:                          # a damaged record; the checkpoint decides
        return
    if run is not None and run.finished:
        raise CheckpointError(f"{folder.path}: already holds a run that is finished, after "
                              f"{run.epochs} epoch(s); {new_run(folder)}")


def task_in(args: argparse.Namespace, folder: RunFolder, recipe: Recipe | None, lock: RunLock,
            say: Callable[[str], None]) -> int:
    """What to do in the folder: NEW, GO_ON or DONE. Only the main process calls this.

    It locks a folder that it may write to. recipe: that of a new run; None if --resume names the
    folder.
    """
    if args.dry_run:
        return GO_ON if recipe is None or args.resume and folder.holds_checkpoint() else NEW
    if args.resume is None:
        require_unfinished(folder)
        folder.require_unused()
        return NEW
    if folder.path.is_dir():
        lock.take(folder.path, say)
    if folder.holds_checkpoint() or recipe is None and not folder.path.is_dir():
        return GO_ON
    finished = left_without_checkpoint(folder, recipe)
    if finished:
        say(finished)
    return DONE if finished else NEW


def choose_run(args: argparse.Namespace, processes: Processes, recipes: Path, lock: RunLock,
               say: Callable[[str], None]) -> Chosen | None:
    """The run to train; None if it is finished already.

    recipes: the folder in which recipes are found by name. Raises the same OneLineError on all
    processes.
    """
    recipe = None
    if args.resume in (None, "auto"):
        recipe = processes.on_all(lambda: fresh_recipe(
            args.recipe, init=args.init, seed=args.seed, data_dir=args.data_dir, sets=args.set,
            recipes=recipes, say=say))
        folder = RunFolder(args.out_dir or Path("runs") /
                           f"{recipe.name}-{recipe.init.name}-s{recipe.run.seed}")
    else:
        folder = RunFolder(Path(args.resume))
    # The main process's view of the disk decides for all processes.
    own_task = processes.on_all(lambda: task_in(args, folder, recipe, lock, say)
                                if processes.is_main else NEW)
    task = processes.maximum(own_task)
    if task == DONE:
        return None
    if task == NEW:
        return Chosen(folder, None, recipe, recipe.data.root)
    chosen = processes.on_all(lambda: resumed_run(args, folder, say))
    step = chosen.saved.get("step")
    own_step = step if type(step) is int else -1
    latest = processes.maximum(own_step)
    processes.on_all(lambda: require_same_step(folder, own_step, latest))
    return chosen


def require_same_step(folder: RunFolder, own_step: int, latest: int) -> None:
    """Raise CheckpointError if this process read an older checkpoint than another process did."""
    if own_step != latest:
        raise CheckpointError(f"{folder.read_from}: is of step {own_step} here, and of step {latest} "
                              "on another process; expected a folder that all machines share")
