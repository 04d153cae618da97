"""Say how well features tell classes apart: those that `vitinit predict --features` has written.

    vitinit predict RUN photographs/train --features train.npz
    vitinit predict RUN photographs/val --features val.npz
    vitinit features train.npz val.npz --linear --sheet neighbours.png

One line is the accuracy of the 20 nearest training images by cosine similarity, whose votes have the
weights exp(similarity / 0.07), as in DINO (arXiv 2104.14294). --linear adds that of scikit-learn's
LogisticRegression, on features of mean 0 and standard deviation 1 over the training images; it needs
the extra `probe`. --sheet draws images of the second file, each beside its nearest ones of the first.
"""

import zipfile
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy import ndarray

from ..base.files import in_one_line
from ..base.messages import OneLineError, in_brief
from ..data.images import decode_image
from .shared.command_line import Output, Parser, integer, main_of, real
from .shared.plot import BLUE, VERMILION, pixels, pyplot, save, subplots

NEIGHBOURS = 20
TEMPERATURE = 0.07  # of the weights of their votes
ENTRIES = 2**24  # most similarities in memory at a time, about
ROWS, BESIDE = 12, 8  # of a sheet: images, and neighbours of each
SIDE = 1.25  # of an image, in inches


class Features(NamedTuple):
    """What a file has of N images."""

    features: ndarray  # (N, C) float32
    files: ndarray  # (N,) paths
    labels: ndarray  # (N,) names of classes


def read_features(path: Path) -> Features:
    """Read a file of `vitinit predict --features`; OneLineError if it is none."""
    with in_one_line(path, "read"):
        try:
            with np.load(path, allow_pickle=False) as arrays:
                found = Features(*(arrays[name] for name in Features._fields))
        except (ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
            raise OneLineError(
                f"{path}: expected a .npz that vitinit predict --features wrote ({in_brief(error)})"
            ) from None
    if not all(found.labels):
        raise OneLineError(
            f"{path}: {found.files[found.labels == ''][0]} has no label; expected images in folders "
            "of their classes, below the folder that was given"
        )
    return found


def neighbours_of(train: ndarray, held: ndarray, count: int) -> tuple[ndarray, ndarray]:
    """The most similar rows of `train` to each of `held`, (n, count): their numbers, the nearest
    first, and their cosine similarities in float64.
    """
    others, rows = (F.normalize(torch.from_numpy(part).double()) for part in (train, held))
    found = []
    for part in rows.split(1 + ENTRIES // len(others)):
        similarities, nearest = (part @ others.T).sort(descending=True, stable=True)
        found.append((nearest[:, :count], similarities[:, :count]))
    numbers, shares = map(torch.cat, zip(*found))
    return numbers.numpy(), shares.numpy()


def voted(labels: ndarray, nearest: ndarray, similarities: ndarray) -> ndarray:
    """The class with the most votes of each image's neighbours; of equal ones the first by name."""
    classes, numbers = np.unique(labels, return_inverse=True)
    votes = np.zeros((len(nearest), len(classes)))
    rows = np.arange(len(nearest))[:, None]
    np.add.at(votes, (rows, numbers[nearest]), np.exp(similarities / TEMPERATURE))
    return classes[votes.argmax(1)]


def linear(train: Features, held: Features, c: float, steps: int) -> ndarray:
    """What scikit-learn's LogisticRegression says of the images of `held`."""
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError:
        raise OneLineError("--linear needs scikit-learn: pip install 'vitinit[probe]'") from None
    model = make_pipeline(StandardScaler(), LogisticRegression(C=c, max_iter=steps))
    return model.fit(train.features, train.labels).predict(held.features)


def draw_neighbours(out: Path, train: Features, held: Features, nearest: ndarray) -> None:
    """Draw images, evenly chosen, each before its nearest ones; blue is what is of its class."""
    chosen = np.unique(np.linspace(0, len(held.files) - 1, ROWS).astype(int))
    nearest = nearest[chosen, :BESIDE]
    columns = 1 + nearest.shape[1]
    figure, axes = subplots(len(chosen), columns, SIDE * columns, (SIDE + 0.3) * len(chosen))
    for row, number, places in zip(axes, chosen, nearest):
        shown = [(held, number), *((train, place) for place in places)]
        for axis, (part, place) in zip(row, shown):
            label = part.labels[place]
            colour = BLUE if label == held.labels[number] else VERMILION
            axis.imshow(pixels(decode_image(str(part.files[place]))))
            axis.set_title(label, fontsize=8, color=colour)
            axis.set_axis_off()
    save(figure, out, "An image, and to its right the nearest ones")


def parse_arguments(arguments: list[str]) -> Namespace:
    parser = Parser(prog="vitinit features", description=__doc__)
    parser.add_argument("train", type=Path, metavar="TRAIN.npz")
    parser.add_argument("held", type=Path, metavar="VAL.npz")
    parser.add_argument("--linear", action="store_true", help="fit a linear classifier, too")
    parser.add_argument("-C", type=real(above=0.0), default=1.0, help="inverse of its penalty (1)")
    parser.add_argument("--max-iter", type=integer(1), default=1000, help="its steps (1000)")
    parser.add_argument("--sheet", type=Output(".png"), metavar="FILE.png", help="draw neighbours")
    return parser.parse_args(arguments)


def run_features(args: Namespace) -> None:
    if args.sheet:
        pyplot()  # which may be missing
    train, held = read_features(args.train), read_features(args.held)
    if train.features.shape[1] != held.features.shape[1]:
        raise OneLineError(
            f"{args.held}: has {held.features.shape[1]} features per image, and {args.train} "
            f"{train.features.shape[1]}; expected both of one model"
        )
    classes = np.unique(train.labels)
    if args.linear and len(classes) == 1:
        raise OneLineError(
            f"{args.train}: all images are of class '{classes[0]}'; expected two classes for --linear"
        )
    count = min(NEIGHBOURS, len(train.files))
    nearest, similarities = neighbours_of(train.features, held.features, count)
    right = voted(train.labels, nearest, similarities) == held.labels
    print(f"{count} nearest  top-1 {100 * right.mean():.2f} %  over {len(right):,} images")
    if args.linear:
        right = linear(train, held, args.C, args.max_iter) == held.labels
        words = f"C = {args.C:g}, at most {args.max_iter} steps, standardised features"
        print(f"linear      top-1 {100 * right.mean():.2f} %  over {len(right):,} images ({words})")
    if args.sheet:
        draw_neighbours(args.sheet, train, held, nearest)
        print(f"wrote {args.sheet}")


main = main_of("vitinit features", parse_arguments, run_features)
