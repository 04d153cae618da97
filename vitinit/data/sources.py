"""Sources of images: in memory, or in files; and parts of them, drawn class by class.

All sources have the same interface, for N images: `len(source)`, `source.image(i)` → (3, H, W)
uint8 (DataError if it cannot be decoded), `source.labels`, (N,) int64, `source.classes`, their
names, `source.left_out`, a line about files that are no images, or "", and `source.part(indices)`:
only these images, in this order.

A file is an image if its name has one of the EXTENSIONS. Hidden files and folders are left out
(such as .ipynb_checkpoints and macOS's ._x.jpg); what else is left out is counted by suffix. Links
are followed, but not back into a folder that they lie in.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..keys import Stream, keyed_generator
from ..messages import in_brief, one_line
from .images import HEIF_REMEDY, DataError, decode_image

EXTENSIONS = (".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
HEIF = (".heic", ".heif", ".avif")


def class_folders(folder: Path) -> list[str]:
    """The names of the folders in `folder`, sorted, not hidden ones. DataError if there is none."""
    there = os.path.isdir(folder)
    names = sorted(path.name for path in folder.glob("[!.]*") if path.is_dir()) if there else []
    if not names:
        raise DataError(f"{folder}: {'no class folders in it' if there else 'no such folder'}; "
                        f"expected {folder}/<class>/<image>")
    return names


def images_below(folder: str | Path, left_out: Counter[str]) -> list[str]:
    """The paths of the images anywhere under `folder`, folder by folder in alphabetical order.

    left_out: to which files that are no images are added by suffix. Raises DataError for a folder
    that cannot be listed.
    """
    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}") from None
    found = {}
    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        here = os.path.realpath(parent)
        folders[:] = [name for name in folders if not name.startswith(".") and not
                      Path(here).is_relative_to(os.path.realpath(os.path.join(here, name)))]
        files = {name for name in files if not name.startswith(".")}
        found[parent] = sorted(name for name in files if name.lower().endswith(EXTENSIONS))
        left_out.update(map(suffix_of, files.difference(found[parent])))
    return [os.path.join(parent, name) for parent in sorted(found) for name in found[parent]]


def images_in(folder: str | Path) -> tuple[list[str], str]:
    """The paths of the images anywhere under `folder`, and a line on what is left out, or "".

    Raises DataError if there is no image.
    """
    paths = images_below(folder, left_out := Counter())
    line = in_words(left_out, folder)
    if not paths:
        raise DataError(f"{folder}: no images in it{line and '; '}{line}")
    return paths, line


def suffix_of(name: str) -> str:
    """The suffix of a file's name in lower case, or "without suffix"."""
    return os.path.splitext(name)[1].lower() or "without suffix"


def in_words(left_out: Counter[str], folder: str | Path) -> str:
    """A line about the files under `folder` that are left out; "" if there are none.

    Example: "left out: 12 .heic, 3 .mov in photos/train; …", with how to convert the former.
    """
    if not left_out:
        return ""
    kinds = sorted(left_out.items(), key=lambda item: (-item[1], item[0]))
    remedy = f"; {HEIF_REMEDY}" if any(suffix.startswith(HEIF) for suffix in left_out) else ""
    return one_line(f"left out: {', '.join(f'{count:,} {in_brief(kind)}' for kind, count in kinds)}"
                    f" in {folder}{remedy}")


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

    Raises DataError for a folder without classes, and for a class without images.
    """

    def __init__(self, folder: Path) -> None:
        classes, paths, labels = class_folders(folder), [], []
        left_out = Counter(f"{suffix_of(path.name)} of no class" for path in folder.glob("[!.]*")
                           if not path.is_dir())
        for label, name in enumerate(classes):
            found = images_below(folder / name, left_out)
            if not found:
                line = in_words(left_out, folder)
                raise DataError(f"{folder / name}: no image in this class; expected files ending "
                                f"in {', '.join(EXTENSIONS)}{line and '; '}{line}")
            paths += found
            labels += [label] * len(found)
        super().__init__(paths, labels, classes)
        self.left_out = in_words(left_out, folder)


class LooseImages(ImageFiles):
    """The first `count` images anywhere under `folder`, without labels, for figures.

    Raises DataError if there is none.
    """

    def __init__(self, folder: Path, count: int) -> None:
        paths = images_in(folder)[0][:count]
        super().__init__(paths, np.zeros(len(paths)), [""])


Source = ImagesInMemory | ImageFiles


def oriented(source: Source, apply_exif_orientation: bool) -> Source:
    """The same images; those in files are turned as their EXIF data say, or left as stored."""
    source = copy.copy(source)
    source.apply_exif_orientation = apply_exif_orientation
    return source


def folder_of(root: str) -> Path:
    """The path of a data set's folder as a recipe or a command line states it; ~ is the home."""
    return Path(root).expanduser()


def are_names(classes: Sequence[str] | None) -> bool:
    """Whether classes have names: not if none are known, or only the numbers 0, 1, … for them."""
    return bool(classes) and [*classes] != [*map(str, range(len(classes)))]


def indices_by_name(known: Sequence[str], wanted: Sequence[str]) -> list[int | None]:
    """For each name that is wanted its index among those that are known; None: it is not there."""
    indices = {name: index for index, name in enumerate(known)}
    return [indices.get(name) for name in wanted]


def class_indices(model_classes: Sequence[str], set_classes: Sequence[str]) -> list[int]:
    """For each class of a data set, its index among the classes of a model.

    The model's logits at these indices, in this order, are logits over the data set's classes.
    Raises DataError that names the first class that the model does not know.
    """
    indices = indices_by_name(model_classes, set_classes)
    if None in indices:
        raise DataError(f"class '{set_classes[indices.index(None)]}' is none of the model's "
                        f"{len(model_classes)} classes ({', '.join(model_classes[:2])}, … "
                        f"{model_classes[-1]})")
    return indices


def fingerprint(source: Source, root: str) -> str:
    """A digest of the images' labels, classes and, for files, paths below `root`; not of pixels.

    Two processes, or two starts of a run, that have the same see the same images in the same order,
    wherever the data set's folder is.
    """
    digest = hashlib.sha256("\0".join([*source.classes, ""]).encode("utf-8", "surrogateescape"))
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
# contained in every larger one, and no image is both trained on and held out.
# ---------------------------------------------------------------------------------------------


def stratified_part(source: Source, *, share: float = 1.0, images_per_class: int = 0,
                    held_out: int = 0, seed: int = 0, held_out_seed: int | None = None) -> Source:
    """The part of `source` to train on: a share of each class, or a number of images of each class.

    held_out, held_out_seed: how many images per class `held_out_part` takes, by which seed (None:
        the same). They are left out here, and `share` is a share of the remaining images.

    A class of which n images remain keeps share · n of them, rounded to the nearest integer (halves
    up), but at least one; or `images_per_class` of them if that is not 0. Images stay in the order
    of `source`. Raises DataError that names the class if a class has too few images.
    """
    if share == 1.0 and not images_per_class and not held_out:
        return source
    orders, others = (shuffled_classes(source, one, max(images_per_class, 1), held_out)
                      for one in (seed, seed if held_out_seed is None else held_out_seed))
    fronts = []
    for order, other in zip(orders, others):
        order = order[~np.isin(order, other[len(other) - held_out:])]
        fronts.append(order[:images_per_class or max(1, int(share * len(order) + 0.5))])
    return source.part(np.sort(np.concatenate(fronts)))


def held_out_part(source: Source, *, images_per_class: int, seed: int = 0) -> Source:
    """The images of each class that are held out from training, in the order of `source`.

    Raises DataError that names the class if a class would have no image left to train on.
    """
    ends = [order[len(order) - images_per_class:] for order in
            shuffled_classes(source, seed, 1, images_per_class)]
    return source.part(np.sort(np.concatenate(ends)))


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
