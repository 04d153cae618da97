"""Sources of images: in memory, or in files; and parts of them, drawn class by class.

All sources have the same interface, `Source`: `len(source)`, `source.image(i)` → (3, H, W) uint8,
`source.labels[i]`, and `source.classes`, the names of the classes.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..keys import Stream, keyed_generator
from .folders import EXTENSIONS, images_below, images_by_class, in_words
from .images import DataError, decode_image

VALIDATION_FOLDERS = ("val", "test")


class Source(Protocol):
    """Images with labels, by index. Reading an image raises DataError if it cannot be decoded."""

    classes: list[str]
    labels: np.ndarray                               # (N,) int64
    left_out: str                                    # a line about files that are no images, or ""

    def __len__(self) -> int: ...

    def image(self, index: int) -> Tensor: ...       # (3, H, W) uint8

    def part(self, indices: np.ndarray) -> Source: ...   # only these images, in this order


class ImagesInMemory:
    """Images in one tensor in memory, (N, 3, H, W) uint8, so all of one size."""

    left_out = ""

    def __init__(self, images: Tensor, labels: np.ndarray, classes: list[str]) -> None:
        self.images, self.labels, self.classes = images, labels, classes

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Tensor:
        return self.images[index]

    def part(self, indices: np.ndarray) -> ImagesInMemory:
        return ImagesInMemory(self.images[indices], self.labels[indices], self.classes)


class ImageFiles:
    """Images on disk; each is decoded anew whenever it is read.

    Their paths are stored as bytes, (N, length of the longest) uint8, filled up by zeros. Worker
    processes share the memory of this tensor, however they are started. Python strings would be
    copied into each, since reading one writes to its reference count.
    """

    apply_exif_orientation = True                    # `oriented` changes it
    left_out = ""

    def __init__(self, paths: Sequence[str], labels: Sequence[int] | np.ndarray,
                 classes: list[str]) -> None:
        encoded = np.array(list(map(os.fsencode, paths)), bytes)
        self.encoded = torch.from_numpy(encoded[:, None].view(np.uint8))
        self.labels, self.classes = np.array(labels, np.int64), classes

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def paths(self) -> list[str]:
        """The paths of all images."""
        encoded = self.encoded.numpy()
        return list(map(os.fsdecode, encoded.view(f"S{encoded.shape[1]}").ravel().tolist()))

    def image(self, index: int) -> Tensor:
        path = os.fsdecode(self.encoded[index].numpy().tobytes().rstrip(b"\0"))
        return decode_image(path, apply_exif_orientation=self.apply_exif_orientation)

    def part(self, indices: np.ndarray) -> ImageFiles:
        chosen = copy.copy(self)
        chosen.encoded, chosen.labels = self.encoded[indices], self.labels[indices]
        return chosen


class ImageFolder(ImageFiles):
    """The images `folder`/<class>/**/<image>: one folder per class, in alphabetical order.

    Raises DataError for a folder that is missing, has no classes, or has a class without images.
    """

    def __init__(self, folder: Path) -> None:
        if not os.path.isdir(folder):
            raise DataError(f"{folder}: no such folder; an image folder holds train/<class>/… and "
                            f"{' or '.join(f'{name}/<class>/…' for name in VALIDATION_FOLDERS)}")
        left_out = Counter()
        found = images_by_class(folder, left_out)
        self.left_out = in_words(left_out, folder)
        for name, paths in found.items():
            if not paths:
                raise DataError(f"{folder / name}: no image in this class; expected files ending in"
                                f" {', '.join(EXTENSIONS)}{self.left_out and '; '}{self.left_out}")
        labels = np.repeat(np.arange(len(found)), list(map(len, found.values())))
        super().__init__([path for paths in found.values() for path in paths], labels, list(found))


class LooseImages(ImageFiles):
    """The first `count` images anywhere under `folder`, all of one class without a name.

    This is for measurements and figures, which need no labels. Raises DataError if there is no
    image.
    """

    def __init__(self, folder: Path, count: int) -> None:
        left_out = Counter()
        paths = images_below(str(folder), left_out)[:count]
        self.left_out = in_words(left_out, folder)
        if not paths:
            raise DataError(f"{folder}: no images in it{self.left_out and '; '}{self.left_out}")
        super().__init__(paths, np.zeros(len(paths)), [""])


def oriented(source: Source, apply_exif_orientation: bool) -> Source:
    """The same images; those in files are turned as their EXIF data say, or left as stored."""
    source = copy.copy(source)
    source.apply_exif_orientation = apply_exif_orientation
    return source


def folder_of(root: str) -> Path:
    """The path of a data set's folder as a recipe or a command line states it; ~ is the home."""
    return Path(root).expanduser()


def fingerprint(source: Source, root: str) -> str:
    """A digest of the images' labels, classes and, for files, paths below `root`; not of pixels.

    Two processes, or two starts of a run, that have the same see the same images in the same order,
    wherever the data set's folder is.
    """
    digest = hashlib.sha256("\0".join([*source.classes, ""]).encode())
    digest.update(source.labels.tobytes())
    if isinstance(source, ImageFiles):
        folder = os.fsencode(os.path.join(folder_of(root), ""))
        content = os.fsencode("\0".join(["", *source.paths, ""]))
        digest.update(content.replace(b"\0" + folder, b"\0"))
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------------------------------------
# Parts of a training set
#
# The images of each class have a random order that is keyed by (seed, class) alone. Images to train
# on are taken from its front, held-out images from its end. So with the same seed a smaller part is
# contained in every larger one, and no image is both trained on and held out. Such parts serve
# studies of how much data a model needs, and validation without the test set.
# ---------------------------------------------------------------------------------------------


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
    return source.part(np.sort(np.concatenate([
        order[:images_per_class or max(1, int(share * (len(order) - held_out) + 0.5))]
        for order in shuffled_classes(source, seed, max(images_per_class, 1), held_out)])))


def held_out_part(source: Source, *, images_per_class: int, seed: int = 0) -> Source:
    """The images of each class that are held out from training, in the order of `source`.

    Raises DataError that names the class if a class would have no image left to train on.
    """
    return source.part(np.sort(np.concatenate([
        order[len(order) - images_per_class:]
        for order in shuffled_classes(source, seed, 1, images_per_class)])))


def shuffled_classes(source: Source, seed: int, least: int, held_out: int) -> Iterator[np.ndarray]:
    """Yield for each class the indices of its images, in the order of (seed, class).

    Raises DataError for a class that has not `least` images to train on and `held_out` others.
    """
    for label, name in enumerate(source.classes):
        members = np.flatnonzero(source.labels == label)
        if len(members) < least + held_out:
            raise DataError(f"class '{name}' has {len(members)} images, too few to train on "
                            f"{least} and hold out {held_out} of them; expected less of "
                            "data.images_per_class or data.held_out_per_class")
        yield members[keyed_generator(seed, Stream.SUBSET, label).permutation(len(members))]
