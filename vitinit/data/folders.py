"""Which files under a folder are images, and which folders are classes.

A file is an image if its name has one of the EXTENSIONS. Hidden files and folders are left out
(such as .ipynb_checkpoints and macOS's ._x.jpg). What is left out and not hidden is counted by
suffix.

A link to a folder is followed only if its target has nothing in common with what is listed already:
the target must not be such a folder, lie in one, or contain one. So a link that leads back (b/loop
→ ..) adds nothing: neither images that belong to other classes nor the same images again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..messages import in_brief, one_line
from .images import HEIF_REMEDY, DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
HEIF = (".heic", ".heif", ".avif")
KINDS_NAMED = 6                 # of suffixes, in a line about files that are left out


def class_folders(folder: Path) -> list[str]:
    """The names of the folders in `folder`, sorted, not hidden ones. DataError if there is none."""
    _, names, _ = next(walk(folder))
    if not names:
        raise DataError(f"{folder}: no class folders in it; expected {folder}/<class>/<image>")
    return sorted(names)


def images_by_class(folder: Path, left_out: Counter[str]) -> dict[str, list[str]]:
    """The paths of the images of each class, `folder`/<class>/**/<image>, in alphabetical order.

    left_out: to which the files that are no images, or in no class, are added by suffix. Raises
    DataError for a class that is a link back into the data set.
    """
    names, listed = class_folders(folder), [real_folder(folder)]
    for path in filter(os.path.islink, [os.path.join(folder, name) for name in names]):
        if overlaps(real_folder(path), listed[:1]):
            raise DataError(f"{path}: a link that leads back into {folder}")
        listed.append(real_folder(path))
    for suffix in map(suffix_of, next(walk(folder))[2]):
        left_out[f"{suffix} of no class" if suffix in EXTENSIONS else suffix] += 1
    return {name: images_below(os.path.join(folder, name), left_out, listed) for name in names}


def images_below(folder: str, left_out: Counter[str], listed: Sequence[str] = ()) -> list[str]:
    """The paths of all images under `folder`, folder by folder in alphabetical order.

    left_out: to which files that are no images are added by suffix. listed: the real paths of
    folders of the same data set, into which no link is followed. Raises DataError for a folder that
    cannot be listed.
    """
    found, listed = {}, [real_folder(folder), *listed]
    for parent, folders, files in walk(folder):
        for path in filter(os.path.islink, [os.path.join(parent, name) for name in folders]):
            real = real_folder(path)
            if overlaps(real, listed):
                folders.remove(os.path.basename(path))       # os.walk does not follow it
            else:
                listed.append(real)
        found[parent] = sorted(name for name in files if name.lower().endswith(EXTENSIONS))
        left_out.update(map(suffix_of, set(files).difference(found[parent])))
    return [os.path.join(parent, name) for parent in sorted(found) for name in found[parent]]


def walk(folder: str | Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """os.walk through links, without hidden names. DataError for a folder that cannot be listed."""
    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}") from None
    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield parent, folders, [name for name in files if not name.startswith(".")]


def real_folder(path: str | Path) -> str:
    """The path of a folder without links, with a slash at its end."""
    return os.path.join(os.path.realpath(path), "")


def overlaps(folder: str, others: Sequence[str]) -> bool:
    """Whether a folder is one of the others, lies in one, or contains one (all `real_folder`)."""
    return folder.startswith(tuple(others)) or any(other.startswith(folder) for other in others)


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
