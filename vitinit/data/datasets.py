"""All data sets by name: image folders and lists, published sets, and the embedded set `shapes`.

torchvision lists, reads and downloads the published ones, except for ImageNet and Tiny ImageNet.
Four test sets are for models that were trained on ImageNet-1K:

    ImageNet-V2      Recht et al., arXiv 1902.10811: images collected anew in the same way
    ImageNet-R       Hendrycks et al., arXiv 2006.16241: paintings, toys, tattoos, …; 200 classes
    ImageNet-A       Hendrycks et al., arXiv 1907.07174: photos that fool a ResNet-50; 200 classes
    ImageNet-Sketch  Wang et al., arXiv 1905.13549: drawings in black and white
"""

import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..base.files import one_at_a_time
from ..base.messages import OneLineError, counted, in_brief, unknown
from . import shapes
from .classes import class_indices
from .folders import (
    SPLITS,
    TEST,
    TRAIN,
    VAL,
    WITHOUT_VALIDATION,
    classes_in,
    folders_in,
    listed,
    splits_in,
)
from .images import DataError
from .lists import open_list
from .sources import ImageFiles, ImageFolder, ImagesInMemory, LooseImages, Source, folder_of
from .tars import TARS, open_tar, wnids_in

__all__ = ["DATA_SETS", "DataSet", "EVAL_SETS", "data_set_of", "download", "open_split"]


def open_folder(root: Path, split: str) -> ImageFolder:
    """Open a split of an image folder; folders.py says which folders are splits and classes.

    split: "train", "val", or "whole": all images if the folder has no splits, else "val". Raises
    DataError if there are no images of the split, or if it has a class that train/ lacks.
    """
    splits = splits_in(root)
    if not splits and split != "val":
        source = ImageFolder(root)
        if split == "whole":
            source.note(
                f"{root}: no splits in it, so that all {len(source):,} images are evaluated"
            )
        return source
    held = VAL if VAL in splits else TEST
    name = splits.get(TRAIN if split == "train" else held, "")
    others = [
        folder for folder in folders_in(root) if SPLITS.get(folder.lower()) not in (TRAIN, held)
    ]
    if not name or not folders_in(root / name):
        refuse_split(root, split, name, splits, others)
    source = ImageFolder(root / name)
    if split != "train" and TRAIN in splits:
        train = root / splits[TRAIN]
        take_the_classes(classes_in(train), source, root / name, train)
    if others:
        source.note(f"left out: {counted(len(others), 'folder')} in {root}: {listed(others)}")
    if split == "train" and held in splits:
        source.to_validate_on = f"{splits[held]}/"
    return source


def refuse_split(
    root: Path, split: str, name: str, splits: dict[int, str], others: list[str]
) -> None:
    """Refuse a split that is missing, or has no classes, by what is there in its place; where there
    is nothing else, `ImageFolder` refuses it.

    name: its folder, or "". others: folders that are neither to train nor to validate on.
    """
    missing = "train/" if split == "train" else "val/ or test/"
    lacks = f"no class folders in {name}/" if name else f"no {missing} in it"
    train = root / splits.get(TRAIN, "")
    if split != "train" and (not splits or TRAIN in splits and folders_in(train)):
        raise DataError(
            f"{root}: {lacks}; {WITHOUT_VALIDATION} a folder of classes by --data "
            f"image_folder={train}"
        )
    if not name or others:
        raise DataError(
            f"{root}: {lacks}, but {listed(folders_in(root))}; expected train/<class>/<image>; if "
            f"all are classes, they belong into {root}/train/ or {root}/val/"
        )


def take_the_classes(trained_on: list[str], source: ImageFiles, held: Path, train: Path) -> None:
    """Number the images in `held` by the classes in `train`, if there are any, of which some may
    have none of these images. DataError for images of another class.
    """
    unknown = set(source.classes) - set(trained_on)
    if not trained_on:
        return
    if unknown:
        raise DataError(
            f"{train.parent}: class '{min(unknown)}' is in {held.name}/ and not in {train.name}/; "
            f"expected images to train on, or none in {held.name}/"
        )
    source.labels = np.array(class_indices(trained_on, source.classes))[source.labels]
    source.classes = trained_on


def open_images(root: Path, split: str) -> ImageFiles:
    """All images anywhere under `root`, of one class without a name; none is in the split "val"."""
    images = LooseImages(root)
    return images if split == "train" else images.part(np.arange(0))


def open_imagenet(root: Path, split: str) -> ImageFiles:
    """Open a split of ImageNet-1K, train/ or val/, or else its tar; its test/ has no labels."""
    tars = {
        name: root / tar
        for name, tar in TARS.items()
        if not (root / name).is_dir() and (root / tar).is_file()
    }
    if split not in tars and not (root / split).is_dir():
        raise DataError(
            f"{root}: neither {split}/ nor {TARS[split]} in it; expected {DATA_SETS['imagenet'].holds}"
        )
    source = open_tar(tars[split], split) if split in tars else open_wnids(root / split, split)
    if split != "train":
        train = root / "train"
        trained_on = wnids_in(tars["train"]) if "train" in tars else classes_in(train)
        take_the_classes(trained_on, source, root / split, train)
        if not source.class_images.all():
            lost = source.classes[source.class_images.argmin()]
            raise DataError(
                f"{root}: class '{lost}' is in train/ and not in {split}/; ImageNet has 50 images "
                "of each class to validate on"
            )
    return source


def open_wnids(folder: Path, split: str) -> ImageFolder:
    """All images of a folder whose classes are wnids, whatever the split."""
    source = ImageFolder(folder)
    for name in source.classes:
        if not is_wnid(name):
            raise DataError(
                f"{folder / name}: not a class of ImageNet, such as n01440764; other "
                "image folders go by the name image_folder"
            )
    return source


def open_imagenet_v2(root: Path, split: str) -> ImageFolder:
    """ImageNet-V2, whose folders are 0 … 999, in the order of the wnids."""
    source = ImageFolder(root)
    wnids = imagenet_wnids()
    numbers = np.array(source.classes, np.int64)  # sorted as words: 0, 1, 10, 100, …
    present, source.labels = np.unique(numbers[source.labels], return_inverse=True)
    source.classes = [wnids[number] for number in present]
    return source


def open_tiny_imagenet(root: Path, split: str) -> ImageFiles:
    """Tiny ImageNet: 500 images of 64×64 pixels per class in train, 50 in val.

    Lines of val/val_annotations.txt begin with a file's name in val/images/ and its class.
    """
    lines = (root / "val" / "val_annotations.txt").read_text(encoding="utf-8").splitlines()
    if split == "train":
        source = ImageFolder(root / "train")
        source.left_out = ""  # lists of bounding boxes
        return source
    names, wnids = zip(*(line.split("\t")[:2] for line in lines))
    classes, labels = np.unique(wnids, return_inverse=True)
    paths = [root / "val" / "images" / name for name in names]
    return ImageFiles(paths, labels, classes.tolist())


def imagenet_wnids() -> list[str]:
    """The WordNet ids (wnids) of ImageNet-1K's classes, sorted, as a model's outputs are."""
    file = Path(__file__).with_name("imagenet_wnids.txt")
    return file.read_text(encoding="ascii").split()


def unnamed_classes(count: int) -> list[str] | None:
    """What the outputs of a model stand for that nobody has named: of 1000, ImageNet's classes."""
    wnids = imagenet_wnids()
    return wnids if count == len(wnids) else None


def is_wnid(name: str) -> bool:
    """Whether `name` is a WordNet id: the letter n and eight digits."""
    return re.fullmatch(r"n\d{8}", name) is not None


TRAIN_AND_TEST = {"train": "train", "val": "test"}  # our splits, and what most sets call them


def published(name: str) -> Any:
    """torchvision's class of a set; few runs need torchvision, whose import takes seconds."""
    from torchvision import datasets

    kind = getattr(datasets, name)
    if name == "STL10":  # without its unlabelled images (2.8 GB), which may be missing
        return type(name, (kind,), {"train_list": kind.train_list[:2]})
    return kind


def fetch(name: str, root: Path) -> None:
    """Let torchvision download a set, unless its files are there already."""
    kind = published(name)
    kind(root, download=True)
    if name == "SVHN":  # of which that is the training set alone
        kind(root, "test", download=True)


def read_arrays(name: str, root: Path, split: str) -> ImagesInMemory:
    """Read a split of a set of torchvision that holds its images in an array `data`."""
    if name.startswith("CIFAR"):
        arrays = published(name)(root, split == "train")
        images = torch.from_numpy(arrays.data).permute(0, 3, 1, 2)
        labels = arrays.targets
    else:
        arrays = published(name)(root, TRAIN_AND_TEST[split])
        images = torch.from_numpy(arrays.data)
        labels = arrays.labels
    images = images.contiguous(memory_format=torch.channels_last)  # (N, 3, H, W)
    classes = list(getattr(arrays, "classes", "0123456789"))  # SVHN's digits
    return ImagesInMemory(images, labels, classes)


def list_food101(root: Path, split: str) -> ImageFiles:
    """Food-101 class by class in alphabetical order; its lists have another order of classes."""
    foods = published("Food101")(root, TRAIN_AND_TEST[split])
    files = [foods._image_files[index] for index in np.argsort(foods._labels, kind="stable")]
    return ImageFiles(files, np.sort(foods._labels), foods.classes)


def list_flowers102(root: Path, split: str) -> ImageFiles:
    """Oxford Flowers: train has its training and validation images, val has its test images."""
    names = ["train", "val"] if split == "train" else ["test"]
    parts = [published("Flowers102")(root, name) for name in names]
    paths = [file for part in parts for file in part._image_files]
    labels = [label for part in parts for label in part._labels]
    return ImageFiles(paths, labels, list(parts[0].classes))


def list_pets(root: Path, split: str) -> ImageFiles:
    """Oxford-IIIT Pet; its classes are called as in its files, such as american_bulldog."""
    pets = published("OxfordIIITPet")(root, "trainval" if split == "train" else "test")
    breeds = {
        label: path.stem.rpartition("_")[0] for label, path in zip(pets._labels, pets._images)
    }
    return ImageFiles(pets._images, pets._labels, [breeds[label] for label in sorted(breeds)])


class DataSet(NamedTuple):
    """A row of `DATA_SETS`: how a set is read, what its folder holds, and how many classes it has."""

    open: Callable[[Path, str], Source]  # a split under a root folder; see `open_folder`
    holds: str  # what the root folder has to hold, for error messages
    num_classes: int | None  # how many classes the set has; None: any number
    torchvision: str = ""  # its class that downloads the set; "": none does
    drawn: bool = False  # its images are drawn, so that it needs no folder


# The data sets by name, with what each folder has to hold.
# fmt: off
DATA_SETS = {
    "shapes": DataSet(
        lambda root, split: shapes.Shapes(split),
        "drawn and needs no folder: leave out --data-dir", 10, drawn=True),
    "image_folder": DataSet(
        open_folder, "train/<class>/… and val/<class>/… or test/<class>/…; or <class>/… alone",
        None),
    "images": DataSet(open_images, "images in any folders, without classes", None),
    "image_list": DataSet(
        open_list, "train.csv and val.csv, or images.csv, with the columns path and label", None),
    "imagenet": DataSet(
        open_imagenet,
        "train/<wnid>/… and val/<wnid>/…, or the tars of both as downloaded", 1000),
    "cifar10": DataSet(
        partial(read_arrays, "CIFAR10"), "cifar-10-batches-py/ (cifar-10-python.tar.gz unpacked)",
        10, "CIFAR10"),
    "cifar100": DataSet(
        partial(read_arrays, "CIFAR100"), "cifar-100-python/ (cifar-100-python.tar.gz unpacked)",
        100, "CIFAR100"),
    "stl10": DataSet(partial(read_arrays, "STL10"), "stl10_binary/ (stl10_binary.tar.gz unpacked)",
                     10, "STL10"),
    "svhn": DataSet(partial(read_arrays, "SVHN"),            # without its extra images
                    "train_32x32.mat and test_32x32.mat", 10, "SVHN"),
    "food101": DataSet(list_food101, "food-101/ (food-101.tar.gz unpacked)", 101, "Food101"),
    "flowers102": DataSet(
        list_flowers102,
        "flowers-102/ with imagelabels.mat, setid.mat and jpg/ (102flowers.tgz unpacked)", 102,
        "Flowers102"),
    "pets": DataSet(
        list_pets, "oxford-iiit-pet/ with images/ and annotations/ (two archives unpacked)", 37,
        "OxfordIIITPet"),
    "tiny_imagenet": DataSet(
        open_tiny_imagenet, "train/ and val/ (cs231n.stanford.edu/tiny-imagenet-200.zip unpacked)",
        200),
}
# fmt: on

# The data sets by name that have no training split.
EVAL_SETS = {
    "imagenet_v2": DataSet(
        open_imagenet_v2, "0/… to 999/… (imagenetv2-matched-frequency-format-val unpacked)", 1000
    ),
    "imagenet_r": DataSet(open_wnids, "200 folders <wnid>/…", 200),
    "imagenet_a": DataSet(open_wnids, "200 folders <wnid>/…", 200),
    "imagenet_sketch": DataSet(open_wnids, "1000 folders <wnid>/…", 1000),
}


def data_set_of(name: str) -> DataSet:
    """The row of a data set, by its name; DataError for one that is in neither table."""
    rows = DATA_SETS | EVAL_SETS
    if name not in rows:
        raise DataError(unknown("data set", name, rows))
    return rows[name]


def download(name: str, root: str) -> None:
    """Download a data set that torchvision offers to `root`, unless its files are there already.

    name: a key of DATA_SETS; others than torchvision's are left alone. Of processes that share the
    folder, on any machine, one downloads and the others wait; if it dies, the next goes on. Raises
    DataError if the download fails, and for an unknown name.
    """
    data_set = data_set_of(name)
    folder = folder_of(root)
    if not data_set.torchvision:
        return
    with suppress(OSError):  # where no folder can be made
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with one_at_a_time(folder / f".{name}.downloading"), suppress(ImportError):
            fetch(data_set.torchvision, folder)  # without scipy, see `open_split`
    except (OSError, RuntimeError, ValueError) as error:  # urllib's errors are OSErrors
        raise DataError(
            f"{name}: not complete in {folder} and cannot be downloaded ({in_brief(error)}); "
            f"put there {data_set.holds}"
        ) from None


def open_split(name: str, root: str, split: str, num_classes: int) -> Source:
    """Open a split, "train" or "val", of a data set that is on disk already; see `open_folder`.

    name: a key of DATA_SETS or EVAL_SETS. root: the folder, in which ~ is the home. num_classes: how
    many are expected; 0: any number. Raises DataError for another number, a file that is missing or
    damaged, a class without images, and an unknown name.
    """
    data_set = data_set_of(name)
    folder = folder_of(root)
    if not os.path.isdir(folder):
        raise DataError(f"{folder}: no such folder; {name} is {data_set.holds}")
    try:
        source = data_set.open(folder, split)
    except OneLineError:
        raise
    except ImportError:
        raise DataError(
            f"{name}: reading it needs scipy: pip install 'vitinit[datasets]'"
        ) from None
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        reason = "a file is missing or damaged"  # torchvision raises all of them
        if isinstance(error, OSError) and error.filename:
            reason = f"{error.filename}: {error.strerror}"
        raise DataError(
            f"{folder}: no complete {name} in it ({reason}); expected {data_set.holds}"
        ) from None
    if num_classes not in (0, len(source.classes)):
        kind = name if name == "image_list" else "image_folder"
        raise DataError(
            f"{root or name}: {len(source.classes)} classes found, and {num_classes} "
            f"expected; --set data.num_classes=0, or eval.py --data {kind}={root}, "
            "takes those that are there"
        )
    return source
