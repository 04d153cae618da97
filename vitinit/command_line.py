"""The doors of train.py, eval.py and figures: arguments in, a recipe and one-line errors out."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from .data.datasets import DATA_SETS
from .data.eval_sets import EVAL_SETS, Place
from .data.images import DataError
from .init import INITS, init_function
from .models import MODELS, build_model
from .models.convert import native_names
from .recipe import (Override, Recipe, RecipeError, differences, find_recipe, from_dict, load_recipe,
                     parse_override, resolve_options, with_options)
from .train.checkpoint import CheckpointError, load_model, model_state
from .train.distributed import LaunchError, Processes, environment_rank
from .train.run_folder import RunFolder
from .train.transfer import change_size
from .values import nearest, to_toml

USER_ERRORS = (RecipeError, DataError, CheckpointError, LaunchError)    # one line each, to mend


class Parser(argparse.ArgumentParser):
    """A parser whose complaints take the same way as all others."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                         **options)

    def error(self, message: str) -> NoReturn:
        hint = ("; any key of a recipe goes by --set section.key=value"
                if "unrecognized" in message else "")
        raise RecipeError(message + hint)


def overrides(*, init: str | None = None, seed: int | None = None, data_dir: str | None = None,
              sets: list[str]) -> list[Override]:
    """Everything on the command line that changes a recipe, in the order in which it applies."""
    flags = {"data.root": ("--data-dir", data_dir), "init.name": ("--init", init),
             "run.seed": ("--seed", seed)}
    return [Override(key, value, f"{flag} {value}") for key, (flag, value) in flags.items()
            if value is not None] + [parse_override(text) for text in sets]


def named_set(text: str) -> Place:
    """NAME=DIR as --data takes it; `shapes` stands alone."""
    name, _, root = text.partition("=")
    known = [*DATA_SETS, *EVAL_SETS]
    if name not in known:
        raise argparse.ArgumentTypeError(f"{text}: there is no data set '{name}'"
                                         f"{nearest(name, known)}")
    if bool(root) == (name == "shapes"):
        raise argparse.ArgumentTypeError(
            f"{text}: expected " + ("shapes alone, which lies in no folder" if root else
                                    f"{name}=DIR, the folder of the data set"))
    return Place(name, root)


def image_size(text: str) -> tuple[int, int]:
    """N, or H,W, in pixels, as --image-size takes it: (height, width)."""
    sides = text.split(",")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise argparse.ArgumentTypeError(f"{text}: expected a number of pixels, such as 288, or "
                                         "height and width, such as 192,256")
    return int(sides[0]), int(sides[-1])


def resolve_recipe(path: Path, changes: list[Override]) -> Recipe:
    """The recipe at `path` with `changes` applied and every option of model and init written out.

    Raises RecipeError for whatever is wrong, unknown models, inits and their options included.
    """
    recipe = load_recipe(path, changes)

    def source(key: str) -> str:
        """Where the value of `key`, or the table that holds it, was written last."""
        return next((change.text for change in reversed(changes)
                     if f"{key}.".startswith(f"{change.key}.")), str(path))

    def resolved(section: str, function: Callable, fixed: Mapping[str, Any],
                 given: tuple[str, ...]) -> dict[str, Any]:
        chosen = getattr(recipe, section)
        return resolve_options(function, chosen.options, fixed=fixed, given=given,
                               title=f"[{section}.options] of {chosen.name}",
                               source=lambda name: source(f"{section}.options.{name}"))

    for section, table in (("model", MODELS), ("init", INITS)):
        name = getattr(recipe, section).name
        if name not in table:
            raise RecipeError(f"{source(f'{section}.name')}: {section}.name is '{name}'"
                              f"{nearest(name, table)}")
    family, sizes = MODELS[recipe.model.name]
    try:
        init = init_function(recipe.init.name, family)
    except ValueError as error:
        raise RecipeError(f"{source('init.name')}: {error}") from None
    return with_options(recipe, model=resolved("model", family, sizes, ("num_classes", "image_size")),
                        init=resolved("init", init, {}, ("generator",)))


# ---------------------------------------------------------------------------------------------
# train.py: a new run, or one to continue
# ---------------------------------------------------------------------------------------------


def choose_run(args: argparse.Namespace, processes: Processes, recipes: Path,
               say: Callable[[str], None]) -> tuple[RunFolder, dict[str, Any] | None, Recipe]:
    """The run's folder, its last checkpoint if it is to be continued, and its recipe."""
    if args.resume in (None, "auto"):
        recipe = processes.together(lambda: fresh_recipe(args, recipes, say), USER_ERRORS)
        folder = RunFolder(args.out_dir or Path("runs") /
                           f"{recipe.name}-{recipe.init.name}-s{recipe.run.seed}")
        # What the main process sees on its disk decides for all.
        holds_run = processes.maximum(int(processes.is_main and folder.last.exists()))
        if args.resume is None or not holds_run:
            return folder, None, recipe
    else:
        folder = RunFolder(Path(args.resume))
    state, recipe = processes.together(lambda: resumed_run(args, folder), USER_ERRORS)
    return folder, state, recipe


def fresh_recipe(args: argparse.Namespace, recipes: Path, say: Callable[[str], None]) -> Recipe:
    """The file, then the command line, every option resolved.

    --init NAME keeps those of the recipe's options that NAME has, too, such as `base`.
    """
    if args.recipe is None:
        raise RecipeError("--recipe is missing; for example --recipe quickstart")
    path = find_recipe(args.recipe, recipes)
    changes = overrides(init=args.init, seed=args.seed, data_dir=args.data_dir, sets=args.set)
    if args.init in INITS:
        from_file = [change for change in changes if not change.key.startswith("init.options")]
        recipe = load_recipe(path, from_file)
        options, (family, _) = recipe.init.options, MODELS.get(recipe.model.name, (None, {}))
        function = INITS[args.init].get(family)      # None is complained of below
        known = inspect.signature(function).parameters if function else options
        set_aside = {name: value for name, value in options.items() if name not in known}
        if set_aside:
            kept = {name: value for name, value in options.items() if name in known}
            changes.insert(0, Override("init.options", kept, str(path)))     # the file wrote them
            say(f"--init {args.init} has none of these options of the recipe, which are set aside: "
                f"{to_toml(set_aside)}")
    return resolve_recipe(path, changes)


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


def moved(recipe: Recipe, data_dir: str | None) -> Recipe:
    """The recipe for the same pictures in another place, if one was given."""
    if data_dir is None:
        return recipe
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, root=data_dir))


# ---------------------------------------------------------------------------------------------
# A checkpoint's model
# ---------------------------------------------------------------------------------------------


def loaded(recipe: Recipe, state: dict, path: Path, name: str,
           image_size: tuple[int, int] | None = None) -> nn.Module:
    """The recipe's model with the checkpoint's weights under "model" or "ema".

    image_size: (height, width), another than the recipe's, to fit the model to.
    """
    def built(size: tuple[int, int], place: str) -> nn.Module:
        try:
            return build_model(recipe.model.name, num_classes=recipe.data.num_classes,
                               image_size=size, **recipe.model.options)
        except ValueError as error:
            raise RecipeError(f"{place}: {error}") from None
    model = built(recipe.data.image_size, f"recipe {recipe.name}")
    load_model(model, native_names(model_state(state, path, name)), path)
    if image_size in (None, recipe.data.image_size):
        return model
    resized = built(image_size, f"{path} at {image_size[0]}×{image_size[1]}")
    change_size(model, resized, path)
    return resized


# ---------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------


def complain(program: str, error: Exception) -> None:
    """One line on standard error, by the main process alone.

    A loader's worker wraps its error in a traceback, of which the last line is the error itself.
    """
    if environment_rank() == 0:
        line = str(error).strip().splitlines()[-1]
        for kind in USER_ERRORS:
            line = line.removeprefix(f"{kind.__module__}.{kind.__qualname__}: ")
        print(f"{program}: {line}", file=sys.stderr, flush=True)
