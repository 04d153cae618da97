"""How far our code was from what a test held it against, beside what was written down before.

A test that takes the fixture `held_against` calls it with each pair that it compares; its docstring
says what with. Once it has passed, it must have counted as many cases as equalities.json has of it,
and no difference above the bound there. `python .ci/equalities.py` writes that file, and the numbers
of recipes/we_equal_deit.md.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

RECORD = Path(__file__).with_name("equalities.json")


def numbers(thing: Any) -> np.ndarray:
    """All numbers of a tensor, an array, a number, or a sequence of such, in one row of float64."""
    if isinstance(thing, (list, tuple)):
        return np.concatenate([numbers(part) for part in thing])
    if isinstance(thing, Tensor):
        thing = thing.detach().double().numpy()
    return np.asarray(thing, np.float64).ravel()


def rounding_of(thing: Any) -> float:
    """The relative distance of neighbouring floats of a tensor's type; float64's of all else."""
    first = thing[0] if isinstance(thing, (list, tuple)) else thing
    floats = isinstance(first, Tensor) and first.is_floating_point()
    return torch.finfo(first.dtype if floats else torch.float64).eps


class HeldAgainst:
    """How many cases a test has compared, the largest difference, and the bound to write down.

    A difference of whole numbers, such as pixels, boxes and counts, is itself, and any other is
    divided by the largest of the numbers expected. The bound is the same for whole numbers, and for
    others the power of ten above four times as much, so that another processor stays below.
    """

    def __init__(self) -> None:
        self.cases, self.largest, self.bound = 0, 0.0, 0.0

    def __call__(
        self, found: Any, expected: Any, *, cases: int = 1, within: float | None = None
    ) -> None:
        """Count what our code gave beside what its reference gave.

        within: the test's own bound, where that is none of rounding: 0 to the bit, a level of grey.
        """
        ours, theirs = numbers(found), numbers(expected)
        assert ours.shape == theirs.shape and ours.size > 0
        largest = abs(ours - theirs).max().item()
        whole = (ours == ours.round()).all() and (theirs == theirs.round()).all()
        if not whole:
            largest /= abs(theirs).max().item() or 1.0
        if within is None:
            within = largest if whole else above(max(largest, rounding_of(found)))
        self.cases += cases
        self.largest = max(self.largest, largest)
        self.bound = max(self.bound, within)


def above(largest: float) -> float:
    return float(f"1e{math.ceil(math.log10(4 * largest))}")


def require_recorded(test: str, held: HeldAgainst) -> None:
    """Fail unless a test, by its pytest id, compared what it did when it was written down."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))["tests"]
    cases, bound = record.get(test, (0, 0.0))
    assert held.cases == cases and held.largest <= bound, (
        f"{held.cases} cases, which differ by at most {held.largest:.2g}; {RECORD.name} has {cases}, "
        f"and {bound:g}. If that is meant: python .ci/equalities.py"
    )
