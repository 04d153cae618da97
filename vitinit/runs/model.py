"""The model of a run: built, initialised or read from a checkpoint, and wrapped to be trained."""

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..data.datasets import DATA_SETS
from ..data.sources import Source
from ..init import family_of, init_weights, reads_images
from ..init.baseline import default
from ..models import build_model
from ..models.layers import Classifier
from ..models.masked_autoencoder import MaskedAutoencoder
from ..models.vit import VisionTransformer
from ..recipe.files import building
from ..recipe.sections import Recipe
from ..train.distributed import Processes
from ..train.metrics import Progress
from ..train.optim import freeze_below_head, optimizer_for
from ..train.state import Ema, TrainState
from ..watch.mass import measure_mass
from .data import training_views

INIT_IMAGES = 512               # training images that an init may read


def build(recipe: Recipe, source: str = "") -> Classifier:
    """The recipe's model, as its constructor draws it; RecipeError begins with `source`, if any."""
    with building(source or f"recipe {recipe.name}", "model"):
        return build_model(recipe.model.name, num_classes=recipe.data.num_classes,
                           image_size=recipe.data.image_size, **recipe.model.options)


def without_data(recipe: Recipe) -> Recipe:
    """The recipe with the published set's number of classes, or 2, where the data would say it."""
    return recipe.with_data(num_classes=recipe.data.num_classes
                     or DATA_SETS[recipe.data.name].num_classes or 2)


def initialise(model: Classifier, recipe: Recipe, source: Source | None) -> torch.Generator:
    """Apply the recipe's init to its model, on the CPU, from a generator of the run's seed, which
    is returned. source: the training images, of which some inits read INIT_IMAGES; None: there are
    none. Raises RecipeError, and DataError for an image that cannot be read.
    """
    init = recipe.init
    with building(f"recipe {recipe.name}", "init"):
        images = (training_views(recipe, source, INIT_IMAGES)
                  if source is not None and not init.checkpoint    # which replaces what they show
                  and reads_images(init.name, family_of(model)) else None)
        generator = torch.Generator().manual_seed(recipe.run.seed)
        init_weights(model, init.name, **init.options, images=images, generator=generator)
    return generator


def for_task(classifier: Classifier, recipe: Recipe) -> Classifier | MaskedAutoencoder:
    """What the recipe trains: the classifier, or what reconstructs images, with its decoder."""
    if recipe.task.name == "classify":
        return classifier
    with building(f"recipe {recipe.name}", "task"):
        return MaskedAutoencoder(cast(VisionTransformer, classifier), **recipe.task.options)


def initial_state(recipe: Recipe, processes: Processes, train_set: Source | None = None,
                  saved: dict[str, Any] | None = None, path: Path = Path()
                  ) -> tuple[TrainState, list[str]]:
    """The state that training starts from, and lines for the terminal about it.

    In a new run the weights are those of the init, or of the checkpoint that the recipe names. All
    processes take the main one's, before the moving average copies them.

    train_set: the training images, which some inits read, if they are there.
    saved: the contents of the checkpoint at `path`, to resume from; None for a new run.
    """
    classifier, notes = build(recipe), []
    model = for_task(classifier, recipe)
    if saved is None:
        with processes.together():
            generator = initialise(classifier, recipe, train_set)
            if isinstance(model, MaskedAutoencoder):
                default(model.decoder, generator=generator)
            if recipe.init.checkpoint:
                from .saved import fine_tune
                notes = fine_tune(classifier, recipe, [*map(str, train_set.classes)]
                                  if train_set and model is classifier else [])
            elif processes.is_main and train_set is not None:
                notes = measure_mass(classifier, recipe, train_set)
    model.to(processes.device).to(memory_format=(
        torch.channels_last if recipe.engine.channels_last else torch.contiguous_format))
    if saved is None:
        processes.share(model)
    if recipe.optim.train == "head":
        freeze_below_head(model)
    with building(f"recipe {recipe.name}", "optim"):
        optimizer = optimizer_for(model, recipe.optim)
    scaler = torch.amp.GradScaler(processes.device.type, enabled=recipe.engine.amp == "fp16")
    ema = Ema(model, decay=recipe.ema.decay, warmup=recipe.ema.warmup) if recipe.ema.decay else None
    state = TrainState(model, optimizer, scaler, ema, Progress())
    if saved is not None:
        state.load_state_dict(saved, path)
    return state, notes


def wrap_models(state: TrainState, recipe: Recipe, processes: Processes
                ) -> tuple[nn.Module, list[nn.Module]]:
    """The state's model as it is called to train it, and those to evaluate, which share its
    weights: it and, if there is one, its moving average.
    """
    forward, measured = state.model, [state.model, *([state.ema.model] if state.ema else [])]
    if processes.world_size > 1:
        forward = DistributedDataParallel(forward, gradient_as_bucket_view=True)
        # Only BatchNorm's statistics change; before evaluation `Processes.share` sends them.
        forward.broadcast_buffers = False            # an argument that torch 2.14 deprecates
    if recipe.engine.compile:
        forward, measured = compiled(forward), [*map(compiled, measured)]
    return forward, measured


def compiled(model: nn.Module) -> nn.Module:
    """What torch.compile makes of a model, which is a module, though its type does not say so."""
    return cast(nn.Module, torch.compile(model))
