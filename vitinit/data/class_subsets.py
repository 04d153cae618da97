"""Classes by name: which of a model's classes a data set has, and the names of ImageNet-1K's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .images import DataError

WNIDS = Path(__file__).with_name("imagenet_wnids.txt")


def imagenet_wnids() -> list[str]:
    """WordNet's numbers of ImageNet-1K's classes, sorted: class 0 is n01440764, the tench.

    That is the order of its folders, so that of every model trained on them.
    """
    return WNIDS.read_text(encoding="ascii").split()


def class_indices(ours: Sequence[str], theirs: Sequence[str]) -> list[int]:
    """For each class of a data set, `theirs`, its place among a model's classes, `ours`.

    The model's logits at these places, in this order, are logits over the data set's classes.
    Raises DataError naming the first class that the model does not know.
    """
    places = {name: place for place, name in enumerate(ours)}
    for name in theirs:
        if name not in places:
            raise DataError(f"class '{name}' is none of the model's {len(ours)} classes "
                            f"({', '.join(ours[:2])}, … {ours[-1]})")
    return [places[name] for name in theirs]
