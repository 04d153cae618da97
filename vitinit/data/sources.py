"""Sources of images: in memory, or in files; and parts of them, drawn class by class."""

import copy
import hashlib
import os
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from ..base.keys import Purpose, keyed_generator
from ..base.messages import one_line
from .classes import class_indices, members_of
from .folders import (
    EXTENSIONS,
    classes_in,
    composed,
    folders_in,
    images_below,
    in_words,
    suffix_of,
)
from .images import DataError, decode_bytes, jpeg_decoder, read_image, room_for, with_channels

__all__ = ["ImageFiles", "ImageFolder", "ImagesInMemory", "LooseImages", "Source"]

SIZES = "sizes of files"  # the name of their digest among what a run records
SIZED = 5_000  # files of a split whose sizes it is of


class Source:
    """N images, their labels, and the names of their K classes.

    labels: (N,) int64, the class of each image; or (N, K) uint8, 1 for each class that it is of.
    """

    pixels: Callable[[int], Tensor]  # of an image that is in memory
    channels = 3  # of its images; `read_as` changes it, and what it says of files
    apply_exif_orientation = True
    left_out = ""  # lines about what is left out of a folder
    to_validate_on = ""  # what else there is, beside images to train on, such as "val/"

    def __init__(self, stored: Tensor, labels: Sequence[int] | ndarray, classes: list[str]) -> None:
        self.stored = stored
        self.labels = np.array(labels)
        if not self.several_labels:
            self.labels = self.labels.astype(np.int64)
        self.classes = classes

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def several_labels(self) -> bool:
        """Whether an image may be of several classes, or of none."""
        return self.labels.ndim == 2

    @property
    def class_images(self) -> ndarray:
        """(K,), how many images each class has."""
        if self.several_labels:
            return self.labels.sum(axis=0, dtype=np.int64)
        return np.bincount(self.labels, minlength=len(self.classes))

    def of_class(self, number: int) -> ndarray:
        """The indices of the images of a class, ascending."""
        return np.flatnonzero(
            self.labels[:, number] if self.several_labels else self.labels == number
        )

    def image(self, index: int, view: Callable = lambda image: image) -> Any:
        """Image `index`, (3, H, W) uint8, or what `view` makes of it: DataError if there is too
        little memory for either, or if it cannot be decoded or is no tensor of uint8.
        """
        pixels = self.pixels(index)
        kind = getattr(pixels, "dtype", None)  # numpy's, of an array
        if kind != torch.uint8:  # values from 0 to 1 would be cut to 0
            raise DataError(f"image {index}: has {kind} values; expected a tensor of torch.uint8")
        return view(with_channels(pixels, self.channels))

    def path(self, index: int) -> str:
        """The file of an image; "" of one in memory."""
        return ""

    def content(self, index: int) -> bytes:
        """The content of an image's file; b"" of one in memory. DataError if it cannot be read."""
        return b""

    def note(self, line: str) -> None:
        """Put a line before what `left_out` says."""
        self.left_out = f"{one_line(line)}\n{self.left_out}".rstrip()

    def some_paths(self) -> list[str]:
        """At most 64 of the files' paths, spread evenly; [] of images in memory."""
        return []

    def part(self, indices: ndarray) -> Self:
        """Only these images, in this order."""
        part = copy.copy(self)
        part.stored = self.stored[indices]
        part.labels = self.labels[indices]
        return part

    def in_order(self, classes: Sequence[str]) -> Self:
        """The same images, with their classes in this order, and spelt so, if these are the same."""
        own, known = (sorted(map(composed, names)) for names in (self.classes, classes))
        if list(classes) == self.classes or own != known:
            return self
        ordered = copy.copy(self)
        numbers = np.array(class_indices(classes, self.classes))
        if self.several_labels:
            ordered.labels = self.labels[:, numbers.argsort()]
        else:
            ordered.labels = numbers[self.labels]
        ordered.classes = list(classes)
        return ordered


class ImagesInMemory(Source):
    """Images in one tensor in memory, (N, 3, H, W) uint8, so all of one size."""

    def pixels(self, index: int) -> Tensor:
        return self.stored[index]


class ImageFiles(Source):
    """Images on disk; each is decoded anew whenever it is read, and DataError if it cannot be.

    paths: of N files. labels: (N,), the number of each one's class. classes: their names.

    Their paths are bytes in one tensor, `text`, which parts share, and `stored`, (N, 2) int64, has
    where in it each begins and ends: tensors, whose memory workers share. Strings would be copied
    into each worker, since reading one counts a reference.
    """

    def __init__(
        self, paths: Iterable[str | Path], labels: Sequence[int] | ndarray, classes: list[str]
    ) -> None:
        text = bytearray()
        bounds = array("q")
        for path in map(os.fsencode, paths):
            bounds.extend((len(text), len(text) + len(path)))
            text += path
        stored = torch.from_numpy(np.asarray(bounds).reshape(-1, 2))
        super().__init__(stored, labels, classes)
        self.text = torch.from_numpy(np.frombuffer(text, np.uint8))
        jpeg_decoder()  # which forked workers then have

    def each_path(self) -> Iterator[str]:
        """Each path, one at a time: a list of them takes 57 bytes more for each."""
        text = self.text.numpy().data
        for start, end in self.stored.numpy()[:, :2]:
            yield os.fsdecode(bytes(text[start:end]))

    @property
    def paths(self) -> list[str]:
        return list(self.each_path())

    def some_paths(self) -> list[str]:  # evenly, since a folder's are sorted by class
        return self.part(np.arange(0, len(self), len(self) // 64 + 1)).paths

    def path(self, index: int) -> str:
        start, end = self.stored[index, :2].tolist()
        return os.fsdecode(self.text[start:end].numpy().tobytes())

    def image(self, index: int, view: Callable = lambda image: image) -> Any:
        path = self.path(index)
        with room_for(path):
            image = decode_bytes(
                self.content(index),
                path,
                channels=self.channels,
                apply_exif_orientation=self.apply_exif_orientation,
            )
            return view(image)

    def content(self, index: int) -> bytes:
        return read_image(self.path(index))

    def size(self, index: int) -> int:
        """The bytes of an image's file; -1 if it is not there any more."""
        path = self.path(index)
        return os.path.getsize(path) if os.path.exists(path) else -1


class ImageFolder(ImageFiles):
    """Images `folder`/<class>/**/<image>, sorted; DataError for no class, or one without images.

    Folders are one class if their composed names are equal.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        if not os.path.isdir(folder):
            raise DataError(f"{folder}: no such folder; expected {folder}/<class>/<image>")
        names = folders_in(folder)
        # Of each folder, and of no class in `folder` itself.
        paths = defaultdict[str, list[str]](list)
        left_out = Counter[str]()
        for parent, files in images_below(folder, left_out):
            name, *_ = os.path.relpath(parent, folder).split(os.sep)
            paths[name] += [os.path.join(parent, file) for file in files]
        left_out.update(f"{suffix_of(path)} of no class" for path in paths[os.curdir])
        self.left_out = in_words(left_out, folder)
        if not names:
            raise DataError(
                f"{folder}: no class folders in it; expected {folder}/<class>/<image>, with archives "
                "unpacked, or a list: --set data.name=image_list reads images.csv, with the columns "
                f"path and label{self.left_out and '; '}{self.left_out}"
            )
        for name in names:
            if not paths[name]:
                raise DataError(
                    f"{folder / name}: no image in this class; expected files ending in "
                    f"{', '.join(EXTENSIONS)}{self.left_out and '; '}{self.left_out}"
                )
        classes = classes_in(folder)
        numbers = {name: number for number, name in enumerate(classes)}
        labels = np.repeat(
            [numbers[composed(name)] for name in names], [len(paths[name]) for name in names]
        )
        super().__init__(chain.from_iterable(paths[name] for name in names), labels, classes)


class LooseImages(ImageFiles):
    """The first `count` images anywhere under `folder`, or all; DataError if there is none."""

    def __init__(self, folder: str | Path, count: int | None = None) -> None:
        left_out = Counter[str]()
        paths = [
            os.path.join(parent, file)
            for parent, files in images_below(folder, left_out)
            for file in files
        ]
        self.left_out = in_words(left_out, folder)
        if not paths:
            raise DataError(f"{folder}: no images in it{self.left_out and '; '}{self.left_out}")
        paths = paths[:count]
        super().__init__(paths, np.zeros(len(paths)), [""])


def read_as(source: Source, channels: int, apply_exif_orientation: bool) -> Source:
    """The same images with so many channels; those in files are turned as their EXIF data say, or
    left as stored.
    """
    source = copy.copy(source)
    source.channels, source.apply_exif_orientation = channels, apply_exif_orientation
    return source


def folder_of(root: str) -> Path:
    """The path of a data set's folder as a recipe or a command line states it; ~ is the home."""
    return Path(root).expanduser()


def fingerprint(source: Source, root: str) -> str:
    """A digest of labels, classes and, for files, paths below `root`; not of pixels.

    With the same, two processes, or two starts of a run, see the same images in the same order.
    """
    digest = hashlib.sha256("\0".join([*source.classes, ""]).encode("utf-8", "surrogateescape"))
    digest.update(source.labels.tobytes())
    if isinstance(source, ImageFiles):
        folder = folder_of(root)
        starts = [os.path.join(start, "") for start in (folder, os.path.abspath(folder))]
        for path in source.each_path():
            for start in starts:  # paths of a list may have either
                path = path.removeprefix(start)
            digest.update(os.fsencode(f"\0{path}"))
        digest.update(b"\0")
    return digest.hexdigest()[:16]


def file_sizes(sources: Sequence[Source], seed: int) -> dict[str, str]:
    """SIZES and a digest of the sizes in bytes of at most SIZED files of each source, drawn by key.

    {} if all images are in memory. A file that is not there any more counts as of another size.
    """
    sizes: list[int] = []
    for split, source in enumerate(sources):
        if isinstance(source, ImageFiles):
            order = keyed_generator(seed, Purpose.FILE_SIZES, split).permutation(len(source))
            sizes += map(source.size, order[:SIZED].tolist())
    if not sizes:
        return {}
    return {SIZES: hashlib.sha256(repr(sizes).encode()).hexdigest()[:16]}


class HeldOut(NamedTuple):
    """Which images of each class are held out: a share of them, or a number; or none."""

    share: float = 0.0
    per_class: int = 0
    seed: int = 0  # of the order from which they are taken

    def number(self, images: int) -> int:
        """How many of a class with so many images. A share is `rounded`, and leaves one to train
        on: of a single image nothing is held out.
        """
        if not self.share:
            return self.per_class
        return min(rounded(self.share, images), images - 1)


def rounded(share: float, images: int) -> int:
    """A share of so many images: the nearest integer, halves up, but at least one."""
    return max(1, int(share * images + 0.5))


# The images of each class have a random order that is keyed by (seed, class) alone. Images to train
# on are taken from its front, held-out images from its end. So with the same seed a smaller part is
# contained in every larger one, and no image is both trained on and held out.
def stratified_part(
    source: Source,
    *,
    share: float = 1.0,
    images_per_class: int = 0,
    held_out: HeldOut = HeldOut(),
    seed: int = 0,
) -> Source:
    """The part of `source` to train on: a share of each class, or a number of images of each class.

    held_out: which `held_out_part` takes. They are left out here, and `share` is a share of the
        remaining images.

    A class of which n images remain keeps share · n of them, `rounded`; or `images_per_class` of
    them if that is not 0. Images stay in the order of `source`. Raises DataError that names the
    class if a class has too few images.
    """
    if share == 1.0 and not images_per_class and not (held_out.share or held_out.per_class):
        return source
    least = max(images_per_class, 1)
    orders = shuffled_classes(source, seed, least, held_out)
    others = shuffled_classes(source, held_out.seed, least, held_out)
    fronts = []
    for order, other in zip(orders, others):
        end = other[len(other) - held_out.number(len(other)) :]
        order = order[~np.isin(order, end)]
        size = images_per_class or rounded(share, len(order))
        fronts.append(order[:size])
    return source.part(np.sort(np.concatenate(fronts)))


def held_out_part(source: Source, held_out: HeldOut) -> Source:
    """The held-out images of each class, in the source's order; DataError for too small classes."""
    ends = [
        order[len(order) - held_out.number(len(order)) :]
        for order in shuffled_classes(source, held_out.seed, 1, held_out)
    ]
    return source.part(np.sort(np.concatenate(ends)))


def shuffled_classes(source: Source, seed: int, least: int, held_out: HeldOut) -> Iterator[ndarray]:
    """Yield the indices of each class in its order; DataError for too few to train and hold out.
    Images that may be of several classes count as one.
    """
    names, labels = source.classes, source.labels
    if source.several_labels:
        names, labels = [""], np.zeros(len(source), np.int64)
    for label, (name, members) in enumerate(zip(names, members_of(labels, len(names)))):
        held = held_out.number(len(members))
        if len(members) < least + held:
            which = f"class '{name}'" if name else "the folder"  # without classes
            raise DataError(
                f"{which} has {len(members)} images, too few to train on {least} and hold out "
                f"{held} of them; expected less of data.images_per_class or "
                f"data.held_out{'' if held_out.share else '_per_class'}"
            )
        yield members[keyed_generator(seed, Purpose.SUBSET, label).permutation(len(members))]
