"""What a trained model is evaluated on: any set's validation split, and ImageNet's other test sets.

The latter hold images of ImageNet-1K's classes, or of 200 of them, and no training split:

    ImageNet-V2      Recht et al., arXiv 1902.10811: the images were collected a second time
    ImageNet-R       Hendrycks et al., arXiv 2006.16241: paintings, toys, tattoos, …; 200 classes
    ImageNet-A       Hendrycks et al., arXiv 1907.07174: photographs that fool a ResNet-50; 200
    ImageNet-Sketch  Wang et al., arXiv 1905.13549: drawings in black and white

Accuracy on R and A is defined over their 200 classes: a model's logits of the other 800 are left
out (`class_subsets.class_indices`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .class_subsets import imagenet_wnids
from .datasets import DATA_SETS, ImageFolder, ImageFiles, Source, folder_of, open_split
from .folders import class_folders
from .images import DataError


@dataclass(frozen=True)
class EvalSet:
    """A folder of class folders.

    unpacked: the folder that its archive unpacks into, which is the one to name.
    numbered: folders are called 0 … 999, ImageNet's classes in the order of their wnids.
    """

    unpacked: str
    num_classes: int
    numbered: bool = False

    @property
    def holds(self) -> str:
        return "0/… to 999/…" if self.numbered else f"{self.num_classes} folders <wnid>/…"


class NamedSet(NamedTuple):
    """A data set by its name and folder; "" for one that lies in none."""

    name: str
    root: str

    def __str__(self) -> str:
        return f"{self.name}={self.root}" if self.root else self.name


EVAL_SETS: dict[str, EvalSet] = {
    "imagenet_v2": EvalSet("imagenetv2-matched-frequency-format-val", 1000, numbered=True),
    "imagenet_r": EvalSet("imagenet-r", 200),
    "imagenet_a": EvalSet("imagenet-a", 200),
    "imagenet_sketch": EvalSet("sketch", 1000),
}


def open_to_evaluate(name: str, root: str) -> Source:
    """A set by its name in EVAL_SETS or, its validation split, in DATA_SETS.

    Raises DataError for what is missing, damaged, incomplete or laid out differently.
    """
    if name in EVAL_SETS:
        return open_eval_set(name, folder_of(root))
    source = open_split(name, root, "val", None)
    expected, found = DATA_SETS[name].num_classes, len(source.classes)
    if expected not in (None, found):
        raise DataError(f"{root}: {found} classes found, and {name} has {expected}; a part of it "
                        f"goes by image_folder={root}")
    return source


def open_eval_set(name: str, root: Path) -> ImageFiles:
    """One of EVAL_SETS; its classes are wnids whatever its folders are called."""
    known = EVAL_SETS[name]
    where = f"the folder {known.unpacked} of its archive, {known.holds}"
    if not os.path.isdir(root):
        raise DataError(f"{root}: no such folder; {name} is {where}")
    folders, wnids = class_folders(root), imagenet_wnids()
    classes = [str(number) for number in range(len(wnids))] if known.numbered else wnids
    strange = [folder for folder in folders if folder not in set(classes)]
    if strange:
        hint = f"; did you mean {root / strange[0]}?" if len(folders) == 1 else ""
        raise DataError(f"{root / strange[0]}: not a class of {name}, which is {where}{hint}")
    if len(folders) != known.num_classes:
        raise DataError(f"{root}: {len(folders)} classes found, and {name} has "
                        f"{known.num_classes}; it is not complete")
    source = ImageFolder(root)
    if known.numbered:                               # in alphabetical order: 0, 1, 10, 100, 101, …
        source.labels = np.array(source.classes, dtype=np.int64)[source.labels]
        source.classes = wnids
    return source
