"""A trained model, from its checkpoint."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ..command_line import building
from ..models import build_model
from ..models.convert import native_tensors
from ..recipe.sections import Recipe
from ..train.checkpoint import model_state, require_finite
from ..train.transfer import change_size, load_exactly


def loaded(recipe: Recipe, state: dict, path: Path, name: str,
           image_size: tuple[int, int] | None = None) -> nn.Module:
    """The recipe's model with the checkpoint's weights under "model" or "ema".

    image_size: (height, width), another than the recipe's, to fit the model to.
    """
    def built(size: tuple[int, int], place: str) -> nn.Module:
        with building(place, "model"):
            return build_model(recipe.model.name, num_classes=recipe.data.num_classes,
                               image_size=size, **recipe.model.options)
    model = built(recipe.data.image_size, f"recipe {recipe.name}")
    tensors = model_state(state, path, name)
    require_finite(tensors, name, path)              # what they classify would be chance
    load_exactly(model, native_tensors(tensors), path)
    if image_size in (None, recipe.data.image_size):
        return model
    resized = built(image_size, f"{path} at {image_size[0]}×{image_size[1]}")
    change_size(model, resized, path)
    return resized
