"""Values of recipe keys: what a key accepts, in words, and conversion from and to TOML.

A `kind` is a type annotation, such as int, tuple[float, float], Literal["a", "b"] or PAIR.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ..bounds import PAIR

Bounds = Mapping[str, float | None]         # what `number` was given: minimum, above, maximum, below
UNBOUNDED: Bounds = types.MappingProxyType({})


def nearest(word: str, valid: Iterable[str]) -> str:
    """A hint for a mistyped word: '; did you mean X?', or all valid words if none is similar."""
    valid = list(valid)
    close = difflib.get_close_matches(str(word), valid, n=1)
    if close and close[0] != word:
        return f"; did you mean '{close[0]}'?"
    return f"; valid: {', '.join(sorted(valid))}" if valid else "; it takes none"


def shown(value: Any) -> str:
    """A value in an error message, cut short if it is long."""
    try:
        text = {True: "true", False: "false"}[value] if type(value) is bool else repr(value)
    except (ValueError, RecursionError):             # more than 4,300 digits; hundreds of brackets
        return "a value too long to be shown"
    return text if len(text) <= 80 else text[:77] + "..."


def describe(kind: Any, bounds: Bounds = UNBOUNDED) -> str:
    """What a key of this kind accepts, in words, such as 'an integer ≥ 1'."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        words = "one of " + ", ".join(f'"{choice}"' for choice in arguments)
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        words = " or ".join(describe(option) for option in arguments)
    elif typing.get_origin(kind) is tuple and typing.get_origin(arguments[0]) is Literal:
        words = "a list of words out of " + describe(arguments[0]).removeprefix("one of ")
    elif typing.get_origin(kind) is tuple:
        count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
        words = f"a list of {count}{'integers' if arguments[0] is int else 'numbers'}"
        if kind == PAIR:
            words = f"an integer or {words}"
    else:
        words = {int: "an integer", float: "a number", bool: "true or false", str: "a string"
                 }.get(kind, "a table")
    signs = {"minimum": "≥", "above": ">", "maximum": "≤", "below": "<"}
    limits = [f"{sign} {_number(bounds[name])}" for name, sign in signs.items()
              if bounds.get(name) is not None]
    return " ".join([words, " and ".join(limits)]).strip()


def _number(value: float) -> str:
    is_power = type(value) is int and value >= 2**20 and value & (value - 1) == 0
    return f"2^{value.bit_length() - 1}" if is_power else f"{value:g}"


def convert(value: Any, kind: Any, bounds: Bounds = UNBOUNDED) -> Any:
    """Convert a TOML value to `kind`; lists become tuples and tables read-only mappings.

    Raises TypeError, in the words "…, expected …; did you mean …?", if the value is of another kind
    or beyond its bounds.
    """
    arguments, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin is Literal:
        if value in arguments and not isinstance(value, bool):
            return value
    elif origin in (typing.Union, types.UnionType):
        for option in arguments:
            try:
                return convert(value, option)
            except TypeError:
                continue
    elif origin is tuple:
        if kind == PAIR and type(value) is int:
            value = (value, value)                  # image_size = 224 means 224 × 224
        if isinstance(value, (list, tuple)):
            kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
            if len(value) == len(kinds):
                try:
                    return tuple(convert(item, each, bounds) for item, each in zip(value, kinds))
                except TypeError:
                    pass
    elif kind is float:
        try:
            if type(value) in (int, float) and math.isfinite(value) and _within(value, bounds):
                return float(value) + 0.0            # makes a negative zero positive
        except OverflowError:                        # an integer beyond what a float can hold
            pass
    elif origin is Mapping:
        if isinstance(value, Mapping):
            return types.MappingProxyType(dict(value))
    elif type(value) is kind and _within(value, bounds):
        return value
    raise TypeError(f"{shown(value)}, expected {describe(kind, bounds)}{_hint(value, kind)}")


def _within(value: float, bounds: Bounds) -> bool:
    limits = {name: limit for name, limit in bounds.items() if limit is not None}
    return (value >= limits.get("minimum", value) and value <= limits.get("maximum", value)
            and ("above" not in limits or value > limits["above"])
            and ("below" not in limits or value < limits["below"]))


def _hint(value: Any, kind: Any) -> str:
    """'; did you mean X?' for a choice of words, or for the first wrong word of a list of such."""
    named, arguments = "", typing.get_args(kind)
    if typing.get_origin(kind) is tuple and isinstance(value, list):
        kind, arguments = arguments[0], typing.get_args(arguments[0])
        value = next((item for item in value if item not in arguments), None)
        named = f"; {shown(value)} is none of them"
    if typing.get_origin(kind) is not Literal or not isinstance(value, str):
        return ""
    close = difflib.get_close_matches(value, arguments, n=1)
    return named + (f"; did you mean '{close[0]}'?" if close else "")


def plain(value: Any) -> Any:
    """The value with all nested tuples as lists and all nested mappings and dataclasses as dicts.

    These are the containers of TOML, and of checkpoints that torch.load reads with weights_only.
    """
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def to_toml(value: Any) -> str:
    """A value in TOML's notation."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are valid in TOML, which in addition requires this character to be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(to_toml, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {to_toml(item)}" for key, item in value.items()) + "}"
    return repr(value)
