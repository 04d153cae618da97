"""ImageNet's two tars as they are downloaded: an index of each, by which its images are read.

That of the training images holds a tar of each class, that of the validation images only these;
their labels are in a file beside it. To a run they are the images of the same folders,
train/<wnid>/<name> and val/<wnid>/<name>: in their order, with their paths, labels and sizes.
"""

import csv
import os
import re
import sys
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from numpy import ndarray

from ..base.files import FileError, one_at_a_time, written_atomically
from ..base.messages import in_brief, say, warn
from .images import DataError
from .sources import ImageFiles

TARS = {"train": "ILSVRC2012_img_train.tar", "val": "ILSVRC2012_img_val.tar"}
SOLUTION, DEVKIT = "LOC_val_solution.csv", "ILSVRC2012_devkit_t12.tar.gz"  # labels of "val"
DATA = "ILSVRC2012_devkit_t12/data"  # the folder in the devkit that says them
CLASS, IMAGE = r"n\d{8}\.tar", r"\w{1,35}\.JPEG"  # the names of what a tar holds
BLOCK = 512  # bytes of a header; contents are filled up to multiples of it
# An index: of each image its class, its name, where its content begins in the tar, and its bytes.
INDEX = [("wnid", "S9"), ("name", "S40"), ("offset", "i8"), ("size", "i8")]
AS_DOWNLOADED = "expected the file as it was downloaded"


class Member(NamedTuple):
    name: str
    offset: int  # of its content in the file
    size: int  # bytes


class TarImages(ImageFiles):
    """Images in one of TARS, each of which is one `os.pread`.

    index: of `make_index`. `stored` has each image's offset and size in two more columns.
    """

    def __init__(self, tar: Path, split: str, index: ndarray) -> None:
        folder = tar.with_name(split)
        names = zip(index["wnid"], index["name"])
        paths = (f"{folder}/{wnid.decode()}/{name.decode()}" for wnid, name in names)
        classes, labels = np.unique(index["wnid"], return_inverse=True)
        super().__init__(paths, labels, [wnid.decode() for wnid in classes])
        places = np.column_stack([index["offset"], index["size"]])
        self.stored = torch.cat([self.stored, torch.from_numpy(places)], dim=1)
        self.tar, self.stamp = tar, stamp_of(tar)

    def size(self, index: int) -> int:
        return int(self.stored[index, 3])

    def content(self, index: int) -> bytes:
        offset, size = self.stored[index, 2:].tolist()
        try:
            return os.pread(descriptor(self.tar, self.stamp), size, offset)
        except OSError as error:
            raise DataError(f"{self.tar}: cannot be read: {error.strerror}") from None


def stamp_of(file: Path | int) -> tuple[int, int]:
    """Bytes and time of a file, or of an open one, by which one sees that it is another."""
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


@cache
def descriptor(tar: Path, stamp: tuple[int, int]) -> int:
    """The descriptor by which this process reads a tar, opened once. A forked worker may use its
    parent's, since `os.pread` does not move it. DataError for a file with another stamp.
    """
    opened = os.open(tar, os.O_RDONLY)
    if stamp_of(opened) != stamp:
        os.close(opened)
        raise DataError(f"{tar}: is another file than when this run began; start again")
    return opened


def open_tar(tar: Path, split: str) -> TarImages:
    """Open a split by the index beside its tar, which is made if there is none of this very file.
    Raises DataError for a tar that is damaged, or has no labels.
    """
    files = [tar] if split == "train" else [tar, labels_beside(tar)]
    stamps = repr([(file.name, stamp_of(file)) for file in files])
    place = tar.with_suffix(".index.npz")
    with one_at_a_time(tar.with_suffix(".indexing")):
        index = read_index(place, stamps)
        if index is None:
            say(f"note    {tar}: its index is made, which may take minutes", sys.stderr)
            index = make_index(*files)
            try:
                with written_atomically(place) as file:
                    np.savez(file, stamps=stamps, index=index)
            except FileError as error:
                warn(f"{error}; every process of every start makes this index anew")
    return TarImages(tar, split, index)


def read_index(place: Path, stamps: str) -> ndarray | None:
    """The index of files with these stamps, or None."""
    # Where it is damaged, errors are of many kinds, and it is made anew.
    with suppress(Exception), open(place, "rb") as file, np.load(file) as saved:
        if saved["stamps"] == stamps:
            return saved["index"]
    return None


def make_index(tar: Path, labels: Path | None = None) -> ndarray:
    """Where the images of a tar are, (N,) INDEX in the order of folders. labels: of "val". Raises
    DataError unless these are labels of the images in it.
    """
    with open(tar, "rb") as file:
        if labels is None:
            rows = [
                (inner.name[:9], *image)
                for inner in members(file, CLASS)
                for image in members(file, IMAGE, inner.offset, inner.offset + inner.size)
            ]
        else:
            wnids = read_labels(labels)
            images = {image.name: image for image in members(file, IMAGE)}
            differing = images.keys() ^ wnids.keys()
            if differing:
                raise DataError(
                    f"{tar}: {min(differing)} is not both in it and in {labels.name}; "
                    f"{AS_DOWNLOADED}"
                )
            rows = [(wnids[name], *image) for name, image in images.items()]
    return np.sort(np.array(rows, INDEX))


def members(file: BinaryIO, names: str, start: int = 0, end: int = 0) -> Iterator[Member]:
    """Yield what is in the tar that lies between two places of a file; 0, 0: all of it. names: the
    pattern of all names. DataError for any other, and for a tar that is damaged, or has no end.
    """
    end = end or stamp_of(file.fileno())[0]
    while (header := os.pread(file.fileno(), BLOCK, start)) != bytes(BLOCK):
        try:
            info = tarfile.TarInfo.frombuf(header, "ascii", "replace")
        except tarfile.HeaderError as error:
            raise DataError(f"{file.name}: not a whole tar ({error}); {AS_DOWNLOADED}") from None
        offset = start + BLOCK
        start = offset + -(-info.size // BLOCK) * BLOCK
        if not offset <= start <= end or not re.fullmatch(names, info.name):
            raise DataError(
                f"{file.name}: '{in_brief(info.name)}' in it is cut off, or no {names}; "
                f"{AS_DOWNLOADED}"
            )
        yield Member(info.name, offset, info.size)


def wnids_in(tar: Path) -> list[str]:
    """The classes of the training tar, sorted."""
    with open(tar, "rb") as file:
        return sorted(inner.name[:9] for inner in members(file, CLASS))


def labels_beside(tar: Path) -> Path:
    """The file with the labels of the validation tar; DataError if there is none."""
    for name in (SOLUTION, DEVKIT):  # the first needs no scipy
        if tar.with_name(name).is_file():
            return tar.with_name(name)
    raise DataError(f"{tar}: has no labels in it; expected {SOLUTION} or {DEVKIT} beside it")


def read_labels(file: Path) -> dict[str, str]:
    """The wnid of each validation image by its name; DataError if the file does not say them."""
    try:
        if file.name == SOLUTION:
            with open(file, newline="") as text:
                rows = list(csv.DictReader(text))
            return {f"{row['ImageId']}.JPEG": row["PredictionString"][:9] for row in rows}
        from scipy.io import loadmat

        with tarfile.open(file) as devkit:
            synsets = loadmat(devkit.extractfile(f"{DATA}/meta.mat"), squeeze_me=True)["synsets"]
            truth = devkit.extractfile(f"{DATA}/ILSVRC2012_validation_ground_truth.txt")
            numbers = truth.read().split()  # type: ignore[union-attr]  # a file, and no folder
        wnids = dict(zip(synsets["ILSVRC2012_ID"], synsets["WNID"]))
        return {
            f"ILSVRC2012_val_{image:08d}.JPEG": wnids[int(number)]
            for image, number in enumerate(numbers, 1)
        }
    except ImportError:
        raise
    except Exception as error:  # each library has its own
        raise DataError(f"{file}: no labels in it ({in_brief(error)}); {AS_DOWNLOADED}") from None
