"""Classify images with a trained model.

    python -m vitinit.predict runs/quickstart-impulse-s0 photo.jpg
    python -m vitinit.predict runs/base photographs/ --json guesses.jsonl --sheet guesses.png

One line is printed per image: its path, then the likeliest classes with their probabilities. Images
come in the order given, those of a folder sorted by name. If the folder that an image is in has the
name of a class, that class counts as the truth, and the last line says how many images were
classified correctly. An image that cannot be read is named and skipped, and the exit status is 1.

--json FILE writes one JSON object per image and line; --csv FILE writes one row per image.
--sheet FILE.png draws a contact sheet of the images with their predictions, marked as right or
wrong; --attention adds a map of what the model attends to. --sheet needs the extra `figures`.
"""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .command_line import Parser, integer, run_program
from .data.folders import images_below, in_words
from .data.images import DataError, decode_image, resize_and_centre_crop
from .data.loader import batch_loader
from .figures.sheet import Tile, attended, draw_sheet, require_attention
from .recipe.resolve import overrides
from .runs.trained import VIEW_KEYS, Trained, as_input, load
from .train.checkpoint import write_text_atomically
from .train.metrics import ProgressBar

SHEET = 60                      # most images on a contact sheet; of more, an evenly spaced selection


class Guess(NamedTuple):
    """The prediction for one image."""

    path: str
    truth: str | None           # the name of its folder, if that is a class
    ranked: list[tuple[str, float]]     # the likeliest classes and their probabilities
    problem: str = ""           # why it could not be read; `ranked` is then empty

    @property
    def right(self) -> bool | None:
        """Whether the likeliest class is the true one; None if the truth is not known."""
        return None if self.truth is None or self.problem else self.ranked[0][0] == self.truth

    def line(self) -> str:
        """The printed line: path, then classes with their probabilities in percent."""
        guesses = "  ".join(f"{name} {100 * share:.1f} %" for name, share in self.ranked)
        return f"{self.path}  {guesses}"

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of --json."""
        known = {"image": self.path} | ({} if self.truth is None else {"truth": self.truth})
        if self.problem:
            return known | {"problem": self.problem}
        return known | {"classes": [{"class": name, "probability": share}
                                    for name, share in self.ranked]}


# ---------------------------------------------------------------------------------------------
# Images
# ---------------------------------------------------------------------------------------------


def images_of(arguments: Sequence[str]) -> list[str]:
    """The paths of all images: files as given, and the images below each folder, sorted.

    Prints a line about a folder's files that are no images. Raises DataError for a path that does
    not exist and for a folder without images.
    """
    paths = []
    for argument in arguments:
        if os.path.isdir(argument):
            left_out: Counter[str] = Counter()
            found = images_below(argument, left_out)
            line = in_words(left_out, argument)
            if not found:
                raise DataError(f"{argument}: no images in it{line and '; '}{line}")
            if line:
                print(f"vitinit.predict: {line}", file=sys.stderr, flush=True)
            paths += found
        elif os.path.exists(argument):
            paths.append(argument)
        else:
            raise DataError(f"{argument}: no such file or folder")
    return paths


class Views(Dataset):
    """The evaluation views of image files, (3, *size) uint8; for a broken file, the error message."""

    def __init__(self, paths: Sequence[str], *, size: tuple[int, int], crop_pct: float,
                 interpolation: str) -> None:
        self.paths, self.size = paths, size
        self.crop_pct, self.interpolation = crop_pct, interpolation

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor | str:
        try:
            return resize_and_centre_crop(decode_image(self.paths[index]), self.size, self.crop_pct,
                                          self.interpolation)
        except DataError as error:
            return str(error)


class ViewsOfFiles(NamedTuple):
    """One batch of files."""

    views: Tensor               # (B, 3, H, W) uint8, of the B files that could be read
    problems: list[str]         # per file, why it could not be read, or ""


def _stack(found: list[Tensor | str]) -> ViewsOfFiles:
    """Collate what `Views` returned for the files of one batch."""
    readable = [view for view in found if isinstance(view, Tensor)]
    return ViewsOfFiles(torch.stack(readable) if readable else torch.empty(0),
                        [view if isinstance(view, str) else "" for view in found])


# ---------------------------------------------------------------------------------------------
# Guesses
# ---------------------------------------------------------------------------------------------


def guesses(trained: Trained, paths: Sequence[str], *, top: int, batch_size: int, workers: int
            ) -> Iterator[tuple[Guess, Tensor | None]]:
    """Yield for each file, in order, its prediction and the view it was made from.

    The view is (3, H, W) uint8, or None for a file that could not be read. top: classes per image.
    workers: processes that decode images.
    """
    views = Views(paths, size=trained.image_size, crop_pct=trained.recipe.eval.crop_pct,
                  interpolation=trained.recipe.eval.interpolation)
    loader = batch_loader(views, _stack, min(workers, -(-len(paths) // batch_size)),
                          trained.device.type == "cuda", batch_size=batch_size)
    names, waiting = set(trained.classes), iter(paths)
    for batch in loader:
        ranked: Iterator = iter(())
        if len(batch.views):
            inputs = as_input(batch.views.to(trained.device, non_blocking=True), trained.recipe)
            ranked = iter(trained.ranked(trained.probabilities(inputs), top))
        readable = iter(batch.views)
        for problem in batch.problems:
            path = next(waiting)
            folder = os.path.basename(os.path.dirname(os.path.abspath(path)))
            truth = folder if folder in names else None
            if problem:
                yield Guess(path, truth, [], problem), None
            else:
                yield Guess(path, truth, next(ranked)), next(readable)


def as_csv(found: Sequence[Guess], top: int) -> str:
    """The table of --csv: a heading, then one row per image; unknown cells are empty."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["image", "truth", "problem",
                   *(cell for rank in range(1, top + 1) for cell in (f"class_{rank}",
                                                                     f"probability_{rank}"))])
    for guess in found:
        cells = [cell for name, share in guess.ranked for cell in (name, share)]
        rows.writerow([guess.path, guess.truth or "", guess.problem,
                       *cells, *[""] * (2 * top - len(cells))])
    return text.getvalue()


def summary(found: Sequence[Guess]) -> str:
    """How many predictions were right, and how many files could not be read; "" for neither."""
    judged = [guess.right for guess in found if guess.right is not None]
    broken = sum(bool(guess.problem) for guess in found)
    parts = []
    if judged:
        parts.append(f"{sum(judged):,} of {len(judged):,} images are classified as their folder says "
                     f"({100 * sum(judged) / len(judged):.2f} %)")
    if broken:
        parts.append(f"{broken:,} of {len(found):,} could not be read")
    return "; ".join(parts)


# ---------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------


def predict(trained: Trained, paths: Sequence[str], *, top: int, batch_size: int, workers: int,
            json_file: Path | None, csv_file: Path | None, sheet: Path | None, attention: bool
            ) -> int:
    """Print the predictions, and write the requested files and name them.

    Returns the exit status: 1 if a file could not be read, otherwise 0.
    """
    top = min(top, len(trained.classes))
    on_sheet = {number * len(paths) // min(SHEET, len(paths)) for number in range(SHEET)}
    found: list[Guess] = []
    tiles: list[Tile] = []
    with ProgressBar("predict", len(paths), shown=sys.stderr.isatty()) as bar:
        for guess, view in bar.over(guesses(trained, paths, top=top, batch_size=batch_size,
                                            workers=workers)):
            if view is None:
                print(f"vitinit.predict: {guess.problem}", file=sys.stderr, flush=True)
            else:
                print(guess.line())
                if sheet is not None and len(found) in on_sheet:
                    heat = attended(trained, view) if attention else None
                    tiles.append(Tile(guess.path, view, heat, guess.truth, *guess.ranked[0]))
            found.append(guess)
    last_line = summary(found)
    if last_line:
        print(last_line, flush=True)
    if json_file is not None:
        write_text_atomically("".join(json.dumps(guess.as_dict()) + "\n" for guess in found), json_file)
    if csv_file is not None:
        write_text_atomically(as_csv(found, top), csv_file)
    if sheet is not None:
        draw_sheet(sheet, tiles, heading=f"{trained.path.parent.name}, {len(tiles)} of "
                                         f"{len(paths):,} images"
                                         + (f": {last_line}" if last_line else ""))
    for file in filter(None, (json_file, csv_file, sheet)):
        print(f"wrote {file}")
    return int(any(guess.problem for guess in found))


def main(arguments: list[str] | None = None) -> int:
    """Run the program with these arguments (default: the command line); return the exit status."""
    parser = Parser(prog="python -m vitinit.predict", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="run folder or checkpoint")
    parser.add_argument("images", nargs="+", metavar="IMAGE|FOLDER")
    parser.add_argument("--top", type=integer(1), default=5, help="classes per image (5)")
    parser.add_argument("--weights", choices=("model", "ema"), default="model")
    parser.add_argument("--image-size", type=integer(1), metavar="N",
                        help="in pixels, if it is to differ from the run's")
    parser.add_argument("--recipe", help="describes a checkpoint that contains no recipe")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
                        help="override a key of the recipe: any of one given by --recipe, "
                             f"{' and '.join(VIEW_KEYS)} of a run's")
    parser.add_argument("--json", type=Path, metavar="FILE",
                        help="write one JSON object per image and line")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write one row per image")
    parser.add_argument("--sheet", type=Path, metavar="FILE.png",
                        help=f"draw a contact sheet of at most {SHEET} images, evenly chosen")
    parser.add_argument("--attention", action="store_true",
                        help="add to the sheet what the model attends to")
    parser.add_argument("--batch-size", type=integer(1), default=64, help="images at a time (64)")
    parser.add_argument("--workers", type=integer(0), default=min(8, os.cpu_count() or 1),
                        help="processes that decode images")

    def program() -> int:
        args = parser.parse_args(arguments)
        if args.attention and args.sheet is None:
            parser.error("--attention is drawn on a contact sheet; give --sheet FILE.png, too")
        for flag, file in (("--json", args.json), ("--csv", args.csv), ("--sheet", args.sheet)):
            if file is not None and (file.is_dir() or not file.parent.is_dir()):
                parser.error(f"{flag} {file}: expected a file in a folder that exists")
        trained = load(args.run, weights=args.weights, image_size=args.image_size,
                       device="cuda" if torch.cuda.is_available() else "cpu", recipe=args.recipe,
                       overrides={change.key: change.value for change in overrides(sets=args.set)})
        trained.require_classifier()
        if args.attention:
            require_attention(trained)
        return predict(trained, images_of(args.images), top=args.top, batch_size=args.batch_size,
                       workers=args.workers, json_file=args.json, csv_file=args.csv,
                       sheet=args.sheet, attention=args.attention)
    return run_program("vitinit.predict", program)


if __name__ == "__main__":
    sys.exit(main())
