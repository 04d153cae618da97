"""Parts of a training set, drawn class by class: the images to train on, and images that are held out.

The images of each class have a random order that is keyed by (seed, class) alone. Images to train
on are taken from its front, held-out images from its end. So with the same seed a smaller part is
contained in every larger one, and no image is both trained on and held out. Such parts serve
studies of how much data a model needs, and validation without the test set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ..keys import Stream, keyed_generator
from .datasets import Source
from .images import DataError


def ordered_classes(source: Source, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield for each class its name and the indices of its images, in the order of (seed, class)."""
    for label, name in enumerate(source.classes):
        members = np.flatnonzero(source.labels == label)
        yield name, members[keyed_generator(seed, Stream.SUBSET, label).permutation(len(members))]


def stratified_part(source: Source, *, share: float = 1.0, images_per_class: int = 0,
                    held_out: int = 0, seed: int = 0) -> Source:
    """The part of `source` to train on: a share of each class, or a number of images of each class.

    held_out: how many images per class `held_out_part` takes. They are left out here, and `share`
        is a share of the remaining images.

    A class of which n images remain keeps share · n of them, rounded to the nearest integer (halves
    up), but at least one; or `images_per_class` of them if that is not 0. Images stay in the order
    of `source`. Without any limit (share 1.0, images_per_class 0, held_out 0) the result is
    `source` itself. Raises DataError that names the class if a class has too few images.
    """
    if share == 1.0 and not images_per_class and not held_out:
        return source
    indices = []                                     # of the images to train on, class by class
    for name, members in ordered_classes(source, seed):
        left = len(members) - held_out
        if left < max(images_per_class, 1):
            wanted = f"data.images_per_class is {images_per_class}, but " if images_per_class else ""
            taken = (f", of which data.held_out_per_class takes {held_out}; expected at most "
                     f"{max(len(members) - max(images_per_class, 1), 0)}" if held_out else "")
            raise DataError(f"{wanted}class '{name}' has {len(members)} images to train on{taken}")
        count = images_per_class or max(1, math.floor(share * left + 0.5))
        indices.append(members[:count])
    return source.part(np.sort(np.concatenate(indices)))


def held_out_part(source: Source, *, images_per_class: int, seed: int = 0) -> Source:
    """The images of each class that are held out from training, in the order of `source`.

    Raises DataError that names the class if a class would have no image left to train on.
    """
    indices = []                                     # of the images that are held out, class by class
    for name, members in ordered_classes(source, seed):
        if images_per_class >= len(members):
            raise DataError(f"data.held_out_per_class is {images_per_class}, but class '{name}' has "
                            f"{len(members)} images in all; expected fewer")
        indices.append(members[len(members) - images_per_class:])
    return source.part(np.sort(np.concatenate(indices)))
