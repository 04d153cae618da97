"""Trained models for use in Python: weights, class names and preprocessing, read from a run.

    import vitinit

    trained = vitinit.load("runs/quickstart-impulse-s0")
    trained.predict("photo.jpg", top=3)             # [("cat", 0.81), ("dog", 0.12), …]

`load` and `Trained` are the public interface. Read the file downwards:
    path → `open_saved`: contents, recipe, what is known → `Saved.model` → `load`: a `Trained`
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn

from ..command_line import Parser, building
from ..data.augment import normalise
from ..data.eval_sets import imagenet_wnids
from ..data.images import DataError, decode_bytes, decode_image, from_pillow, resize_and_centre_crop
from ..models import build_model
from ..models.layers import to_pair
from ..recipe.files import Override, RecipeError, from_dict, load_recipe
from ..recipe.files import overrides as parse_overrides, with_data
from ..recipe.sections import Recipe
from ..recipe.values import nearest, plain
from ..train.checkpoint import CheckpointError, model_state, require_finite
from ..train.transfer import load_exactly, start_from
from . import foreign
from .folder import BOXED, RunFolder, read_checkpoint

VIEW_KEYS = ("eval.crop_pct", "eval.interpolation")  # of a run's own recipe, `load` can change
BATCH = 64                                           # images per forward pass in `predict_batch`

Weights = Literal["model", "ema"]
ImageLike = str | os.PathLike | bytes | Image.Image | Tensor


# ---------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------


def build(recipe: Recipe, source: str = "") -> nn.Module:
    """The recipe's model, as its constructor draws it.

    Raises RecipeError, which begins with `source`, by default "recipe NAME".
    """
    with building(source or f"recipe {recipe.name}", "model"):
        return build_model(recipe.model.name, num_classes=recipe.data.num_classes,
                           image_size=recipe.data.image_size, **recipe.model.options)


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
        return ["model", *["ema"] * bool(self.state.get("ema"))]

    def model(self, weights: str, *, or_backbone: bool = False) -> nn.Module:
        """Build the model with the weights "model" or "ema", for images of `size`.

        Learned position embeddings are resized if that is not the recipe's size.

        or_backbone: where the checkpoint has no classifier, build the model without one, which
            returns the pooled features. Otherwise that is an error.

        Returns the model on the CPU, in float32. Raises CheckpointError if the weights do not fit
        the recipe's model, are infinite or NaN, or depend on the image size, and RecipeError if
        the model cannot be built.
        """
        from ..models.convert import native_tensors      # its names are for checkpoints alone
        recipe, tensors = self.recipe, model_state(self.state, self.path, weights)
        require_finite(tensors, weights, self.path)
        tensors = native_tensors(tensors)
        if or_backbone and not any(name.startswith("head") for name in tensors):
            recipe = with_data(recipe, num_classes=0)
        model = build(recipe)
        load_exactly(model, tensors, self.path)
        if self.size == recipe.data.image_size:
            return model
        height, width = self.size
        resized = build(with_data(recipe, image_size=self.size),
                        f"{self.path} at {height}×{width}")
        start_from(resized, model.state_dict(), f"{self.path} at {height}×{width}", model.grid)
        return resized

    def assumptions(self, model: nn.Module) -> str:
        """A line on what is assumed of the model of a checkpoint that contains no recipe."""
        return f"{self.path}: {foreign.assumptions(model, self.recipe, self.description)}"


def open_all(paths: Sequence[Path], *, recipe: str | None, changes: Sequence[Override],
             changeable: Sequence[str], image_size: Any) -> list[Saved]:
    """Open several checkpoints, as `open_saved` does.

    recipe: an error if no checkpoint needs it.
    """
    found = [open_saved(path, recipe=recipe, changes=changes, changeable=changeable,
                        image_size=image_size) for path in paths]
    if recipe is not None and all(saved.brings_recipe for saved in found):
        raise RecipeError(f"{found[0].path}: brings its own recipe; the recipe {recipe} that was "
                          "given is for checkpoints that hold none")
    return found


def open_saved(path: Path, *, recipe: str | None = None, changes: Sequence[Override] = (),
               changeable: Sequence[str] = (), image_size: Any = None) -> Saved:
    """Open a checkpoint, a run folder, or a model of recipes/trained (see `read_checkpoint`).

    Args:
        recipe: the name or the file of a recipe, for a checkpoint that contains none.
        changes: overrides of the recipe. Of one that the checkpoint contains only the keys
            `changeable` can change; other changes are an error, unless they are for `recipe`.
        image_size: in pixels: 288, (192, 256) or "192,256"; None: that of the recipe.

    Raises CheckpointError if the file cannot be read, and RecipeError if there is no recipe or a
    value is invalid.
    """
    # Tensors stay on disk until a model copies them; no model needs those of the optimiser.
    state, path = read_checkpoint(path, mmap=True)
    state = {key: part for key, part in state.items() if key not in ("optimizer", "scaler")}
    description = None
    if "recipe" in state:
        for change in changes:
            if change.key not in changeable and recipe is None:
                raise RecipeError(f"{change.text}: the checkpoint brings its own recipe, of which "
                                  "only how to evaluate can change"
                                  f"{nearest(change.key, changeable)}")
        found = from_dict(state["recipe"], str(path),
                          [change for change in changes if change.key in changeable])
        found = with_data(found, root=str(RunFolder(path.parent).data_of(-1).get(
            "root", found.data.root)))
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
    size = found.data.image_size if image_size is None else parse_size(image_size)
    return Saved(path, state, found, size, description)


def parse_size(given: Any) -> tuple[int, int]:
    """(height, width) in pixels of 288, (192, 256) or "192,256"; RecipeError if it is no size."""
    try:
        sides = list(map(int, given.split(","))) if isinstance(given, str) else given
        size = to_pair(sides * 2 if isinstance(given, str) and len(sides) == 1 else sides)
    except (TypeError, ValueError):
        size = (0, 0)
    if min(size) < 1:
        raise RecipeError(f"the image size is {given!r}, expected a number of pixels, such as 288, "
                          "or height and width, such as 192,256")
    return size


# ---------------------------------------------------------------------------------------------
# The options of programs that open checkpoints
# ---------------------------------------------------------------------------------------------


def add_options(parser: Parser, changeable: Sequence[str]) -> None:
    """Add --image-size, --recipe and --set. changeable: see `open_saved`."""
    parser.add_argument("--image-size", metavar="N or H,W",
                        help="in pixels, if it is to differ from the recipe's")
    parser.add_argument("--recipe", help="describes checkpoints that contain no recipe")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
                        help="override any key of the recipe given by --recipe, and of any recipe "
                             f"{', '.join(changeable)}")


def add_run(parser: Parser) -> None:
    """Add all arguments that `load_run` takes: one run, and how to open it."""
    parser.add_argument("run", metavar="RUN", help="run folder or checkpoint")
    parser.add_argument("--weights", choices=("model", "ema"), default="model")
    add_options(parser, VIEW_KEYS)


def load_run(args: argparse.Namespace, device: str = "cpu") -> Trained:
    """`load` what the arguments of `add_run` say; CheckpointError if it has no classifier."""
    changes = {change.key: change.value for change in parse_overrides(sets=args.set)}
    trained = load(args.run, weights=args.weights, image_size=args.image_size, device=device,
                   recipe=args.recipe, overrides=changes)
    trained.require_classifier()
    return trained


# ---------------------------------------------------------------------------------------------
# Images
# ---------------------------------------------------------------------------------------------


def evaluation_view(image: Tensor, recipe: Recipe, size: tuple[int, int] | None = None) -> Tensor:
    """Resize and centre-crop an image as the recipe's evaluation does.

    image: (3, H, W) uint8. size: (height, width); None: the recipe's image size. Returns
    (3, height, width) uint8.
    """
    return resize_and_centre_crop(image, size or recipe.data.image_size, recipe.eval.crop_pct,
                                  recipe.eval.interpolation)


def as_input(views: Tensor, recipe: Recipe) -> Tensor:
    """Normalise views (B, 3, H, W) uint8 by the recipe's mean and std → (B, 3, H, W) float32."""
    return normalise(views, recipe.data.mean, recipe.data.std)


def as_uint8(image: ImageLike) -> Tensor:
    """Read an image into a tensor (3, H, W) uint8, in RGB, on the CPU.

    image: the path of a file, a file's bytes, a PIL image, or a tensor that is (3, H, W) uint8
    already. Raises DataError, a ValueError, for anything else and for files that cannot be decoded.
    """
    if isinstance(image, Image.Image):
        return from_pillow(image)
    if isinstance(image, bytes):
        return decode_bytes(image, "an image given as bytes")
    if isinstance(image, (str, os.PathLike)):
        return decode_image(os.fspath(image))
    what = f"a {type(image).__name__}"
    if isinstance(image, Tensor):
        if image.dtype == torch.uint8 and image.ndim == 3 and len(image) == 3 and image.numel():
            return image.cpu()
        what = f"a tensor {tuple(image.shape)} {image.dtype}"
    raise DataError(f"an image is {what}, expected a path, bytes, a PIL image or a tensor (3, H, "
                    "W) torch.uint8")


# ---------------------------------------------------------------------------------------------
# The public interface
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A trained model together with its class names and its preprocessing. `load` makes one.

    Wherever a method takes an image, it may be a path, the bytes of an image file, a PIL image, or
    a tensor (3, H, W) uint8. Images may have any size.

    Example:
        trained = vitinit.load("runs/quickstart-impulse-s0")
        [(name, probability)] = trained.predict("photo.jpg", top=1)
        logits = trained.model(trained.preprocess(["a.jpg", "b.jpg"]))       # (2, classes)
    """

    model: nn.Module            # in eval mode: what `preprocess` returns → logits (B, classes)
    classes: tuple[str, ...]    # the class of each logit, in order; () without a classifier
    recipe: Recipe              # of the training, with every option written out
    image_size: tuple[int, int]  # (height, width) of the model's input
    path: Path                  # of the checkpoint

    @property
    def device(self) -> torch.device:
        """The device that the model's parameters are on."""
        return next(self.model.parameters()).device

    def view(self, image: ImageLike) -> Tensor:
        """Resize and centre-crop one image to the size of the model's input.

        Returns (3, *image_size) uint8, on the CPU. Raises ValueError, naming the image, if it
        cannot be read.
        """
        return evaluation_view(as_uint8(image), self.recipe, self.image_size)

    def preprocess(self, images: ImageLike | Sequence[ImageLike]) -> Tensor:
        """Turn one image, or several, into input of the model, exactly as `eval.py` does.

        Each image is resized, centre-cropped and normalised by the recipe's mean and std.

        Returns (B, 3, *image_size) float32 on the model's device, with B = 1 for a single image.
        Raises ValueError, naming the image, if one cannot be read, and if there is none.
        """
        if isinstance(images, ImageLike) and getattr(images, "ndim", 3) == 3:
            images = [images]
        views = [self.view(image) for image in images]
        if not views:
            raise DataError("no image was given; expected at least one")
        return as_input(torch.stack(views).to(self.device), self.recipe)

    @torch.no_grad()
    def probabilities(self, inputs: Tensor) -> Tensor:
        """Class probabilities (B, classes) float32, on the CPU.

        inputs: (B, 3, *image_size), as `preprocess` returns them. The probabilities of each image
        are the softmax of its logits.
        """
        return self.model(inputs).float().softmax(dim=1).cpu()

    def predict(self, image: ImageLike, top: int = 5) -> list[tuple[str, float]]:
        """Classify one image.

        Returns the `top` likeliest classes as (name, probability), likeliest first; all of them if
        the model has fewer. Raises ValueError if the image cannot be read, or if `top` is below 1.

        Example:
            trained.predict("photo.jpg", top=3)     # [("cat", 0.81), ("dog", 0.12), ("fox", 0.02)]
        """
        return self.predict_batch([image], top)[0]

    def predict_batch(self, images: Iterable[ImageLike], top: int = 5
                      ) -> list[list[tuple[str, float]]]:
        """Classify several images; returns for each of them, in order, what `predict` returns.

        The images pass through the model 64 at a time. Raises ValueError like `predict`.
        """
        if top < 1:
            raise ValueError(f"top is {top}, expected at least 1")
        self.require_classifier()
        images, found = list(images), []
        for start in range(0, len(images), BATCH):
            found += self.ranked(self.probabilities(self.preprocess(images[start:start + BATCH])),
                                 top)
        return found

    def require_classifier(self) -> None:
        """Raise CheckpointError, a ValueError, if the checkpoint is a bare backbone."""
        if not self.classes:
            raise CheckpointError(f"{self.path}: holds no classifier, so there are no classes; its "
                                  "model returns features, and init.checkpoint fine-tunes it")

    def ranked(self, probabilities: Tensor, top: int) -> list[list[tuple[str, float]]]:
        """The `top` likeliest classes of each image, as (name, probability), likeliest first.

        probabilities: (B, classes). Classes of equal probability keep the order of `classes`.
        """
        order = probabilities.sort(dim=1, descending=True, stable=True)
        return [[(self.classes[index], value) for index, value in zip(indices[:top], values[:top])]
                for indices, values in zip(order.indices.tolist(), order.values.tolist())]


def load(path: str | os.PathLike, *, weights: Weights = "model",
         image_size: int | tuple[int, int] | None = None,
         device: str | torch.device | None = None, recipe: str | None = None,
         overrides: Mapping[str, Any] | None = None) -> Trained:
    """Load a trained model with its class names and preprocessing.

    Args:
        path: a run folder (its last.pt is read), a checkpoint file (.pt, .pth or .safetensors), a
            folder that transformers' save_pretrained wrote, or the name of a model in
            recipes/trained.
        weights: "model", or "ema" for the exponential moving average of the weights.
        image_size: the input size in pixels, if it is to differ from that of training: an integer
            for a square, or (height, width). Position embeddings are resized; a model whose weights
            depend on the image size (an MLP-Mixer, for example) raises an error.
        device: where the model is put; default: the CPU.
        recipe: describes the model of a checkpoint that contains no recipe: the name of a recipe,
            or the path of a .toml file. Official DeiT-B weights are loaded with recipe="deit_base".
            A folder of transformers describes itself.
        overrides: values for keys of the recipe, such as {"eval.crop_pct": 1.0}. Of a recipe that
            the checkpoint contains, only `VIEW_KEYS` can change: how images are prepared.

    For a checkpoint of another project, a line on standard error says what is assumed that tensors
    do not show, such as the number of heads.

    Returns a `Trained`, whose model is in evaluation mode and does not require gradients. Class
    names are those that the checkpoint records; without them they are ImageNet's synset ids (such
    as "n01440764") for a model of 1000 classes, and otherwise "0", "1", …. A checkpoint without a
    classifier has no classes, and its model returns the pooled features.

    Raises ValueError, with a message of one line, if there is no such checkpoint, if it is damaged,
    if it does not fit its model, or if an argument has an invalid value.

    Example:
        trained = vitinit.load("runs/quickstart-impulse-s0", weights="ema", device="cuda")
        trained.predict("photo.jpg", top=3)         # [("cat", 0.81), ("dog", 0.12), ("fox", 0.02)]
    """
    if weights not in ("model", "ema"):
        raise ValueError(f'weights is {weights!r}, expected "model" or "ema"')
    changes = [Override(key, plain(value), f"{key}={value!r}")
               for key, value in (overrides or {}).items()]
    saved, = open_all([Path(path)], recipe=recipe, changes=changes, changeable=VIEW_KEYS,
                      image_size=image_size)
    model = saved.model(weights, or_backbone=not saved.brings_recipe).eval().requires_grad_(False)
    if not saved.brings_recipe:
        print(saved.assumptions(model), file=sys.stderr, flush=True)
    numbers = imagenet_wnids() if model.num_classes == 1000 else map(str, range(model.num_classes))
    classes = tuple(saved.classes or numbers) if model.num_classes else ()
    return Trained(model.to(device or "cpu"), classes, saved.recipe, saved.size, saved.path)

