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
    lines, cautions = of_classes(train_set)
    copies = []
    if (
        isinstance(train_set, ImageFiles)
        and isinstance(val_set, ImageFiles)
        and len(train_set) <= most
    ):
        files = []
        for split, source in enumerate((train_set, val_set)):
            for label, path in zip(source.labels.tolist(), source.paths):
                files.append(File(split, label, path))
        copies = same_bytes(files)
        cautions += of_copies(copies)
        step = len(files) // LOOKED_AT + 1
        paths = [file.path for file in files[::step]]
        kinds, more = of_headers(paths, side, turned=train_set.apply_exif_orientation)
        lines.append(kinds)
        cautions += more
    return Survey([*map(one_line, lines)], [*map(one_line, cautions)], copies)


def of_classes(train_set: Source) -> tuple[list[str], list[str]]:
    """A line about how many images each class has, if there are classes, and cautions."""
    names = train_set.classes
    counts = np.bincount(train_set.labels, minlength=len(names))
    order = np.argsort(-counts, kind="stable")
    texts = [f"{names[index]} {counts[index]:,}" for index in order]
    if len(texts) > LISTED:  # the largest and the smallest
        texts[3:-2] = [f"… {texts[-3]}"]
    cautions = []
    if counts.max() > IMBALANCE * counts.min() > 0:
        cautions.append(
            f"class {names[order[0]]} has {counts.max():,} images and {names[counts.argmin()]} "
            f"{counts.min():,}: read val_balanced, the mean over classes, beside top-1"
        )
    if not any(names):  # the images of a bare folder have no class
        return [], cautions
    return [f"classes {', '.join(texts)}"], cautions


def same_bytes(files: Iterable[File]) -> list[list[File]]:
    """The files with the same bytes, in groups. Only those of equal size are read, and whole only
    those whose middles are equal: a camera's BMP or TIFF files are all of one size.
    """
    by_path: dict[str, File] = {}  # a set may be both splits
    for file in files:
        if os.path.isfile(file.path) and os.path.getsize(file.path):  # a pipe may wait for ever
            by_path.setdefault(file.path, file)
    groups = [[*by_path.values()]]
    for key in (os.path.getsize, middle_of, digest_of):
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
    between, across, within = [], [], []
    for group in copies:
        text = " = ".join(map(str, group))
        if len({file.split for file in group}) > 1:
            between.append(text)
        elif len({file.label for file in group}) > 1:
            across.append(text)
        else:
            within.append(text)
    kinds = {
        "to validate on and to train on": between,
        "of several classes": across,
        "of one class": within,
    }
    for kind, groups in kinds.items():
        if groups:
            count = counted(len(groups), "image")
            verb = "is" if len(groups) == 1 else "are"
            yield f"{count} {kind} {verb} there twice, byte by byte: {shortened(groups)}"


def of_headers(paths: Sequence[str], side: int, *, turned: bool) -> tuple[str, list[str]]:
    """A line about the kinds of these images, and cautions. turned: by their EXIF data."""
    sizes = []
    modes: Counter[str] = Counter()
    sideways, profiled, alpha, unread = [], [], [], []
    formats = FORMATS + heif_formats()
    for path in filter(os.path.isfile, paths):  # a pipe may wait for ever
        try:
            with without_warnings(), Image.open(path, formats=formats) as image:
                sizes.append(image.size)
                modes[image.mode] += 1
                if image.getexif().get(ORIENTATION) in TURNED:
                    sideways.append(path)
                profile = image.info.get("icc_profile") or SRGB[0]
                if not any(name in profile for name in SRGB):
                    profiled.append(path)
                if image.has_transparency_data:
                    alpha.append(path)
        except Exception:  # Pillow's plug-ins raise many kinds
            unread.append(path)
    if not sizes:
        return "files   none of them can be read", []
    shorter = list(map(min, sizes))
    middle = median(shorter)
    line = (
        f"files   {len(sizes):,} looked at: shorter side {min(shorter):,} to "
        f"{max(shorter):,} px, median {middle:g}, longer side up to {max(map(max, sizes)):,}; "
        f"{', '.join(f'{mode} {count:,}' for mode, count in modes.most_common())}; "
        f"{len(sideways):,} turned by EXIF, {len(profiled):,} with a colour profile that is "
        f"not sRGB, {len(alpha):,} with an alpha channel"
    )
    wrong = [(unread, "cannot be opened; --dry-run --read-images lists all such files")]
    if not turned:
        turning = "--set data.apply_exif_orientation=true"
        wrong.append((sideways, f"are stored sideways, and EXIF data would turn them: {turning}"))
    wrong.append((profiled, "have a colour profile that is not sRGB, which is ignored"))
    looked = f"of {counted(len(sizes) + len(unread), 'file')} looked at"
    cautions = [
        f"{len(listed):,} {looked} {problem}: {shortened(listed)}"
        for listed, problem in wrong
        if listed
    ]
    clear = [path for path in alpha[:DECODED] if is_transparent(path, formats)]
    if clear:
        cautions.append(
            f"{len(alpha):,} {looked} have an alpha channel, and where they are transparent, "
            f"colours that nobody sees are trained on: {shortened(clear)}"
        )
    if 2 * middle < side:
        cautions.append(
            f"half of the images have {middle:g} px or less, and are enlarged to {side}: --set "
            f"data.image_size={int(middle)} and a smaller model.options.patch_size train faster"
        )
    return line, cautions


def is_transparent(path: str, formats: tuple[str, ...]) -> bool:
    """Whether any pixel of an image is; False if it cannot be decoded, which training says."""
    with suppress(Exception), without_warnings(), Image.open(path, formats=formats) as image:
        return bool(np.asarray(image.convert("RGBA"))[..., 3].min() < 255)
    return False


class ImageWatcher:
    """Prints what the images of a new run are like, and writes it to images.txt in its folder."""

    survey: Survey | None = None  # of a new run

    def opened(self, data: Data, recipe: Recipe) -> list[str]:
        self.survey = survey(data.train_set, data.val_set, min(recipe.data.image_size))
        return [*self.survey.lines, *(f"warning {line}" for line in self.survey.cautions)]

    def started(self, folder: RunFolder, step: int, steps_per_epoch: int) -> None:
        if self.survey is not None:
            write_text_atomically(str(self.survey), folder.images)
