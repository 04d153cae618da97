"""Where pictures come from: image folders, CIFAR, and the embedded set `shapes`.

Every source answers the same three questions: `len(source)`, `source.picture(i)` → (3, H, W) uint8,
and `source.labels[i]`; `source.classes` names the labels.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.folder import make_dataset

from . import shapes
from .images import DataError, decode_image

EXTENSIONS = (".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
CIFAR = {"cifar10": CIFAR10, "cifar100": CIFAR100}
VALIDATION_FOLDERS = ("val", "test")


class Source(Protocol):
    """Pictures with labels, by index."""

    classes: list[str]
    labels: np.ndarray                               # (N,) int64

    def __len__(self) -> int: ...

    def picture(self, index: int) -> Tensor: ...     # (3, H, W) uint8


class PicturesInMemory:
    """Pictures of one size that fit into memory: (N, 3, H, W) uint8."""

    def __init__(self, pictures: Tensor, labels: np.ndarray, classes: list[str]) -> None:
        self.pictures, self.labels, self.classes = pictures, labels, classes

    def __len__(self) -> int:
        return len(self.labels)

    def picture(self, index: int) -> Tensor:
        return self.pictures[index]


class ImageFolder:
    """`folder`/<class>/**/<picture>: one folder a class, in alphabetical order.

    Raises DataError, in one line, for a folder that is missing, has no classes, or has a class
    without pictures.
    """

    def __init__(self, folder: Path) -> None:
        self.classes = class_folders(folder)
        samples = make_dataset(str(folder), {name: i for i, name in enumerate(self.classes)},
                               is_valid_file=lambda path: is_picture(path, folder),
                               allow_empty=True)
        # One array of bytes, not a million Python strings: workers share it without copying.
        self.paths = np.array([os.fsencode(path) for path, _ in samples], dtype=np.bytes_)
        self.labels = np.array([label for _, label in samples], dtype=np.int64)
        empty = set(range(len(self.classes))) - set(self.labels.tolist())
        if empty:
            raise DataError(f"{folder / self.classes[min(empty)]}: no picture in this class; "
                            f"expected files ending in {', '.join(EXTENSIONS)}")

    def __len__(self) -> int:
        return len(self.labels)

    def picture(self, index: int) -> Tensor:
        return decode_image(os.fsdecode(self.paths[index]))


class LoosePictures:
    """Every picture under `folder`, at most `count` of them, all of one nameless class.

    For measurements and figures. Raises DataError if there is none.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.paths = sorted(str(path) for path in Path(folder).rglob("*")
                            if is_picture(str(path), folder))[:count]
        if not self.paths:
            raise DataError(f"{folder}: no pictures in it")
        self.classes, self.labels = [""], np.zeros(len(self.paths), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.paths)

    def picture(self, index: int) -> Tensor:
        return decode_image(self.paths[index])


def is_picture(path: str, root: Path) -> bool:
    """By its ending; hidden files and folders (.ipynb_checkpoints, macOS' ._x.jpg) do not count."""
    parts = Path(path).relative_to(root).parts
    return path.lower().endswith(EXTENSIONS) and not any(part.startswith(".") for part in parts)


def class_folders(folder: Path) -> list[str]:
    """The names of the class folders in `folder`, sorted; hidden ones left out."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; an image folder holds train/<class>/… and "
                        f"{' or '.join(f'{name}/<class>/…' for name in VALIDATION_FOLDERS)}")
    names = sorted(entry.name for entry in os.scandir(folder)
                   if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise DataError(f"{folder}: no class folders in it; expected {folder}/<class>/<picture>")
    return names


def download(name: str, root: str) -> None:
    """Fetch a data set that torchvision offers, unless it is there; raises DataError offline."""
    if name not in CIFAR:
        return
    try:
        for train in (True, False):
            CIFAR[name](root, train=train, download=True)
    except (OSError, RuntimeError) as error:         # urllib's errors are OSErrors
        archive = CIFAR[name].filename
        raise DataError(f"{name}: not complete in {root} and cannot be downloaded "
                        f"({error}); put {archive} or its unpacked folder "
                        f"{CIFAR[name].base_folder} there yourself") from None


def open_split(name: str, root: str, split: str, num_classes: int) -> Source:
    """The split "train" or "val" of a data set that is on disk already.

    Image folders call their second split val/ or test/. Raises DataError when something is missing
    or when the number of classes is not `num_classes`.
    """
    if name == "shapes":
        source = PicturesInMemory(*shapes.make_split(split), shapes.CLASSES)
    elif name in CIFAR:
        source = _open_cifar(name, root, split)
    else:
        source = _open_folder(Path(root), split)
    if len(source.classes) != num_classes:
        raise DataError(f"{root or name}: {len(source.classes)} classes found, but the recipe's "
                        f"data.num_classes is {num_classes}; "
                        f"--set data.num_classes={len(source.classes)} if the data is right")
    return source


def _open_folder(root: Path, split: str) -> ImageFolder:
    if split == "train":
        return ImageFolder(root / "train")
    present = [name for name in VALIDATION_FOLDERS if (root / name).is_dir()]
    folder = root / (present[0] if present else VALIDATION_FOLDERS[0])
    source = ImageFolder(folder)
    if (root / "train").is_dir():
        ours, theirs = set(source.classes), set(class_folders(root / "train"))
        for extra, there, not_there in ((ours - theirs, folder, root / "train"),
                                        (theirs - ours, root / "train", folder)):
            if extra:
                raise DataError(f"{not_there}: class '{min(extra)}' of {there} is missing; both "
                                "must hold the same classes")
    return source


def _open_cifar(name: str, root: str, split: str) -> PicturesInMemory:
    try:
        pictures = CIFAR[name](root, train=split == "train")
    except RuntimeError:
        raise DataError(f"{root}: no complete {name} in it; expected the folder "
                        f"{CIFAR[name].base_folder}") from None
    tensor = torch.from_numpy(pictures.data).permute(0, 3, 1, 2)         # (N, 3, 32, 32)
    return PicturesInMemory(tensor, np.array(pictures.targets), list(pictures.classes))
