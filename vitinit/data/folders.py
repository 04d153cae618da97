"""What a folder of images holds: splits, classes, and files.

A folder with one of the names in SPLITS, in any case, is a split; without one, all folders are
classes. A file is an image if its name has one of the EXTENSIONS, or one of HEIF that can be read
here. Hidden files and folders are left out (such as .ipynb_checkpoints and macOS's ._x.jpg); what
else is left out is counted. Links are followed, but each real folder is read once, as of the class
that it lies in (README.md).
"""

import fnmatch
import os
import re
from collections import Counter
from collections.abc import Iterable
from heapq import heappop, heappush
from pathlib import Path

from ..base.messages import in_brief, one_line
from .images import HEIF_REMEDY, DataError, heif_formats

EXTENSIONS = (
    ".jpg",
    ".jpeg",
    ".jfif",
    ".png",
    ".gif",
    ".webp",
    ".bmp",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
)
HEIF = {".heic": "HEIF", ".heif": "HEIF", ".hif": "HEIF", ".avif": "AVIF"}  # Pillow's names
TRAIN, VAL, TEST = range(3)
SPLITS = {
    "train": TRAIN,
    "training": TRAIN,
    "val": VAL,
    "valid": VAL,
    "validation": VAL,
    "dev": VAL,
    "test": TEST,
    "testing": TEST,
}


def folders_in(folder: Path) -> list[str]:
    """The names of the folders in `folder`, sorted, not hidden ones; [] if it cannot be listed."""
    _, names, _ = next(os.walk(folder), ("", [], []))
    return sorted(fnmatch.filter(names, "[!.]*"))


def listed(names: Iterable[str]) -> str:
    """Some folders' names, to be quoted in a line: "cat/, dog/, …"."""
    return in_brief(", ".join(f"{name}/" for name in names))


def splits_in(root: Path) -> dict[int, str]:
    """The folders in `root` that are splits, by their names: TRAIN, VAL or TEST → name.

    Raises DataError if two are the same split, and if there is none but folders look like splits:
    by words in their names, or because most hold the same folders, at least two, and no images.
    """
    names, splits = folders_in(root), dict[int, str]()
    for name in names:
        split = SPLITS.get(name.lower())
        if split is not None and not os.path.samefile(
            root / name, root / (other := splits.setdefault(split, name))
        ):
            raise DataError(
                f"{root}: {other}/ and {name}/ are the same split, and in it are "
                f"{listed(names)}; expected one of the two: merge or move them"
            )
    words = {SPLITS.get(word) for name in names for word in re.split("[^a-z]+", name.lower())}
    nested = [
        {*folders_in(root / name)}
        for name in names
        if not splits and not any(map(is_image, os.listdir(root / name)))
    ]
    shared = set.intersection(*nested) if nested else set[str]()
    alike = len(shared) > 1 and len(nested) > 1 and 2 * len(nested) > len(names)
    if not splits and (alike or {TRAIN} < words - {None}):  # such as train2017/ and val2017/
        reason = f": {len(nested)} hold {listed(sorted(shared))}" if alike else ""
        raise DataError(
            f"{root}: {listed(names)} look like splits, not classes{reason}; expected "
            "the names train/, and val/ or test/; if they are classes, they belong "
            f"into {root}/train/ or {root}/val/"
        )
    return splits


def images_below(folder: str | Path, left_out: Counter[str]) -> list[tuple[str, list[str]]]:
    """The folders under `folder` in alphabetical order, itself included, each with its images.

    left_out: to which are added files that are no images, by suffix, and links that are not
    followed. Raises DataError for a folder that cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}") from None

    images, seen = {}, set[str]()
    # Still to be read: how deep a link is, or 0 for what is none, its path, and the real path.
    waiting = [(0, os.fspath(folder), os.path.realpath(folder))]
    while waiting:
        _, parent, real = heappop(waiting)
        if real in seen:
            left_out["read elsewhere"] += 1
            continue
        seen.add(real)
        _, *content = next(os.walk(parent, onerror=refuse))
        folders, files = (fnmatch.filter(names, "[!.]*") for names in content)
        for name in folders:
            path = os.path.join(parent, name)
            linked = os.path.islink(path)
            target = os.path.realpath(path) if linked else os.path.join(real, name)
            if linked and Path(real).is_relative_to(target):
                left_out["linked back"] += 1
            else:
                heappush(waiting, (linked * path.count(os.sep), path, target))
        images[parent] = sorted(filter(is_image, files))
        left_out.update(map(suffix_of, set(files).difference(images[parent])))
    return sorted(images.items())


def is_image(name: str) -> bool:
    """Whether a file's name ends as that of an image which can be read here."""
    return name.lower().endswith(EXTENSIONS) or (
        (suffix := suffix_of(name)) in HEIF and HEIF[suffix] in heif_formats()
    )


def suffix_of(name: str) -> str:
    """The suffix of a file's name in lower case, or "without suffix"."""
    return os.path.splitext(name)[1].lower() or "without suffix"


def in_words(left_out: Counter[str], folder: str | Path) -> str:
    """A line such as "left out: 12 .heic, 3 .mov in photos/train; …"; "" if nothing is."""
    if not left_out:
        return ""
    kinds = sorted(left_out.items(), key=lambda item: (-item[1], item[0]))
    unread = any(
        kind.startswith(suffix) and name not in heif_formats()
        for kind in left_out
        for suffix, name in HEIF.items()
    )
    remedy = f"; {HEIF_REMEDY}" if unread else ""
    return one_line(
        f"left out: {', '.join(f'{count:,} {in_brief(kind)}' for kind, count in kinds)}"
        f" in {folder}{remedy}"
    )
