"""Checkpoints as they are opened, with what is known about them, before a model is built.

    path → `open_saved`: contents, recipe, what is known → `Saved.model`
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ..bounds import PAIR
from ..command_line import Parser
from ..models.convert import native_tensors
from ..recipe.files import Override, RecipeError, from_dict, load_recipe
from ..recipe.sections import Recipe
from ..recipe.values import convert, nearest
from ..train.checkpoint import model_state, require_finite
from ..train.transfer import load_exactly, start_from
from . import foreign
from .folder import BOXED, RunFolder, read_checkpoint
from .start import build


class Saved(NamedTuple):
    """An opened checkpoint, whose tensors are still on disk, and what is known about it."""

    path: Path                  # of the checkpoint file
    state: dict[str, Any]       # the checkpoint's contents, without optimiser and loss scaling
    recipe: Recipe
    size: tuple[int, int]       # (height, width) of the images that the model is to take
    description: foreign.Description | None     # of another project's files beside it

    @property
    def name(self) -> str:
        """The path as the user knows it: of a model in recipes/trained it begins with its name."""
        return str(self.path.relative_to(BOXED) if self.path.is_relative_to(BOXED) else self.path)

    @property
    def brings_recipe(self) -> bool:
        """Whether the checkpoint contains the recipe it was trained by."""
        return "recipe" in self.state

    @property
    def classes(self) -> Sequence[str] | None:
        """The class of each logit, in order; None if neither checkpoint nor files name them."""
        return self.state.get("classes") or (self.description and self.description.classes)

    @property
    def weights(self) -> list[str]:
        """Which weights the checkpoint contains: "model", and "ema" for a moving average."""
        return ["model", "ema"] if self.state.get("ema") else ["model"]

    def model(self, weights: str, *, or_backbone: bool = False) -> nn.Module:
        """Build the model with the weights "model" or "ema", for images of `size`.

        It is on the CPU, in float32. Learned position embeddings are resized if that is not the
        recipe's size. Raises CheckpointError if the weights do not fit the recipe's model, are
        infinite or NaN, or depend on the image size, and RecipeError if it cannot be built.

        or_backbone: where the checkpoint has no classifier, build the model without one, which
            returns the pooled features. Otherwise that is an error.
        """
        recipe, tensors = self.recipe, model_state(self.state, self.path, weights)
        require_finite(tensors, weights, self.path)
        tensors = native_tensors(tensors)
        if or_backbone and not any(name.startswith("head") for name in tensors):
            recipe = recipe.with_data(num_classes=0)
        model = build(recipe)
        load_exactly(model, tensors, self.path)
        if self.size == recipe.data.image_size:
            return model
        place = f"{self.path} at {self.size[0]}×{self.size[1]}"
        resized = build(recipe.with_data(image_size=self.size), place)
        start_from(resized, model.state_dict(), place, model.grid)
        return resized

    def assumptions(self) -> str:
        """A line on what is assumed of the model of a checkpoint that contains no recipe."""
        return f"{self.path}: {foreign.assumptions(self.recipe, self.description)}"


def open_saved(path: Path, *, recipe: str | None = None, changes: Sequence[Override] = (),
               changeable: Sequence[str] = (), image_size: Any = None) -> Saved:
    """Open a checkpoint, a run folder, or a model of recipes/trained (see `read_checkpoint`).

    Args:
        recipe: the name or the file of a recipe, for a checkpoint that contains none.
        changes: overrides of the recipe. Of one that the checkpoint contains only the keys
            `changeable` can change.
        image_size: in pixels: 288 or (192, 256); None: that of the recipe.

    Raises CheckpointError if the file cannot be read, and RecipeError if there is no recipe, or two
    of them, or a value is invalid.
    """
    # Tensors stay on disk until a model copies them; no model needs those of the optimiser.
    state, path = read_checkpoint(path, mmap=True)
    state = {key: part for key, part in state.items() if key not in ("optimizer", "scaler")}
    description = None
    if "recipe" in state:
        if recipe is not None:
            raise RecipeError(f"{path}: brings its own recipe; the recipe {recipe} that was given "
                              "is for checkpoints that hold none")
        for change in changes:
            if change.key not in changeable:
                raise RecipeError(f"{change.text}: the checkpoint brings its own recipe, of which "
                                  "only how to evaluate can change"
                                  f"{nearest(change.key, changeable)}")
        found = from_dict(state["recipe"], str(path), changes)
        where = RunFolder(path.parent).data_of(-1)   # a relative path was relative to elsewhere
        found = found.with_data(root=str(where.get("root", found.data.root)))
    else:
        description = foreign.read_description(path, str(state.get("arch", "")))
        recipe = recipe or (description and description.recipe)
        if not recipe:
            raise RecipeError(f"{path}: holds no recipe; say with --recipe what it is a checkpoint "
                              "of (recipe=… in Python)")
        found = load_recipe(recipe, [*(description.changes if description else ()), *changes])
    if not found.data.num_classes:
        raise RecipeError(f"{path}: recipe {found.name} has data.num_classes = 0, which only "
                          "training takes from the data; expected the checkpoint's number")
    try:
        size = convert(found.data.image_size if image_size is None else image_size, PAIR,
                       {"minimum": 1})
    except TypeError as error:
        raise RecipeError(f"the image size is {error}") from None
    return Saved(path, state, found, size, description)


def fine_tune(model: nn.Module, recipe: Recipe) -> list[str]:
    """Start a run from the weights of init.checkpoint: load them into `model`, as initialised.

    The checkpoint is a file, a run folder, or a folder of transformers.

    Returns lines for the summary: what was loaded and, for another project's checkpoint, what is
    assumed that tensors do not show. Raises CheckpointError if the checkpoint does not fit.
    """
    init = recipe.init
    state, path = read_checkpoint(Path(init.checkpoint))
    tensors = native_tensors(model_state(state, path, init.checkpoint_weights))
    notes = []
    if "recipe" not in state:
        description = foreign.read_description(path, str(state.get("arch", "")))
        foreign.require_same_function(description, recipe)
        notes = [f"note    {foreign.assumptions(recipe, None)}"]
    transfer = start_from(model, tensors, path, state.get("grid"))
    return [f"start   {init.checkpoint}: {transfer}", *notes]


def parse_sides(text: str) -> int | list[int]:
    """The argument of --image-size: "288" → 288, "192,256" → [192, 256]."""
    try:
        sides = [int(side) for side in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: expected a number of pixels, such as 288, or "
                                         "height and width, such as 192,256") from None
    return sides if len(sides) > 1 else sides[0]


def add_options(parser: Parser, changeable: Sequence[str]) -> None:
    """Add --image-size, --recipe and --set. changeable: see `open_saved`."""
    parser.add_argument("--image-size", type=parse_sides, metavar="N or H,W",
                        help="in pixels, if it is to differ from the recipe's")
    parser.add_argument("--recipe", help="describes checkpoints that contain no recipe")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
                        help="override any key of the recipe given by --recipe, and of any recipe "
                             f"{', '.join(changeable)}")
