"""What a set of images is like: images per class, files with the same bytes, sizes and kinds.

Nothing is decoded but what may be transparent, and some files of 16 bits: a survey takes a second
for thousands of images.
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
from ..base.messages import counted, one_line, without_warnings
from ..data.folders import ARRAYS, suffix_of
from ..data.images import FORMATS, LARGEST_FILE, has_unknown_bands, heif_formats
from ..data.pipeline import Data
from ..data.sources import ImageFiles, Source
from ..data.tars import TarImages
from ..recipe.sections import Recipe
from ..runs.folder import RunFolder

MOST_SURVEYED = 50_000  # images of a run whose files are compared at its start
LOOKED_AT = 2_000  # files whose headers are read, spread evenly over the set
MIDDLE = 2**16  # bytes in the middle of a file
DECODED = 32  # of these with an alpha channel
IMBALANCE = 5  # images of the largest class per image of the smallest
NAMED = 3  # most files that a caution names
ROOM = 2 * 80 - len("warning ")  # characters of a caution: two lines of a terminal
LISTED = 12  # most classes whose counts are all listed
ORIENTATION, TURNED = 274, range(2, 9)  # EXIF's tag, and its values for images to be turned
SRGB = b"sRGB", "sRGB".encode("utf-16-be")  # in a profile's description, by its version


class File(NamedTuple):
    split: int  # 0: to train on; 1: to validate on
    label: str  # its class's number, or the marks of all
    path: str

    def __str__(self) -> str:
        return class_and_name(self.path)


class Named(NamedTuple):
    words: str  # about files
    paths: list[str]  # of all of them


class Survey(NamedTuple):
    """What there is to say about images, in lines."""

    lines: list[str]
    cautions: list[str]  # each takes two lines of a terminal at most, and names three files at most
    copies: list[list[File]]  # files with the same bytes
    named: list[Named]  # what other cautions say of files

    def __str__(self) -> str:
        """All of it, with all paths: those of copies, a group per paragraph, and of each caution."""
        paragraphs = [[file.path for file in group] for group in self.copies]
        paragraphs += [[one.words, *one.paths] for one in self.named]
        texts = ("\n".join(["", *map(one_line, paragraph)]) for paragraph in paragraphs)
        return "\n".join([*self.lines, *self.cautions, *texts, ""])


def survey(train_set: Source, val_set: Source, side: int, *, most: int = MOST_SURVEYED) -> Survey:
    """Look at the images that a model of `side` pixels is trained and validated on; at their files
    only if there are at most `most` images to train on.
    """
    lines, cautions = of_classes(train_set)
    copies: list[list[File]] = []
    named: list[Named] = []
    if (
        isinstance(train_set, ImageFiles)
        and not isinstance(train_set, TarImages)
        and isinstance(val_set, ImageFiles)
        and len(train_set) <= most
    ):
        files = []
        for split, source in enumerate((train_set, val_set)):
            for label, path in zip(map(str, source.labels), source.paths):
                files.append(File(split, label, path))
        copies = same_bytes(files)
        cautions += of_copies(copies)
        step = len(files) // LOOKED_AT + 1
        paths = [file.path for file in files[::step]]
        if are_photographs(train_set, paths[0]):
            kinds, named, more = of_headers(paths, side, turned=train_set.apply_exif_orientation)
            lines.append(kinds)
            for words, each in named:
                cautions.append(in_two_lines(words, [*map(class_and_name, each)]))
            cautions += more
    if isinstance(train_set, ImageFiles):
        cautions += filter(None, [dark_in_16_bits(train_set.some_paths())])
    return Survey([*map(one_line, lines)], [*map(one_line, cautions)], copies, named)


def are_photographs(source: Source, path: str) -> bool:
    """Whether files like this one of a set are photographs: neither arrays nor of other bands."""
    return source.channels in (1, 3) and suffix_of(path) != ARRAYS


def class_and_name(path: str) -> str:
    return os.path.join(*Path(path).parts[-2:])


def in_two_lines(words: str, names: Sequence[str], sign: str = ", ") -> str:
    """The words, and behind them as many names as NAMED and ROOM allow, but one at least."""
    for shown in range(min(NAMED, len(names)), 0, -1):
        rest = f" and {len(names) - shown:,} more" if shown < len(names) else ""
        line = one_line(f"{words}: {sign.join(names[:shown])}{rest}", longest=2**20)
        if len(line) <= ROOM:
            return line
    return one_line(line, ROOM)


def of_classes(train_set: Source) -> tuple[list[str], list[str]]:
    """A line about how many images each class has, if there are classes, and cautions."""
    names = train_set.classes
    counts = train_set.class_images
    order = np.argsort(-counts, kind="stable")
    texts = [f"{names[index]} {counts[index]:,}" for index in order]
    if len(texts) > LISTED:  # the largest and the smallest
        texts[3:-2] = [f"… {texts[-3]}"]
    cautions = []
    advice = 'loss.class_weights = "balanced" lets all count alike; read val_macro_f1, too'
    if not train_set.several_labels:
        advice = (
            "read val_balanced, the mean over classes, beside top-1; data.sampling or "
            'loss.class_weights = "balanced" lets all count alike'
        )
    if counts.max() > IMBALANCE * counts.min() > 0:
        cautions.append(
            f"class {names[order[0]]} has {counts.max():,} images and {names[counts.argmin()]} "
            f"{counts.min():,}: {advice}"
        )
    first: dict[str, str] = {}
    twins = []
    for name in names:
        other = first.setdefault(name.strip().casefold(), name)
        if other != name:
            twins.append(f"{other} beside {name}")
    if twins:
        words = f"{len(twins):,} {'class differs' if len(twins) == 1 else 'classes differ'} from "
        words += "another in case or spaces alone, perhaps by mistake"
        cautions.append(in_two_lines(words, twins))
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
        if len({file.split for file in group}) > 1:
            between.append(group)
        elif len({file.label for file in group}) > 1:
            across.append(group)
        else:
            within.append(group)
    kinds = {
        "to validate on and to train on": between,
        "of several classes": across,
        "of one class": within,
    }
    for kind, groups in kinds.items():
        if groups:
            count = counted(len(groups), "image")
            verb = "is" if len(groups) == 1 else "are"
            times = "twice" if all(len(group) == 2 for group in groups) else "more than once"
            words = f"{count} {kind} {verb} there {times}, byte by byte"
            names = [str(file) for file in groups[0]]
            yield in_two_lines(words, names, " = ")


class Headers:
    """What the headers of some image files say."""

    def __init__(self, paths: Iterable[str], formats: tuple[str, ...]) -> None:
        self.sizes: list[tuple[int, int]] = []
        self.modes = Counter[str]()
        self.sideways: list[str] = []  # paths, from here on
        self.profiled: list[str] = []
        self.alpha: list[str] = []
        self.unknown: list[str] = []
        self.unread: list[str] = []
        for path in filter(os.path.isfile, paths):  # a pipe may wait for ever
            try:
                with without_warnings(), Image.open(path, formats=formats) as image:
                    self.add(path, image)
            except Exception:  # Pillow's plug-ins raise many kinds
                self.unread.append(path)

    def add(self, path: str, image: Image.Image) -> None:
        self.sizes.append(image.size)
        if has_unknown_bands(image):
            self.unknown.append(path)
            self.modes["unknown bands"] += 1
        else:
            self.modes[image.mode] += 1
            if image.has_transparency_data:
                self.alpha.append(path)
        if image.getexif().get(ORIENTATION) in TURNED:
            self.sideways.append(path)
        profile = image.info.get("icc_profile") or SRGB[0]
        if not any(name in profile for name in SRGB):
            self.profiled.append(path)

    def in_words(self) -> str:
        if not self.sizes:
            return "files   none of them can be read"
        shorter = list(map(min, self.sizes))
        longest = max(map(max, self.sizes))
        modes = ", ".join(f"{mode} {count:,}" for mode, count in self.modes.most_common())
        return (
            f"files   {len(shorter):,} looked at: shorter side {min(shorter):,} to "
            f"{max(shorter):,} px, median {median(shorter):g}, longer side up to {longest:,}; "
            f"{modes}; {len(self.sideways):,} turned by EXIF, {len(self.profiled):,} with a colour "
            f"profile that is not sRGB, {len(self.alpha):,} with an alpha channel"
        )


def of_headers(
    paths: Sequence[str], side: int, *, turned: bool
) -> tuple[str, list[Named], list[str]]:
    """A line about the kinds of these images, what is to be said of some of them with their paths,
    and cautions about all. turned: by their EXIF data.
    """
    formats = FORMATS + heif_formats()
    seen = Headers(paths, formats)
    if not seen.sizes:
        return seen.in_words(), [], []
    wrong = {
        "cannot be opened; train.py --dry-run --read-images lists all such files": seen.unread,
        "are TIFFs with bands beside colours, none of them alpha, and are refused": seen.unknown,
        "have a colour profile that is not sRGB, which is ignored": seen.profiled,
    }
    if not turned:
        wrong[
            "are stored sideways; as EXIF says, --set data.apply_exif_orientation=true turns them"
        ] = seen.sideways
    clear = [path for path in seen.alpha[:DECODED] if is_transparent(path, formats)]
    looked = f"of {counted(len(seen.sizes) + len(seen.unread), 'file')} looked at"
    named = [Named(f"{len(bad):,} {looked} {words}", bad) for words, bad in wrong.items() if bad]
    if clear:
        words = (
            "have an alpha channel, and where they are transparent, unseen colours are trained on"
        )
        named.append(Named(f"{len(seen.alpha):,} {looked} {words}", clear))
    cautions = []
    middle = median(map(min, seen.sizes))
    if 2 * middle < side:
        cautions.append(
            f"half of the images have {middle:g} px or less, and are enlarged to {side}: --set "
            f"data.image_size={int(middle)} and a smaller model.options.patch_size train faster"
        )
    return seen.in_words(), named, cautions


def dark_in_16_bits(paths: Iterable[str]) -> str:
    """A caution if some of these files have 16 bits and all of those are dark, or ""."""
    highest = []  # value of each file of 16 bits, white being 1
    for path in filter(os.path.isfile, paths):  # a pipe may wait for ever
        if suffix_of(path) == ARRAYS:
            with suppress(Exception):  # as below
                values = np.load(path, mmap_mode="r")
                if values.dtype == np.uint16:
                    highest.append(values.max() / 65_535)
            continue
        # A file that cannot be read is refused elsewhere; other formats have no 16 bits.
        with (
            suppress(Exception),
            without_warnings(),
            Image.open(path, formats=("PNG", "TIFF", "PPM")) as image,
        ):
            if ";16" in str(image.tile):
                grey = image.mode.startswith("I")
                values = np.asarray(image if grey else image.convert("RGB"))
                highest.append(values.max() / (65_535 if grey else 255))
    if max(highest, default=1.0) >= 0.25:
        return ""
    return (
        f"{len(highest):,} images of 16 bits were looked at, and their highest value is "
        f"{100 * max(highest):.1f} % of white: nearly black, as the higher 8 bits are kept; multiply "
        "12 bits by 16"
    )


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
