"""Which files under a folder are images, and which folders are classes.

A file is an image if its name has one of the EXTENSIONS. Hidden files and folders are left out
(such as .ipynb_checkpoints and macOS's ._x.jpg), and so is whatever is not a regular file, such as
a pipe. A link to a file counts as a file. What is left out and not hidden is counted by suffix.

A link to a folder is followed only if its target has nothing in common with what is listed already:
the target must not be such a folder, lie in one, or contain one. So a link that leads back (b/loop
→ ..) adds nothing: neither images that belong to other classes nor the same images again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

from ..messages import in_brief, one_line
from .images import HEIF_REMEDY, DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
HEIF = (".heic", ".heif", ".avif")
KINDS_NAMED = 6                 # of suffixes, in a line about files that are left out


class ListedFolders:
    """The folders that are listed already, by their real paths (without links)."""

    def __init__(self) -> None:
        self.listed: set[str] = set()
        self.above: set[str] = set()                 # the listed folders and all that contain one

    def add(self, real: str) -> None:
        """Add the folder with this real path."""
        self.listed.add(real)
        self.above.update(lineage(real))

    def overlap(self, real: str) -> bool:
        """Whether a folder is one of the listed ones, lies in one, or contains one."""
        return real in self.above or not self.listed.isdisjoint(lineage(real))


def lineage(path: str) -> list[str]:
    """A path and all of its parent folders."""
    return [path, *map(str, PurePath(path).parents)]


def class_folders(folder: Path) -> list[str]:
    """The names of the folders in `folder`, sorted, without hidden ones. DataError if there is none."""
    with entries_of(folder) as entries:
        names = sorted(entry.name for entry in entries
                       if not entry.name.startswith(".") and leads_to_folder(entry))
    if not names:
        raise DataError(f"{folder}: no class folders in it; expected {folder}/<class>/<image>")
    return names


def images_of_classes(folder: Path, classes: list[str], left_out: Counter[str]
                      ) -> list[list[str]]:
    """The paths of the images of each class, `folder`/<class>/**/<image>, in alphabetical order.

    left_out: to which the files that are no images, or in no class, are added by suffix. Raises
    DataError for a class that is a link back into the data set.
    """
    data_set = ListedFolders()
    data_set.add(os.path.realpath(folder))
    linked = set()
    with entries_of(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                linked.add(entry.name)
            if not entry.name.startswith(".") and not leads_to_folder(entry):
                suffix = suffix_of(entry.name)
                left_out[f"{suffix} of no class" if suffix in EXTENSIONS else suffix] += 1
    links = {name: os.path.realpath(folder / name) for name in classes if name in linked}
    for name, real in links.items():
        if data_set.overlap(real):
            raise DataError(f"{folder / name}: a link that leads back into {folder}")
    for real in links.values():
        data_set.add(real)
    return [images_below(os.path.join(folder, name), left_out, data_set) for name in classes]


def images_below(folder: str, left_out: Counter[str], data_set: ListedFolders | None = None
                 ) -> list[str]:
    """The paths of all images under `folder`, folder by folder in alphabetical order.

    left_out: to which files that are no images are added by suffix. data_set: the folders of the
    same data set, into which no link is followed. Raises DataError for a folder that cannot be
    listed and for a link whose target does not exist.
    """
    listed = ListedFolders()
    names: dict[str, list[str]] = {}                 # of images, by folder
    waiting = [folder]
    while waiting:
        current = waiting.pop()
        with entries_of(current) as entries:
            names[current], folders = sort_out(entries, left_out)
        for entry in folders:
            if entry.is_symlink():
                listed.add(os.path.realpath(folder))     # only here, as most data sets have no links
                real = os.path.realpath(entry.path)
                if listed.overlap(real) or (data_set is not None and data_set.overlap(real)):
                    continue
                listed.add(real)
            waiting.append(entry.path)
    paths = []
    for parent in sorted(names):
        prefix = os.path.join(parent, "")            # computed once for all files in the folder
        paths += [prefix + name for name in sorted(names[parent])]
    return paths


@contextmanager
def entries_of(folder: Path | str) -> Iterator[Iterator[os.DirEntry]]:
    """The entries of a folder, in the order of the disk. Raises DataError if it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            yield entries
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror}") from None


def sort_out(entries: Iterator[os.DirEntry], left_out: Counter[str]
             ) -> tuple[list[str], list[os.DirEntry]]:
    """Among the entries of one folder: the names of the images, and the folders or links to folders.

    left_out: to which the others are added by suffix, unless they are hidden. Raises DataError for
    a link with the name of an image whose target does not exist.
    """
    names, folders = [], []
    for entry in entries:
        name = entry.name
        if name.startswith("."):
            continue
        image = name.lower().endswith(EXTENSIONS)
        if not entry.is_symlink():                   # known from the listing, without disk access
            if image and entry.is_file():
                names.append(name)
            elif entry.is_dir():
                folders.append(entry)
            else:
                left_out[suffix_of(name)] += 1
        elif image and os.path.isfile(entry.path):
            names.append(name)
        elif leads_to_folder(entry):
            folders.append(entry)
        elif image and not os.path.exists(entry.path):
            target = os.readlink(entry.path)
            raise DataError(f"{entry.path}: a link to {target}, which is not there")
        else:
            left_out[suffix_of(name)] += 1
    return names, folders


def suffix_of(name: str) -> str:
    """The suffix of a file's name in lower case, or "without suffix"."""
    return os.path.splitext(name)[1].lower() or "without suffix"


def in_words(left_out: Counter[str], folder: str | Path) -> str:
    """A line about the files under `folder` that are left out; "" if there are none.

    Example: "left out: 12 .heic, 3 .mov in photos/train; …", with how to convert the former.
    """
    if not left_out:
        return ""
    kinds = sorted(left_out.items(), key=lambda item: (-item[1], item[0]))
    named = [f"{count:,} {in_brief(suffix)}" for suffix, count in kinds[:KINDS_NAMED]]
    others = sum(count for _, count in kinds[KINDS_NAMED:])
    remedy = f"; {HEIF_REMEDY}" if any(suffix.startswith(HEIF) for suffix in left_out) else ""
    return one_line(f"left out: {', '.join(named)}{f', {others:,} others' if others else ''} in "
                    f"{folder}{remedy}")


def leads_to_folder(entry: os.DirEntry) -> bool:
    """Whether an entry is a folder or a link to one.

    For links that form a ring the answer is False; DirEntry.is_dir would raise an error.
    """
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()
