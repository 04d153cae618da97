"""What a model is evaluated on: validation splits, four more test sets, parts of a training set.

The four test sets are for models that were trained on ImageNet-1K. They have its 1000 classes, or
200 of them, and no training split:

    ImageNet-V2      Recht et al., arXiv 1902.10811: images collected anew in the same way
    ImageNet-R       Hendrycks et al., arXiv 2006.16241: paintings, toys, tattoos, …; 200 classes
    ImageNet-A       Hendrycks et al., arXiv 1907.07174: photos that fool a ResNet-50; 200 classes
    ImageNet-Sketch  Wang et al., arXiv 1905.13549: drawings in black and white

Accuracy on ImageNet-R and ImageNet-A is defined over their 200 classes: the model's logits of the
other 800 classes are left out (`class_indices`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from .datasets import DATA_SETS, open_split
from .images import DataError
from .sources import ImageFiles, ImageFolder, Source, folder_of, held_out_part, stratified_part

WNIDS = Path(__file__).with_name("imagenet_wnids.txt")


def imagenet_wnids() -> list[str]:
    """The WordNet ids (wnids) of ImageNet-1K's classes, sorted: class 0 is n01440764, the tench.

    ImageNet's folders have the same order, so the outputs of every model trained on them have it,
    too.
    """
    return WNIDS.read_text(encoding="ascii").split()


def class_indices(model_classes: Sequence[str], set_classes: Sequence[str]) -> list[int]:
    """For each class of a data set, its index among the classes of a model.

    The model's logits at these indices, in this order, are logits over the data set's classes.
    Raises DataError that names the first class that the model does not know.
    """
    indices = {name: index for index, name in enumerate(model_classes)}
    for name in set_classes:
        if name not in indices:
            raise DataError(f"class '{name}' is none of the model's {len(model_classes)} classes "
                            f"({', '.join(model_classes[:2])}, … {model_classes[-1]})")
    return [indices[name] for name in set_classes]


class EvalSet(NamedTuple):
    """A test set that is a folder of class folders."""

    unpacked: str               # the folder that its archive unpacks into, which is to be given
    num_classes: int
    numbered: bool = False      # its class folders are 0 … 999, in the order of the wnids


class NamedSet(NamedTuple):
    """A data set by its name and its folder, which is "" for the embedded set `shapes`."""

    name: str
    root: str

    def __str__(self) -> str:
        return f"{self.name}={self.root}" if self.root else self.name

    def open(self) -> Source:
        """Open the set to evaluate; see `open_to_evaluate`."""
        return open_to_evaluate(self.name, self.root)


class TrainingPart(NamedTuple):
    """Images of a run's own training set: those that it trains on, or those that it holds out."""

    name: Literal["train", "held_out"]
    data: Any                   # the recipe's data section

    @property
    def root(self) -> str:
        """The folder of the data set."""
        return self.data.root

    def __str__(self) -> str:
        return str(NamedSet(self.name, self.root))

    def open(self) -> Source:
        """Open the data set and choose the images, as train.py does.

        Raises DataError as `open_split` does, and if a class has too few images.
        """
        data = self.data
        source = open_split(data.name, data.root, "train", data.num_classes)
        if self.name == "held_out":
            return held_out_part(source, images_per_class=data.held_out_per_class,
                                 seed=data.subset_seed)
        return stratified_part(source, share=data.subset, images_per_class=data.images_per_class,
                               held_out=data.held_out_per_class, seed=data.subset_seed)


EvaluatedSet = NamedSet | TrainingPart      # what one result of an evaluation is about


def own_set(data: Any) -> EvaluatedSet:
    """What a recipe, with this data section, validates on."""
    return (TrainingPart("held_out", data) if data.held_out_per_class else
            NamedSet(data.name, data.root))


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
    """Open one of EVAL_SETS. Its classes are wnids, whatever its folders are called."""
    unpacked, num_classes, numbered = EVAL_SETS[name]
    holds = "0/… to 999/…" if numbered else f"{num_classes} folders <wnid>/…"
    where = f"the folder {unpacked} of its archive, {holds}"
    if not os.path.isdir(root):
        raise DataError(f"{root}: no such folder; {name} is {where}")
    source, wnids = ImageFolder(root), imagenet_wnids()
    known = map(str, range(len(wnids))) if numbered else wnids
    strange = sorted(set(source.classes).difference(known))
    if strange:
        hint = f"; did you mean {root / strange[0]}?" if len(source.classes) == 1 else ""
        raise DataError(f"{root / strange[0]}: not a class of {name}, which is {where}{hint}")
    if len(source.classes) != num_classes:
        raise DataError(f"{root}: {len(source.classes)} classes found, and {name} has "
                        f"{num_classes}; it is not complete")
    if numbered:                                     # folders are sorted as words: 0, 1, 10, 100, …
        source.labels = np.array(source.classes, np.int64)[source.labels]
        source.classes = wnids
    return source
