"""What a folder of images holds: splits, classes, and files.

A folder with one of the names in SPLITS, in any case, is a split; without one, all folders are
classes. A file is an image if its name has one of the EXTENSIONS, or one of HEIF that can be read
here; where there is none, arrays of numpy's are. Hidden files are left out (such as macOS's
._x.jpg), and so are hidden folders and those OF_SYSTEMS; but for hidden files, what is left out is
counted. Links are followed, but each real folder is read once, as of the class that it lies in
(README.md).
"""

import fnmatch
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from pathlib import Path

from ..base.messages import counted, in_brief, one_line, shortened
from .images import HEIF_REMEDY, DataError, heif_formats

EXTENSIONS = tuple(".jpg .jpeg .jfif .png .gif .webp .bmp .tif .tiff .ppm .pgm".split())
ARRAYS = ".npy"
HEIF = {".heic": "HEIF", ".heif": "HEIF", ".hif": "HEIF", ".avif": "AVIF"}  # Pillow's names
TRAIN, VAL, TEST = range(3)
VISIBLE = "[!.]*"  # the pattern of names that are not hidden
# Folders of thumbnails and of deleted or lost files, which network drives and desktops make.
OF_SYSTEMS = {
    "@eaDir",
    "#recycle",
    "#snapshot",
    "@Recycle",
    "__MACOSX",
    "$RECYCLE.BIN",
    "lost+found",
}
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

# What needs no images to validate on.
WITHOUT_VALIDATION = (
    "train.py needs none with --set data.held_out=0.1, which validates on a tenth of each class, or "
    "--set eval.every_epochs=0, which validates nothing, and eval.py evaluates all images of"
)


def folders_in(folder: Path) -> list[str]:
    """The names of the folders in `folder`, sorted, without those that are left out; [] if it cannot
    be listed.
    """
    _, names, _ = next(os.walk(folder), ("", [], []))
    return sorted(name for name in names if not is_left_out(name))


def is_left_out(name: str) -> bool:
    """Whether a folder of this name is left out: a hidden one, or one of OF_SYSTEMS."""
    return name.startswith(".") or name in OF_SYSTEMS


def composed(name: str) -> str:
    """The name of a class with composed letters (NFC): macOS often stores "é" as "e" and an accent,
    which are one letter to a reader.
    """
    return unicodedata.normalize("NFC", name)


def classes_in(folder: Path) -> list[str]:
    """The classes whose folders lie in `folder`, sorted."""
    return sorted({*map(composed, folders_in(folder))})


def listed(names: Iterable[str]) -> str:
    """Some folders' names, to be quoted in a line: "cat/, dog/, …"."""
    return in_brief(", ".join(f"{name}/" for name in names))


def splits_in(root: Path) -> dict[int, str]:
    """The folders in `root` that are splits, by their names: TRAIN, VAL or TEST → name.

    Raises DataError if two are the same split, and if there is none but folders look like splits:
    by words in their names, or because most hold the same folders, at least two, and no images.
    """
    names = folders_in(root)
    splits: dict[int, str] = {}
    for name in names:
        split = SPLITS.get(name.lower())
        if split is None:
            continue
        other = splits.setdefault(split, name)
        if not os.path.samefile(root / name, root / other):
            raise DataError(
                f"{root}: {other}/ and {name}/ are the same split, and in it are "
                f"{listed(names)}; expected one of the two: merge or move them"
            )
    if splits:
        return splits
    words = re.split("[^a-z]+", " ".join(names).lower())
    named = set(map(SPLITS.get, words)) - {None}  # such as by train2017/ and val2017/
    shared = shared_folders(root, names)
    if shared or named > {TRAIN}:
        raise DataError(
            f"{root}: {listed(names)} look like splits, not classes{shared}; expected "
            "the names train/, and val/ or test/; if they are classes, they belong "
            f"into {root}/train/ or {root}/val/"
        )
    return splits


def shared_folders(root: Path, names: list[str]) -> str:
    """What most of the folders hold, such as ": 3 hold cat/, dog/": the same folders, at least two,
    and no images; else "".
    """
    nested = []
    for name in names:
        if not any(map(is_image, os.listdir(root / name))):
            nested.append(set(classes_in(root / name)))
    if len(nested) < 2 or 2 * len(nested) <= len(names):
        return ""
    shared = set.intersection(*nested)
    if len(shared) < 2:
        return ""
    return f": {len(nested)} hold {listed(sorted(shared))}"


def images_below(folder: str | Path, left_out: Counter[str]) -> list[tuple[str, list[str]]]:
    """The folders under `folder` in alphabetical order, itself included, each with its images.

    left_out: to which are added files that are no images, by suffix, folders that are left out, by
    name, and links that are not followed. Raises DataError for a folder that cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}") from None

    found = {}
    seen = set()
    # Still to be read: how deep a link is, or 0 for what is none, its path, and the real path.
    waiting = [(0, os.fspath(folder), os.path.realpath(folder))]
    while waiting:
        _, parent, real = heappop(waiting)
        if real in seen:
            left_out["read elsewhere"] += 1
            continue
        seen.add(real)
        _, folders, files = next(os.walk(parent, onerror=refuse))
        for name in folders:
            path = os.path.join(parent, name)
            if is_left_out(name):
                left_out[f"{name}/"] += 1
                continue
            if not os.path.islink(path):
                heappush(waiting, (0, path, os.path.join(real, name)))
                continue
            target = os.path.realpath(path)
            if Path(real).is_relative_to(target):
                left_out["linked back"] += 1
            else:
                heappush(waiting, (path.count(os.sep), path, target))
        found[parent] = fnmatch.filter(files, VISIBLE)
    is_taken = image_filter(name for names in found.values() for name in names)
    images = []
    for parent, names in sorted(found.items()):
        taken = sorted(filter(is_taken, names))
        left_out.update(map(suffix_of, set(names).difference(taken)))
        images.append((parent, taken))
    return images


def image_filter(names: Iterable[str]) -> Callable[[str], bool]:
    """What tells the images of a set from its other files: `is_image`, or, where none of the `names`
    is one of these, whether a file is an array of numpy's, which may have any number of channels.
    """
    if any(map(is_image, names)):
        return is_image
    return lambda name: suffix_of(name) == ARRAYS


def is_image(name: str) -> bool:
    """Whether a file's name ends as that of an image which can be read here."""
    suffix = suffix_of(name)
    if suffix in HEIF:
        return HEIF[suffix] in heif_formats()
    return name.lower().endswith(EXTENSIONS)


def suffix_of(name: str) -> str:
    """The suffix of a file's name in lower case, or "without suffix"."""
    return os.path.splitext(name)[1].lower() or "without suffix"


def since_left_out(root: Path, fewer: int) -> str:
    """What to say of images in folders OF_SYSTEMS, where a run finds so many images fewer than it
    began with, perhaps by an earlier version, which took these for photographs; "" if there are
    not as many of them, so that it has not lost these.
    """
    found = []
    for path in sorted(root.glob("**/*")):
        if is_image(path.name) and OF_SYSTEMS & {*path.parts} and path.is_file():
            found.append(str(path.relative_to(root)))
    if not found or len(found) != fewer:
        return ""
    return (
        f"; {counted(len(found), 'image')} in it are left out, on which earlier versions trained: "
        f"{shortened(found)}; the git_commit in the run's run.json goes on with them"
    )


def in_words(left_out: Counter[str], folder: str | Path) -> str:
    """A line such as "left out: 12 .heic, 3 .mov in photos/train; …"; "" if nothing is."""
    if not left_out:
        return ""
    kinds = sorted(left_out.items(), key=lambda item: (-item[1], item[0]))
    counts = ", ".join(f"{count:,} {in_brief(kind)}" for kind, count in kinds)
    line = f"left out: {counts} in {folder}"
    found = [suffix for suffix in HEIF if any(kind.startswith(suffix) for kind in left_out)]
    if any(HEIF[suffix] not in heif_formats() for suffix in found):
        line += f"; {HEIF_REMEDY}"
    return one_line(line)
