"""Classify images with a trained model.

    python -m vitinit.predict runs/quickstart-impulse-s0 photo.jpg
    python -m vitinit.predict runs/base photographs/ --json guesses.jsonl --sheet guesses.png

One line is printed per image: its path, then the likeliest classes with their probabilities. Images
come in the order given, those of a folder sorted by name. If the folder that an image is in has the
name of a class, that class counts as the truth, and the last line says how many images were
classified correctly. An image that cannot be read is named and skipped, and the exit status is 1.

--json FILE writes one JSON object per image and line. --sheet FILE.png draws a contact sheet of the
images with their predictions, marked as right or wrong; --attention adds a map of what the model
attends to. --sheet needs the extra `figures`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from .command_line import Output, Parser, add_run, integer, run_arguments, run_program
from .data.folders import images_in
from .data.images import DataError, dark_in_16_bits
from .figures.sheet import Tile, attended, draw_sheet, require_attention
from .files import write_text_atomically
from .messages import one_line
from .runs.trained import BATCH, VIEW_KEYS, Trained, load
from .train.device import this_device
from .train.metrics import ProgressBar

SHEET = 60                      # most images on a contact sheet; of more, every k-th


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

    def as_json(self) -> str:
        """The line of --json."""
        classes = [{"class": name, "probability": share} for name, share in self.ranked]
        return json.dumps({"image": self.path}
                          | ({} if self.truth is None else {"truth": self.truth})
                          | ({"problem": self.problem} if self.problem else {"classes": classes}))


def images_of(arguments: Sequence[str]) -> list[str]:
    """The paths of all images: files as given, and the images below each folder, sorted.

    Prints a line about a folder's files that are no images.
    """
    paths = []
    for argument in arguments:
        if not os.path.exists(argument):
            raise DataError(f"{argument}: no such file or folder")
        files, line = images_in(argument) if os.path.isdir(argument) else ([argument], "")
        if line:
            print(f"vitinit.predict: {line}", file=sys.stderr, flush=True)
        paths += files
    return paths


def classify(trained: Trained, paths: Sequence[str], *, top: int
             ) -> Iterator[tuple[Guess, Tensor | None]]:
    """Yield for each file, in order, its prediction and the view it was made from.

    The view is (3, H, W) uint8, or None for a file that could not be read. top: classes per image.
    """
    def view_of(path: str) -> Tensor | str:
        try:
            return trained.view(path)
        except DataError as error:
            return str(error)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(paths), BATCH):
            chunk = paths[start:start + BATCH]
            views = list(pool.map(view_of, chunk))   # decoding does not hold Python's lock
            readable = [view for view in views if isinstance(view, Tensor)]
            inputs = trained.inputs(torch.stack(readable)) if readable else None
            ranked = iter(() if inputs is None else
                          trained.ranked(trained.probabilities(inputs), top))
            for path, view in zip(chunk, views):
                folder = os.path.basename(os.path.dirname(os.path.abspath(path)))
                truth = folder if folder in trained.classes else None
                if isinstance(view, str):
                    yield Guess(path, truth, [], view), None
                else:
                    yield Guess(path, truth, next(ranked)), view


def share_right(guesses: Sequence[Guess]) -> str:
    """How many guesses were right, and how many files could not be read; "" for neither."""
    judged = [guess.right for guess in guesses if guess.right is not None]
    broken = sum(bool(guess.problem) for guess in guesses)
    parts = [f"{sum(judged):,} of {len(judged):,} images are classified as their folder says "
             f"({100 * sum(judged) / len(judged):.2f} %)"] if judged else []
    parts += [f"{broken:,} of {len(guesses):,} could not be read"] if broken else []
    return "; ".join(parts)


def predict(trained: Trained, paths: Sequence[str], args: argparse.Namespace) -> int:
    """Print the predictions, and write the requested files and name them.

    Returns the exit status: 1 if a file could not be read, otherwise 0.
    """
    on_sheet = {number * len(paths) // min(SHEET, len(paths)) for number in range(SHEET)}
    guesses: list[Guess] = []
    tiles: list[Tile] = []
    with ProgressBar("predict", len(paths), shown=sys.stderr.isatty()) as bar:
        for guess, view in bar.over(classify(trained, paths, top=args.top)):
            if view is None:
                print(f"vitinit.predict: {guess.problem}", file=sys.stderr, flush=True)
            else:
                words = (f"{name} {100 * share:.1f} %" for name, share in guess.ranked)
                print(one_line("  ".join([guess.path, *words]), longest=2**20))
                if args.sheet is not None and len(guesses) in on_sheet:
                    heat = attended(trained, view) if args.attention else None
                    tiles.append(Tile(guess.path, view, heat, guess.truth, *guess.ranked[0]))
            guesses.append(guess)
    if last_line := share_right(guesses):
        print(last_line, flush=True)
    if args.json is not None:
        write_text_atomically("".join(f"{guess.as_json()}\n" for guess in guesses), args.json)
    if args.sheet is not None:
        draw_sheet(args.sheet, tiles, heading=f"{trained.path.parent.name}, {len(tiles)} of "
                   f"{len(paths):,} images{last_line and ': '}{last_line}")
    for file in filter(None, (args.json, args.sheet)):
        print(f"wrote {file}")
    return int(any(guess.problem for guess in guesses))


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="python -m vitinit.predict", description=__doc__)
    add_run(parser, VIEW_KEYS)
    parser.add_argument("images", nargs="+", metavar="IMAGE|FOLDER")
    parser.add_argument("--top", type=integer(1), default=5, help="classes per image (5)")
    parser.add_argument("--json", type=Output(".json", ".jsonl"), metavar="FILE",
                        help="write one JSON object per image and line")
    parser.add_argument("--sheet", type=Output(".png"), metavar="FILE.png",
                        help=f"draw a contact sheet of at most {SHEET} images, evenly chosen")
    parser.add_argument("--attention", action="store_true",
                        help="add to the sheet what the model attends to")
    args = parser.parse_args(arguments)
    if args.attention and args.sheet is None:
        parser.error("--attention is drawn on a contact sheet; give --sheet FILE.png, too")
    return args


def main(arguments: list[str] | None = None) -> int:
    def program() -> int:
        args = parse_arguments(arguments)
        trained = load(**run_arguments(args), device=this_device())
        trained.require_classifier()
        if args.attention:
            require_attention(trained)
        paths = images_of(args.images)
        if caution := dark_in_16_bits(paths[:BATCH]):
            print(f"vitinit.predict: warning {caution}", file=sys.stderr, flush=True)
        return predict(trained, paths, args)
    return run_program("vitinit.predict", program)


if __name__ == "__main__":
    sys.exit(main())
