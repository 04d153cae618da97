"""What a trained model is evaluated on: validation splits, four more test sets, parts of a training set.

The four test sets test models that were trained on ImageNet-1K. They have its 1000 classes, or 200 of them,
and no training split:

    ImageNet-V2      Recht et al., arXiv 1902.10811: images collected anew in the same way
    ImageNet-R       Hendrycks et al., arXiv 2006.16241: paintings, toys, tattoos, …; 200 classes
    ImageNet-A       Hendrycks et al., arXiv 1907.07174: photographs that fool a ResNet-50; 200 classes
    ImageNet-Sketch  Wang et al., arXiv 1905.13549: drawings in black and white

Accuracy on ImageNet-R and ImageNet-A is defined over their 200 classes: the model's logits of the
other 800 classes are left out (`class_subsets.class_indices`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from .class_subsets import imagenet_wnids
from .datasets import DATA_SETS, ImageFolder, ImageFiles, Source, folder_of, open_split
from .folders import class_folders
from .images import DataError
from .subset import held_out_part, stratified_part


@dataclass(frozen=True)
class EvalSet:
    """A test set that is a folder of class folders.

    unpacked: the name of the folder that its archive unpacks into, which the user should give.
    numbered: whether its class folders are called 0 … 999, for ImageNet's classes in the order of
    their wnids; else they are called by the wnids themselves.
    """

    unpacked: str
    num_classes: int
    numbered: bool = False

    @property
    def holds(self) -> str:
        """What the folder has to hold, in words for error messages."""
        return "0/… to 999/…" if self.numbered else f"{self.num_classes} folders <wnid>/…"


class NamedSet(NamedTuple):
    """A data set by its name and its folder, which is "" for the embedded set `shapes`."""

    name: str
    root: str

    def __str__(self) -> str:
        return f"{self.name}={self.root}" if self.root else self.name


class TrainingPart(NamedTuple):
    """Images of a run's own training set: those that it trains on, or those that it holds out.

    The fields after `data_set` are keys of the recipe's data section.
    """

    name: Literal["train", "held_out"]
    data_set: NamedSet
    num_classes: int
    subset: float
    images_per_class: int
    held_out_per_class: int
    subset_seed: int

    @property
    def root(self) -> str:
        """The folder of the data set."""
        return self.data_set.root

    def __str__(self) -> str:
        return str(NamedSet(self.name, self.root))

    def open(self) -> Source:
        """Open the data set and choose the images, as train.py does.

        Raises DataError as `open_split` does, and if a class has too few images.
        """
        source = open_split(*self.data_set, "train", self.num_classes)
        if self.name == "held_out":
            return held_out_part(source, images_per_class=self.held_out_per_class,
                                 seed=self.subset_seed)
        return stratified_part(source, share=self.subset, images_per_class=self.images_per_class,
                               held_out=self.held_out_per_class, seed=self.subset_seed)


EvaluatedSet = NamedSet | TrainingPart      # what one result of an evaluation is about


EVAL_SETS: dict[str, EvalSet] = {
    "imagenet_v2": EvalSet("imagenetv2-matched-frequency-format-val", 1000, numbered=True),
    "imagenet_r": EvalSet("imagenet-r", 200),
    "imagenet_a": EvalSet("imagenet-a", 200),
    "imagenet_sketch": EvalSet("sketch", 1000),
}


def open_to_evaluate(name: str, root: str) -> Source:
    """Open a set of EVAL_SETS, or the validation split of a set of DATA_SETS, by its name.

    Raises DataError if files are missing, damaged or laid out differently, or if classes are
    missing.
    """
    if name in EVAL_SETS:
        return open_eval_set(name, folder_of(root))
    source = open_split(name, root, "val", 0)
    expected, found = DATA_SETS[name].num_classes, len(source.classes)
    if expected not in (None, found):
        raise DataError(f"{root}: {found} classes found, and {name} has {expected}; a part of it "
                        f"goes by image_folder={root}")
    return source


def open_eval_set(name: str, root: Path) -> ImageFiles:
    """Open one of EVAL_SETS. The names of its classes are wnids, whatever its folders are called."""
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
    if known.numbered:                               # folders are sorted as words: 0, 1, 10, 100, …
        source.labels = np.array(source.classes, dtype=np.int64)[source.labels]
        source.classes = wnids
    return source
