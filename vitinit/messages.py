"""Messages of one line, which the names, paths and errors that they quote cannot break."""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

LONGEST = 1000                  # most characters of a message, with everything that it quotes
IN_BRIEF = 120                  # most characters quoted from the error of another library


class OneLineError(ValueError):
    """An error that the user can fix. Its message is always one line, whatever it quotes."""

    status = 2                  # the exit status of a program that ends with this error
    of_one_process = False      # whether the other processes of a run do not know of it

    def __init__(self, text: object = "") -> None:
        super().__init__(one_line(own_words(str(text))))


def one_line(text: object, longest: int = LONGEST) -> str:
    r"""`text` as a line of printable characters: others, and bytes that are not UTF-8, are written
    as in a Python string, such as "\n". Of more than `longest` characters it loses its middle.
    """
    text = str(text)
    if not text.isprintable():
        text = "".join(character if character.isprintable() else
                       character.encode("unicode_escape").decode("ascii") for character in text)
    if len(text) <= longest:
        return text
    head = (longest - 1) // 2
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head):]}"


def in_brief(essay: object, longest: int = IN_BRIEF) -> str:
    """The first words of a long text, such as another library's exception, or else its class."""
    text = one_line(" ".join(str(essay).split()), longest=2**20)
    if not text:
        return type(essay).__name__
    return text if len(text) <= longest else text[:longest - 1].rstrip() + "…"


def nearest(word: str, valid: Iterable[str]) -> str:
    """A hint for a mistyped word: '; did you mean X?', or all valid words if none is similar."""
    valid = list(valid)
    if close := difflib.get_close_matches(word, valid, n=1):
        return f"; did you mean '{close[0]}'?"
    return f"; valid: {', '.join(sorted(valid))}" if valid else "; it takes none"


def environment_rank() -> int:
    """The rank of this process by its environment, known before the processes are connected."""
    return int(os.environ.get("RANK", 0))


def warn(line: str) -> None:
    """Print a warning on standard error, by the main process alone."""
    if environment_rank() == 0:
        print(one_line(f"warning {line}"), file=sys.stderr, flush=True)


def shortened(names: Sequence[str], limit: int = 5) -> str:
    """The names in one line, separated by commas; of more than `limit` only the first ones."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


@contextmanager
def without_warnings() -> Iterator[None]:
    """A context without Python's warnings for threads, which `warnings.catch_warnings` is not."""
    filters, ignore = cast(list, warnings.filters), ("ignore", None, Warning, None, 0)
    filters.insert(0, ignore)
    try:
        yield
    finally:
        filters.remove(ignore)


def own_words(text: str) -> str:
    """The message itself of an error that torch raises again with a loader worker's traceback."""
    if not (text.startswith("Caught ") and "\nOriginal Traceback " in text):
        return text
    name, _, message = text.rstrip().splitlines()[-1].partition(": ")
    return message or name
