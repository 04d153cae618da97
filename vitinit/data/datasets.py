"""Sources of images: image folders, published data sets, and the embedded set `shapes`.

All sources have the same interface, `Source`: `len(source)`, `source.image(i)` → (3, H, W) uint8,
`source.labels[i]`, and `source.classes`, the names of the classes. `DATA_SETS` lists all data sets.
torchvision lists, reads and downloads the published ones, except for ImageNet and Tiny ImageNet.
"""

from __future__ import annotations

import copy
import fcntl
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets import (CIFAR10, CIFAR100, STL10, SVHN, Flowers102, Food101,
                                  OxfordIIITPet, VisionDataset)

from ..keys import Stream, keyed_generator
from ..messages import in_brief
from . import shapes
from .folders import EXTENSIONS, class_folders, images_below, images_by_class, in_words
from .images import DataError, decode_image

VALIDATION_FOLDERS = ("val", "test")
QUOTED = 50                     # how many characters of another library's error a message quotes


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


# ---------------------------------------------------------------------------------------------
# Image folders
# ---------------------------------------------------------------------------------------------


def open_folder(root: Path, split: str) -> ImageFolder:
    """Open a split of an image folder.

    Images are in root/train/<class>/… and in root/val/<class>/… or root/test/<class>/…. If root has
    none of these three folders, all images are training images, in root/<class>/…. Raises DataError
    if there are no validation images, or if the two splits do not have the same classes.
    """
    train = root / "train"
    present = [name for name in VALIDATION_FOLDERS if os.path.isdir(root / name)]
    if split == "train":
        splits = present or os.path.isdir(train) or not os.path.isdir(root)
        return ImageFolder(train if splits else root)
    if not present and os.path.isdir(root):
        raise DataError(f"{root}: no {'/ or '.join(VALIDATION_FOLDERS)}/ in it; training needs "
                        "none with --set data.held_out_per_class=N, which validates on N images of "
                        "each class")
    source = ImageFolder(root / (present or VALIDATION_FOLDERS)[0])
    if os.path.isdir(train):
        unshared = set(source.classes) ^ set(class_folders(train))
        if unshared:
            raise DataError(f"{root}: class '{min(unshared)}' is in only one of train/ and "
                            f"{present[0]}/; both must hold the same classes")
    return source


def open_imagenet(root: Path, split: str) -> ImageFolder:
    """Open a split of ImageNet-1K, which is an image folder whose classes are WordNet ids.

    The published archive of validation images unpacks into one flat folder without class folders;
    that raises DataError with a hint how to sort them. Its test/ has no labels to validate on.
    """
    folder = root / split
    if not os.path.isdir(folder):
        raise DataError(f"{folder}: no such folder; ImageNet is train/<wnid>/… and val/<wnid>/…")
    if not any(entry.is_dir() for entry in os.scandir(folder)):
        raise DataError(f"{folder}: no class folders in it; ImageNet's images must lie in "
                        f"{folder}/<wnid>/, the 50,000 of validation, too (valprep.sh of "
                        "github.com/soumith/imagenetloader.torch moves them)")
    source = open_folder(root, split)
    strange = [name for name in source.classes if not is_wnid(name)]
    if strange:
        raise DataError(f"{folder / strange[0]}: not a class of ImageNet, such as n01440764; for "
                        "other image folders --set data.name=image_folder")
    return source


def open_tiny_imagenet(root: Path, split: str) -> ImageFiles:
    """Tiny ImageNet, 64×64 pixels, 200 classes: train has 500 images per class, val has 50.

    Training images are train/<wnid>/images/*.JPEG. All validation images are in val/images/; each
    line of val/val_annotations.txt gives the file name, the class and the bounding box of one of
    them, separated by tabs.
    """
    lines = (root / "val" / "val_annotations.txt").read_text(encoding="utf-8").splitlines()
    if split == "train":
        source = ImageFolder(root / "train")
        source.left_out = ""                         # lists of bounding boxes
        return source
    names, wnids = zip(*(line.split("\t")[:2] for line in lines))
    classes, labels = np.unique(wnids, return_inverse=True)
    paths = [str(root / "val" / "images" / name) for name in names]
    return ImageFiles(paths, labels, classes.tolist())


def is_wnid(name: str) -> bool:
    """Whether `name` is a WordNet id: the letter n and eight digits."""
    return len(name) == 9 and name[0] == "n" and name[1:].isdecimal()


# ---------------------------------------------------------------------------------------------
# torchvision's sets
# ---------------------------------------------------------------------------------------------


TRAIN_AND_TEST = {"train": "train", "val": "test"}   # our splits, and what most sets call them


class LabelledSTL10(STL10):
    """STL-10 without its unlabelled images (2.8 GB), whose files may be missing."""

    train_list = STL10.train_list[:2]                # images and labels


def read_arrays(kind: type[VisionDataset], labels: str, splits: dict[str, str | bool], root: Path,
                split: str) -> ImagesInMemory:
    """Read a split of a set of torchvision that holds its images in an array `data`.

    labels: the attribute that holds its labels. splits: what torchvision calls "train" and "val".
    """
    found = kind(root, splits[split])
    images = torch.from_numpy(found.data)            # (N, 3, H, W), or (N, H, W, 3) of CIFAR
    images = images.permute(0, 3, 1, 2) if images.shape[-1] == 3 else images
    return ImagesInMemory(images.contiguous(memory_format=torch.channels_last),
                          np.array(getattr(found, labels), np.int64),
                          list(getattr(found, "classes", "0123456789")))     # SVHN's digits


def list_food101(root: Path, split: str) -> ImageFiles:
    """Food-101 class by class in alphabetical order; its lists have another order of classes.

    Some labels of the training images are wrong.
    """
    found = Food101(root, TRAIN_AND_TEST[split])
    order = np.argsort(found._labels, kind="stable")
    return ImageFiles([str(found._image_files[index]) for index in order],
                      np.sort(found._labels), found.classes)


def list_flowers102(root: Path, split: str) -> ImageFiles:
    """Oxford Flowers: train has its training and validation images, val has its test images."""
    parts = [Flowers102(root, name)
             for name in (("train", "val") if split == "train" else ("test",))]
    return ImageFiles([str(file) for part in parts for file in part._image_files],
                      sum([part._labels for part in parts], []), list(Flowers102.classes))


def list_pets(root: Path, split: str) -> ImageFiles:
    """Oxford-IIIT Pet; its classes are called as in its files, such as american_bulldog."""
    found = OxfordIIITPet(root, "trainval" if split == "train" else "test")
    breeds = {label: path.stem.rpartition("_")[0]
              for label, path in zip(found._labels, found._images)}
    return ImageFiles(list(map(str, found._images)), found._labels,
                      [breeds[label] for label in sorted(breeds)])


# ---------------------------------------------------------------------------------------------
# All sets
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataSet:
    """What is known about a data set.

    open: opens the split "train" or "val" under a root folder.
    holds: what the root folder has to hold, in words for error messages.
    num_classes: how many classes the set has; None: any number.
    downloads: each downloads into a root folder what is missing there of the set, or of a part of
    it; none if the set cannot be downloaded.
    """

    open: Callable[[Path, str], Source]
    holds: str
    num_classes: int | None
    downloads: Sequence[Callable[[Path], object]] = ()


IN_MEMORY = ("shapes", "cifar10", "cifar100", "stl10", "svhn")     # sets that are no image files

DATA_SETS: dict[str, DataSet] = {
    "shapes": DataSet(lambda _, split: ImagesInMemory(*shapes.make_split(split), shapes.CLASSES),
                      "nothing", 10),
    "image_folder": DataSet(
        open_folder, "train/<class>/… and val/<class>/… or test/<class>/…; or <class>/… alone",
        None),
    "imagenet": DataSet(open_imagenet, "train/<wnid>/… and val/<wnid>/…", 1000),
    "cifar10": DataSet(partial(read_arrays, CIFAR10, "targets", {"train": True, "val": False}),
                       "cifar-10-batches-py/ (cifar-10-python.tar.gz unpacked)", 10,
                       [partial(CIFAR10, download=True)]),
    "cifar100": DataSet(partial(read_arrays, CIFAR100, "targets", {"train": True, "val": False}),
                        "cifar-100-python/ (cifar-100-python.tar.gz unpacked)", 100,
                        [partial(CIFAR100, download=True)]),
    "stl10": DataSet(partial(read_arrays, LabelledSTL10, "labels", TRAIN_AND_TEST),
                     "stl10_binary/ (stl10_binary.tar.gz unpacked)", 10,
                     [partial(LabelledSTL10, download=True)]),
    "svhn": DataSet(                                 # without its extra images
        partial(read_arrays, SVHN, "labels", TRAIN_AND_TEST),
        "train_32x32.mat and test_32x32.mat", 10,
        [partial(SVHN, split=split, download=True) for split in ("train", "test")]),
    "food101": DataSet(list_food101, "food-101/ (food-101.tar.gz unpacked)", 101,
                       [partial(Food101, download=True)]),
    "flowers102": DataSet(
        list_flowers102,
        "flowers-102/ with imagelabels.mat, setid.mat and jpg/ (102flowers.tgz unpacked)", 102,
        [partial(Flowers102, download=True)]),
    "pets": DataSet(
        list_pets, "oxford-iiit-pet/ with images/ and annotations/ (two archives unpacked)", 37,
        [partial(OxfordIIITPet, download=True)]),
    "tiny_imagenet": DataSet(
        open_tiny_imagenet, "train/ and val/ (cs231n.stanford.edu/tiny-imagenet-200.zip unpacked)",
        200),
}


def download(name: str, root: str, say: Callable[[str], object] = print) -> None:
    """Download a data set that torchvision offers, unless its files are there already.

    Among processes that share the folder, on one or several machines, one downloads and the others
    wait. say: called with one line if this process has to wait. Raises DataError if the download
    fails.
    """
    data_set, folder = DATA_SETS[name], folder_of(root)
    if not data_set.downloads:
        return
    try:
        with one_at_a_time(folder / f".{name}.downloading", say):
            for download_part in data_set.downloads:
                download_part(folder)
    except ImportError:                              # of scipy, of which `open_split` tells
        pass
    except (OSError, RuntimeError, ValueError) as error:     # urllib's errors are OSErrors
        reason = in_brief(getattr(error, "reason", error), QUOTED)
        raise DataError(f"{name}: not complete in {folder} and cannot be downloaded ({reason}); "
                        f"put there {data_set.holds}") from None


@contextmanager
def one_at_a_time(lock_file: Path, say: Callable[[str], object]) -> Iterator[None]:
    """Wait for a lock on a file and hold it during the `with` block; see `download`.

    All processes on all machines that share the disk see the lock. If a process dies, its lock is
    released. Where no file can be created there is no lock, because nothing can be downloaded; nor
    on a file system that has none.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            lock_file.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(lock_file, "a"))
            # Two may enter once everything is there.
            stack.callback(lock_file.unlink, missing_ok=True)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):       # POSIX allows both
                say(f"{lock_file.parent}: waiting for another process that downloads into it")
                fcntl.lockf(file, fcntl.LOCK_EX)
        yield


def open_split(name: str, root: str, split: str, num_classes: int) -> Source:
    """Open the split "train" or "val" of a data set that is on disk already.

    num_classes: how many classes are expected; 0: any number. Raises DataError if a file is
    missing or damaged, if a class has no image, or if the number of classes is different.
    """
    data_set, folder = DATA_SETS[name], folder_of(root)
    try:
        source = data_set.open(folder, split)
    except DataError:
        raise
    except ImportError:
        raise DataError(f"{name}: reading it needs scipy: pip install 'vitinit[datasets]'"
                        ) from None
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        reason = "no such folder"                    # torchvision raises all of them
        if os.path.isdir(folder):
            reason = "a file is missing or damaged"
            if isinstance(error, OSError) and error.filename:
                reason = f"{error.filename}: {in_brief(error.strerror, QUOTED)}"
        raise DataError(f"{folder}: no complete {name} in it ({reason}); expected "
                        f"{data_set.holds}") from None
    if num_classes not in (0, len(source.classes)):
        raise DataError(f"{root or name}: {len(source.classes)} classes found, but the recipe's "
                        f"data.num_classes is {num_classes}; --set data.num_classes=0 takes the "
                        "number from the data")
    return source


def folder_of(root: str) -> Path:
    """The path of a data set's folder as a recipe or a command line states it; ~ is the home."""
    return Path(root).expanduser()
