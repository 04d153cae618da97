"""What all programs share: the parser, kinds of arguments, one-line errors and exit statuses."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from .messages import OneLineError, in_brief, one_line
from .recipe.files import RecipeError
from .recipe.values import convert, describe, nearest, within
from .train.device import ran_out_of_memory
from .train.distributed import environment_rank
from .train.interruption import Interrupted

ROOT = Path(__file__).resolve().parent.parent
OURS = ("vitinit", "tests", "train.py", "eval.py")      # in ROOT, where a .venv may stand, too


# ---------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """A parser whose complaints take the same way as all others; its subparsers, too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                         **options)

    def error(self, message: str) -> NoReturn:
        hint = ("; any key of a recipe goes by --set section.key=value"
                if "unrecognized" in message and "--set" in self.format_usage() else "")
        raise RecipeError(message + hint)


def integer(minimum: int, below: int = 2**31) -> Callable[[str], int]:
    """What `type` of an argument is: an integer within bounds."""
    return _number_within(int, int, dict(minimum=minimum, below=below))


def real(**bounds: float) -> Callable[[str], float]:
    """Likewise a finite number; bounds as recipe keys have them: minimum, above, maximum, below."""
    return _number_within(float, float, bounds)


def one_of(words: Collection[str]) -> Callable[[str], str]:
    """Likewise one of some words; a near one is named where it is none of them."""
    def parse(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"there is no '{text}'{nearest(text, words)}")
        return text
    return parse


def _number_within(read: Callable[[str], Any], kind: type, bounds: dict[str, float]
                   ) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = convert(read(text), kind)
            if within(value, bounds):
                return value
        except (ValueError, TypeError):              # no number; NaN or infinity
            pass
        raise argparse.ArgumentTypeError(f"{text}: expected {describe(kind, bounds)}")
    return parse


# ---------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------


def complain(program: str, error: object) -> None:
    """One line on standard error: by the main process, and where one alone knows of it by that one."""
    if environment_rank() == 0 or getattr(error, "of_one_process", False):
        print(f"{program}: {one_line(error)}", file=sys.stderr, flush=True)


def run_program(name: str, program: Callable[[], int | None], *, stopped: str = "") -> int:
    """Run a whole program; returns its exit status.

    Whatever its user can mend, or has asked for, ends in one line. stopped: what it says after
    "stopped by SIGINT". Any other exception is a fault of the program and passes through.
    """
    try:
        return program() or 0
    except (KeyboardInterrupt, Interrupted) as request:
        number = getattr(request, "number", signal.SIGINT)
        complain(name, f"stopped by {signal.Signals(number).name}{stopped}")
        return 128 + number
    except OneLineError as error:
        complain(name, error)
        return error.status
    except BrokenPipeError:                          # whoever read our lines has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        place = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        complain(name, f"{place}{error.strerror or in_brief(error)}")
        return 2


@contextmanager
def building(source: str, section: str) -> Iterator[None]:
    """Where the values of a section become data, a model or weights. Also a decorator.

    source: of the values, such as "recipe quickstart". What the parts foresee they say themselves,
    by OneLineError or ValueError. Whatever else is raised becomes a RecipeError, too: it names the
    section, what was raised and, for whoever mends the program, the innermost line of ours that it
    went through.
    """
    try:
        yield
    except OneLineError:
        raise
    except ValueError as error:
        if _is_foreseen(error):
            raise RecipeError(f"{source}: {error}") from error
        raise _unforeseen(source, section, error) from error
    except Exception as error:
        raise _unforeseen(source, section, error) from error


def _is_foreseen(error: Exception) -> bool:
    """Whether a `raise` of ours made it, in our words, and not what that line called."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return _ours(last) is not None and (last.line or "").startswith("raise ")


def _unforeseen(source: str, section: str, error: Exception) -> RecipeError:
    if ran_out_of_memory(error):
        return RecipeError(f"{source}: [{section}] takes more memory than there is "
                           f"({in_brief(error)}); expected smaller values")
    places = list(filter(None, map(_ours, traceback.extract_tb(error.__traceback__))))
    said = in_brief(error, 90)
    kind = type(error).__name__
    return RecipeError(f"{source}: [{section}] cannot be built with these values: "
                       f"{said if said == kind else f'{kind}: {said}'} (at {places[-1]})")


def _ours(frame: traceback.FrameSummary) -> str | None:
    """file:line of a frame in this repository."""
    path = Path(frame.filename)
    if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in OURS:
        return None
    return f"{path.relative_to(ROOT)}:{frame.lineno}"
