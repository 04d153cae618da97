"""Values of recipe keys: types within bounds, also in words; conversion, also from and to TOML.

A section of a recipe is a frozen dataclass, whose fields' types say what its keys take. A `kind` is
such a type, as int, tuple[float, float] or Literal["a", "b"], perhaps Annotated: a number by its
`Bounds`, a string by the Literal of its words where a table has them.
"""

import dataclasses
import json
import math
import operator
import re
import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, NoReturn

import numpy as np

from .messages import in_brief, nearest

TINIEST, LARGEST = 2.0**-149, 2.0**128  # the range of float32, in which training calculates
SIGNS = {
    "minimum": ("≥", operator.ge),
    "above": (">", operator.gt),
    "maximum": ("≤", operator.le),
    "below": ("<", operator.lt),
}
WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The bounds of a number: `number in bounds`; as a string "≥ 1 and < 101"."""

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None

    def __contains__(self, number: float) -> bool:
        return all(
            SIGNS[name][1](number, limit) for name, limit in vars(self).items() if limit is not None
        )

    def __str__(self) -> str:
        return " and ".join(
            f"{SIGNS[name][0]} {limit:{',' if type(limit) is int else 'g'}}"
            for name, limit in vars(self).items()
            if limit is not None
        )


Count = Annotated[int, Bounds(minimum=0, below=2**31)]  # both fit into a C integer
AtLeastOne = Annotated[int, Bounds(minimum=1, below=2**31)]
Size = tuple[AtLeastOne, AtLeastOne]  # (height, width); one integer stands for both
Proportion = Annotated[float, Bounds(minimum=0.0, maximum=1.0)]  # such as a probability
Fraction = Annotated[float, Bounds(above=0.0, maximum=1.0)]  # such as a part of an area
NonNegative = Annotated[float, Bounds(minimum=0.0)]
ProperFraction = Annotated[float, Bounds(above=0.0, below=1.0)]  # such as a share of attention
BelowOne = Annotated[float, Bounds(minimum=0.0, below=1.0)]  # such as a decay per step
PositiveNumber = Annotated[float, Bounds(above=0.0, below=LARGEST)]


class ReadOnly(dict):
    """A table that stays as it is; unlike types.MappingProxyType, it can be copied and pickled."""

    def _refuse(self, *values: object, **named: object) -> NoReturn:
        raise TypeError("a table of a recipe is read-only")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return ReadOnly, (dict(self),)


def show(value: Any) -> str:
    """A value in an error message, cut short if it is long."""
    return in_brief(to_toml(value) if type(value) is bool else repr(value), 80)


def accepted_values(kind: Any) -> str:
    """What a key of this kind accepts, such as 'an integer ≥ 1 and < 101'."""
    arguments, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in arguments)
    if origin is Annotated:
        base, limits = arguments
        return accepted_values(limits) if base is str else f"{accepted_values(base)} {limits}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(accepted_values, arguments))
    if origin is tuple:
        count = "" if arguments[-1] is Ellipsis else f" of {len(arguments)}"
        either = "an integer or " if kind == Size else ""
        return f"{either}a list{count}, each {accepted_values(arguments[0])}"
    return WORDS.get(kind, "a table")


def convert(value: Any, kind: Any) -> Any:
    """Convert a TOML value to `kind`, lists to tuples; or raise TypeError, "…, expected …"."""
    arguments, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin is Literal:
        if value in arguments:
            return value
        raise TypeError(f"{show(value)}{nearest(str(value), arguments)}")
    if origin is Annotated:
        base, limits = arguments
        if base is str:
            return convert(value, limits)
        with suppress(TypeError):
            if (number := convert(value, base)) in limits:
                return number
    elif origin in (typing.Union, types.UnionType):
        for option in arguments:
            with suppress(TypeError):
                return convert(value, option)
    elif origin is tuple:
        items = [value] * 2 if kind == Size and type(value) is int else value
        if isinstance(items, (list, tuple)):
            kinds = arguments[:1] * len(items) if arguments[-1] is Ellipsis else arguments
            with suppress(TypeError, ValueError):  # of an item, or of another number of them
                return tuple(convert(item, each) for item, each in zip(items, kinds, strict=True))
    elif origin is Mapping and isinstance(value, Mapping):
        return ReadOnly(value)
    elif kind is float and isinstance(value, (int, float)) and type(value) is not bool:
        with suppress(OverflowError):  # an integer beyond all floats
            if math.isfinite(value):
                return float(value)
    elif type(value) is kind:
        return value
    raise TypeError(f"{show(value)}, expected {accepted_values(kind)}")


def plain(value: Any) -> Any:
    """The value with nested tuples as lists, mappings and dataclasses as dicts, as in TOML; numpy's
    numbers are Python's.
    """
    if isinstance(value, np.generic):
        return value.item()
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables: {"init": {"options": {"rank": 3}}} → {"init.options.rank": 3}."""
    keys: dict[str, Any] = {}
    for name, value in table.items():
        keys |= (
            flat(value, f"{prefix}{name}.")
            if isinstance(value, Mapping)
            else {f"{prefix}{name}": value}
        )
    return keys


def to_toml(value: Any) -> str:
    """A value in TOML's notation, which is JSON's but for tables; none may be in a list.

    TOML has no U+007F, and no surrogates, in which Python keeps a path's bytes that are not UTF-8:
    "\\U0010DCE9" stands for the byte E9, and `files.parse_toml` reads it so.
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {to_toml(item)}" for key, item in value.items()) + "}"
    return re.sub(
        "[\x7f\ud800-\udfff]",
        lambda character: (
            "\\U%08X" % (ord(character[0]) + (0x100000 if character[0] > "\x7f" else 0))
        ),
        json.dumps(value, ensure_ascii=False),
    )
