"""Classify images with a trained model.

    vitinit predict runs/quickstart-impulse-s0 photo.jpg
    vitinit predict runs/base photographs/ --json guesses.jsonl --sheet guesses.png

One line is printed per image: its path, then the likeliest classes with their probabilities; of a
model of several labels all those that reach its task.options.threshold, which --set changes. Images
come in the order given, those of a folder sorted by name. If an image lies below a folder that has the
name of a class, at any depth, that class counts as the truth, as in training, and the last line says
how many images were classified correctly; not of several labels. With --least P the answer is "none
of these" where the likeliest class has less than the probability P; such images count apart. Where nothing names the classes of a checkpoint, --classes
does, or they are those of the images' folders if these are as many, sorted as eval.py sorts them; a
line says so. An image that cannot be read is named and skipped, and the exit status is 1.

--json FILE writes one JSON object per image and line, --csv FILE the path, likeliest class (or all
labels) and its probability of each image that can be read, which data.name = "image_list" reads again. --sheet
FILE.png draws a contact sheet of the images with their predictions, marked as right or wrong;
--attention adds a map of what the model attends to. --sheet needs the extra `figures`. --features
FILE.npz (or .csv) writes what the classifier reads of each image in place of guesses: see `vitinit
features`, which takes the former.
"""

import math
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..base.files import written_atomically
from ..base.messages import ProgressBar, in_brief, one_line, say
from ..data.datasets import is_wnid
from ..data.folders import classes_in, composed
from ..data.images import DataError
from ..data.lists import as_csv, as_list
from ..data.sources import LooseImages
from ..mixing import block_grids, mixing_matrices
from ..recipe.files import RecipeError
from ..runs.trained import BATCH, VIEW_KEYS, Trained, load
from ..train.device import this_device
from ..watch.survey import dark_in_16_bits
from .shared.command_line import Output, Parser, add_run, integer, main_of, real, run_arguments
from .shared.orders import order_taken
from .shared.outputs import deliver, require_no_input
from .shared.plot import BLUE, VERMILION, FigureError, draw_heat, pixels, pyplot, save, subplots
from .shared.results import json_line

TOP = 5  # classes per image
SHEET = 60  # most images on a contact sheet, evenly chosen if there are more
UNKNOWN = "0.35"  # a grey, where the true class is not known
TILES_PER_ROW = 10  # tiles per row, at most
SIDE = 1.25  # width and height of an image in inches
NO_LABEL = "no label"
NONE = "none of these"  # the answer of --least where no class is likely enough
LONGEST = 22  # characters shown of a class or file name, at most
STRONG = 4.0  # the scale of attention ends, at least, in multiples of uniform


class Guess(NamedTuple):
    path: str
    truth: str | None  # the class of its folder; None: not known
    # The likeliest classes and their probabilities; of a model of several labels those it has.
    ranked: list[tuple[str, float]]
    problem: str = ""  # why it could not be read; `ranked` is then empty
    several: bool = False  # whether the model gives several labels
    least: float = 0.0  # the probability that the likeliest class has to have

    @property
    def none(self) -> bool:
        """Whether no class is likely enough."""
        return bool(self.ranked) and self.ranked[0][1] < self.least

    @property
    def right(self) -> bool | None:
        """Whether the likeliest class is the true one; None if the truth is not known, or there is
        no answer.
        """
        if self.truth is None or self.problem or self.none:
            return None
        return self.ranked[0][0] == self.truth

    @property
    def labels(self) -> list[tuple[str, float]]:
        """The likeliest class with its probability, or NONE with that; of a model of several labels
        all it has.
        """
        if self.none:
            return [(NONE, self.ranked[0][1])]
        return self.ranked if self.several else self.ranked[:1]

    def as_json(self) -> str:
        ranked = [{"class": name, "probability": share} for name, share in self.ranked]
        facts = {
            "image": self.path,
            "truth": self.truth,
            "problem": self.problem,
            "answer": NONE if self.none else "",
            "classes": None if self.problem else ranked,  # [] is an answer
        }
        return json_line({key: value for key, value in facts.items() if value not in (None, "")})


class Tile(NamedTuple):
    guess: Guess
    view: Tensor  # (3, H, W) uint8, the image as the model sees it
    heat: Tensor | None  # (rows, columns), the attention on each patch; None: not shown


def images_of(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """The paths of all images, each with the argument that names it, or a folder above it: files as
    given, and the images below each folder, sorted.
    """
    found = []
    for argument in arguments:
        if argument.startswith(("http://", "https://")):
            raise DataError(
                f"{argument}: an address; expected a file: curl -O {argument} fetches it"
            )
        if not os.path.exists(argument):
            raise DataError(f"{argument}: no such file or folder")
        if os.path.isdir(argument):
            images = LooseImages(argument)
            if images.left_out:
                say(f"vitinit predict: {images.left_out}", sys.stderr)
            found += [(path, argument) for path in images.paths]
        else:
            found.append((argument, argument))
    return found


class Truths:
    """Finds the class folder that an image lies in, as training does, which is given the folder of
    all classes: there, an image in oak/elm/ is one of oak.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        self.known = {composed(name): name for name in classes}
        self.classes_beside = cache(self._classes_beside)
        self.in_folder = cache(self._in_folder)  # of which an image is one of many

    def _classes_beside(self, folder: Path) -> int:
        """How many classes a folder holds, up to two; 0 if it holds other folders, too."""
        names = classes_in(folder)
        return min(2, len(names)) if self.known.keys() >= {*names} else 0

    def __call__(self, path: str, argument: str) -> str | None:
        """The class of an image that `argument` names, or that lies below it; None if not known."""
        return self.in_folder(Path(os.path.abspath(path)).parent, os.path.abspath(argument))

    def _in_folder(self, own: Path, start: str) -> str | None:
        """The class of the images whose own folder that is, named by the absolute path `start`.

        Of the folders with the name of a class, the first one counts that lies beside other classes
        alone. Folders in the argument come first, from above; then those above it, from below, of
        which only the image's own counts if it is not in a set of classes. If no folder is in one,
        the nearest counts.
        """
        folders = [own, *own.parents]
        inside = [folder for folder in folders if folder.is_relative_to(start)]
        order = [*reversed(inside), *folders[len(inside) :]]
        beside = {}
        for folder in order:
            if composed(folder.name) in self.known:
                count = self.classes_beside(folder.parent)
                if count == 2 or folder in inside or folder == own:
                    beside[folder] = count
        if not beside:
            return None
        best = max(beside, key=lambda folder: beside[folder])
        if not beside[best]:
            best = max(beside, key=lambda folder: len(folder.parts))
        return self.known[composed(best.name)]


def classify(
    trained: Trained,
    paths: Sequence[str],
    truths: Sequence[str | None],
    *,
    top: int,
    least: float = 0.0,
) -> Iterator[tuple[Guess, Tensor | None]]:
    """Yield for each file, in order, its prediction and the view it was made from.

    The view is (3, H, W) uint8, or None for a file that could not be read. top: classes per image.
    least: see `Guess`.
    """
    several = trained.threshold is not None
    files = zip(paths, truths)
    for inputs, views in batches_of(trained, paths):
        ranked = []
        if inputs is not None:
            ranked = trained.ranked(trained.probabilities(inputs), top)
        for (view, problem), (path, truth) in zip(views, files):
            labels = [] if problem else ranked.pop(0)
            yield Guess(path, truth, labels, problem, several, least), view


def batches_of(
    trained: Trained, paths: Sequence[str]
) -> Iterator[tuple[Tensor | None, list[tuple[Tensor | None, str]]]]:
    """Yield BATCH files at a time: the model's inputs, None if there are none, and of each file its
    view, or None and why it could not be read.
    """

    def view_of(path: str) -> tuple[Tensor | None, str]:
        try:
            return trained.view(path), ""
        except DataError as error:
            return None, str(error)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for start in range(0, len(paths), BATCH):
            chunk = paths[start : start + BATCH]
            views = list(pool.map(view_of, chunk))  # decoding does not hold Python's lock
            readable = [view for view, _ in views if view is not None]
            yield trained.inputs(torch.stack(readable)) if readable else None, views


def write_features(trained: Trained, images: Sequence[tuple[str, str]], out: Path) -> int:
    """Write the pooled features of all images that can be read, their files, and as labels the
    folders right below the arguments that they come from. Return the exit status.
    """
    paths, labels, rows = [], [], []
    files = iter(images)
    for inputs, views in batches_of(trained, [path for path, _ in images]):
        if inputs is not None:
            rows.append(trained.features(inputs))
        for (_, problem), (path, argument) in zip(views, files):
            if problem:
                say(f"vitinit predict: {problem}", sys.stderr)
                continue
            below = Path(path).relative_to(argument).parts
            paths.append(os.path.abspath(path))
            labels.append(below[0] if len(below) > 1 else "")
    if not rows:
        raise DataError(f"{out}: no image could be read, so there are no features")
    features = torch.cat(rows).numpy()
    with written_atomically(out) as file:
        if out.suffix == ".csv":
            head = ["path", "label", *map(str, range(features.shape[1]))]
            lines = zip(paths, labels, *features.T.astype(str))
            file.write(as_csv([head, *lines]))
        else:
            np.savez(file, features=features, files=np.array(paths), labels=np.array(labels))
    print(f"wrote {out}: {features.shape[1]} features of {len(paths):,} images")
    return int(len(paths) < len(images))


def named_by_folders(trained: Trained, paths: Sequence[str]) -> Trained:
    """A model whose classes nothing names, with the names of the images' folders, sorted as texts,
    if they are as many, as eval.py takes them. Otherwise no folder counts as the truth.
    """
    if trained.named:
        return trained
    names = tuple(sorted({name_of_folder(path) for path in paths}))
    if len(names) != len(trained.classes):
        synsets = is_wnid(trained.classes[0])
        if not synsets:
            say(
                f"vitinit predict: {trained.path}: does not name its classes: 0, 1, … are its "
                "outputs; --classes FILE states the names, one per line",
                sys.stderr,
            )
        return replace(trained, named=synsets)
    if names != trained.classes:
        words = order_taken(names) or "--classes FILE states all names, one per line"
        say(
            f"vitinit predict: {trained.path}: does not name its classes, which are taken for the "
            f"{len(names):,} folders of the images; {words}",
            sys.stderr,
        )
    return replace(trained, classes=names, named=True)


def name_of_folder(path: str) -> str:
    """The name of the folder that an image is in."""
    return Path(os.path.abspath(path)).parent.name


def share_right(guesses: Sequence[Guess]) -> str:
    """How many guesses were right, and how many files could not be read; "" for neither."""
    judged = [guess.right for guess in guesses if guess.right is not None]
    broken = len([guess for guess in guesses if guess.problem])
    parts = []
    if judged:
        right = sum(judged)
        parts.append(
            f"{right:,} of {len(judged):,} images are classified as their folder says "
            f"({100 * right / len(judged):.2f} %)"
        )
    none = len([guess for guess in guesses if guess.none])
    if none:
        parts.append(f"{none:,} of {len(guesses):,} are {NONE}")
    if broken:
        parts.append(f"{broken:,} of {len(guesses):,} could not be read")
    return "; ".join(parts)


def require_attention(trained: Trained) -> None:
    if trained.model.family not in ("vit", "simple_vit", "swin"):
        raise FigureError(
            f"--attention: a {type(trained.model).__name__} has no attention; "
            "expected a ViT, a SimpleViT or a Swin"
        )


@torch.no_grad()
def attended(trained: Trained, view: Tensor) -> Tensor:
    """The last block's attention on each patch token, (rows, columns), as the mean over heads.

    The query is the class token if the model pools by it; else the mean over all patch tokens as
    queries is taken. view: (3, H, W) uint8.
    """
    model = trained.model
    grid = block_grids(model)[-1]
    patches = math.prod(grid)
    matrices = mixing_matrices(model, trained.inputs(view[None]), blocks=[-1])
    (weights,) = next(iter(matrices.values()))  # (h, N, N)
    queries = slice(-patches, None)
    if model.family == "vit" and model.pool == "class":
        queries = slice(1)
    return weights[:, queries, -patches:].mean((0, 1)).view(grid).cpu()


def draw_sheet(out: Path, tiles: Sequence[Tile], *, heading: str) -> None:
    """Draw all tiles in rows, each with its file and its guess below the image.

    The guess is blue if right, vermilion if wrong, grey if the truth is unknown. Heat, of all tiles
    or none, lies over the same image in grey, below the image. Its one scale, in multiples of
    uniform attention, reaches STRONG at least, so that attention without a preference is dark.
    Raises FigureError if there are no tiles.
    """
    if not tiles:
        raise FigureError(f"{out}: no image could be read, so there is nothing to draw")
    plt = pyplot()
    heats = [tile.heat * tile.heat.numel() for tile in tiles if tile.heat is not None]
    every = torch.cat([heat.flatten() for heat in heats] or [torch.zeros(1)])
    top = max(STRONG, every.quantile(0.99).item())  # one bright patch does not darken all others
    columns = min(TILES_PER_ROW, len(tiles))
    rows = math.ceil(len(tiles) / columns)
    stacked = 2 if heats else 1  # images of a tile
    beside = 1.2 if heats else 0.5  # inches: the heading, and a colour bar
    height = (stacked * SIDE + 0.47) * rows + beside
    figure, axes = subplots(stacked * rows, columns, SIDE * columns + 0.3, height)
    for axis in axes.flat:
        axis.set_axis_off()
    for number, tile in enumerate(tiles):
        row, column = divmod(number, columns)
        images = axes[stacked * row : stacked * (row + 1), column]
        upper, lower = images[0], images[-1]
        upper.imshow(pixels(tile.view))
        if heats:
            layer = draw_heat(lower, tile.view, heats[number], plt.Normalize(0.0, top))
        words = in_brief(", ".join(name for name, _ in tile.guess.labels) or NO_LABEL, LONGEST)
        truth = tile.guess.truth
        if len(tile.guess.labels) == 1 and not tile.guess.none:
            words += f" {100 * tile.guess.labels[0][1]:.0f} %"
        if tile.guess.right is False:
            words += f"\nis {in_brief(truth, LONGEST)}"
        colour = {None: UNKNOWN, True: BLUE, False: VERMILION}[tile.guess.right]
        below = {"transform": lower.transAxes, "ha": "center", "va": "top"}
        file = "/".join(Path(tile.guess.path).absolute().parts[-2:])  # with its folder
        if len(file) > LONGEST:
            file = "…" + file[1 - LONGEST :]
        lower.text(0.5, -0.03, file, fontsize=6, color=UNKNOWN, **below)
        lower.text(0.5, -0.13, words, fontsize=7, color=colour, **below)
    if heats:
        bar = figure.colorbar(
            layer,
            ax=list(axes.flat),
            location="bottom",
            aspect=40,
            pad=0.01,
            shrink=min(1.0, 4 / columns),
            extend="max" if every.max() > top else "neither",
        )
        bar.set_label("attention on a patch,\n1: the same on all", fontsize=8)
        bar.ax.tick_params(labelsize=7)
    save(figure, out, heading)


def predict(
    trained: Trained, paths: Sequence[str], truths: Sequence[str | None], args: Namespace
) -> int:
    """Print the predictions, write the requested files, and return the exit status."""
    on_sheet = {number * len(paths) // min(SHEET, len(paths)) for number in range(SHEET)}
    guesses: list[Guess] = []
    tiles = []
    items = classify(trained, paths, truths, top=args.top or TOP, least=args.least)
    with ProgressBar("predict", len(paths), items=items, shown=sys.stderr.isatty()) as bar:
        for guess, view in bar:
            if view is None:
                say(f"vitinit predict: {guess.problem}", sys.stderr)
            else:
                words = [f"{name} {100 * share:.1f} %" for name, share in guess.ranked]
                if guess.none:
                    words.insert(0, NONE)
                words = words or [NO_LABEL]
                bar.write(one_line("  ".join([guess.path, *words]), longest=2**20))
                if args.sheet and len(guesses) in on_sheet:
                    heat = attended(trained, view) if args.attention else None
                    tiles.append(Tile(guess, view, heat))
            guesses.append(guess)
    last_line = share_right(guesses)
    if last_line:
        print(last_line, flush=True)
    deliver("".join(guess.as_json() for guess in guesses), args.json)
    if args.csv:
        labels = [(guess.path, guess.labels) for guess in guesses if not guess.problem]
        several = trained.threshold is not None
        with written_atomically(args.csv) as file:
            file.write(as_list(labels, args.csv.parent, several=several))
        print(f"wrote {args.csv}")
    if args.sheet:
        heading = f"{trained.path.parent.name}, {len(tiles)} of {len(paths):,} images"
        if last_line:
            heading += f": {last_line}"
        draw_sheet(args.sheet, tiles, heading=heading)
        print(f"wrote {args.sheet}")
    return int(any(guess.problem for guess in guesses))


def parse_arguments(arguments: list[str]) -> Namespace:
    parser = Parser(prog="vitinit predict", description=__doc__)
    add_run(parser, VIEW_KEYS)
    parser.add_argument("images", nargs="+", metavar="IMAGE|FOLDER")
    parser.add_argument("--top", type=integer(1), help=f"classes per image ({TOP})")
    parser.add_argument(
        "--least",
        type=real(above=0.0, maximum=1.0),
        default=0.0,
        metavar="P",
        help=f"the answer is '{NONE}' where the likeliest class has less than this probability",
    )
    parser.add_argument(
        "--json",
        type=Output(".json", ".jsonl", prints=True),
        metavar="FILE",
        help="write one JSON object per image and line; -: to the terminal",
    )
    parser.add_argument(
        "--csv",
        type=Output(".csv"),
        metavar="FILE.csv",
        help="write the likeliest class of each image, as a list",
    )
    parser.add_argument(
        "--features",
        type=Output(".npz", ".csv"),
        metavar="FILE",
        help="write pooled features, and nothing else; the labels are the folders below FOLDER",
    )
    parser.add_argument(
        "--sheet",
        type=Output(".png"),
        metavar="FILE.png",
        help=f"draw a contact sheet of at most {SHEET} images, evenly chosen",
    )
    parser.add_argument(
        "--attention", action="store_true", help="add to the sheet what the model attends to"
    )
    args = parser.parse_args(arguments)
    if args.features and (args.json or args.csv or args.sheet or args.least or args.top):
        parser.error("--features is written without guesses; expected no other output")
    if args.attention and not args.sheet:
        parser.error("--attention is drawn on a contact sheet; give --sheet FILE.png, too")
    return args


def run_predict(args: Namespace) -> int:
    if args.sheet:
        pyplot()  # which may be missing: before all images
    trained = load(**run_arguments(args), device=this_device())
    if not args.features:
        trained.require_classifier()
    if args.attention:
        require_attention(trained)
    images = images_of(args.images)
    paths = [path for path, _ in images]
    for out in filter(None, (args.sheet, args.json, args.csv, args.features)):
        require_no_input(out, paths)  # links may lead to it
    if args.features:
        return write_features(trained, images, args.features)
    trained = named_by_folders(trained, paths)
    if caution := dark_in_16_bits(paths[:BATCH]):
        say(f"vitinit predict: warning {caution}", sys.stderr)
    several = trained.threshold is not None
    if several and (args.least or args.top):
        raise RecipeError(
            f"--least and --top: {trained.path} gives all labels that reach its threshold; expected "
            "--set task.options.threshold=0.3, say"
        )
    truth_of = Truths(trained.classes if trained.named and not several else ())
    truths = [truth_of(path, argument) for path, argument in images]
    return predict(trained, paths, truths, args)


main = main_of("vitinit predict", parse_arguments, run_predict)
