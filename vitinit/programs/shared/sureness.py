"""How sure models are, as eval.py measures it in passing, and the temperatures that it fits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ...base.messages import OneLineError, say
from ...recipe.files import RecipeError
from ...runs.calibration import add_row
from ...runs.load import BOXED, Saved
from ...tasks import Loss
from ...tasks.multi_label import of_all_processes
from ...train.distributed import Processes
from .calibration import BINS, calibration_error, fit_temperature, reliability


@dataclass
class Sureness:
    """What one model says of the images of a set, added up batch by batch."""

    loss: Loss
    temperature: float = 1.0  # by which its logits are divided already
    keeps: bool = False  # whether to keep the logits, 4 bytes for each image and class
    bins: Tensor = field(default_factory=lambda: torch.zeros(3, BINS, dtype=torch.float64))
    rows: list[Tensor] = field(default_factory=list)  # of the logits and label of each image

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: (B, K) and (B,)."""
        self.bins += reliability(self.loss.probabilities(logits), labels)
        if self.keeps:
            self.rows.append(torch.column_stack([logits, labels]).cpu())

    def gather(self, processes: Processes) -> None:
        """Add up what all processes have seen."""
        processes.sum(self.bins)
        if self.keeps:
            self.rows = [of_all_processes(torch.cat(self.rows), processes)]

    @cached_property
    def error(self) -> float:
        """The expected calibration error in percent."""
        return calibration_error(self.bins)


def require_one_label(saved: Saved) -> None:
    """Raise RecipeError unless a temperature can be fitted to a checkpoint, and stored beside it."""
    if saved.recipe.task.kind.several_labels:
        raise RecipeError(
            f"--fit-temperature: {saved.name} decides each of several labels by its threshold; "
            "expected --set task.options.threshold=0.3, say"
        )
    if saved.path.is_relative_to(BOXED):
        raise RecipeError(
            f"--fit-temperature: {saved.name} comes with the package, whose files stay as they are; "
            f"expected a copy: cp -r {saved.path.parent} runs/"
        )


def store_temperatures(
    saved: Saved, sureness: Mapping[str, Sureness], data: str, processes: Processes
) -> None:
    """Fit and store a temperature for each of a checkpoint's weights, by the main process. What
    fails there, such as a full disk, ends them all.
    """
    with processes.together():
        if processes.is_main:
            for name, seen in sureness.items():
                store_temperature(saved, name, seen, data)


def store_temperature(saved: Saved, weights: str, seen: Sureness, data: str) -> None:
    """Fit the temperature of the weights "model" or "ema", print what it changes, and store it
    beside the checkpoint. seen: all logits. data: the name of the set.
    """
    (rows,) = seen.rows
    logits, labels = rows[:, :-1].double(), rows[:, -1].long()
    try:
        temperature = fit_temperature(logits, labels, seen.loss)
    except ValueError as error:
        raise OneLineError(f"{saved.name}, {weights}: {error}") from None
    probabilities = seen.loss.probabilities(logits / temperature)
    after = calibration_error(reliability(probabilities, labels))
    row = {
        "temperature": temperature,
        "weights": weights,
        "data": data,
        "images": len(labels),
        "view": saved.view,
        "calibration error before": seen.error,
        "calibration error after": after,
    }
    file = add_row(row, saved.tensors(weights), saved.path.parent)
    say(
        f"{weights:5}  temperature {temperature:.4f}  ECE {seen.error:.3f} → {after:.3f} %  "
        f"over {len(labels):,} images of {data}, in {file}"
    )
