"""Parts of a training set, drawn class by class: what is trained on, and what is held out.

Both come from one fixed order of each class, which is keyed by (seed, class): what is trained on from
its front, what is held out from its end. So a smaller part lies in every larger one of the same seed,
and the two never share an image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ..keys import Stream, keyed_generator
from .datasets import Source
from .images import DataError


def ordered_classes(source: Source, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Of each class its name, and the numbers of its images in the order keyed by (seed, class)."""
    for label, name in enumerate(source.classes):
        members = np.flatnonzero(source.labels == label)
        yield name, members[keyed_generator(seed, Stream.SUBSET, label).permutation(len(members))]


def stratified_part(source: Source, *, share: float = 1.0, images_per_class: int = 0,
                    held_out: int = 0, seed: int = 0) -> Source:
    """A share of each class, or a number of images of each, in the order of `source`.

    held_out: number of images of each class that `held_out_part` takes. They are in no part, and
        `share` is of the others.

    A class of n images keeps share · n of them, rounded to the nearest integer (a half up), but at
    least one. Without any limit (share 1.0, images_per_class 0, held_out 0) the result is `source`
    itself. Raises DataError, naming it, for a class of too few images.
    """
    if share == 1.0 and not images_per_class and not held_out:
        return source
    kept = []
    for name, members in ordered_classes(source, seed):
        left = len(members) - held_out
        if left < max(images_per_class, 1):
            raise DataError(f"data.images_per_class is {images_per_class}, but class '{name}' has "
                            f"{len(members)} images to train on" +
                            (f", of which data.held_out_per_class takes {held_out}" if held_out else ""))
        count = images_per_class or max(1, math.floor(share * left + 0.5))
        kept.append(members[:count])
    return source.part(np.sort(np.concatenate(kept)))


def held_out_part(source: Source, *, images_per_class: int, seed: int = 0) -> Source:
    """The images of each class that are set aside from training, in the order of `source`.

    Raises DataError, naming it, for a class that has no image left to train on.
    """
    held = []
    for name, members in ordered_classes(source, seed):
        if images_per_class >= len(members):
            raise DataError(f"data.held_out_per_class is {images_per_class}, but class '{name}' has "
                            f"{len(members)} images in all; expected fewer")
        held.append(members[len(members) - images_per_class:])
    return source.part(np.sort(np.concatenate(held)))
