"""The mass on the targets of a run's init, in a line at its start."""

from torch import nn

from ..data.images import DataError
from ..data.sources import Source
from ..recipe.sections import Recipe
from ..runs.data import training_views
from .targets import has_targets, mass_on_images

MASS_IMAGES = 64                # on which the mass on the init's targets is measured


class MassWatcher:
    """Says how much attention is on the init's targets, if it has any, in MASS_IMAGES images."""

    def initialised(self, model: nn.Module, recipe: Recipe, train_set: Source) -> list[str]:
        name, options = recipe.init.name, recipe.init.options
        if not has_targets(model, name, options):
            return []
        try:
            images = training_views(recipe, train_set, MASS_IMAGES)
        except DataError:                            # training will say so when it needs the image
            return []
        mass = mass_on_images(model, name, options, images)
        return [f"mass    {mass}, on {len(images)} training images"]
