"""Values of recipe keys: conversion to a type within bounds, what a key accepts in words, and TOML.

A `kind` is a type annotation, such as int, tuple[float, float], Literal["a", "b"] or PAIR; bounds
are what `number` was given.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import operator
import types
import typing
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Literal, NoReturn

from ..bounds import PAIR
from ..messages import in_brief

WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
SIGNS = {"minimum": ("≥", operator.ge), "above": (">", operator.gt),
         "maximum": ("≤", operator.le), "below": ("<", operator.lt)}


class ReadOnly(dict):
    """A table that stays as it is; unlike types.MappingProxyType, it can be copied and pickled."""

    def _refuse(self, *values: object, **named: object) -> NoReturn:
        raise TypeError("a table of a recipe is read-only")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return ReadOnly, (dict(self),)


def nearest(word: str, valid: Iterable[str]) -> str:
    """A hint for a mistyped word: '; did you mean X?', or all valid words if none is similar."""
    valid = list(valid)
    if close := difflib.get_close_matches(word, valid, n=1):
        return f"; did you mean '{close[0]}'?"
    return f"; valid: {', '.join(sorted(valid))}" if valid else "; it takes none"


def show(value: Any) -> str:
    """A value in an error message, cut short if it is long."""
    return in_brief(to_toml(value) if type(value) is bool else repr(value), 80)


def describe(kind: Any, bounds: Mapping[str, float]) -> str:
    """What a key of this kind accepts, in words, such as 'an integer ≥ 1 and < 101'."""
    arguments, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(option, bounds) for option in arguments)
    if origin is tuple:
        count = "" if arguments[-1] is Ellipsis else f" of {len(arguments)}"
        words = f"a list{count}, each {describe(arguments[0], bounds)}"
        return f"an integer or {words}" if kind == PAIR else words
    limits = [f"{SIGNS[name][0]} {limit:{',' if type(limit) is int else 'g'}}"
              for name, limit in bounds.items()]
    return f"{WORDS.get(kind, 'a table')} {' and '.join(limits)}".rstrip()


def convert(value: Any, kind: Any, bounds: Mapping[str, float]) -> Any:
    """Convert a TOML value to `kind`; lists become tuples and tables read-only mappings.

    Raises TypeError, in the words "…, expected …", if the value is of another kind or beyond its
    bounds.
    """
    arguments, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin is Literal:
        if value in arguments:
            return value
        raise TypeError(f"{show(value)}{nearest(str(value), arguments)}")
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            with suppress(TypeError):
                return convert(value, option, bounds)
    elif origin is tuple:
        items = [value] * 2 if kind == PAIR and type(value) is int else value
        if isinstance(items, (list, tuple)):
            kinds = arguments[:1] * len(items) if arguments[-1] is Ellipsis else arguments
            with suppress(TypeError, ValueError):    # of an item, or of another number of them
                return tuple(convert(item, each, bounds)
                             for item, each in zip(items, kinds, strict=True))
    elif origin is Mapping and isinstance(value, Mapping):
        return ReadOnly(value)
    elif type(value) is kind or kind is float and type(value) is int:
        found = float(value) + 0.0 if kind is float else value   # makes a negative zero positive
        if (kind is not float or math.isfinite(found)) and all(
                SIGNS[name][1](found, limit) for name, limit in bounds.items()):
            return found
    raise TypeError(f"{show(value)}, expected {describe(kind, bounds)}")


def plain(value: Any) -> Any:
    """The value with nested tuples as lists, and mappings and dataclasses as dicts, as in TOML."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables: {"init": {"options": {"rank": 3}}} → {"init.options.rank": 3}."""
    keys = {}
    for name, value in table.items():
        keys |= (flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else
                 {f"{prefix}{name}": value})
    return keys


def to_toml(value: Any) -> str:
    """A value in TOML's notation, which is JSON's but for tables; none may be in a list."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {to_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
