"""The model that a new run starts from: built, and initialised on the run's own training images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..command_line import building
from ..data.datasets import DATA_SETS, Source, open_split, oriented, stratified_part
from ..data.images import DataError
from ..init import init_weights, reads_images
from ..keys import Stream, keyed_generator
from ..models import build_model
from ..recipe.resolve import with_num_classes
from ..recipe.sections import DataSection, Recipe
from .trained import as_input, evaluation_view

INIT_IMAGES = 1000              # training images that an init may read


def open_training_set(data: DataSection, root: str) -> tuple[Source, Source]:
    """The whole training set of a recipe, and the part of it that is trained on.

    root: the data set's folder. Raises DataError if the data set cannot be opened, or has a single
    class.
    """
    whole = oriented(open_split(data.name, root, "train", data.num_classes),
                     data.apply_exif_orientation)
    if len(whole.classes) < 2:
        raise DataError(f"{root}: one class found, '{whole.classes[0]}'; expected two at least, a "
                        "folder each")
    return whole, stratified_part(whole, share=data.subset, images_per_class=data.images_per_class,
                                  held_out=data.held_out_per_class, seed=data.subset_seed)


def training_views(recipe: Recipe, source: Source, count: int) -> Tensor:
    """`count` training images, or all if there are fewer: normalised evaluation views (n, 3, H, W).

    Which ones is keyed by the run's seed.
    """
    order = keyed_generator(recipe.run.seed, Stream.INIT_IMAGES).permutation(len(source))
    return as_input(torch.stack([evaluation_view(source.image(int(index)), recipe)
                                 for index in order[:count]]), recipe)


def without_data(recipe: Recipe) -> Recipe:
    """The recipe with a number of classes, for a model that is built without its data set.

    Where it is to be taken from the data (0), it is that of the published set, or 2.
    """
    return with_num_classes(recipe, recipe.data.num_classes
                            or DATA_SETS[recipe.data.name].num_classes or 2)


def built(recipe: Recipe) -> nn.Module:
    """The recipe's model, as its constructor draws it. Raises RecipeError."""
    with building(f"recipe {recipe.name}", "model"):
        return build_model(recipe.model.name, num_classes=recipe.data.num_classes,
                           image_size=recipe.data.image_size, **recipe.model.options)


def initialise(model: nn.Module, recipe: Recipe, source: Source | None) -> None:
    """Apply the recipe's init to its model, on the CPU, from a generator of the run's seed.

    source: the training images, of which some inits read INIT_IMAGES; None: there are none. Raises
    RecipeError, and DataError for an image that cannot be read.
    """
    init = recipe.init
    with building(f"recipe {recipe.name}", "init"):
        images = (training_views(recipe, source, INIT_IMAGES)
                  if source is not None and reads_images(init.options) else None)
        init_weights(model, init.name, **init.options, images=images,
                     generator=torch.Generator().manual_seed(recipe.run.seed))
