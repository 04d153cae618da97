"""How published data sets are laid out on disk: a root folder and a split → images, labels, classes.

Binary sets are read completely. Of the other sets only the lists of images are read, and an image
is decoded when it is needed. Root folders are those of torchvision.datasets, which reads the binary
sets and downloads all sets but Tiny-ImageNet. `split` is "train" or "val"; each function says which
published part of its set that is.

All functions raise OSError or RuntimeError if a file is missing or damaged, and DataError if a file
has unexpected content or lists an image that does not exist.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets import CIFAR10, STL10, SVHN, Flowers102

from .images import DataError


class ImageArrays(NamedTuple):
    """A binary set: all of its images in memory."""

    images: Tensor                  # (N, 3, H, W) uint8
    labels: np.ndarray              # (N,) int64
    classes: list[str]


class ImageList(NamedTuple):
    """A set of image files: the paths and labels of its images."""

    paths: list[str]
    labels: list[int]
    classes: list[str]


# ---------------------------------------------------------------------------------------------
# Binary sets
# ---------------------------------------------------------------------------------------------


class LabelledSTL10(STL10):
    """STL-10 without its unlabelled images (2.8 GB), whose files may be missing."""

    train_list = [entry for entry in STL10.train_list if not entry[0].startswith("unlabeled")]


def read_cifar(kind: type[CIFAR10], root: Path, split: str) -> ImageArrays:
    """CIFAR-10 or CIFAR-100 (fine labels): train has 50,000 images, val has the 10,000 test images."""
    read = kind(root, train=split == "train")
    images = torch.from_numpy(read.data).permute(0, 3, 1, 2)             # channels-last in memory
    return ImageArrays(images, np.array(read.targets, dtype=np.int64), list(read.classes))


def read_stl10(root: Path, split: str) -> ImageArrays:
    """STL-10's labelled images of 96×96 pixels.

    train has the 5,000 training images of all folds, val has the 8,000 test images.
    """
    read = LabelledSTL10(root, split="train" if split == "train" else "test")
    if not hasattr(read, "classes"):                 # torchvision ignores that the file is missing
        raise FileNotFoundError(2, "No such file or directory",
                                str(root / read.base_folder / read.class_names_file))
    return ImageArrays(_channels_last(read.data), read.labels.astype(np.int64), read.classes)


def read_svhn(root: Path, split: str) -> ImageArrays:
    """SVHN's cropped digits of 32×32 pixels.

    train has the 73,257 training images, without the set's extra images; val has the 26,032 test
    images.
    """
    read = SVHN(root, split="train" if split == "train" else "test")
    return ImageArrays(_channels_last(read.data), read.labels, [str(digit) for digit in range(10)])


def _channels_last(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images).contiguous(memory_format=torch.channels_last)


# ---------------------------------------------------------------------------------------------
# Sets of files
# ---------------------------------------------------------------------------------------------


def list_food101(root: Path, split: str) -> ImageList:
    """Food-101: train has 750 images per class, val has 250 test images per class.

    The training images are not cleaned: some labels are wrong. The files food-101/meta/train.json
    and test.json hold {class: ["<class>/<number>", …]}.
    """
    folder = root / "food-101"
    file = folder / "meta" / f"{'train' if split == 'train' else 'test'}.json"
    try:
        names = json.loads(file.read_text(encoding="utf-8"))
        classes = sorted(names)
        listed = [(str(folder / "images" / f"{name}.jpg"), label)
                  for label, key in enumerate(classes) for name in names[key]]
    except (ValueError, TypeError) as error:
        raise DataError(f"{file}: expected {{class: [\"class/number\", …]}} as JSON "
                        f"({str(error).splitlines()[0]})") from None
    return _checked(listed, classes, file)


def list_flowers102(root: Path, split: str) -> ImageList:
    """Oxford Flowers, 102 classes.

    train has the 2,040 images of its training and validation parts; val has its 6,149 test images.
    flowers-102/setid.mat holds the numbers of the images in each part, and imagelabels.mat the
    class of each image. Numbers and classes are counted from 1.
    """
    folder = root / "flowers-102"
    file, parts = folder / "setid.mat", ("trnid", "valid") if split == "train" else ("tstid",)
    numbers = np.concatenate([_variable(file, part) for part in parts])
    labels = _variable(folder / "imagelabels.mat", "labels")
    if not len(numbers) or numbers.min() < 1 or numbers.max() > len(labels):
        raise DataError(f"{file}: expected numbers of images from 1 to the {len(labels)} of "
                        "imagelabels.mat")
    listed = [(str(folder / "jpg" / f"image_{number:05}.jpg"), int(labels[number - 1]) - 1)
              for number in numbers.tolist()]
    return _checked(listed, list(Flowers102.classes), file)


def _variable(file: Path, name: str) -> np.ndarray:
    """Read one variable of a .mat file: a flat int64 array."""
    from scipy.io import loadmat                     # here, because scipy is an optional dependency
    with open(file, "rb") as content:
        try:
            return loadmat(content)[name].astype(np.int64).ravel()
        except Exception as error:                   # scipy's readers raise many kinds
            raise DataError(f"{file}: expected a MATLAB file with the variable '{name}' "
                            f"({type(error).__name__})") from None


def list_pets(root: Path, split: str) -> ImageList:
    """Oxford-IIIT Pet, 37 breeds.

    train has the 3,680 images of its trainval part; val has its 3,669 test images. Each line of
    oxford-iiit-pet/annotations/trainval.txt and test.txt is "<Breed>_<number> <class> <species>
    <number in species>", with classes counted from 1.
    """
    folder = root / "oxford-iiit-pet"
    file = folder / "annotations" / f"{'trainval' if split == 'train' else 'test'}.txt"
    listed, breeds = [], {}
    for where, line in _lines(file):
        words = line.split()
        if len(words) != 4 or not words[1].isdecimal() or int(words[1]) < 1:
            raise DataError(f"{where}: found '{line}', expected <image> <class> <species> "
                            "<number> such as 'Abyssinian_100 1 1 1'")
        label = int(words[1]) - 1
        breed = breeds.setdefault(label, words[0].rpartition("_")[0])
        if words[0].rpartition("_")[0] != breed:
            raise DataError(f"{where}: found '{line}', but class {label + 1} is {breed} above")
        listed.append((str(folder / "images" / f"{words[0]}.jpg"), label))
    count = max(breeds, default=-1) + 1
    classes = [breeds.get(label, f"class {label + 1}") for label in range(count)]
    return _checked(listed, classes, file)


def list_tiny_imagenet(root: Path, split: str) -> ImageList:
    """Tiny-ImageNet, 64×64 pixels, 200 classes: train has 500 images per class, val has 50.

    wnids.txt lists the classes, which are sorted here. Training images are
    train/<wnid>/images/*.JPEG. All validation images are in val/images/; each line of
    val/val_annotations.txt gives the file name, the class and the bounding box of one of them,
    separated by tabs.
    """
    classes = sorted(wnid for _, line in _lines(root / "wnids.txt") for wnid in line.split())
    labels = {wnid: label for label, wnid in enumerate(classes)}
    if split == "train":
        folders = [root / "train" / wnid / "images" for wnid in classes]
        return ImageList(*_columns([(str(folder / name), label)
                                 for label, folder in enumerate(folders)
                                 for name in sorted(os.listdir(folder))
                                 if name.endswith(".JPEG") and not name.startswith(".")]), classes)
    file, listed = root / "val" / "val_annotations.txt", []
    for where, line in _lines(file):
        words = line.split("\t")
        if len(words) < 2 or words[1] not in labels:
            raise DataError(f"{where}: found {line!r}, expected <image> and a class of wnids.txt "
                            "between tabs")
        listed.append((str(root / "val" / "images" / words[0]), labels[words[1]]))
    return _checked(listed, classes, file)


def _lines(file: Path) -> list[tuple[str, str]]:
    """(where it is, text) of every line of a file that is not blank."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise DataError(f"{file}: expected text in UTF-8") from None
    return [(f"{file}, line {number}", line) for number, line in enumerate(lines, 1)
            if line.strip()]


def _checked(listed: list[tuple[str, int]], classes: list[str], file: Path) -> ImageList:
    """The (path, label) pairs that `file` lists. Raises DataError if an image is missing.

    Each folder of images is listed once, which is faster than asking for each file.
    """
    folders = {os.path.dirname(path) for path, _ in listed}
    present = {os.path.join(folder, name) for folder in folders if os.path.isdir(folder)
               for name in os.listdir(folder)}
    missing = [path for path, _ in listed if path not in present]
    if missing:
        raise DataError(f"{missing[0]}: no such image; {len(missing):,} of the {len(listed):,} "
                        f"that {file} lists are missing")
    return ImageList(*_columns(listed), classes)


def _columns(listed: list[tuple[str, int]]) -> tuple[list[str], list[int]]:
    """All paths and all labels of (path, label) pairs."""
    return [path for path, _ in listed], [label for _, label in listed]
