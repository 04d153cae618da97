"""What a frozen dataclass of settings needs to state the bounds of its fields.

Such a dataclass is a section of a recipe: its fields are the section's keys, and their types and
bounds are what the recipe is checked by. This module imports nothing of the package.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

PAIR = tuple[int, int]          # (height, width); one integer stands for both
COUNT = 2**31                   # counts must be less than this, so that they fit into a C integer
TINIEST, LARGEST = 2.0**-149, 2.0**128      # the range of float32, in which training calculates


def number(**bounds: float) -> Any:
    """A numeric field with bounds: `minimum`, `maximum` inclusive, `above`, `below` exclusive.

    In a list, every element must be within the bounds.
    """
    return field(metadata=bounds)
