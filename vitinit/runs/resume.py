"""Which run train.py is about: a new one, or one to continue."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ..recipe.files import Override, RecipeError, from_dict
from ..recipe.resolve import fresh_recipe, overrides, with_defaults
from ..recipe.sections import MACHINE_KEYS, Recipe
from ..recipe.upgrade import notes, processes_of
from ..recipe.values import nearest, to_toml
from ..train.checkpoint import CheckpointError
from ..train.distributed import Processes
from ..train.engine import normalises_over_images
from .folder import RunFolder
from .groups import keys_of, read_run
from .lock import RunLock

NEW, GO_ON, DONE = range(3)             # what is to be done in a folder; the largest decides


class Chosen(NamedTuple):
    """A run for train.py."""

    folder: RunFolder
    kept: dict[str, Any] | None         # its last checkpoint if it is to be continued
    recipe: Recipe


# ---------------------------------------------------------------------------------------------
# A run that goes on
# ---------------------------------------------------------------------------------------------


def continued(stored: Recipe, changes: Sequence[Override], source: str
              ) -> tuple[Recipe, list[str]]:
    """The recipe to go on with, and what the command line would change that may not, in phrases.

    All of the command line is applied to the run's own recipe, as it was to the recipe's file at
    the start. So whatever is written twice, or as a table, changes nothing if it changed nothing
    then. What belongs to the machine may change, and so may the place of the data.
    """
    wanted = from_dict(stored.as_dict(), source, changes)
    before, after = (keys_of(with_defaults(recipe.as_dict())) for recipe in (stored, wanted))
    renamed = [title for title in ("model", "init")
               if before[f"{title}.name"] != after[f"{title}.name"]]
    wrong = []
    for key in dict.fromkeys([*after, *before]):
        section, *_, last = key.split(".")
        if before.get(key) == after.get(key) or key in ("data.root", *MACHINE_KEYS) or (
                section in renamed and last != "name"):          # another one has other options
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
    """Images of a forward pass, in runs whose checkpoints do not say: the most that fitted."""
    share = max(recipe.optim.global_batch // processes, 1)
    return next(size for size in range(min(recipe.optim.max_batch_per_process, share), 0, -1)
                if share % size == 0)


def require_same_micro_batch_size(model: nn.Module, now: int, kept: Mapping[str, Any] | None) -> None:
    """RecipeError where a run goes on in other micro-batches, and its model would notice.

    kept: the checkpoint that it goes on from; None of a new run.
    """
    before = (kept or {}).get("micro_batch", now)
    if now != before and normalises_over_images(model):
        raise RecipeError(f"this run's BatchNorm has seen micro-batches of {before} images, and they "
                          f"would have {now} now; go on with as many processes and the same "
                          "optim.max_batch_per_process as before")


def resumed_run(args: argparse.Namespace, folder: RunFolder, say: Callable[[str], None]) -> Chosen:
    """A run's last checkpoint and its own recipe; a command line that differs is an error."""
    if args.dry_run:
        raise RecipeError("--dry-run and --resume exclude each other; --dry-run shows a new run")
    if args.out_dir is not None and args.out_dir.resolve() != folder.path.resolve():
        raise RecipeError(f"--out-dir {args.out_dir} differs from --resume {folder.path}; a run "
                          "goes on in its own folder")
    folder.starts()                                  # what cannot be read cannot be added to later
    folder.metrics.rows()
    folder.steps.rows()
    state = folder.load_last(say=say)
    source, processes = str(folder.read_from), processes_of(folder.path)
    stored = from_dict(state["recipe"], source, processes=processes)
    recipe, wrong = continued(stored, overrides(init=args.init, seed=args.seed, sets=args.set,
                                                data_dir=args.data_dir), source)
    if args.recipe is not None and Path(args.recipe).stem != stored.name:
        wrong.insert(0, f"--recipe {args.recipe} differs from the run's recipe {stored.name}")
    if wrong:
        raise RecipeError(f"--resume {folder.path}: {'; '.join(wrong)}; a run goes on as it began")
    for note in notes(state["recipe"]):
        say(f"note    {note}")
    return Chosen(folder, {"micro_batch": old_micro_batch_size(stored, processes)} | state, recipe)


# ---------------------------------------------------------------------------------------------
# Which run
# ---------------------------------------------------------------------------------------------


def left_without_checkpoint(folder: RunFolder, recipe: Recipe | None) -> str | None:
    """Of a run whose last.pt is gone: None if there is nothing of it, else that it is finished.

    recipe: what the command line asks for, if it does. Raises CheckpointError for a run that is not
    finished, and for another one: what it left is not started over.
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


def look(args: argparse.Namespace, folder: RunFolder, recipe: Recipe | None, lock: RunLock,
         say: Callable[[str], None]) -> int:
    """What is to be done in the folder, from what the main process sees there, locked if need be.

    recipe: of a new run; None where --resume names the folder.
    """
    if args.dry_run:
        return GO_ON if recipe is None or args.resume and folder.holds_checkpoint() else NEW
    if args.resume is None:
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
    """The run to train, or None where nothing is left to do."""
    recipe = None
    if args.resume in (None, "auto"):
        recipe = processes.on_all(lambda: fresh_recipe(
            args.recipe, init=args.init, seed=args.seed, data_dir=args.data_dir, sets=args.set,
            recipes=recipes, say=say))
        folder = RunFolder(args.out_dir or Path("runs") /
                           f"{recipe.name}-{recipe.init.name}-s{recipe.run.seed}")
    else:
        folder = RunFolder(Path(args.resume))
    # What the main process sees on its disk decides for all.
    seen = processes.on_all(lambda: look(args, folder, recipe, lock, say)
                            if processes.is_main else NEW)
    task = processes.maximum(seen)
    if task == DONE:
        return None
    if task == NEW:
        return Chosen(folder, None, recipe)
    chosen = processes.on_all(lambda: resumed_run(args, folder, say))
    step = chosen.kept.get("step")
    ours = step if type(step) is int else -1
    latest = processes.maximum(ours)
    processes.on_all(lambda: require_same_step(folder, ours, latest))
    return chosen


def require_same_step(folder: RunFolder, ours: int, latest: int) -> None:
    """CheckpointError where this process read another checkpoint than the others did."""
    if ours != latest:
        raise CheckpointError(f"{folder.read_from}: is of step {ours} here, and of step {latest} on "
                              "another process; expected a folder that all machines share")
