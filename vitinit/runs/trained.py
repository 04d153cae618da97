"""A trained model as something to use: from its run or checkpoint, with its classes and its view.

    trained = vitinit.load("runs/quickstart-impulse-s0")
    trained.predict("photo.jpg", top=3)             # [("cat", 0.81), ("dog", 0.12), …]
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from ..command_line import building
from ..data.augment import normalise
from ..data.class_subsets import imagenet_wnids
from ..data.images import DataError, decode_bytes, decode_image, from_pillow, resize_and_centre_crop
from ..models import build_model
from ..models.convert import native_tensors
from ..models.layers import to_pair
from ..recipe.files import Override, RecipeError, from_dict
from ..recipe.resolve import fresh_recipe
from ..recipe.sections import Recipe
from ..train.checkpoint import load as load_checkpoint, model_state, require_finite
from ..train.transfer import change_size, load_exactly
from .folder import checkpoint_file

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
BOXED = RECIPES / "trained"                          # models that come with the repository
BATCH = 64                                           # images a forward pass of `predict_batch`

Weights = Literal["model", "ema"]
ImageLike = str | os.PathLike | bytes | Image.Image | Tensor


# ---------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """A checkpoint, its tensors still on disk, and what is known of it."""

    path: Path
    state: dict[str, Any]
    recipe: Recipe
    classes: list[str] | None   # the model's, in order; None: nobody wrote them down
    size: tuple[int, int]       # (height, width) of what the model is to see

    @property
    def brings_recipe(self) -> bool:
        return "recipe" in self.state

    @property
    def weights(self) -> list[str]:
        """Which it holds: the model's, and those of its moving average if there is one."""
        return [name for name in ("model", "ema") if name == "model" or self.state.get(name)]

    def model(self, name: str) -> nn.Module:
        """The model with the weights under "model" or "ema", fitted to `size`."""
        return loaded(self.recipe, self.state, self.path, name, self.size)


def open_saved(path: Path, *, recipe: Recipe | None = None, changes: Sequence[Override] = (),
               image_size: tuple[int, int] | None = None) -> Saved:
    """The checkpoint at `path`, or the last one of the run in that folder.

    recipe: what a checkpoint that brings none is a checkpoint of; RecipeError without it. changes:
        to a recipe that it brings. image_size: (height, width); None: the recipe's.
    """
    path = checkpoint_file(path)
    # Tensors stay on disk until a model takes them; an optimiser's are none that one takes.
    state = {key: part for key, part in load_checkpoint(path, mmap=True).items()
             if key not in ("optimizer", "scaler")}
    if "recipe" in state:
        recipe = from_dict(state["recipe"], str(path), changes)
    elif recipe is None:
        raise RecipeError(f"{path}: holds no recipe; say with --recipe what it is a checkpoint of "
                          "(recipe=… in Python)")
    return Saved(path, state, recipe, state.get("classes"), image_size or recipe.data.image_size)


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


# ---------------------------------------------------------------------------------------------
# Images
# ---------------------------------------------------------------------------------------------


def evaluation_view(image: Tensor, recipe: Recipe, size: tuple[int, int] | None = None) -> Tensor:
    """(3, H, W) uint8 → what the recipe evaluates of it, (3, *size) uint8; None: its own size."""
    return resize_and_centre_crop(image, size or recipe.data.image_size, recipe.eval.crop_pct,
                                  recipe.eval.interpolation)


def as_input(views: Tensor, recipe: Recipe) -> Tensor:
    """(B, 3, H, W) uint8 → what the recipe's model takes, float32."""
    return normalise(views, recipe.data.mean, recipe.data.std)


def as_uint8(image: ImageLike) -> Tensor:
    """A file by its path, a file's bytes, one of Pillow's images, or a tensor → (3, H, W) uint8.

    A tensor is (3, H, W) uint8 already. Raises DataError for anything else.
    """
    if isinstance(image, Tensor):
        if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != 3 or not image.numel():
            raise DataError(f"an image is a tensor {tuple(image.shape)} {image.dtype}, expected "
                            "(3, H, W) torch.uint8")
        return image.cpu()
    if isinstance(image, Image.Image):
        return from_pillow(image)
    if isinstance(image, (bytes, bytearray)):
        return decode_bytes(bytes(image), "an image given as bytes")
    if isinstance(image, (str, os.PathLike)):
        return decode_image(os.fspath(image))
    raise DataError(f"an image is a {type(image).__name__}, expected a path, bytes, a PIL image or a "
                    "tensor (3, H, W) torch.uint8")


# ---------------------------------------------------------------------------------------------
# The whole
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A trained model and all that it takes to use it; `load` makes one."""

    model: nn.Module            # in eval mode, on its device, float32
    classes: tuple[str, ...]    # the names of its logits, in order
    recipe: Recipe              # of its training, with every option written out
    image_size: tuple[int, int]  # (height, width) that the model sees
    path: Path                  # of the checkpoint

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def view(self, image: ImageLike) -> Tensor:
        """What the model sees of one image, before it is normalised: (3, H, W) uint8."""
        return evaluation_view(as_uint8(image), self.recipe, self.image_size)

    def preprocess(self, images: ImageLike | Sequence[ImageLike]) -> Tensor:
        """One image or several → (B, 3, H, W) float32 on the model's device.

        This is the evaluation view, resized and cut out and normalised as `eval.py` does it. Raises
        ValueError naming an image that cannot be read.
        """
        if isinstance(images, (str, os.PathLike, bytes, bytearray, Image.Image)) or (
                isinstance(images, Tensor) and images.ndim == 3):
            images = [images]
        views = [self.view(image) for image in images]
        if not views:
            raise DataError("no image was given; expected at least one")
        return as_input(torch.stack(views).to(self.device), self.recipe)

    @torch.no_grad()
    def probabilities(self, inputs: Tensor) -> Tensor:
        """(B, 3, H, W) as `preprocess` makes them → (B, classes) float32, on the CPU."""
        return self.model(inputs).float().softmax(dim=1).cpu()

    def predict(self, image: ImageLike, top: int = 5) -> list[tuple[str, float]]:
        """The `top` likeliest classes of one image and their probabilities, likeliest first."""
        return self.predict_batch([image], top)[0]

    def predict_batch(self, images: Iterable[ImageLike], top: int = 5
                      ) -> list[list[tuple[str, float]]]:
        """Likewise of each of the images."""
        if top < 1:
            raise ValueError(f"top is {top}, expected at least 1")
        images, found = list(images), []
        for start in range(0, len(images), BATCH):
            found += self.ranked(self.probabilities(self.preprocess(images[start:start + BATCH])),
                                 top)
        return found

    def ranked(self, probabilities: Tensor, top: int) -> list[list[tuple[str, float]]]:
        """(B, classes) → of each image the `top` likeliest classes; equal ones in class order."""
        order = probabilities.sort(dim=1, descending=True, stable=True)
        return [[(self.classes[place], value) for place, value in zip(places[:top], values[:top])]
                for places, values in zip(order.indices.tolist(), order.values.tolist())]


def load(path: str | os.PathLike, *, weights: Weights = "model",
         image_size: int | tuple[int, int] | None = None,
         device: str | torch.device | None = None, recipe: str | None = None) -> Trained:
    """A trained model: a run folder, a checkpoint, or the name of a model in recipes/trained.

    weights: the model's, or those of its moving average. image_size: another than it was trained
        at, one integer or (height, width). device: by default the CPU. recipe: what a checkpoint
        that holds none is a checkpoint of, by name or path, for example "deit_base" for DeiT's own.
    Raises ValueError, of one line, for whatever is wrong.
    """
    if weights not in ("model", "ema"):
        raise ValueError(f'weights is {weights!r}, expected "model" or "ema"')
    foreign = None if recipe is None else fresh_recipe(recipe, recipes=RECIPES, say=lambda line: None)
    saved = open_saved(named_run(Path(path)), recipe=foreign,
                       image_size=None if image_size is None else to_pair(image_size))
    if foreign is not None and saved.brings_recipe:
        raise RecipeError(f"{saved.path} brings its own recipe; the recipe {foreign.name} that was "
                          "given is for checkpoints that hold none")
    model = saved.model(weights).eval().requires_grad_(False)
    return Trained(model.to(device or "cpu"), tuple(class_names(saved)), saved.recipe, saved.size,
                   saved.path)


def named_run(path: Path) -> Path:
    """A path as it is, or what recipes/trained holds under that name where nothing lies there."""
    boxed = BOXED / path
    return boxed if not os.path.exists(path) and path.parent == Path(".") and boxed.is_dir() else path


def class_names(saved: Saved) -> list[str]:
    """Those of a checkpoint; of an unnamed ImageNet model its wnids, of any other "0", "1", …"""
    count = saved.recipe.data.num_classes
    if saved.classes is not None:
        return list(saved.classes)
    if count == len(imagenet_wnids()):
        return imagenet_wnids()
    return [str(number) for number in range(count)]
