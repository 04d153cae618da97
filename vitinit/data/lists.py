"""Lists of images: train.csv and val.csv, or images.csv alone, as Python's csv module reads them.

The first line names the columns, of which these count: `path`, below the folder of the list or
absolute, `label`, the name of a class, and in images.csv `split`, one of folders.SPLITS. Without
that column all its images are to train on. An image is listed once, in one split.

An image has several labels, or none, if in place of `label` there is a column `labels`, of names
with | or ; between them, or else a column for each class, of 0 and 1.

Lists are read row by row. At any time an image takes at most 150 bytes of memory beyond its path,
in arrays, and each of the folders that are remembered, 65,536, some 300.
"""

import csv
import io
import os
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy import ndarray

from ..base.files import in_one_line, opened
from ..base.messages import counted, in_brief, shortened
from .folders import (
    SPLITS,
    TEST,
    TRAIN,
    VAL,
    WITHOUT_VALIDATION,
    composed,
    image_filter,
    in_words,
    suffix_of,
)
from .images import LARGEST_FILE, DataError
from .sources import ImageFiles

ALL = 3  # beside TRAIN, VAL and TEST: of a list without splits
OWN_COLUMNS = {"path", "label", "labels", "split"}  # the others may be classes
LISTS = {"train.csv": TRAIN, "val.csv": VAL, "images.csv": ALL}  # the split of all its images
NUMBERS = {name: number for number, name in enumerate(LISTS)}
SEPARATOR = "|"  # of several labels; ; is read as well
# What a column of a class holds; pandas writes True and False.
MARKS = {"0": False, "1": True, "0.0": False, "1.0": True, "False": False, "True": True}
LONGEST_ROW = 2**20  # most characters of a row, over all its lines
# What spreadsheets write in place of a list, by a character of the first line that tells it.
OF_SPREADSHEETS = {
    "\0": "is in UTF-16; expected UTF-8: iconv -f UTF-16 -t UTF-8 makes it",
    ";": "has semicolons between columns; expected commas: replace each ; by one",
    "\t": "has tabs between columns; expected commas: replace each tab by one",
}


class ListedLines:
    """Of the lines that can be used all but their paths, and what is wrong with the others."""

    def __init__(self) -> None:
        self.several: bool | None = None  # whether an image has several labels; None: not known yet
        self.labels: dict[str, int] = {}  # and the number of each; of several all as one text
        self.numbers = array("i")  # of each line label, split, list, line
        self.digests = bytearray()  # of its path, 16 bytes
        self.wrong = 0  # how many cannot be used
        self.problems: list[str] = []  # of the first of these

    def refuse(self, problem: str) -> None:
        self.wrong += 1
        if self.wrong <= 5:  # as many as `shortened` shows
            self.problems.append(problem)

    def add(
        self, folder: str, name: str, number: int, columns: list[str], row: list[str]
    ) -> str | None:
        """Add line `number` of the list `name` in a folder, and return its path; or add what is
        wrong with it.
        """
        place = f"{name}:{number}"
        if len(row) != len(columns):
            self.refuse(f"{place} has {counted(len(row), 'value')}, not {len(columns)}")
            return None
        values = dict(zip(columns, row))
        path = values.pop("path")
        if not path:
            self.refuse(f"{place} has no path")
            return None
        split = LISTS[name]
        word = values.pop("split", "").strip()
        if split == ALL and "split" in columns:
            if word.lower() not in SPLITS:
                self.refuse(f"{place} has the split '{in_brief(word)}', not train, val or test")
                return None
            split = SPLITS[word.lower()]
        try:
            label = self.label_in(values)
        except ValueError as error:
            self.refuse(f"{place} {error}")
            return None
        label_number = self.labels.setdefault(label, len(self.labels))
        self.numbers.extend((label_number, split, NUMBERS[name], number))
        path = os.path.join(folder, path)
        place_on_disk = os.fsencode(os.path.normpath(path))
        # Different ones with the same 128 bits are not to be expected.
        self.digests += blake2b(place_on_disk, digest_size=16).digest()
        return path

    def label_in(self, values: Mapping[str, str]) -> str:
        """The label of a line, or all its labels, sorted, as one text; ValueError says what is
        wrong. values: by column, without path and split.
        """
        if not self.several:
            label = composed(values["label"].strip())
            if not label:
                raise ValueError("has no label")
            return label
        if "labels" in values:
            names = values["labels"].replace(";", SEPARATOR).split(SEPARATOR)
        else:
            marks = {name: mark.strip() for name, mark in values.items()}
            unknown = {*marks.values()} - MARKS.keys()
            if unknown:
                raise ValueError(f"has '{in_brief(min(unknown))}' for a class, not 0 or 1")
            names = [name for name, mark in marks.items() if MARKS[mark]]
        return SEPARATOR.join(sorted({composed(name.strip()) for name in names} - {""}))


def open_list(root: Path, split: str) -> ImageFiles:
    """Open a split of the images that are listed in `root`, in the order of their list.

    Classes are the labels to train on, or else to validate on, sorted as texts. split: as of
    `open_folder`; "whole" are all images of an images.csv without splits. Raises DataError that
    names lines which cannot be used, or if a split or class has no images.
    """
    names = lists_in(root)
    lines = ListedLines()
    images = ImageFiles((path for name in names for path in read_list(root / name, lines)), (), [])
    images.labels, splits, *_ = np.asarray(lines.numbers).reshape(-1, 4).T
    to_train = np.isin(splits, [TRAIN, ALL])
    to_hold = splits == (VAL if VAL in splits else TEST)
    whole = split == "whole" and ALL in splits  # a list without splits
    used = to_train if split == "train" or whole else to_hold
    learned = np.unique(images.labels[to_train if to_train.any() else to_hold])
    texts = list(lines.labels)
    names_of = [
        [*filter(None, text.split(SEPARATOR))] if lines.several else [text] for text in texts
    ]
    classes = sorted({name for number in learned for name in names_of[number]})
    known = {number for number, names in enumerate(names_of) if {*classes}.issuperset(names)}
    check_lines(root, images, lines, used, known)
    listed = images.part(used)
    where = f"in {' and '.join(names)}"
    if not len(listed):
        if split == "train":
            raise DataError(f"{root}: no images to train on {where}")
        raise DataError(
            f"{root}: no images to validate on {where}; {WITHOUT_VALIDATION} an images.csv without "
            "a column split"
        )
    if not classes:
        raise DataError(f"{root}: no image {where} has a label")
    listed.classes = classes
    listed.labels = numbered(names_of, classes, several=lines.several)[listed.labels]
    of_test = len(images) - to_train.sum() - to_hold.sum()
    source = readable_part(listed, of_test, root)
    if split == "train" and to_hold.any():
        source.to_validate_on = f"{counted(to_hold.sum(), 'image')} of {names[-1]}"
    if whole:
        source.note(f"{root}: no splits in it, so that all {len(source):,} images are evaluated")
    return source


def numbered(
    names_of: Sequence[Sequence[str]], classes: list[str], *, several: bool | None
) -> ndarray:
    """What the names of each label stand for, as `Source.labels`: (n,), or (n, K) if an image has
    several. Names that are no class are left out.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    if not several:
        return np.array([numbers.get(name, -1) for [name] in names_of])
    marks = np.zeros((len(names_of), len(classes)), np.uint8)
    for row, names in zip(marks, names_of):
        row[[numbers[name] for name in names if name in numbers]] = 1
    return marks


def lists_in(root: Path) -> list[str]:
    """The names of the lists in a folder; DataError for none, or an images.csv that is not alone."""
    names = [name for name in LISTS if os.path.isfile(root / name)]
    if not names or "images.csv" in names[1:]:
        raise DataError(
            f"{root}: {' beside '.join(names) or 'no list'} in it; expected train.csv and val.csv, or "
            f"images.csv alone, with the columns path and label"
        )
    return names


def readable_part(listed: ImageFiles, of_test: int, root: Path) -> ImageFiles:
    """The images whose names have a suffix of images; DataError for a class that has no other ones.

    of_test: how many other images are left out, since they are of the split "test".
    """
    readable = np.array([*map(image_filter(listed.each_path()), listed.each_path())])
    source = listed.part(readable)
    left_out = Counter(map(suffix_of, listed.part(~readable).paths))
    left_out["of the split test"] = of_test
    source.left_out = in_words(+left_out, root)
    empty = (source.class_images == 0) & (listed.class_images > 0)
    if empty.any():
        name = listed.classes[empty.argmax()]
        raise DataError(f"{root}: no image of class '{name}' can be read; {source.left_out}")
    return source


def read_list(file: Path, lines: ListedLines) -> Iterator[str]:
    """Yield the path of each line, and add to `lines` the rest of it, or what is wrong with it.
    Raises DataError for a file that is no list. Names of files need not be UTF-8.
    """
    folder, name = str(file.parent), file.name
    length = 0  # of the row that is being read

    def limited() -> Iterator[str]:
        nonlocal length
        while line := text.readline(LONGEST_ROW + 1):
            length += len(line)
            if length > LONGEST_ROW:
                raise DataError(
                    f"{file}:{rows.line_num + 1}: row larger than row limit ({LONGEST_ROW})"
                )
            yield line

    with in_one_line(file, "read"), opened(file, LARGEST_FILE) as content:
        text = io.TextIOWrapper(content, "utf-8-sig", "surrogateescape", newline="")
        rows = csv.reader(limited(), strict=True)
        try:
            columns = columns_in(file, next(rows, []))
            several = "label" not in columns
            if lines.several not in (None, several):
                raise DataError(
                    f"{file}: has {'several labels' if several else 'one label'} per image, unlike "
                    "the list before it; expected the same columns"
                )
            lines.several = several
            length = 0
            for row in rows:
                length = 0
                if not row:  # an empty line
                    continue
                path = lines.add(folder, name, rows.line_num, columns, row)
                if path is not None:
                    yield path
        except csv.Error as error:
            raise DataError(f"{file}:{rows.line_num}: {error}") from None


def columns_in(file: Path, row: list[str]) -> list[str]:
    """The names of a list's columns, which its first row states; DataError for what is no list."""
    columns = [name.strip() for name in row]
    columns = [name.lower() if name.lower() in OWN_COLUMNS else name for name in columns]
    if columns.count("path") == columns.count("label") == 1:
        return columns
    each_once = len({*columns}) == len(columns)
    of_classes = {*columns} - OWN_COLUMNS
    if "path" in columns and "label" not in columns and each_once:
        names = "".join(of_classes).replace(";", SEPARATOR)
        if "labels" in columns or (len(of_classes) > 1 and SEPARATOR not in names):
            return columns
    header = ",".join(row) or "empty"
    problem = (
        "expected the columns path and label, each once, with commas between, in its first line; or "
        "path and labels; or path and two classes or more, with no | or ; in a name"
    )
    for sign, words in OF_SPREADSHEETS.items():
        if sign in header:
            problem = words
    raise DataError(f"{file}: {problem} ({in_brief(header)})")


def check_lines(
    root: Path, images: ImageFiles, lines: ListedLines, used: ndarray, known: set[int]
) -> None:
    """Refuse lines with an image that is listed before, and, in a split that is used, with one that
    is not there or whose label is not known. DataError names the first lines that are refused.
    """

    @lru_cache(2**16)  # asking for each file takes longer
    def hashes_in(folder: str) -> ndarray:
        entries = os.scandir(folder) if os.path.isdir(folder) else ()
        return np.sort(np.fromiter((hash(entry.name) for entry in entries), np.int64))

    def is_there(path: str) -> bool:
        folder, name = os.path.split(path)
        hashes = hashes_in(folder)
        wanted = hash(name)
        listed = bisect_left(hashes, wanted) < bisect_right(hashes, wanted)
        return listed or os.path.isfile(path)

    def place(index: int) -> str:
        file, line = lines.numbers[4 * index + 2 : 4 * index + 4]
        return f"{list(LISTS)[file]}:{line}"

    digests = np.frombuffer(lines.digests, "S16")
    order = digests.argsort(kind="stable")
    digests = digests[order]
    firsts = np.empty_like(order)
    firsts[order] = order[np.searchsorted(digests, digests)]  # in order they are near at hand
    labels = list(lines.labels)
    start = os.path.join(root, "")
    for index, path in enumerate(images.each_path()):
        first = firsts[index]
        label = images.labels[index]
        if first != index:
            lines.refuse(f"{place(index)} repeats {place(first)}")
        elif used[index] and label not in known:
            named = in_brief(labels[label])
            lines.refuse(f"{place(index)} has the label '{named}', which none to train on has")
        elif used[index] and not is_there(path):
            name = path.removeprefix(start)
            space = "" if name == name.strip() else " with a space beside its name: take it away"
            lines.refuse(f"{place(index)} has no file {in_brief(name)}{space}")
    if lines.wrong:
        raise DataError(
            f"{root}: {counted(lines.wrong, 'line')} cannot be used: "
            f"{shortened(lines.problems, lines.wrong)}"
        )


def as_list(
    guesses: Iterable[tuple[str, Sequence[tuple[str, float]]]], folder: Path, *, several: bool
) -> bytes:
    """The content of a list in `folder`, each image once. guesses: paths, each with its label and
    the probability of that, or with several.
    """
    start = os.path.join(os.path.abspath(folder), "")
    rows = {}
    for path, labels in guesses:
        name = os.path.abspath(path).removeprefix(start)
        shares = [f"{share:.6f}" for _, share in labels]
        rows[name] = name, SEPARATOR.join(label for label, _ in labels), SEPARATOR.join(shares)
    head = "path", "labels" if several else "label", "probability"
    return as_csv([head, *rows.values()])


def as_csv(rows: Sequence[Sequence[str]]) -> bytes:
    """The content of a file with these rows, as `read_list` and others read it."""
    text = io.StringIO(newline="")
    # A writer whose lines end in "\n" leaves "\r" unquoted, which ends a line for a reader.
    broken = any("\r" in "".join(row) for row in rows)
    writer = csv.writer(
        text, lineterminator="\n", quoting=csv.QUOTE_ALL if broken else csv.QUOTE_MINIMAL
    )
    writer.writerows(rows)
    return text.getvalue().encode("utf-8", "surrogateescape")
