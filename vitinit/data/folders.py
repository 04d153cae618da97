"""Which files under a folder are its images, and which folders its classes.

Files count by their ending; hidden files and folders (.ipynb_checkpoints, macOS' ._x.jpg) do not,
nor does what is no file, such as a pipe. Links to files are files.

Links to folders are followed if they lead out of the listing: not to a folder that is part of it,
nor to one that holds such a folder. So a link that leads back (b/loop → ..) brings in nothing,
neither others' images nor itself again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

from .images import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")


class Places:
    """Folders that are listed already, by their real paths."""

    def __init__(self) -> None:
        self.listed: set[str] = set()
        self.above: set[str] = set()                 # the listed ones and all that hold one

    def add(self, real: str) -> None:
        self.listed.add(real)
        self.above.update(lineage(real))

    def meet(self, real: str) -> bool:
        """Whether a folder is one of them, lies in one, or holds one."""
        return real in self.above or not self.listed.isdisjoint(lineage(real))


def lineage(path: str) -> list[str]:
    """A path and all folders above it."""
    return [path, *map(str, PurePath(path).parents)]


def class_folders(folder: Path) -> list[str]:
    """The names of the folders in `folder`, sorted; hidden ones left out. DataError without any."""
    with entries_of(folder) as entries:
        names = sorted(entry.name for entry in entries
                       if not entry.name.startswith(".") and leads_to_folder(entry))
    if not names:
        raise DataError(f"{folder}: no class folders in it; expected {folder}/<class>/<image>")
    return names


def images_of_classes(folder: Path, classes: list[str]) -> list[list[str]]:
    """The paths of each class' images, `folder`/<class>/**/<image>, in alphabetical order.

    Raises DataError for a class that is a link back into the data set.
    """
    whole = Places()
    whole.add(os.path.realpath(folder))
    with entries_of(folder) as entries:
        linked = {entry.name for entry in entries if entry.is_symlink()}
    links = {name: os.path.realpath(folder / name) for name in classes if name in linked}
    for name, real in links.items():
        if whole.meet(real):
            raise DataError(f"{folder / name}: a link that leads back into {folder}")
    for real in links.values():
        whole.add(real)
    return [images_below(os.path.join(folder, name), whole) for name in classes]


def images_below(folder: str, whole: Places | None = None) -> list[str]:
    """The paths of all images under `folder`, folder by folder in alphabetical order.

    whole: other folders of the same data set, into which no link is followed. Raises DataError for
    a folder that cannot be listed and for a link that leads nowhere.
    """
    here = Places()
    names: dict[str, list[str]] = {}                 # by folder
    waiting = [folder]
    while waiting:
        place = waiting.pop()
        with entries_of(place) as entries:
            names[place], folders = sort_out(entries)
        for entry in folders:
            if entry.is_symlink():
                here.add(os.path.realpath(folder))   # which most data sets never need to know
                real = os.path.realpath(entry.path)
                if here.meet(real) or (whole is not None and whole.meet(real)):
                    continue
                here.add(real)
            waiting.append(entry.path)
    found = []
    for place in sorted(names):
        begins = os.path.join(place, "")             # once for all files in it
        found += [begins + name for name in sorted(names[place])]
    return found


@contextmanager
def entries_of(folder: Path | str) -> Iterator[Iterator[os.DirEntry]]:
    """All that is in a folder, in the order of the disk. DataError if it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            yield entries
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror}") from None


def sort_out(entries: Iterator[os.DirEntry]) -> tuple[list[str], list[os.DirEntry]]:
    """What of one folder's entries is an image, by name, and what leads to a folder."""
    names, folders = [], []
    for entry in entries:
        name = entry.name
        if name.startswith("."):
            continue
        image = name.lower().endswith(EXTENSIONS)
        if not entry.is_symlink():                   # which costs no look at the disk
            if image and entry.is_file():
                names.append(name)
            elif entry.is_dir():
                folders.append(entry)
        elif image and os.path.isfile(entry.path):
            names.append(name)
        elif leads_to_folder(entry):
            folders.append(entry)
        elif image and not os.path.exists(entry.path):
            target = os.readlink(entry.path)
            raise DataError(f"{entry.path}: a link to {target}, which is not there")
    return names, folders


def leads_to_folder(entry: os.DirEntry) -> bool:
    """Whether it is a folder or a link to one; of a ring of links False, where is_dir raises."""
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()
