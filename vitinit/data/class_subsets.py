"""Classes by name: the names of ImageNet-1K's classes, and which of a model's classes a set has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .images import DataError

WNIDS = Path(__file__).with_name("imagenet_wnids.txt")


def imagenet_wnids() -> list[str]:
    """The WordNet ids (wnids) of ImageNet-1K's classes, sorted: class 0 is n01440764, the tench.

    ImageNet's folders have the same order, so the outputs of every model trained on them have it,
    too.
    """
    return WNIDS.read_text(encoding="ascii").split()


def class_indices(model_classes: Sequence[str], set_classes: Sequence[str]) -> list[int]:
    """For each class of a data set, its index among the classes of a model.

    The model's logits at these indices, in this order, are logits over the data set's classes.
    Raises DataError that names the first class that the model does not know.
    """
    indices = {name: index for index, name in enumerate(model_classes)}
    for name in set_classes:
        if name not in indices:
            raise DataError(f"class '{name}' is none of the model's {len(model_classes)} classes "
                            f"({', '.join(model_classes[:2])}, … {model_classes[-1]})")
    return [indices[name] for name in set_classes]
