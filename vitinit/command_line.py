"""What train.py and eval.py share at their doors: arguments in, one-line errors out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from .data.images import DataError
from .init import INITS
from .models import MODELS
from .recipe import (Override, Recipe, RecipeError, load_recipe, parse_override, resolve_options,
                     with_options)
from .train.checkpoint import CheckpointError
from .train.distributed import LaunchError, environment_rank
from .values import nearest

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


def resolve_recipe(path: Path, changes: list[Override]) -> Recipe:
    """The recipe at `path` with `changes` applied and every option of model and init written out.

    Raises RecipeError for whatever is wrong, unknown models, inits and their options included.
    """
    recipe = load_recipe(path, changes)

    def source(key: str) -> str:
        """Where the value of `key`, or the table that holds it, was written last."""
        return next((change.text for change in reversed(changes)
                     if f"{key}.".startswith(f"{change.key}.")), str(path))

    def options(table: Mapping[str, Any], section: str, given: tuple[str, ...]) -> dict[str, Any]:
        chosen = getattr(recipe, section)
        if chosen.name not in table:
            raise RecipeError(f"{source(f'{section}.name')}: {section}.name is '{chosen.name}'"
                              f"{nearest(chosen.name, table)}")
        function, fixed = table[chosen.name] if section == "model" else (table[chosen.name], {})
        return resolve_options(function, chosen.options, fixed=fixed, given=given,
                               title=f"[{section}.options] of {chosen.name}",
                               source=lambda name: source(f"{section}.options.{name}"))

    return with_options(recipe, model=options(MODELS, "model", ("num_classes", "image_size")),
                        init=options(INITS, "init", ("generator",)))


def complain(program: str, error: Exception) -> None:
    """One line on standard error, by the main process alone.

    A loader's worker wraps its error in a traceback, of which the last line is the error itself.
    """
    if environment_rank() == 0:
        line = str(error).strip().splitlines()[-1]
        for kind in USER_ERRORS:
            line = line.removeprefix(f"{kind.__module__}.{kind.__qualname__}: ")
        print(f"{program}: {line}", file=sys.stderr, flush=True)
