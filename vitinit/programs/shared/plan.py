"""How long a run will take, and what binds it, from rates that were measured or are given.

    one step of all GPUs = the slower of   each GPU: its step, and the preparation of its images
                                           all cores: loading these images

A GPU adds what it prepares to what it trains, since both use its memory at full rate: two fed
steps of an H200 took 2 % longer than this says. Workers load meanwhile.
"""

import math
from dataclasses import dataclass

from ...base.messages import OneLineError
from ...recipe.sections import Recipe

FORWARD = 1 / 3  # of a step's time; the backward pass takes two


@dataclass(frozen=True)
class Rates:
    """Images/s of each part alone. Infinite is a part that costs nothing."""

    step: float  # of one GPU's training step, on images that are there
    core: float  # that one core loads beside the others
    prepare: float = math.inf  # that one GPU augments, and decodes if it does, and mixes


@dataclass(frozen=True)
class Plan:
    """A run on so many GPUs and cores: images/s of all GPUs, seconds, and what binds it."""

    images: int  # of an epoch
    validation: float  # images that are validated after an epoch, on average
    epochs: int
    gpus: int
    cores: int
    rates: Rates
    weights: int = 1  # models that a validation measures

    @property
    def of_gpus(self) -> float:
        return self.gpus / (1 / self.rates.step + 1 / self.rates.prepare)

    @property
    def of_cores(self) -> float:
        return self.cores * self.rates.core

    @property
    def rate(self) -> float:
        return min(self.of_gpus, self.of_cores)

    @property
    def bound(self) -> str:
        return "loading" if self.of_cores < self.of_gpus else "the GPU"

    @property
    def epoch_seconds(self) -> float:
        """Training, and a validation whose images have been decoded before."""
        evaluated = self.weights * self.validation * FORWARD / (self.gpus * self.rates.step)
        return self.images / self.rate + evaluated

    @property
    def hours(self) -> float:
        return self.epochs * self.epoch_seconds / 3600

    @property
    def cores_needed(self) -> int:
        """Cores with which loading does not bind."""
        return math.ceil(self.of_gpus / self.rates.core)

    def jobs(self, limit_hours: float, start_seconds: float) -> int:
        """Jobs of `limit_hours` that the run takes, each of which first compiles and starts. Raises
        OneLineError if one ends before it has started.
        """
        trains = limit_hours - start_seconds / 3600
        if trains <= 0:
            raise OneLineError(
                f"--start-seconds {start_seconds:g}: expected less than --limit-hours {limit_hours:g}, "
                f"which are {3600 * limit_hours:g} seconds"
            )
        return math.ceil(self.hours / trains)


def plan_run(
    recipe: Recipe, rates: Rates, *, images: int, validation: int, gpus: int, cores: int
) -> Plan:
    """The plan of a recipe's run. images, validation: of its sets."""
    epochs, every = recipe.schedule.total_epochs, recipe.eval.every_epochs
    validations = math.ceil(epochs / every) if every else 0  # the last epoch has one
    return Plan(
        images=round(images * recipe.data.subset),
        validation=validation * validations / epochs,
        epochs=epochs,
        gpus=gpus,
        cores=cores,
        rates=rates,
        weights=2 if recipe.ema.decay else 1,
    )
