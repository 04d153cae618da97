"""Sources of images: image folders, published data sets, and the embedded set `shapes`.

All sources have the same interface, `Source`: `len(source)`, `source.image(i)` → (3, H, W) uint8,
`source.labels[i]`, and `source.classes`, the names of the classes. `DATA_SETS` lists all data sets.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100, SVHN, Flowers102, Food101, OxfordIIITPet

from ..messages import in_brief
from . import layouts, shapes
from .folders import EXTENSIONS, class_folders, images_below, images_of_classes, in_words
from .images import DataError, decode_image
from .one_at_a_time import one_at_a_time
from .paths import Paths

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
    """Images on disk; each is decoded anew whenever it is read."""

    apply_exif_orientation = True                    # `oriented` changes it
    left_out = ""

    def __init__(self, paths: Sequence[str], labels: Sequence[int] | np.ndarray,
                 classes: list[str]) -> None:
        self.paths = paths if isinstance(paths, Paths) else Paths(paths)
        self.labels, self.classes = np.array(labels, dtype=np.int64), classes

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Tensor:
        return decode_image(self.paths[index], apply_exif_orientation=self.apply_exif_orientation)

    def part(self, indices: np.ndarray) -> ImageFiles:
        chosen = copy.copy(self)
        chosen.paths, chosen.labels = self.paths.part(indices), self.labels[indices]
        return chosen


class ImageFolder(ImageFiles):
    """The images `folder`/<class>/**/<image>: one folder per class, in alphabetical order.

    Raises DataError for a folder that is missing, has no classes, or has a class without images.
    """

    def __init__(self, folder: Path) -> None:
        if not os.path.isdir(folder):
            raise DataError(f"{folder}: no such folder; an image folder holds train/<class>/… and "
                            f"{' or '.join(f'{name}/<class>/…' for name in VALIDATION_FOLDERS)}")
        classes, left_out = class_folders(folder), Counter()
        paths = images_of_classes(folder, classes, left_out)
        self.left_out = in_words(left_out, folder)
        for name, found in zip(classes, paths):
            if not found:
                others = self.left_out and f"; {self.left_out}"
                raise DataError(f"{folder / name}: no image in this class; expected files ending "
                                f"in {', '.join(EXTENSIONS)}{others}")
        super().__init__([path for found in paths for path in found],
                         np.repeat(np.arange(len(classes)), list(map(len, paths))), classes)


class LooseImages:
    """The first `count` images anywhere under `folder`, all of one class without a name.

    This is for measurements and figures, which need no labels. Raises DataError if there is no
    image.
    """

    def __init__(self, folder: Path, count: int) -> None:
        left_out = Counter()
        found = images_below(str(folder), left_out) if os.path.isdir(folder) else []
        self.paths, self.left_out = sorted(found)[:count], in_words(left_out, folder)
        if not self.paths:
            raise DataError(f"{folder}: no images in it{self.left_out and '; '}{self.left_out}")
        self.classes, self.labels = [""], np.zeros(len(self.paths), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.paths)

    def image(self, index: int) -> Tensor:
        return decode_image(self.paths[index])


def oriented(source: Source, apply_exif_orientation: bool) -> Source:
    """The same images; those in files are turned as their EXIF data say, or left as stored."""
    if isinstance(source, ImageFiles):
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
    paths = getattr(source, "paths", None)
    if isinstance(paths, Paths):
        folder = os.fsencode(os.path.join(folder_of(root), ""))
        digest.update((b"\0" + paths.content.numpy().tobytes()).replace(b"\0" + folder, b"\0"))
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------------------------------------
# Image folders
# ---------------------------------------------------------------------------------------------


def open_folder(root: Path, split: str) -> ImageFolder:
    """Open a split of an image folder.

    Images are in root/train/<class>/… and in root/val/<class>/… or root/test/<class>/…. If root has
    none of these three folders, all images are training images, in root/<class>/…. Raises DataError
    if there are no validation images, or if the two splits do not have the same classes.
    """
    present = [name for name in VALIDATION_FOLDERS if os.path.isdir(root / name)]
    if split == "train":
        splits = present or os.path.isdir(root / "train") or not os.path.isdir(root)
        return ImageFolder(root / "train" if splits else root)
    if not present and os.path.isdir(root):
        missing = " or ".join(f"{name}/" for name in VALIDATION_FOLDERS)
        raise DataError(f"{root}: no {missing} in it; training needs none with "
                        "--set data.held_out_per_class=N, which validates on N images of each class")
    folder = root / (present[0] if present else VALIDATION_FOLDERS[0])
    source = ImageFolder(folder)
    if os.path.isdir(root / "train"):
        here, in_train = set(source.classes), set(class_folders(root / "train"))
        for extra, holder, other in ((here - in_train, folder, root / "train"),
                                     (in_train - here, root / "train", folder)):
            if extra:
                raise DataError(f"{other}: class '{min(extra)}' of {holder} is missing; both "
                                "must hold the same classes")
    return source


def open_imagenet(root: Path, split: str) -> ImageFolder:
    """Open a split of ImageNet-1K, which is an image folder whose classes are WordNet ids.

    The published archive of validation images unpacks into one flat folder without class folders;
    that raises DataError with a hint how to sort them.
    """
    folder = root / split
    if os.path.isdir(folder) and not any(os.path.isdir(entry.path) for entry in os.scandir(folder)):
        raise DataError(f"{folder}: no class folders in it; ImageNet's images must lie in "
                        f"{folder}/<wnid>/, the 50,000 of validation, too (valprep.sh of "
                        "github.com/soumith/imagenetloader.torch moves them)")
    if not os.path.isdir(folder):                    # ImageNet's test/ has no labels to validate on
        raise DataError(f"{folder}: no such folder; ImageNet is train/<wnid>/… and val/<wnid>/…")
    source = open_folder(root, split)
    strange = [name for name in source.classes if not is_wnid(name)]
    if strange:
        raise DataError(f"{folder / strange[0]}: not a class of ImageNet, such as n01440764; for "
                        "other image folders --set data.name=image_folder")
    return source


def is_wnid(name: str) -> bool:
    """Whether `name` is a WordNet id: the letter n and eight digits."""
    return len(name) == 9 and name[0] == "n" and name[1:].isdecimal()


# ---------------------------------------------------------------------------------------------
# All sets
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataSet:
    """What is known about a data set.

    open: opens the split "train" or "val" under a root folder.
    holds: what the root folder has to hold, in words for error messages.
    num_classes: how many classes the set has; None: any number.
    mean, std: per channel, of values in [0, 1], as the recipes for this set normalise images.
    download: downloads into a root folder whatever is missing there, by torchvision; None if the
    set cannot be downloaded. needs_scipy: whether its files are read with scipy.
    """

    open: Callable[[Path, str], Source]
    holds: str
    num_classes: int | None
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    download: Callable[[Path], object] | None = None
    needs_scipy: bool = False


def _in_memory(read: Callable[[Path, str], layouts.ImageArrays]) -> Callable[[Path, str], Source]:
    return lambda root, split: ImagesInMemory(*read(root, split))


def _from_files(list_images: Callable[[Path, str], layouts.ImageList]
                ) -> Callable[[Path, str], Source]:
    return lambda root, split: ImageFiles(*list_images(root, split))


def _download_svhn(root: Path) -> None:
    for split in ("train", "test"):
        SVHN(root, split=split, download=True)


IN_MEMORY = ("shapes", "cifar10", "cifar100", "stl10", "svhn")     # sets that are no image files

# The mean and std of torchvision and timm, which arXiv 2505.19985 also uses for its small data
# sets. They are used for every set whose own have not been computed. CIFAR's are those of its
# training pixels.
IMAGENET = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))

DATA_SETS: dict[str, DataSet] = {
    "shapes": DataSet(
        lambda _, split: ImagesInMemory(*shapes.make_split(split), shapes.CLASSES),
        "nothing", 10, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)),
    "image_folder": DataSet(
        open_folder, "train/<class>/… and val/<class>/… or test/<class>/…; or <class>/… alone",
        None, **IMAGENET),
    "imagenet": DataSet(open_imagenet, "train/<wnid>/… and val/<wnid>/…", 1000, **IMAGENET),
    "cifar10": DataSet(
        _in_memory(partial(layouts.read_cifar, CIFAR10)),
        "cifar-10-batches-py/ (cifar-10-python.tar.gz unpacked)", 10,
        mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616),
        download=partial(CIFAR10, download=True)),
    "cifar100": DataSet(
        _in_memory(partial(layouts.read_cifar, CIFAR100)),
        "cifar-100-python/ (cifar-100-python.tar.gz unpacked)", 100,
        mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762),
        download=partial(CIFAR100, download=True)),
    "stl10": DataSet(
        _in_memory(layouts.read_stl10), "stl10_binary/ (stl10_binary.tar.gz unpacked)", 10,
        **IMAGENET, download=partial(layouts.LabelledSTL10, download=True)),
    "svhn": DataSet(
        _in_memory(layouts.read_svhn), "train_32x32.mat and test_32x32.mat", 10, **IMAGENET,
        download=_download_svhn, needs_scipy=True),
    "food101": DataSet(
        _from_files(layouts.list_food101), "food-101/ (food-101.tar.gz unpacked)", 101, **IMAGENET,
        download=partial(Food101, download=True)),
    "flowers102": DataSet(
        _from_files(layouts.list_flowers102),
        "flowers-102/ with imagelabels.mat, setid.mat and jpg/ (102flowers.tgz unpacked)", 102,
        **IMAGENET, download=partial(Flowers102, download=True), needs_scipy=True),
    "pets": DataSet(
        _from_files(layouts.list_pets),
        "oxford-iiit-pet/ with images/ and annotations/ (two archives unpacked)", 37,
        **IMAGENET, download=partial(OxfordIIITPet, download=True)),
    "tiny_imagenet": DataSet(
        _from_files(layouts.list_tiny_imagenet),
        "wnids.txt, train/ and val/ (cs231n.stanford.edu/tiny-imagenet-200.zip unpacked)", 200,
        **IMAGENET),
}


def download(name: str, root: str, say: Callable[[str], object] = print) -> None:
    """Download a data set that torchvision offers, unless its files are there already.

    Among processes that share the folder, on one or several machines, one downloads and the others
    wait. say: called with one line if this process has to wait, or if the folder's file system
    cannot lock files. Raises DataError if the download fails.
    """
    data_set = DATA_SETS[name]
    if data_set.download is None:
        return
    _require_scipy(name)                             # checked before hours of downloading
    folder = folder_of(root)
    try:
        with one_at_a_time(folder / f".{name}.downloading", say):
            data_set.download(folder)
    except (OSError, RuntimeError, ValueError) as error:     # urllib's errors are OSErrors
        reason = in_brief(getattr(error, "reason", error), QUOTED)
        raise DataError(f"{name}: not complete in {folder} and cannot be downloaded ({reason}); "
                        f"put there {data_set.holds}") from None


def open_split(name: str, root: str, split: str, num_classes: int) -> Source:
    """Open the split "train" or "val" of a data set that is on disk already.

    num_classes: how many classes are expected; 0: any number. Raises DataError if a file is
    missing or damaged, if a class has no image, or if the number of classes is different.
    """
    data_set = DATA_SETS[name]
    _require_scipy(name)
    folder = folder_of(root)
    try:
        source = data_set.open(folder, split)
    except DataError:
        raise
    except (OSError, RuntimeError, ValueError) as error:     # torchvision raises RuntimeError
        reason = "no such folder"
        if os.path.isdir(folder):
            reason = "a file is missing or damaged"
            if isinstance(error, OSError) and error.filename:
                reason = f"{error.filename}: {in_brief(error.strerror, QUOTED)}"
        raise DataError(f"{folder}: no complete {name} in it ({reason}); expected "
                        f"{data_set.holds}") from None
    found = len(source.classes)
    if num_classes not in (0, found):
        condition = ("the data is right" if data_set.num_classes in (None, found) else
                     f"a part of {name}, which has {data_set.num_classes}, is meant")
        advice = (f"--set data.num_classes={found} if {condition}" if found > 1 else
                  "expected two classes at least, a folder each")
        raise DataError(f"{root or name}: {found} classes found, but the recipe's data.num_classes "
                        f"is {num_classes}; {advice}")
    empty = set(range(found)) - set(source.labels.tolist())
    if empty:
        raise DataError(f"{root}: class '{source.classes[min(empty)]}' of {name} has no image in "
                        f"its {split} split")
    return source


def folder_of(root: str) -> Path:
    """The path of a data set's folder as written in a recipe or on a command line.

    A leading ~ is the home folder. Raises DataError for a zero byte, which no path can hold.
    """
    if "\0" in root:
        raise DataError(f"{root}: a path holds no zero byte")
    return Path(os.path.expanduser(root))


def _require_scipy(name: str) -> None:
    """Raise DataError if reading this set needs scipy and it is not installed."""
    if not DATA_SETS[name].needs_scipy:
        return
    try:
        import_module("scipy.io")
    except ImportError:
        raise DataError(f"{name}: reading it needs scipy: pip install 'vitinit[datasets]'") from None
