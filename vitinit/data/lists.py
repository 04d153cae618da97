"""Lists of images: train.csv and val.csv, or images.csv alone, as Python's csv module reads them.

The first line names the columns, of which these count: `path`, below the folder of the list or
absolute, `label`, the name of a class, and in images.csv `split`, one of folders.SPLITS. Without
that column all its images are to train on. An image is listed once, in one split.
"""

import csv
import io
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from sys import intern
from typing import NamedTuple

from ..base.files import read_bytes
from ..base.messages import counted, in_brief, shortened
from .folders import SPLITS, TEST, TRAIN, VAL, in_words, is_image, suffix_of
from .images import LARGEST_FILE, DataError
from .sources import ImageFiles

LISTS = {"train.csv": TRAIN, "val.csv": VAL, "images.csv": None}     # the split of all its images


class Line(NamedTuple):
    place: str                  # such as "val.csv:7"
    path: str                   # as it is listed
    label: str
    split: int | None           # TRAIN, VAL or TEST; None: its list has no splits


def open_list(root: Path, split: str) -> ImageFiles:
    """Open a split of the images that are listed in `root`, in the order of their list.

    Classes are the labels to train on, or else to validate on, sorted as words, or as numbers if
    all are. split: as of `open_folder`; "whole" are all images of an images.csv without splits.
    Raises DataError that names lines which cannot be used, or if a split or class has no images.
    """
    names = [name for name in LISTS if os.path.isfile(root / name)]
    if not names or "images.csv" in names[1:]:
        raise DataError(f"{root}: {' beside '.join(names) or 'no list'} in it; expected train.csv "
                        "and val.csv, or images.csv alone, with the columns path and label")
    problems: list[str] = []
    lines = [line for name in names for line in read_list(root / name, problems)]
    splits = {line.split for line in lines}
    to_train: set[int | None] = {TRAIN, None}
    to_hold: set[int | None] = {VAL if VAL in splits else TEST}
    whole = split == "whole" and splits == {None}            # a list without splits
    used = to_train if split == "train" or whole else to_hold
    labels = ({line.label for line in lines if line.split in to_train} or
              {line.label for line in lines if line.split in to_hold})
    problems += wrong_lines(root, lines, used, labels)
    if problems:
        raise DataError(f"{root}: {counted(len(problems), 'line')} cannot be used: "
                        f"{shortened(problems)}")
    listed = [line for line in lines if line.split in used]
    if not listed and split == "train":
        raise DataError(f"{root}: no images to train on in {' and '.join(names)}")
    if not listed:
        raise DataError(
            f"{root}: no images to validate on in {' and '.join(names)}; train.py needs none with "
            "--set data.held_out_per_class=N, which validates on N images of each class, and "
            "eval.py evaluates all images of an images.csv without a column split")
    images = [line for line in listed if is_image(line.path)]
    left_out = Counter(suffix_of(line.path) for line in listed if not is_image(line.path))
    left_out["of the split test"] = sum(line.split not in to_train | to_hold for line in lines)
    left_out_line = in_words(+left_out, root)
    if empty := {line.label for line in listed}.difference(line.label for line in images):
        raise DataError(f"{root}: no image of class '{min(empty)}' can be read; {left_out_line}")
    classes = sorted(labels, key=int if all(map(str.isdecimal, labels)) else None)
    numbers = {label: number for number, label in enumerate(classes)}
    source = ImageFiles([os.path.join(root, line.path) for line in images],
                        [numbers[line.label] for line in images], classes)
    source.left_out = left_out_line
    if whole:
        source.note(f"{root}: no splits in it, so that all {len(source):,} images are evaluated")
    return source


def read_list(file: Path, problems: list[str]) -> Iterator[Line]:
    """Yield the lines of a list, and add to `problems` what is wrong with others. Raises DataError
    for a file that is no list. Names of files need not be UTF-8.
    """
    content = io.BytesIO(read_bytes(file, limit=LARGEST_FILE))
    rows = csv.reader(io.TextIOWrapper(content, "utf-8-sig", "surrogateescape", newline=""),
                      strict=True)
    try:
        columns = [name.strip().lower() for name in next(rows, [])]
        if not {"path", "label"} <= set(columns):
            raise DataError(f"{file}: no columns path and label, with commas between, in its first "
                            f"line ({in_brief(','.join(columns) or 'empty')})")
        split = LISTS[file.name]
        by_column = split is None and "split" in columns
        for row in filter(None, rows):               # without empty lines
            place, values = f"{file.name}:{rows.line_num}", dict(zip(columns, row))
            path, label = values.get("path"), values.get("label", "").strip()
            word = values.get("split", "").strip()
            if len(row) != len(columns):
                problems.append(f"{place} has {counted(len(row), 'value')}, not {len(columns)}")
            elif not path or not label:
                problems.append(f"{place} has no {'label' if path else 'path'}")
            elif by_column and word.lower() not in SPLITS:
                problems.append(f"{place} has the split '{in_brief(word)}', not train, val or test")
            else:
                yield Line(place, path, intern(label), SPLITS[word.lower()] if by_column else split)
    except csv.Error as error:
        raise DataError(f"{file}:{rows.line_num}: {error}") from None


def wrong_lines(root: Path, lines: Iterable[Line], used: set[int | None], labels: set[str]
                ) -> Iterator[str]:
    """Yield what is wrong with lines: an image that is listed before, and, in a split that is used,
    one that is not there or has none of these labels.
    """
    @cache                                           # asking for each file takes longer
    def names_in(folder: str) -> frozenset[str]:
        return frozenset(os.listdir(folder) if os.path.isdir(folder) else ())
    places: dict[str, str] = {}
    for line in lines:
        path = os.path.join(root, line.path)
        folder, name = os.path.split(path)
        first = places.setdefault(os.path.normpath(path), line.place)
        if first != line.place:
            yield f"{line.place} repeats {first}"
        elif line.split in used and line.label not in labels:
            yield f"{line.place} has the label '{in_brief(line.label)}', which none to train on has"
        elif line.split in used and name not in names_in(folder) and not os.path.isfile(path):
            yield f"{line.place} has no file {in_brief(line.path)}"


def as_list(guesses: Iterable[tuple[str, str, float]], folder: Path) -> bytes:
    """The content of a list in `folder`: paths, labels and their probabilities, each image once."""
    text, start = io.StringIO(newline=""), os.path.join(os.path.abspath(folder), "")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("path", "label", "probability"))
    shares = {os.path.abspath(path).removeprefix(start): (label, f"{share:.6f}")
              for path, label, share in guesses}
    rows.writerows((path, *label_and_share) for path, label_and_share in shares.items())
    return text.getvalue().encode("utf-8", "surrogateescape")
