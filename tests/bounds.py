"""The bounds of numbers, as their types state them."""

import typing

from vitinit.base.values import Bounds


def bounds_in(kind) -> list[Bounds | None]:
    """The bounds of each kind of number in a type; None: a number has none."""
    if kind in (int, float):
        return [None]
    if typing.get_origin(kind) is typing.Annotated:
        return [note for note in kind.__metadata__ if isinstance(note, Bounds)]
    return [bounds for part in dict.fromkeys(typing.get_args(kind)) for bounds in bounds_in(part)]
