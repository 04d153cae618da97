"""The figure `data`: a sheet of what a set of images is like."""

from pathlib import Path

import numpy as np
from einops import rearrange
from torch import Tensor

from ...base.messages import one_line
from ...data.datasets import open_split
from ...data.images import DataError, resize_and_centre_crop
from ...data.lists import LISTS
from ...data.sources import ImageFiles, Source
from ...watch.survey import Survey, survey
from ..shared.outputs import require_no_input
from ..shared.plot import BLUE, as_drawn, pixels, save, subplots

EXAMPLES, SIDE = 8, 64  # images per class, spread evenly over it, and their pixels
LONGEST = 30  # characters of a class's name
MOST_CLASSES = 20  # rows; the classes with the most and with the fewest images


def draw_data(out: Path, *, data_dir: str, image_size: int) -> None:
    """Draw examples of each class with its number of images, and how large images are; print what a
    run of `image_size` pixels would say at its start, and every group of files with the same bytes.
    """
    listed = any(Path(data_dir, file).is_file() for file in LISTS)
    name = "image_list" if listed else "image_folder"
    source = open_split(name, data_dir, "train", 0)
    try:
        val_set = open_split(name, data_dir, "val", len(source.classes))
    except DataError as error:  # training then needs data.held_out
        print(f"val     {error}")
        val_set = source.part(np.arange(0))
    for part in (source, val_set):
        if isinstance(part, ImageFiles):
            require_no_input(out, part.paths)  # a list may name it
    report = survey(source, val_set, image_size, most=len(source))
    print(report, end="")
    sheet(out, source, report)


def sheet(out: Path, source: Source, report: Survey) -> None:
    """Draw a row per class: its examples, and a bar as long as its number of images."""
    counts = source.class_images
    order = np.argsort(-counts, kind="stable")
    rows = order
    hidden = ""
    if len(order) > MOST_CLASSES:
        rows = np.delete(order, range(MOST_CLASSES // 2, len(order) - MOST_CLASSES // 2))
        hidden = f"; {len(order) - len(rows)} classes in between"
    figure, [(images, bars)] = subplots(1, 2, 9.0, 0.5 * len(rows) + 1.0, width_ratios=(3, 2))
    picture = np.full((len(rows), EXAMPLES, SIDE, SIDE, 3), 255, np.uint8)
    for line, label in zip(picture, rows):
        for place, index in zip(line, of_class(source, label)):
            place[:] = example(source, index)
    images.imshow(rearrange(picture, "row n h w rgb -> (row h) (n w) rgb"))
    middles = SIDE * (np.arange(len(rows)) + 0.5)
    names = [as_drawn(one_line(source.classes[label], LONGEST)) for label in rows]
    images.set(xticks=[], yticks=middles, yticklabels=names)
    bars.barh(middles, counts[rows], height=0.7 * SIDE, color=BLUE)
    bars.set(ylim=images.get_ylim(), yticks=[], xlabel="images to train on")
    for middle, count in zip(middles, counts[rows]):
        bars.text(count, middle, f" {count:,}", va="center", fontsize=8)
    bars.margins(x=0.15)
    bars.spines[["top", "right"]].set_visible(False)
    files = "".join(line.partition(":")[2] for line in report.lines[1:])
    heading = f"{len(source):,} images of {len(order)} classes{hidden}\n{files.strip()}"
    save(figure, out, heading)


def of_class(source: Source, label: int) -> np.ndarray:
    """The numbers of at most EXAMPLES images of a class, spread evenly over it."""
    numbers = source.of_class(label)
    spread = np.linspace(0, len(numbers) - 1, min(EXAMPLES, len(numbers)))
    return numbers[spread.astype(int)]


def example(source: Source, index: int) -> np.ndarray:
    """The centre of an image, (SIDE, SIDE, 3) uint8; grey if it cannot be decoded."""

    def centre(image: Tensor) -> Tensor:
        return resize_and_centre_crop(image, (SIDE, SIDE), 1.0, "bicubic")

    try:
        return pixels(source.image(index, centre))
    except DataError:
        return np.full((SIDE, SIDE, 3), 200, np.uint8)
