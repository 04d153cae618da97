"""What an evaluation is about: a data set by name, or a part of the images of a run."""

from pathlib import Path
from typing import NamedTuple

from ...data.datasets import data_set_of, open_split
from ...data.images import DataError
from ...data.sources import Source, fingerprint
from ...recipe.sections import DataSection, Recipe
from ...runs.data import open_held_out, open_training_set
from ...runs.folder import RunFolder, image_digests


class EvaluatedSet(NamedTuple):
    """What one result of an evaluation is about: a data set, or a part of a run's training set."""

    name: str  # of a data set; or "train" or "held_out"
    root: str  # its folder; "" for `shapes`
    data: DataSection | None = None  # of the recipe whose training images they are
    run_seed: int = 0  # of that recipe, where it decides which images they are
    whole: bool = False  # all of an image folder or list, if it has no splits
    classes: int = 0  # so many in place of the set's own number; 0: that
    order: tuple[str, ...] = ()  # of a part's classes, as the run began with them

    def __str__(self) -> str:
        return f"{self.name}={self.root}" if self.root else self.name

    def open(self) -> Source:
        """Open the images; DataError as by `open_split`, and if a class has too few images."""
        if self.data is None:
            number = data_set_of(self.name).num_classes or 0
            split = "whole" if self.whole else "val"
            if number > 0:  # else as many classes as the folder holds
                number = self.classes or number
            return open_split(self.name, self.root, split, number)
        # Which images they are depends on the number of each class.
        whole, trained_on = open_training_set(self.data, self.run_seed, self.order)
        return trained_on if self.name == "train" else open_held_out(self.data, whole)


def own_set(data: DataSection) -> EvaluatedSet:
    """What a recipe, with this data section, validates on."""
    if data.holds_out:
        return EvaluatedSet("held_out", data.root, data)
    return EvaluatedSet(data.name, data.root, classes=data.num_classes)


def trained_set(recipe: Recipe) -> EvaluatedSet:
    """The images that a recipe trains on."""
    data = recipe.data
    seed = recipe.run.seed if data.subset_seed == "run" else 0
    return EvaluatedSet("train", data.root, data, seed)


def require_same_images(part: EvaluatedSet, source: Source, run: Path) -> None:
    """Raise DataError if a part of a run's training set is not what it was as the run began: which
    images are held out depends on all of a class, so others may have been trained on by now.

    source: its images. run: the folder of the run, which has a digest of it on record, or not.
    """
    if part.data is None:
        return
    of_training, of_validation = image_digests(RunFolder(run).data_of(0))
    began, use = of_training, "was trained on"
    if part.name == "held_out":
        began, use = of_validation, "held out"
    if began and fingerprint(source, part.root) != began:
        raise DataError(
            f"{part}: files have changed since the run in {run} began: these are not the images "
            f"that it {use}; expected the same files, or others by --data NAME=DIR"
        )
