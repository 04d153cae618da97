"""How long an epoch of a choice takes on this machine, by some of its steps on the real images."""

from statistics import fmean

import torch

from ..shared.plan import Plan, Rates, plan_run
from ..shared.steps import clock_of, given_step, measured_recipe, set_up, steps_of, train_on
from .choice import Choice

STEPS = 5  # that are measured at least, after one that does not count
SHARE, MOST_SECONDS = 0.04, 30.0  # of the minutes to measure, at most: other programs come and go


def measuring_seconds(minutes: float) -> float:
    """How long a choice for so many minutes is measured."""
    return min(60 * SHARE * minutes, MOST_SECONDS)


def plan_of(choice: Choice, device: torch.device, minutes: float) -> Plan:
    """The plan of a choice's run of so many minutes, by steps on its images, of which nothing stays.
    Loader processes work beside the steps, so that what counts of loading is how long a step waits.
    """
    clock = clock_of(device)
    images = choice.images
    recipe = measured_recipe(choice.recipe, choice.sets(), device)
    recipe = recipe.with_data(num_classes=images.classes)
    state, forward = set_up(recipe, device)
    steps = steps_of(recipe, device)
    prepares: list[float] = []  # seconds of an image, as the following
    trains: list[float] = []
    began, least = clock(), measuring_seconds(minutes)
    while len(trains) <= STEPS or clock() - began < least:
        asked = clock()
        number, (micro_batch, *_) = next(steps)
        part = micro_batch.prepare()
        ready = clock()
        train_on(state, [given_step(number, [part])], forward=forward, amp=recipe.engine.amp)
        batch = len(micro_batch.positions)
        prepares.append((ready - asked) / batch)
        trains.append((clock() - ready) / batch)
    rates = Rates(step=1 / fmean(trains[1:]), core=float("inf"), prepare=1 / fmean(prepares[1:]))
    recipe = recipe.with_data(subset=1.0)  # of which `images` are already
    return plan_run(recipe, rates, images=images.train, validation=images.val, gpus=1, cores=1)
