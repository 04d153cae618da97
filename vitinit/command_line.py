"""The parser that all programs share, and their one-line errors."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from .recipe.files import RecipeError
from .train.distributed import environment_rank


class Parser(argparse.ArgumentParser):
    """A parser whose complaints take the same way as all others."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                         **options)

    def error(self, message: str) -> NoReturn:
        hint = ("; any key of a recipe goes by --set section.key=value"
                if "unrecognized" in message else "")
        raise RecipeError(message + hint)


def complain(program: str, error: Exception) -> None:
    """One line on standard error: by the main process, and where one alone knows of it by that one."""
    if environment_rank() == 0 or getattr(error, "of_one_process", False):
        print(f"{program}: {error}", file=sys.stderr, flush=True)
