"""Published data sets as they lie on disk: a root folder and a split → images, labels, classes.

Binary sets are read whole. Of the others only the lists are read; an image is decoded when it is
asked for. Roots are those of torchvision.datasets, which reads the binary sets and downloads all
but Tiny-ImageNet. `split` is "train" or "val"; which part of a set that is stands with each.

An OSError or RuntimeError means that a file is missing or damaged, a DataError that one says what
it should not.
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


class Whole(NamedTuple):
    """A binary set: all of its images."""

    images: Tensor                  # (N, 3, H, W) uint8
    labels: np.ndarray              # (N,) int64
    classes: list[str]


class Listed(NamedTuple):
    """A set of files: where its images are."""

    paths: list[str]
    labels: list[int]
    classes: list[str]


# ---------------------------------------------------------------------------------------------
# Binary sets
# ---------------------------------------------------------------------------------------------


class LabelledSTL10(STL10):
    """STL-10 without its 2.8 GB of unlabelled images, which need not be there."""

    train_list = [entry for entry in STL10.train_list if not entry[0].startswith("unlabeled")]


def read_cifar(kind: type[CIFAR10], root: Path, split: str) -> Whole:
    """CIFAR-10 or CIFAR-100 (fine labels): 50,000 images to train on, 10,000 to test."""
    found = kind(root, train=split == "train")
    images = torch.from_numpy(found.data).permute(0, 3, 1, 2)            # channels-last in memory
    return Whole(images, np.array(found.targets, dtype=np.int64), list(found.classes))


def read_stl10(root: Path, split: str) -> Whole:
    """STL-10's labelled part: 5,000 images of 96 px to train on, all folds, and 8,000 to test."""
    found = LabelledSTL10(root, split="train" if split == "train" else "test")
    if not hasattr(found, "classes"):                # torchvision does without this file
        raise FileNotFoundError(2, "No such file or directory",
                                str(root / found.base_folder / found.class_names_file))
    return Whole(_channels_last(found.data), found.labels.astype(np.int64), found.classes)


def read_svhn(root: Path, split: str) -> Whole:
    """SVHN's cropped digits, 32 px: 73,257 to train on and 26,032 to test, none of the extra."""
    found = SVHN(root, split="train" if split == "train" else "test")
    return Whole(_channels_last(found.data), found.labels, [str(digit) for digit in range(10)])


def _channels_last(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images).contiguous(memory_format=torch.channels_last)


# ---------------------------------------------------------------------------------------------
# Sets of files
# ---------------------------------------------------------------------------------------------


def list_food101(root: Path, split: str) -> Listed:
    """Food-101: 750 images a class to train on, uncleaned, and 250 to test.

    food-101/meta/<split>.json holds {class: ["<class>/<number>", …]}.
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


def list_flowers102(root: Path, split: str) -> Listed:
    """Oxford Flowers: its training and validation parts (2,040) to train on, and 6,149 to test.

    flowers-102/setid.mat holds the numbers of each part, imagelabels.mat the class of each number,
    both from 1.
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
    """One array of a .mat file, flat."""
    from scipy.io import loadmat                     # an extra, not everybody's need
    with open(file, "rb") as content:
        try:
            return loadmat(content)[name].astype(np.int64).ravel()
        except Exception as error:                   # scipy's readers raise many kinds
            raise DataError(f"{file}: expected a MATLAB file with the variable '{name}' "
                            f"({type(error).__name__})") from None


def list_pets(root: Path, split: str) -> Listed:
    """Oxford-IIIT Pet, 37 breeds: its trainval part (3,680) to train on, and 3,669 to test.

    A line of oxford-iiit-pet/annotations/<part>.txt is "<Breed>_<number> <class> <species>
    <number in species>", the class from 1.
    """
    folder = root / "oxford-iiit-pet"
    file = folder / "annotations" / f"{'trainval' if split == 'train' else 'test'}.txt"
    listed, breeds = [], {}
    for place, line in _lines(file):
        words = line.split()
        if len(words) != 4 or not words[1].isdecimal() or int(words[1]) < 1:
            raise DataError(f"{place}: found '{line}', expected <image> <class> <species> "
                            "<number> such as 'Abyssinian_100 1 1 1'")
        label = int(words[1]) - 1
        breed = breeds.setdefault(label, words[0].rpartition("_")[0])
        if words[0].rpartition("_")[0] != breed:
            raise DataError(f"{place}: found '{line}', but class {label + 1} is {breed} above")
        listed.append((str(folder / "images" / f"{words[0]}.jpg"), label))
    count = max(breeds, default=-1) + 1
    classes = [breeds.get(label, f"class {label + 1}") for label in range(count)]
    return _checked(listed, classes, file)


def list_tiny_imagenet(root: Path, split: str) -> Listed:
    """Tiny-ImageNet, 200 classes of 64 px: 500 images each to train on, 50 to validate.

    wnids.txt lists the classes, sorted here. Training images are train/<wnid>/images/*.JPEG. All
    validation images are in val/images/, and a line of val/val_annotations.txt gives one's file
    name, class and box, between tabs.
    """
    classes = sorted(wnid for _, line in _lines(root / "wnids.txt") for wnid in line.split())
    labels = {wnid: label for label, wnid in enumerate(classes)}
    if split == "train":
        folders = [root / "train" / wnid / "images" for wnid in classes]
        return Listed(*_columns([(str(folder / name), label)
                                 for label, folder in enumerate(folders)
                                 for name in sorted(os.listdir(folder))
                                 if name.endswith(".JPEG") and not name.startswith(".")]), classes)
    file, listed = root / "val" / "val_annotations.txt", []
    for place, line in _lines(file):
        words = line.split("\t")
        if len(words) < 2 or words[1] not in labels:
            raise DataError(f"{place}: found {line!r}, expected <image> and a class of wnids.txt "
                            "between tabs")
        listed.append((str(root / "val" / "images" / words[0]), labels[words[1]]))
    return _checked(listed, classes, file)


def _lines(file: Path) -> list[tuple[str, str]]:
    """(where, text) of every line that is not blank."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise DataError(f"{file}: expected text in UTF-8") from None
    return [(f"{file}, line {number}", line) for number, line in enumerate(lines, 1)
            if line.strip()]


def _checked(listed: list[tuple[str, int]], classes: list[str], file: Path) -> Listed:
    """What `file` lists; an error if an image of it is not there. One look at every folder."""
    folders = {os.path.dirname(path) for path, _ in listed}
    present = {os.path.join(folder, name) for folder in folders if os.path.isdir(folder)
               for name in os.listdir(folder)}
    missing = [path for path, _ in listed if path not in present]
    if missing:
        raise DataError(f"{missing[0]}: no such image; {len(missing):,} of the {len(listed):,} "
                        f"that {file} lists are missing")
    return Listed(*_columns(listed), classes)


def _columns(listed: list[tuple[str, int]]) -> tuple[list[str], list[int]]:
    return [path for path, _ in listed], [label for _, label in listed]
