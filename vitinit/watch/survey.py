"""What a set of images is like: images per class, files with the same bytes, sizes and kinds.

Nothing is decoded but what may be transparent: a survey takes a second for thousands of images.
"""

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from PIL import Image

from ..base.files import read_bytes, write_text_atomically
from ..base.messages import counted, one_line, shortened, without_warnings
from ..data.images import FORMATS, LARGEST_FILE, heif_formats
from ..data.pipeline import Data
from ..data.sources import ImageFiles, Source
from ..recipe.sections import Recipe
from ..runs.folder import RunFolder

MOST_SURVEYED = 50_000  # images of a run whose files are compared at its start
LOOKED_AT = 2_000  # files whose headers are read, spread evenly over the set
MIDDLE = 2**16  # bytes in the middle of a file
DECODED = 32  # of these with an alpha channel
IMBALANCE = 5  # images of the largest class per image of the smallest
LISTED = 12  # most classes whose counts are all listed
ORIENTATION, TURNED = 274, range(2, 9)  # EXIF's tag, and its values for images to be turned
SRGB = b"sRGB", "sRGB".encode("utf-16-be")  # in a profile's description, by its version


class File(NamedTuple):
    split: int  # 0: to train on; 1: to validate on
    label: int
    path: str

    def __str__(self) -> str:
        return os.path.join(*Path(self.path).parts[-2:])  # class/name


class Survey(NamedTuple):
    """What there is to say about images, in lines."""

    lines: list[str]
    cautions: list[str]
    copies: list[list[File]]  # files with the same bytes

    def __str__(self) -> str:
        """All of it, with the paths of all copies, a group per paragraph."""
        groups = (
            "\n".join(["", *(one_line(file.path) for file in group)]) for group in self.copies
        )
        return "\n".join([*self.lines, *self.cautions, *groups, ""])


def survey(train_set: Source, val_set: Source, side: int, *, most: int = MOST_SURVEYED) -> Survey:
    """Look at the images that a model of `side` pixels is trained and validated on; at their files
    only if there are at most `most` images to train on.
    """
    counts = np.bincount(train_set.labels, minlength=len(train_set.classes))
    texts = [
        f"{train_set.classes[index]} {counts[index]:,}"
        for index in np.argsort(-counts, kind="stable")
    ]
    if len(texts) > LISTED:  # the largest and the smallest
        texts[3:-2] = [f"… {texts[-3]}"]
    named = any(train_set.classes)  # the images of a bare folder have no class
    lines, cautions = [f"classes {', '.join(texts)}"] * named, list[str]()
    if counts.max() > IMBALANCE * counts.min() > 0:
        few, many = (train_set.classes[index] for index in (counts.argmin(), counts.argmax()))
        cautions.append(
            f"class {many} has {counts.max():,} images and {few} {counts.min():,}: "
            "read val_balanced, the mean over classes, beside top-1"
        )
    copies = list[list[File]]()
    if (
        isinstance(train_set, ImageFiles)
        and isinstance(val_set, ImageFiles)
        and len(train_set) <= most
    ):
        files = [
            File(split, label, path)
            for split, source in enumerate((train_set, val_set))
            for label, path in zip(source.labels.tolist(), source.paths)
        ]
        copies = same_bytes(files)
        cautions += of_copies(copies)
        step = len(files) // LOOKED_AT + 1
        kinds, more = of_headers(
            [file.path for file in files[::step]], side, turned=train_set.apply_exif_orientation
        )
        lines, cautions = [*lines, kinds], [*cautions, *more]
    return Survey([*map(one_line, lines)], [*map(one_line, cautions)], copies)


def same_bytes(files: Iterable[File]) -> list[list[File]]:
    """The files with the same bytes, in groups. Only those of equal size are read, and whole only
    those whose middles are equal: a camera's BMP or TIFF files are all of one size.
    """
    by_path: dict[str, File] = {}  # a set may be both splits
    for file in files:
        if os.path.isfile(file.path) and os.path.getsize(file.path):  # a pipe may wait for ever
            by_path.setdefault(file.path, file)
    groups = [[*by_path.values()]]
    keys = os.path.getsize, middle_of, digest_of
    for key in keys:
        parts = defaultdict(list)
        for number, group in enumerate(groups):
            for file in group:
                with suppress(OSError, ValueError):  # training names what cannot be read
                    parts[number, key(file.path)].append(file)
        groups = [part for part in parts.values() if len(part) > 1]
    return groups


def middle_of(path: str) -> bytes:
    """At most MIDDLE bytes from half of a file on."""
    with open(path, "rb") as file:
        file.seek(file.seek(0, os.SEEK_END) // 2)
        return file.read(MIDDLE)


def digest_of(path: str) -> bytes:
    return hashlib.sha256(read_bytes(path, limit=LARGEST_FILE)).digest()


def of_copies(copies: Sequence[Sequence[File]]) -> Iterator[str]:
    """A caution for each way in which copies are a mistake; a group counts as the worst."""
    kinds: dict[str, list[str]] = {
        "to validate on and to train on": [],
        "of several classes": [],
        "of one class": [],
    }
    between, across, within = kinds.values()
    for group in copies:
        worst = (
            between
            if len({file.split for file in group}) > 1
            else across
            if len({file.label for file in group}) > 1
            else within
        )
        worst.append(" = ".join(map(str, group)))
    for kind, groups in kinds.items():
        if groups:
            yield (
                f"{counted(len(groups), 'image')} {kind} {'is' if len(groups) == 1 else 'are'} "
                f"there twice, byte by byte: {shortened(groups)}"
            )


def of_headers(paths: Sequence[str], side: int, *, turned: bool) -> tuple[str, list[str]]:
    """A line about the kinds of these images, and cautions. turned: by their EXIF data."""
    shorter, longer, modes = list[int](), list[int](), Counter[str]()
    sideways, profiled, alpha, unread = [list[str]() for _ in range(4)]
    formats = FORMATS + heif_formats()
    for path in filter(os.path.isfile, paths):  # a pipe may wait for ever
        try:
            with without_warnings(), Image.open(path, formats=formats) as image:
                shorter.append(min(image.size))
                longer.append(max(image.size))
                modes[image.mode] += 1
                sideways += [path] * (image.getexif().get(ORIENTATION) in TURNED)
                profile = image.info.get("icc_profile") or SRGB[0]
                profiled += [path] * (not any(name in profile for name in SRGB))
                alpha += [path] * image.has_transparency_data
        except Exception:  # Pillow's plug-ins raise many kinds
            unread.append(path)
    if not shorter:
        return "files   none of them can be read", []
    middle = median(shorter)
    clear = [path for path in alpha[:DECODED] if is_transparent(path, formats)]
    line = (
        f"files   {len(shorter):,} looked at: shorter side {min(shorter):,} to "
        f"{max(shorter):,} px, median {middle:g}, longer side up to {max(longer):,}; "
        f"{', '.join(f'{mode} {count:,}' for mode, count in modes.most_common())}; "
        f"{len(sideways):,} turned by EXIF, {len(profiled):,} with a colour profile that is "
        f"not sRGB, {len(alpha):,} with an alpha channel"
    )
    looked = f"of {counted(len(shorter) + len(unread), 'file')} looked at"
    cautions = list[str]()
    for wrong, listed, problem in (
        (unread, unread, "cannot be opened; --dry-run --read-images lists all such files"),
        (
            sideways if not turned else [],
            sideways,
            "are stored sideways, and EXIF data would "
            "turn them: --set data.apply_exif_orientation=true",
        ),
        (profiled, profiled, "have a colour profile that is not sRGB, which is ignored"),
        (
            clear,
            alpha,
            "have an alpha channel, and where they are transparent, colours that "
            "nobody sees are trained on",
        ),
    ):
        if wrong:
            cautions.append(f"{len(listed):,} {looked} {problem}: {shortened(wrong)}")
    if 2 * middle < side:
        cautions.append(
            f"half of the images have {middle:g} px or less, and are enlarged "
            f"to {side}: --set data.image_size={int(middle)} and a smaller "
            "model.options.patch_size train faster"
        )
    return line, cautions


def is_transparent(path: str, formats: tuple[str, ...]) -> bool:
    """Whether any pixel of an image is; False if it cannot be decoded, which training says."""
    with suppress(Exception), without_warnings(), Image.open(path, formats=formats) as image:
        return bool(np.asarray(image.convert("RGBA"))[..., 3].min() < 255)
    return False


class ImageWatcher:
    """Says what the images of a new run are like, and writes it to images.txt in its folder."""

    def __init__(self) -> None:
        self.survey: Survey | None = None  # of a new run

    def opened(self, data: Data, recipe: Recipe) -> list[str]:
        self.survey = survey(data.train_set, data.val_set, min(recipe.data.image_size))
        return [*self.survey.lines, *(f"warning {line}" for line in self.survey.cautions)]

    def started(self, folder: RunFolder, step: int, steps_per_epoch: int) -> None:
        if self.survey is not None:
            write_text_atomically(str(self.survey), folder.images)
