"""Which recipe `fit` takes, with what changes, and why: by the images and the time there is.

What was measured for it, with what it was chosen over, is in README.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ...base.messages import OneLineError, counted
from ...base.values import to_toml
from ...recipe.files import from_dict, overrides
from ...runs.load import open_file, published_weights
from ..shared.plan import FORWARD, Plan

SMALL = 40  # px of a shorter side, the median over images, up to which they are taken for icons
GRIDS = {"photos_ahead": 16, "photos": 8}  # patches along a side, whatever the size
# 16 patches are taken from so many px of a shorter side on, for so many epochs; below is unmeasured.
FINE_FROM = 96
FEW_EPOCHS = 4
LARGEST = 128  # px to train on
MANY_EPOCHS = 60  # from so many on, images are augmented more
LEAST_EPOCHS = 3  # of fine-tuning all of a model, and of a share of the images
LEAST_SHARE = 0.02
BATCH = 64  # images of a step, in all of these recipes
WARM_UP = 0.1  # of the epochs
TO_VALIDATE = 0.1  # share of the time
OTHER_SECONDS = 15.0  # of opening, drawing weights and writing the report
INIT_AND_FINDINGS = 1_500  # images that are looked at once, beside those to validate on
# Of small images. Attention in all six blocks is not ahead of it, and a step takes .68 of the time.
SHIFTS = {"model.options.shift_blocks": 5, "model.options.shift_kernel": 5}
VARIED = {"rand_augment.layers": 2, "augment.crop_scale": [0.35, 1.0]}


class Images(NamedTuple):
    """What counts of the images for a choice."""

    train: int  # how many are trained on
    val: int
    classes: int
    side: float  # px, median of their shorter sides
    opened_by: list[str]  # changes of a recipe, as --set has them
    stated: list[str]  # further ones, by the user, which count most


@dataclass(frozen=True)
class Choice:
    """A recipe by its name, the changes to it, and why each was made."""

    recipe: str
    images: Images
    changes: dict[str, Any]
    reasons: tuple[str, ...]

    def sets(self) -> list[str]:
        """The changes as --set has them, those of the user last."""
        return [*self.images.opened_by, *self.in_words(), *self.images.stated]

    def in_words(self) -> list[str]:
        """The changes that are not the user's."""
        theirs = {text.partition("=")[0].strip() for text in self.images.stated}
        chosen = self.changes.items()
        return [f"{key}={to_toml(value)}" for key, value in chosen if key not in theirs]

    def but(self, changes: dict[str, Any], reason: str) -> "Choice":
        """This choice with more changes, and why."""
        return replace(self, changes=self.changes | changes, reasons=(*self.reasons, reason))


Planner = Callable[[Choice], Plan]  # measures a choice on this machine, and plans its run


def choose(
    images: Images,
    left: Callable[[], float],
    weights: str,
    planned: Planner,
    stated: str | None = None,
) -> tuple[Choice, Plan]:
    """The choice for these images that ends in time, or after the epochs that a user states, and the
    plan of its epochs.
    left: how many minutes there still are, of which measuring takes some. weights: a checkpoint to
    fine-tune; "": none. stated: the recipe, of GRIDS, that a user wants from scratch. Raises
    OneLineError if there is time for next to none of the images.
    """
    asked = stated_epochs(images)
    choice = from_scratch(images, stated) if stated else by_images(images, weights)
    plan = planned(choice)
    epochs = asked or epochs_in(left(), plan, images)
    if weights and epochs < LEAST_EPOCHS:
        choice = choice.but(
            {"optim.train": "head", "optim.base_lr": 1e-3},
            f"{counted(epochs, 'epoch')} of all layers are few: the classifier alone",
        )
        plan = planned(choice)
    elif choice.recipe == "photos_ahead" and epochs < FEW_EPOCHS and not stated:
        choice = from_scratch(images, "photos").but(
            {},
            f"{counted(epochs, 'epoch')} with patches of half the side, fewer than {FEW_EPOCHS}: "
            "larger patches",
        )
        plan = planned(choice)
    elif choice.recipe in GRIDS and epochs >= MANY_EPOCHS:
        choice = choice.but(VARIED, "so many epochs want images that vary more")
        plan = planned(choice)  # as such images take longer
    minutes = left()
    epochs = asked or epochs_in(minutes, plan, images)
    if epochs < 1:
        choice, plan = of_fewer(choice, minutes, plan)
        epochs = LEAST_EPOCHS
    why = "as --set says" if asked else "fit into the time"
    changes = {"schedule.epochs": epochs, "schedule.warmup_epochs": warm_up_of(epochs)}
    return choice.but(changes, f"{counted(epochs, 'epoch')} {why}"), plan


def stated_epochs(images: Images) -> int:
    """The epochs that a user states, whatever fits into the time; 0: none are stated."""
    epochs = 0
    for change in overrides(sets=images.stated):
        if change.key == "schedule.epochs" and isinstance(change.value, int):
            epochs = change.value
    return epochs


def warm_up_of(epochs: int) -> int:
    return max(1, round(WARM_UP * epochs)) if epochs > 2 else 0


def by_images(images: Images, weights: str) -> Choice:
    """The recipe for these images, however much time there is."""
    if weights:
        return Choice("photos_finetune", images, by_counts(images), ()).but(
            {"init.checkpoint": weights} | model_of(weights),
            f"{images.train:,} images: from the weights {weights}, which have seen many more",
        )
    if images.side <= SMALL:
        return Choice("cifar10_10k_ahead", images, by_counts(images), ()).but(
            {"data.images_per_class": 0, "checkpoint.keep_epochs": []} | SHIFTS,
            f"half of the images have a shorter side of {images.side:g} px or less: a small model, "
            "at 32 px, with attention in the last block, over fixed shifts",
        )
    return from_scratch(images, "photos_ahead" if images.side >= FINE_FROM else "photos")


def from_scratch(images: Images, recipe: str) -> Choice:
    """This recipe for photographs, which are not enlarged, unless a patch would have no pixel."""
    grid = GRIDS[recipe]
    side = min(LARGEST, max(1, int(images.side) // grid) * grid)
    return Choice(recipe, images, by_counts(images), ()).but(
        {"data.image_size": side, "model.options.patch_size": side // grid},
        f"{images.train:,} images: a small model (ViT) from scratch, at {side} px",
    )


def model_of(weights: str) -> dict[str, Any]:
    """The changes that make a recipe's model that of a checkpoint, if its name or its own recipe
    says which that is. Raises CheckpointError if it cannot be read.
    """
    known = published_weights(weights)
    if known:
        return {"model.name": known.model}
    path, state, _ = open_file(Path(weights))
    if "recipe" not in state:
        return {}
    keys = from_dict(state["recipe"], str(path)).keys
    names = ["data.image_size", *(key for key in keys if key.startswith("model."))]
    return {key: keys[key] for key in names}


def by_counts(images: Images) -> dict[str, Any]:
    """The changes of a recipe that go by numbers: after how many epochs the model and its average
    are validated, a batch that fewer images than the recipe's fill, and the warm-up of stated epochs.
    """
    share = 2 * images.val * FORWARD / images.train  # of an epoch's time
    changes = {"eval.every_epochs": max(1, round(share / TO_VALIDATE))}
    asked = stated_epochs(images)
    if asked:  # which the recipe's own warm-up may not fit into
        changes["schedule.warmup_epochs"] = warm_up_of(asked)
    if images.train < BATCH:
        changes["optim.global_batch"] = 2 ** int(math.log2(images.train))
    return changes


def seconds_beside(plan: Plan, images: Images) -> float:
    """What a run takes beside its epochs: to start, and to look at images once more at its end."""
    rates = plan.rates
    looked_at = min(INIT_AND_FINDINGS, 2 * plan.images) + 3 * images.val
    return OTHER_SECONDS + looked_at * (1 / rates.prepare + FORWARD / rates.step)


def epochs_in(minutes: float, plan: Plan, images: Images) -> int:
    """How many of the plan's epochs a run of so many minutes has."""
    return max(0, int((60 * minutes - seconds_beside(plan, images)) / plan.epoch_seconds))


def of_fewer(choice: Choice, minutes: float, plan: Plan) -> tuple[Choice, Plan]:
    """The choice with the share of the images of which LEAST_EPOCHS fit, validated once, and its
    plan. Raises OneLineError if that is less than LEAST_SHARE.
    """
    plan = replace(plan, validation=choice.images.val / LEAST_EPOCHS)
    beside = seconds_beside(plan, choice.images)
    validated = plan.epoch_seconds - plan.images / plan.rate
    left = (60 * minutes - beside) / LEAST_EPOCHS - validated
    share = int(100 * left * plan.rate / plan.images) / 100
    if share < LEAST_SHARE:
        raise OneLineError(
            f"one epoch of {choice.images.train:,} images takes {plan.epoch_seconds / 60:.1f} "
            f"minutes here, and what is beside it {beside / 60:.1f}, of "
            f"{max(minutes, 0.0):.1f} that are left; expected more --minutes"
        )
    changes = {"data.subset": share, "eval.every_epochs": LEAST_EPOCHS}
    reason = f"no epoch of all images fits: {100 * share:.0f} % of each class"
    return choice.but(changes, reason), replace(plan, images=round(share * plan.images))
