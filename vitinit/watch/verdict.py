"""How good a run's model is, in words: beside guessing, and which epoch and weights are the best.

    60 epochs: 52.0 ± 9.7 % of 100 validation images (guessing 20 %)
    best 60.0 % after epoch 7, by averaged weights, which best.pt keeps
    validation loss rose from 1.02 to 1.61 since: …

The best epoch is chosen on the images that it is measured on, so its number is a little too high.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..base.messages import counted
from ..runs.folder import RunFolder
from ..train.metrics import Progress

RISEN = 1.05  # a validation loss that is so many times as high as at the best epoch has risen
Z_SQUARED = 3.841459  # of a standard normal, whose ± z hold 95 %
Row = Mapping[str, Any]  # of metrics.jsonl


class Best(NamedTuple):
    """What best.pt of a run holds."""

    row: Row  # of its epoch
    weights: str  # "model", or "ema" if, of the two in it, averaged weights are better

    def __str__(self) -> str:
        words = f"{in_words(self.row, self.weights)} after epoch {self.row['epoch']}"
        return f"{words}, by averaged weights" if self.weights == "ema" else words


def score_of(row: Row, weights: str) -> float | None:
    """Top-1, or of a task with several labels mAP, in percent; None if none was measured."""
    prefix = {"model": "val"}.get(weights, weights)
    top1 = row.get(f"{prefix}_top1")
    return row.get(f"{prefix}_map") if top1 is None else top1


def in_words(row: Row, weights: str, images: int = 0) -> str:
    """What was measured, of so many images: "52.0 ± 9.7 %", the mAP, or else the loss. 0: no ±."""
    score = score_of(row, weights)
    if score is None:
        return f"loss {row['val_loss']:.3f}"
    if row.get("val_map") is not None:
        return f"mAP {score:.1f} %"
    return f"{score:.1f} ± {margin(score, images):.1f} %" if images else f"{score:.1f} %"


def margin(percent: float, images: int) -> float:
    """How far a share, in percent, that was seen of so many images may be off: the distance to the
    farther end of Wilson's 95 % interval (1927), which holds near 0 and 100 %, too.
    """
    share, z = min(percent, 100.0 - percent) / 100.0, Z_SQUARED / images
    half = math.sqrt(z * share * (1.0 - share) + z * z / 4.0)
    return 100.0 * ((share + z / 2.0 + half) / (1.0 + z) - share)


def best_of(rows: Iterable[Row], best_by: str) -> Best | None:
    """What a run keeps as best.pt by this value of checkpoint.best_by; None if nothing is."""
    progress, best = Progress(), None
    for row in rows:
        if progress.improves(row.get(best_by), best_by):
            best = row
    if best is None:
        return None
    averaged = (score_of(best, "ema") or 0.0) > (score_of(best, "model") or 0.0)
    return Best(best, "ema" if averaged else "model")


def how_good(rows: Iterable[Row], best_by: str, facts: Mapping[str, Any]) -> list[str]:
    """Say in one to three lines how good a run is.

    rows: of metrics.jsonl. best_by: checkpoint.best_by. facts: what run.json has as `data`; without
    its counts, some of which older runs lack, there is no ± and no guessing.
    """
    rows = [row for row in rows if row.get("val_loss") is not None]
    best = best_of(rows, best_by)
    if best is None:
        return ["metrics.jsonl has no validated epoch, so no number says how good the model is"]
    last, images = rows[-1], facts.get("validation images", 0)
    line = f"{counted(last['epoch'], 'epoch')}: {in_words(last, 'model', images)}"
    if images:
        line += f" of {counted(images, 'validation image')}"
    if "score by guessing" in facts:
        line += f" (guessing {facts['score by guessing']:g} %)"
    lines = [line]
    if best != Best(last, "model"):
        lines.append(f"best {best}, which best.pt keeps")
    before, after = best.row["val_loss"], last["val_loss"]
    if after > RISEN * before and last["train_loss"] < best.row["train_loss"]:
        lines.append(
            f"validation loss rose from {before:.2f} to {after:.2f} since: later epochs fitted the "
            "training images alone, so take best.pt, chosen by checkpoint.best_by"
        )
    return lines


class VerdictWatcher:
    """Says how good a run is once it is finished."""

    def finished(self, folder: RunFolder) -> list[str]:
        return how_good(folder.metrics.rows(), best_by_of(folder.keys()), folder.data_of(-1))


def best_by_of(keys: Mapping[str, Any]) -> str:
    """checkpoint.best_by among a recipe's keys, which of an old run are not checked."""
    return str(keys.get("checkpoint.best_by", "val_top1"))


def chosen_weights(path: Path, weights: str) -> tuple[Path, str, Best | None]:
    """Where the weights "model", "ema" or "best" of a run or checkpoint are, which of both they are,
    and what the best are: None if others are asked for, or a folder has no best.pt and no record of
    it; then it is the path itself.
    """
    folder = RunFolder(path)
    best = None
    if weights == "best":
        weights = "model"
        if folder.best.is_file() and folder.recipe.is_file():
            best = best_of(folder.metrics.rows(), best_by_of(folder.keys()))
    return (folder.best, best.weights, best) if best else (path, weights, None)
