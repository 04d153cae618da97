"""Checks of the options of inits, with messages of one line: option, value, what is expected.

Types and finiteness follow from an init's signature and are checked for all inits here; the inits
themselves check the ranges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

GIVEN = ("generator", "images")       # parameters of inits that a caller gives; they are no options
KINDS = {int: "an integer", float: "a finite number", bool: "true or false"}


def require_kinds(init: Callable[..., None], options: Mapping[str, Any]) -> None:
    """Raise ValueError for the first option that does not have its annotated type.

    NaN and ∞ are refused, too. Strings are not checked here, but by the inits, which know the
    accepted values.
    """
    hints = get_type_hints(init)
    for name, value in options.items():
        if name in hints and not _fits(hints[name], value):
            raise ValueError(f"{name} is {_shown(value)}, expected {_in_words(hints[name])}")


def require_positive(**options: float) -> None:
    """Raise ValueError for an option that is not above 0."""
    for name, value in options.items():
        if not value > 0:                            # also refuses NaN
            raise ValueError(f"{name} is {value}, expected {name} > 0")


def require_not_negative(**options: float) -> None:
    """Raise ValueError for an option that is below 0 or NaN."""
    for name, value in options.items():
        if not value >= 0:
            raise ValueError(f"{name} is {value}, expected {name} ≥ 0")


def given_numbers(options: Mapping[str, Any]) -> str:
    """The numeric options as text for a message, " with a=1, b=2"; "" if there are none."""
    numbers = [f"{name}={_shown(value)}" for name, value in options.items()
               if not isinstance(value, (bool, str))]
    return f" with {', '.join(numbers)}" if numbers else ""


def _fits(hint: Any, value: Any) -> bool:
    if isinstance(hint, UnionType):
        return any(_fits(part, value) for part in get_args(hint))
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        return (isinstance(value, Sequence) and len(value) == len(parts)
                and all(map(_fits, parts, value)))
    if hint not in KINDS:
        return True
    if hint is bool or isinstance(value, bool):
        return hint is bool and isinstance(value, bool)
    if hint is int:
        return isinstance(value, Integral)
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:                            # an integer beyond the largest float
        return False


def _in_words(hint: Any) -> str:
    if isinstance(hint, UnionType):
        return " or ".join(map(_in_words, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"{len(get_args(hint))} of them"
    return KINDS[hint]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:30]}… ({len(text)} characters)"
