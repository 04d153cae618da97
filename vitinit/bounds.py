"""What a frozen dataclass of settings needs to state the bounds of its fields.

Such a dataclass is a section of a recipe: its fields are the section's keys, and their types and
bounds are what the recipe is checked by. This module imports nothing of the package.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

PAIR = tuple[int, int]          # (height, width); one integer stands for both
TINIEST, LARGEST = 2.0**-149, 2.0**128      # the range of float32, in which training calculates


def number(**bounds: float) -> Any:
    """A numeric field with bounds: `minimum`, `maximum` inclusive, `above`, `below` exclusive.

    In a list, every element must be within the bounds.
    """
    return field(metadata=bounds)


def at_least(minimum: int) -> Any:
    """A field, or a list, of whole numbers from `minimum` on that fit into a C integer."""
    return number(minimum=minimum, below=2**31)


def proportion() -> Any:
    """A field of a number from 0 to 1, such as a probability."""
    return number(minimum=0.0, maximum=1.0)
