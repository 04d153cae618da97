"""Values of recipe keys: types within bounds, also in words; conversion, also from and to TOML.

A section of a recipe is a frozen dataclass, whose fields' types say what its keys take. A `kind` is
such a type, as int, tuple[float, float] or Literal["a", "b"], perhaps Annotated: a number by its
`Bounds`, a string by the Literal of its words where a table has them.
"""

import dataclasses
import json
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from inspect import signature
from itertools import product
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
Table = dict[str, Any]  # as TOML and JSON have them
WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The bounds of a number: `number in bounds`; as a string "≥ 1 and < 101"."""

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None

    def __contains__(self, number: float) -> bool:
        return all(compare(number, limit) for _, compare, limit in self._stated())

    def __str__(self) -> str:
        return " and ".join(
            f"{sign} {limit:{',' if type(limit) is int else 'g'}}"
            for sign, _, limit in self._stated()
        )

    def _stated(self) -> Iterator[Any]:
        for name, limit in vars(self).items():
            if limit is not None:
                yield *SIGNS[name], limit


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

    def __reduce__(self) -> tuple[type, tuple[Table]]:
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
    """Convert a value of TOML, or of Python, to `kind`: lists to tuples, numpy's numbers to
    Python's. Raises TypeError, "…, expected …".
    """
    arguments, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin is Annotated and arguments[0] is str:
        return convert(value, arguments[1])
    for reading in _readings(plain(value), kind):  # the first counts
        return reading
    if origin is Literal:
        raise TypeError(f"{show(value)}{nearest(str(value), arguments)}")
    raise TypeError(f"{show(value)}, expected {accepted_values(kind)}")


def convert_options(options: Mapping[str, Any], function: Callable[..., Any]) -> Table:
    """Options, each as the type of the function's argument says; ValueError, "name is …". A type
    that no recipe can state, in a function that a user has registered, says nothing.
    """
    converted = dict(options)
    for name, parameter in signature(function, eval_str=True).parameters.items():
        kind = parameter.annotation
        if name in options and accepted_values(kind) != "a table":  # which no option is
            try:
                converted[name] = convert(options[name], kind)
            except TypeError as error:
                raise ValueError(f"{name} is {error}") from None
    return converted


def _readings(value: Any, kind: Any) -> Iterator[Any]:
    """Yield all that a value means as this kind: nothing if it does not fit."""
    arguments, origin = typing.get_args(kind), typing.get_origin(kind)
    if origin is Annotated:
        base, limits = arguments
        allowed = typing.get_args(limits) or limits  # words, or bounds
        yield from (reading for reading in _readings(value, base) if reading in allowed)
    elif origin in (typing.Union, types.UnionType):
        for option in arguments:
            yield from _readings(value, option)
    elif origin is tuple:
        yield from _readings_as_tuple(value, kind)
    elif origin is Mapping and isinstance(value, Mapping):
        yield ReadOnly(value)
    elif kind is float:
        if _is_finite(value):
            yield float(value)
    elif type(value) is kind or origin is Literal and value in arguments:
        yield value


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and type(value) is not bool
    return is_number and abs(value) <= sys.float_info.max


def _readings_as_tuple(value: Any, kind: Any) -> Iterator[tuple]:
    kinds = typing.get_args(kind)
    if kind == Size and type(value) is int:
        value = (value, value)
    if not isinstance(value, (list, tuple)):
        return
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)
    if len(value) == len(kinds):
        yield from product(*map(_readings, value, kinds))


def plain(value: Any) -> Any:
    """The value with nested tuples as lists, mappings and dataclasses as dicts, as in TOML; numpy's
    numbers are Python's, its arrays lists.
    """
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def flat(table: Mapping[str, Any], prefix: str = "") -> Table:
    """Flatten nested tables: {"init": {"options": {"rank": 3}}} → {"init.options.rank": 3}."""
    keys: Table = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            keys |= flat(value, f"{prefix}{name}.")
        else:
            keys[f"{prefix}{name}"] = value
    return keys


def to_toml(value: Any) -> str:
    """A value in TOML's notation, which is JSON's but for tables; none may be in a list.

    TOML has no U+007F, and no surrogates, in which Python keeps a path's bytes that are not UTF-8:
    "\\U0010DCE9" stands for the byte E9, and `files.parse_toml` reads it so.
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {to_toml(item)}" for key, item in value.items()) + "}"
    return re.sub("[\x7f\ud800-\udfff]", _escaped, json.dumps(value, ensure_ascii=False))


def _escaped(character: re.Match) -> str:
    code = ord(character[0])
    if code > 0x7F:  # a surrogate
        code += 0x100000
    return f"\\U{code:08X}"
