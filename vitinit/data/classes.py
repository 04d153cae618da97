"""Names of classes: how two lists of them are matched, and files of them.

A name is a text, whatever it looks like: "01", "1" and "10" are three, in this order. The classes
of folders and lists are sorted as texts, as torchvision sorts them.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy import ndarray

from ..base.files import read_bytes
from ..base.messages import in_brief
from .folders import composed
from .images import DataError


def rows_by_name(classes: Sequence[str]) -> dict[str, int]:
    """The index of each class whose name no other one has; ImageNet has two that are cranes."""
    names = list(map(composed, classes))
    counts = Counter(names)
    return {name: index for index, name in enumerate(names) if counts[name] == 1}


def class_indices(model_classes: Sequence[str], set_classes: Sequence[str]) -> list[int]:
    """For each class of a data set its index among a model's; DataError names one that it lacks, or
    has more than once.
    """
    indices = rows_by_name(model_classes)
    for name in set_classes:
        if composed(name) not in indices:
            raise DataError(
                f"class '{name}' is {model_classes.count(name) or 'none'} of the "
                f"model's {len(model_classes):,} classes ({in_brief(', '.join(model_classes))})"
            )
    return [indices[composed(name)] for name in set_classes]


def members_of(labels: ndarray, count: int) -> list[ndarray]:
    """The indices of the images of each of `count` classes, ascending. labels: (N,), their classes."""
    ends = np.bincount(labels, minlength=count).cumsum()
    return np.split(np.argsort(labels, kind="stable"), ends[:-1])


def read_classes(file: str | Path) -> list[str]:
    """The names in a file, one per line, in order. Names of folders need not be UTF-8."""
    text = read_bytes(file).decode("utf-8-sig", "surrogateescape")
    return [line.strip() for line in text.strip().split("\n")]
