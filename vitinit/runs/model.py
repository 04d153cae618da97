"""The model of a run: built, for its task, and wrapped to be trained."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from ..data.datasets import DATA_SETS
from ..models import build_model
from ..models.layers import Classifier
from ..recipe.files import building
from ..recipe.sections import EngineSection, Recipe
from ..tasks import Task


def build(recipe: Recipe, source: str = "") -> Classifier:
    """The recipe's model, as its constructor draws it; RecipeError begins with `source`, if any."""
    with building(source or f"recipe {recipe.name}", "model"):
        return build_model(
            recipe.model.name,
            num_classes=recipe.data.num_classes,
            image_size=recipe.data.image_size,
            in_channels=recipe.data.channels,
            **recipe.model.options,
        )


def without_data(recipe: Recipe) -> Recipe:
    """The recipe with the published set's number of classes, or 2, where the data would say it."""
    stated = recipe.data.num_classes or DATA_SETS[recipe.data.name].num_classes
    return recipe.with_data(num_classes=stated or 2)


def task_of(recipe: Recipe, classes: Sequence[str] = ()) -> Task:
    """What the recipe learns, but for a teacher. classes: the names of those in the data."""
    return recipe.task.kind(classes, recipe.task.options)


def trained_model(task: Task, classifier: Classifier, recipe: Recipe) -> nn.Module:
    """What is trained: the classifier, or what holds it, such as one that reconstructs images."""
    with building(f"recipe {recipe.name}", "task"):
        return task.model(classifier)


def compiled(model: nn.Module, engine: EngineSection) -> nn.Module:
    """What torch.compile makes of a model, which is a module, though its type does not say so; or
    the model itself, if engine.compile is false.
    """
    if not engine.compile:
        return model
    return cast(nn.Module, torch.compile(model, mode=engine.compile_mode))
