"""Which run train.py is about: a new one, or one to continue."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..recipe.files import Override, RecipeError, from_dict
from ..recipe.resolve import fresh_recipe, moved, overrides
from ..recipe.sections import SECTIONS, Recipe
from ..recipe.values import nearest, plain, to_toml
from ..train.distributed import Processes
from .folder import RunFolder


def differences(ours: Recipe, overrides: Sequence[Override]) -> list[str]:
    """What the user wrote that differs from a run's own recipe, one phrase an override."""
    found = []
    for key, value, text in overrides:
        place: Any = ours.as_dict()
        try:
            for part in key.split("."):
                place = place[part]
        except (KeyError, TypeError):
            valid = place if isinstance(place, dict) else SECTIONS
            raise RecipeError(f"{text}: there is no '{part}'{nearest(part, valid)}") from None
        same_size = key == "data.image_size" and place == [value, value]
        if plain(value) != place and not same_size:
            found.append(f"{text} differs from the run's {key} = {to_toml(place)}")
    return found


def resumed_run(args: argparse.Namespace, folder: RunFolder) -> tuple[dict[str, Any], Recipe]:
    """A run's last checkpoint and its own recipe; a command line that differs is an error."""
    if args.dry_run:
        raise RecipeError("--dry-run and --resume exclude each other; --dry-run shows a new run")
    if args.out_dir is not None and args.out_dir.resolve() != folder.path.resolve():
        raise RecipeError(f"--out-dir {args.out_dir} differs from --resume {folder.path}; a run "
                          "goes on in its own folder")
    state = folder.load_last()
    recipe = from_dict(state["recipe"], str(folder.last))
    wrong = differences(recipe, overrides(init=args.init, seed=args.seed, sets=args.set))
    if args.recipe is not None and Path(args.recipe).stem != recipe.name:
        wrong.insert(0, f"--recipe {args.recipe} differs from the run's recipe {recipe.name}")
    if wrong:
        raise RecipeError(f"--resume {folder.path}: {'; '.join(wrong)}; a run goes on as it began")
    return state, moved(recipe, args.data_dir)


def choose_run(args: argparse.Namespace, processes: Processes, recipes: Path,
               say: Callable[[str], None]) -> tuple[RunFolder, dict[str, Any] | None, Recipe]:
    """The run's folder, its last checkpoint if it is to be continued, and its recipe."""
    if args.resume in (None, "auto"):
        recipe = processes.together(lambda: fresh_recipe(
            args.recipe, init=args.init, seed=args.seed, data_dir=args.data_dir, sets=args.set,
            recipes=recipes, say=say))
        folder = RunFolder(args.out_dir or Path("runs") /
                           f"{recipe.name}-{recipe.init.name}-s{recipe.run.seed}")
        # What the main process sees on its disk decides for all.
        holds_run = processes.maximum(int(processes.is_main and folder.last.exists()))
        if args.resume is None or not holds_run:
            return folder, None, recipe
    else:
        folder = RunFolder(Path(args.resume))
    state, recipe = processes.together(lambda: resumed_run(args, folder))
    return folder, state, recipe
