"""Trained models for use in Python: weights, class names and preprocessing, read from a run."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ..base.files import CheckpointError
from ..base.messages import counted, in_brief, say, shortened, times
from ..base.values import Size
from ..data.datasets import unnamed_classes
from ..data.images import (
    DataError,
    decode_bytes,
    decode_image,
    from_array,
    from_pillow,
    room_for,
    with_channels,
)
from ..recipe.files import overrides as recipe_changes
from ..recipe.sections import Recipe
from .data import as_input, evaluation_view
from .load import open_saved

# Of a run's own recipe, `load` can change these.
VIEW_KEYS = ("eval.crop_pct", "eval.interpolation", "task.options.threshold")
BATCH = 64  # images per forward pass in `predict_batch`

Weights = Literal["model", "ema"]
ImageLike = str | os.PathLike | bytes | Image.Image | np.ndarray | Tensor


def as_uint8(image: ImageLike, channels: int) -> Tensor:
    """Read an image into a tensor (channels, H, W) uint8, three of them in RGB, on the CPU; DataError
    if it is none.
    """
    if isinstance(image, Image.Image):
        try:
            return with_channels(from_pillow(image, channels), channels)
        except OSError as error:  # Pillow reads a file when it is asked for it
            raise DataError(f"an image of Pillow that cannot be read: {in_brief(error)}") from None
    if isinstance(image, bytes):
        return decode_bytes(image, "an image given as bytes", channels=channels)
    if isinstance(image, (str, os.PathLike)):
        return decode_image(os.fspath(image), channels=channels)
    if isinstance(image, np.ndarray):
        fits = image.shape[2:] == (channels,) or channels == 1 and image.ndim == 2
        if fits and image.dtype in (np.uint8, np.uint16) and image.size:
            return from_array(image)
        what = f"an array {image.shape} {image.dtype}"
    elif isinstance(image, Tensor):
        if (
            image.dtype == torch.uint8
            and image.ndim == 3
            and len(image) == channels
            and image.numel()
        ):
            return image.cpu()
        what = f"a tensor {tuple(image.shape)} {image.dtype}"
    else:
        what = f"a {type(image).__name__}"
    raise DataError(
        f"an image is {what}, expected a path, bytes, a PIL image or a tensor ({channels}, H, "
        f"W) torch.uint8, or an array (H, W, {channels}) uint8"
    )


def as_several(images: Any) -> list[ImageLike]:
    """One image, or several, as a list. An array or a tensor of four dimensions is several."""
    if isinstance(images, ImageLike) and getattr(images, "ndim", 3) in (2, 3):
        return [images]
    return list(images)


@dataclass(frozen=True, repr=False)
class Trained:
    """A trained model together with its class names and its preprocessing. `load` makes one.

    An image may be a path, a file's bytes, a PIL image, an array (H, W, 3) uint8, such as a frame
    of a video, or a tensor (3, H, W) uint8, each in RGB and of any size; 3 stands for the channels of
    the model's images, as many as recipe.data.mean has values.

    Example:
        trained = vitinit.load("runs/quickstart-impulse-s0")
        [(name, probability)] = trained.predict("photo.jpg", top=1)
        logits = trained.model(trained.preprocess(["a.jpg", "b.jpg"]))       # (2, classes)
    """

    model: nn.Module  # in eval mode: what `preprocess` returns → logits (B, classes)
    classes: tuple[str, ...]  # the class of each logit, in order; () without a classifier
    recipe: Recipe  # of the training, with every option written out
    image_size: Size  # (height, width) of the model's input
    path: Path  # of the checkpoint
    named: bool = True  # whether anything names the classes; else they may be numbers
    temperature: float = 1.0  # what `probabilities` divides logits by
    weights: Weights = "model"  # "ema": averaged ones

    def __repr__(self) -> str:
        return (
            f"Trained {self.recipe.model.name}, {self.weights} of {self.path}\n"
            f"{counted(len(self.classes), 'class')}: {shortened(self.classes)}\n"
            f"images of {times(self.image_size)}"
        )

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def view(self, image: ImageLike) -> Tensor:
        """Resize and centre-crop one image for the model → (3, *image_size) uint8, on the CPU."""
        name = str(image) if isinstance(image, (str, os.PathLike)) else "an image"
        with room_for(name):
            pixels = as_uint8(image, self.recipe.data.channels)
            return evaluation_view(self.recipe, self.image_size)(pixels)

    def preprocess(self, images: ImageLike | Iterable[ImageLike]) -> Tensor:
        """Turn one image, or several, into input of the model, as `eval.py` does, but upright:
        (B, 3, *image_size), resized, centre-cropped and normalised, on the model's device and in
        its precision. Raises ValueError if there is no image, or one cannot be read.
        """
        views = [self.view(image) for image in as_several(images)]
        if not views:
            raise DataError("no image was given; expected at least one")
        return self.inputs(torch.stack(views))

    def inputs(self, views: Tensor) -> Tensor:
        """Views (B, 3, *image_size) uint8 as input of the model: what `preprocess` returns."""
        return as_input(views.to(self.device), self.recipe).to(next(self.model.parameters()).dtype)

    @property
    def threshold(self) -> float | None:
        """From which probability on an image is of a class; None if it is of one class alone."""
        task = self.recipe.task
        return task.options["threshold"] if task.kind.several_labels else None

    @torch.no_grad()
    def probabilities(self, inputs: Tensor) -> Tensor:
        """Class probabilities (B, classes), on the CPU, of what `preprocess` returns: float32, or as
        the model if that is of float64.
        """
        logits = self.model(inputs) / self.temperature
        return self.recipe.loss.probabilities(logits).cpu()

    @torch.no_grad()
    def features(self, inputs: Tensor) -> Tensor:
        """What the classifier reads, (B, C) float32 on the CPU, of what `preprocess` returns."""
        model: Any = self.model  # a Classifier
        return model.features(inputs).pooled.float().cpu()

    def predict(self, image: ImageLike, top: int | None = 5) -> list[tuple[str, float]]:
        """The `top` likeliest classes (None: all) of one image as (name, probability), likeliest
        first; of a model of several labels instead all that reach its threshold. Raises ValueError
        if the image cannot be read, and for a `top` below 1.
        """
        return self.predict_batch([image], top)[0]

    def predict_batch(
        self, images: ImageLike | Iterable[ImageLike], top: int | None = 5
    ) -> list[list[tuple[str, float]]]:
        """What `predict` returns, for each of several images, or for one: a list of as many. 64 of
        them pass through the model at a time.
        """
        if top is not None and not (isinstance(top, Integral) and top > 0):
            raise ValueError(
                f"top is {top!r}, expected an integer of at least 1, or None for all classes"
            )
        self.require_classifier()
        images = as_several(images)
        guesses = []
        for start in range(0, len(images), BATCH):
            inputs = self.preprocess(images[start : start + BATCH])
            guesses += self.ranked(self.probabilities(inputs), top)
        return guesses

    def require_classifier(self) -> None:
        """Raise CheckpointError, a ValueError, if the checkpoint is a bare backbone."""
        if not self.classes:
            raise CheckpointError(
                f"{self.path}: holds no classifier, so there are no classes; its "
                "model returns features, and init.checkpoint fine-tunes it"
            )

    def ranked(self, probabilities: Tensor, top: int | None) -> list[list[tuple[str, float]]]:
        """What `predict` returns, of (B, classes); equal ones are in the order of `classes`."""
        order = probabilities.sort(dim=1, descending=True, stable=True)
        guesses = []
        counts: list[int | None] = [top] * len(probabilities)
        if self.threshold is not None:
            counts = (probabilities >= self.threshold).sum(1).tolist()
        for count, indices, values in zip(counts, order.indices.tolist(), order.values.tolist()):
            names = [self.classes[index] for index in indices[:count]]
            guesses.append(list(zip(names, values)))
        return guesses


def load(
    path: str | os.PathLike,
    *,
    weights: Weights = "model",
    image_size: int | Size | None = None,
    device: str | torch.device | None = None,
    recipe: str | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    classes: str | Path = "",
) -> Trained:
    """Load a trained model with its class names and preprocessing.

    Args:
        path: a run folder (its last.pt is read), a checkpoint file (.pt, .pth or .safetensors), a
            folder that transformers or timm wrote, or the name of a model in recipes/trained.
        weights: "model", or "ema" for the exponential moving average of the weights.
        image_size: of the input in pixels, if it is to differ from that of training: an integer for
            a square, or (height, width). Position embeddings are resized; a model whose weights
            depend on the image size (an MLP-Mixer, for example) is refused.
        device: where the model is put, such as "cuda", "cuda:1" or "mps"; default: the CPU.
        recipe: describes a checkpoint that contains no recipe: a recipe's name, or the path of a
            .toml file. Official DeiT-B weights are loaded with recipe="deit_base". A folder of
            transformers describes itself.
        overrides: values for keys of the recipe, such as {"eval.crop_pct": 1.0}, or texts such as
            "eval.crop_pct=1.0". Of a recipe that the checkpoint contains, only `VIEW_KEYS` can
            change: how images are prepared.
        classes: a file with the names of the classes, one per line in the order of the logits, for
            a checkpoint that contains none.

    For a checkpoint of another project, a line on standard error says what is assumed that tensors
    do not show. Returns a `Trained`, whose model is in evaluation mode and frozen: no weight requires
    a gradient, until `trained.model.requires_grad_(True)`. Without names in the checkpoint, the
    classes of a model of 1000 are ImageNet's synset ids (such as "n01440764"), otherwise "0", "1",
    …, and `named` is false. A checkpoint without a classifier has no
    classes, and its model returns the pooled features. Raises ValueError for whatever is wrong.
    """
    if weights not in ("model", "ema"):
        raise ValueError(f'weights is {weights!r}, expected "model" or "ema"')
    device = usable_device("cpu" if device is None else device)
    saved = open_saved(
        Path(path),
        recipe=recipe,
        changes=recipe_changes(sets=overrides),
        changeable=VIEW_KEYS,
        image_size=image_size,
        classes=classes,
    )
    model = saved.model(weights, or_backbone=not saved.brings_recipe)
    model.eval().requires_grad_(False).to(device)
    if not saved.brings_recipe:
        say(f"{saved.path}: {saved.assumptions(weights)}", sys.stderr)
    count = model.num_classes
    names: Sequence[str] = ()
    if count:
        names = saved.classes or unnamed_classes(count) or [str(n) for n in range(count)]
    named = bool(saved.classes)
    temperature = saved.temperature(weights) if count else 1.0
    names = tuple(names)
    return Trained(model, names, saved.recipe, saved.size, saved.path, named, temperature, weights)


def usable_device(device: str | torch.device) -> torch.device:
    """The device of this name; ValueError if it cannot be used."""
    try:
        torch.zeros(1, device=device).item()  # a meta tensor has no value
        return torch.device(device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(
            f"device is {str(device)!r}, expected one that this machine has ({in_brief(error)})"
        ) from None
