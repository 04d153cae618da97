"""A part of a training set, as large in every class: for studies of how much data a model needs."""

from __future__ import annotations

import math

import numpy as np

from ..keys import Stream, keyed_generator
from .datasets import Source
from .images import DataError


def stratified_part(source: Source, *, share: float = 1.0, images_per_class: int = 0,
                    seed: int = 0) -> Source:
    """`share` of every class, or `images_per_class` of each, in the order of `source`.

    A class of n images keeps share · n of them, rounded to the nearest (a half up), but at least
    one. Which ones is keyed by (seed, class) alone: of every class the first so many of one fixed
    order. So a smaller part lies in every larger one of the same seed. Without a limit (share 1.0,
    images_per_class 0) that is `source` itself. Raises DataError, naming it, for a class of fewer
    than `images_per_class` images.
    """
    if share == 1.0 and not images_per_class:
        return source
    kept = []
    for label, name in enumerate(source.classes):
        members = np.flatnonzero(source.labels == label)
        if images_per_class > len(members):
            raise DataError(f"data.images_per_class is {images_per_class}, but class '{name}' has "
                            f"{len(members)} images to train on")
        count = images_per_class or max(1, math.floor(share * len(members) + 0.5))
        order = keyed_generator(seed, Stream.SUBSET, label).permutation(len(members))
        kept.append(members[order[:count]])
    return source.part(np.sort(np.concatenate(kept)))
