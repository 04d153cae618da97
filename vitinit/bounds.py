"""Numbers within bounds: types of the fields of frozen dataclasses of settings.

Such a dataclass is a section of a recipe: its fields are the section's keys, and their types are
what the recipe is checked by. This module imports nothing of the package.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Annotated

TINIEST, LARGEST = 2.0**-149, 2.0**128      # the range of float32, in which training calculates
SIGNS = {"minimum": ("≥", operator.ge), "above": (">", operator.gt),
         "maximum": ("≤", operator.le), "below": ("<", operator.lt)}


@dataclass(frozen=True)
class Bounds:
    """The bounds of a number: `number in bounds`. In words: "≥ 1 and < 101"."""

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None

    def __contains__(self, number: float) -> bool:
        return all(SIGNS[name][1](number, limit) for name, limit in vars(self).items()
                   if limit is not None)

    def __str__(self) -> str:
        return " and ".join(f"{SIGNS[name][0]} {limit:{',' if type(limit) is int else 'g'}}"
                            for name, limit in vars(self).items() if limit is not None)


Count = Annotated[int, Bounds(minimum=0, below=2**31)]       # both fit into a C integer
AtLeastOne = Annotated[int, Bounds(minimum=1, below=2**31)]
Size = tuple[AtLeastOne, AtLeastOne]            # (height, width); one integer stands for both
Proportion = Annotated[float, Bounds(minimum=0.0, maximum=1.0)]      # such as a probability
Fraction = Annotated[float, Bounds(above=0.0, maximum=1.0)]          # such as a part of an area
NonNegative = Annotated[float, Bounds(minimum=0.0)]
BelowOne = Annotated[float, Bounds(minimum=0.0, below=1.0)]          # such as a decay per step
PositiveNumber = Annotated[float, Bounds(above=0.0, below=LARGEST)]
