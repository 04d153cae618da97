"""Reduce a training set evenly over its classes, for studies of how much data a model needs."""

from __future__ import annotations

import math

import numpy as np

from ..keys import Stream, keyed_generator
from .datasets import Source
from .images import DataError


def stratified_part(source: Source, *, share: float = 1.0, images_per_class: int = 0,
                    seed: int = 0) -> Source:
    """A part of `source` with a share of each class, or a number of images of each class.

    A class of n images keeps share · n of them, rounded to the nearest integer (halves up), but at
    least one. If `images_per_class` is not 0, every class keeps that many instead. Each class has a
    random order that is keyed by (seed, class) alone, and its first images in that order are kept.
    So with the same seed a smaller part is contained in every larger one. The images that are kept
    stay in the order of `source`. With share 1.0 and images_per_class 0 the result is `source`
    itself. Raises DataError that names the class if a class has fewer than `images_per_class`
    images.
    """
    if share == 1.0 and not images_per_class:
        return source
    indices = []                                     # of the images that are kept, class by class
    for label, name in enumerate(source.classes):
        members = np.flatnonzero(source.labels == label)
        if images_per_class > len(members):
            raise DataError(f"data.images_per_class is {images_per_class}, but class '{name}' has "
                            f"{len(members)} images to train on")
        count = images_per_class or max(1, math.floor(share * len(members) + 0.5))
        order = keyed_generator(seed, Stream.SUBSET, label).permutation(len(members))
        indices.append(members[order[:count]])
    return source.part(np.sort(np.concatenate(indices)))
