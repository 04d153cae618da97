"""What a finished run has to say: how good, what it confuses, and what would help most."""

import math
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...base.files import written_atomically
from ...base.messages import say
from ...base.table import find
from ...data.sources import Source
from ...runs.data import open_sets
from ...runs.folder import RunFolder
from ...runs.load import open_saved
from ...train.device import this_device
from ...watch.verdict import chosen_weights, margin
from ..shared.guesses import guessed

# Which draw the report, and write the model.
PROGRAMS = {"figures": ".programs.figures.program:main", "export": ".programs.export:main"}
TRAINED_ON = 1_000  # images that are looked at again, to see what was learned by heart
# Errors shrink with r times the images and epochs that teach them as r ** -EXPONENT; README.md has
# the runs by which it was chosen.
EXPONENT = 0.2


class Learned(NamedTuple):
    """How often a model errs, as shares, and how that would change."""

    on_trained: float  # of images that it was trained on, as they are, without augmentation
    on_others: float

    @property
    def not_yet(self) -> float:
        """The share of other images that are wrong as the model has yet to learn what it sees, and
        not as it has seen too few."""
        return min(self.on_trained, self.on_others)

    def with_images(self, times: float) -> float:
        """The share of errors with so many times the images, in as many epochs, and so in as many
        times the minutes: all errors shrink."""
        return self.on_others * times**-EXPONENT

    def with_minutes(self, times: float) -> float:
        """The share of errors with so many times the epochs, of the same images: what is not yet
        learned shrinks."""
        return self.on_others - self.not_yet * (1 - times**-EXPONENT)

    def advice(self) -> str:
        """What would help most, in words: minutes, if alone they mend over half of what both do."""
        if not self.on_others:
            return "nothing is wrong here; more images to validate on would show smaller errors"
        images, minutes = (100 * (1 - by(2)) for by in (self.with_images, self.with_minutes))
        kind = "minutes" if 2 * self.not_yet > self.on_others else "images"
        seen, unseen = 100 * (1 - self.on_trained), 100 * (1 - self.on_others)
        return (
            f"more {kind} would help most: {seen:.0f} % of the images trained on are right, and "
            f"{unseen:.0f} % of others; estimated with twice the minutes {minutes:.0f} %, and with "
            f"twice the images as well {images:.0f} %"
        )


def finish(out: Path) -> None:
    """Write the report and the predictions of the run in `out`, and print what there is to know."""
    folder = RunFolder(out)
    file, weights, best = chosen_weights(out, "best")
    assert best is not None  # as epochs were validated
    saved = open_saved(file)
    recipe, device = saved.recipe, this_device()
    model = saved.model(weights).eval().to(device)
    _, train_set, val_set = open_sets(recipe, saved.classes)
    others = guessed(model, recipe, val_set, device)
    seen = guessed(model, recipe, spread(train_set, TRAINED_ON), device)
    predictions, report, model_folder = (
        out / name for name in ("predictions.csv", "report.html", "model")
    )
    with written_atomically(predictions) as table:
        table.write(others.as_csv(val_set))
    find(PROGRAMS["figures"])(["report", str(out), "--weights", "best", "--out", str(report)])
    say(f"wrote   {predictions}")
    if not model_folder.exists():
        export = find(PROGRAMS["export"])
        words = [str(file), "--weights", weights, "--out", str(model_folder), "--to"]
        with redirect_stderr(StringIO()) as why:  # without safetensors, or timm has no such model
            refused = export([*words, "folder"])
        if refused and not export([*words, "run"]):
            say(
                f"note    {model_folder} is for vitinit alone, with weights in half precision "
                f"({why.getvalue().strip()})"
            )
    say(f"next    vitinit predict {folder.in_commands} new/")
    right = 100 * (1 - others.errors)
    chance = 100 * val_set.class_images.max() / len(val_set)
    say(
        f"good    {right:.1f} ± {margin(right, len(val_set)):.1f} % of {len(val_set):,} images are right, by the "
        f"weights after epoch {best.row['epoch']}, chosen by these images, so a little too high; "
        f"guessing the largest class {chance:.1f} %"
    )
    say(f"mixed   {others.confusions(val_set.classes)}")
    say(f"more    {Learned(seen.errors, others.errors).advice()}")


def spread(source: Source, count: int) -> Source:
    """`count` images of the source, spread evenly over it, or all."""
    return source.part(np.arange(len(source))[:: math.ceil(len(source) / count)])
