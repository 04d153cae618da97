"""Checkpoints as they are opened, with what is known about them, before a model is built."""

from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..base.files import CheckpointError, NoCheckpoint
from ..base.messages import in_brief, nearest, say, times, warn
from ..base.table import find
from ..base.values import Size, Table, convert
from ..data.classes import read_classes
from ..models.layers import Classifier
from ..models.masked_autoencoder import MaskedAutoencoder
from ..recipe.files import RECIPES, Override, RecipeError, building, from_dict, load_recipe
from ..recipe.sections import Recipe
from ..train.device import automatic_values, this_device
from ..train.interruption import raising_signals
from .calibration import row_of
from .checkpoint import READERS, model_state, read_checkpoint, stored_tensors, without_prefix
from .folder import RunFolder
from .model import build, task_of, trained_model
from .transfer import load_exactly, start_from

BOXED = RECIPES / "trained"  # models that come with the package, by name
ADDRESS = "https://dl.fbaipublicfiles.com/deit/"  # as DeiT's README has it


class Saved(NamedTuple):
    """An opened checkpoint, whose tensors are still on disk, and what is known about it."""

    path: Path  # of the checkpoint file
    state: Table  # the checkpoint's contents, without optimiser and loss scaling
    recipe: Recipe
    size: Size  # (height, width) of the images that the model is to take
    reader: Any  # of its tensors, and of another project's files beside it

    @property
    def name(self) -> str:
        """The path as the user knows it: of a model in recipes/trained it begins with its name."""
        if self.path.is_relative_to(BOXED):
            return str(self.path.relative_to(BOXED))
        return str(self.path)

    @property
    def brings_recipe(self) -> bool:
        """Whether the checkpoint contains the recipe it was trained by."""
        return "recipe" in self.state

    @property
    def classes(self) -> Sequence[str] | None:
        """The class of each logit, in order; None if neither checkpoint nor files name them."""
        if self.state.get("classes"):
            return self.state["classes"]
        config = self.reader.config
        return config.classes if config else None

    @property
    def view(self) -> str:
        """What the model sees of an image, in words."""
        how = self.recipe.eval
        return f"{times(self.size)}, {self.recipe.augment.fit} {how.crop_pct}, {how.interpolation}"

    @property
    def weights(self) -> list[str]:
        """Which weights the checkpoint contains: "model", and "ema" for a moving average."""
        average = self.state.get("ema")
        has_average = isinstance(average, Mapping) and average
        return ["model", "ema"] if has_average else ["model"]

    def model(self, weights: str, *, or_backbone: bool = False) -> Classifier:
        """Build the model with the weights "model" or "ema", for images of `size`, on the CPU, in
        float32. or_backbone: where the checkpoint has no classifier, build the model without one,
        which returns the pooled features. Otherwise that is an error.

        Raises CheckpointError if the weights do not fit the recipe's model, or depend on the image
        size and it is another, and RecipeError if the model cannot be built.
        """
        recipe, tensors = self.recipe, self.tensors(weights)
        if or_backbone and not rows_of(tensors):
            recipe = recipe.with_data(num_classes=0)
        model = build(recipe)
        load_exactly(model, tensors, self.path)
        if self.size == recipe.data.image_size:
            return model
        place = f"{self.path} at {times(self.size)}"
        resized = build(recipe.with_data(image_size=self.size), place)
        start_from(resized, model.state_dict(), place, model.grid)
        return resized

    def temperature(self, weights: str) -> float:
        """What the logits of the weights "model" or "ema" are divided by, before probabilities are
        made of them; 1 unless it was fitted to these very weights.
        """
        row = row_of(self.tensors(weights), self.path.parent)
        if row is None:
            warn(
                f"{self.path}: calibration.json beside it has no temperature of these weights, so "
                "probabilities are as the model says; eval.py --fit-temperature fits one"
            )
        elif row.get("view", self.view) != self.view:  # which older rows lack
            warn(
                f"{self.path}: the temperature of {weights} was fitted to views of {row['view']}, "
                f"and these are of {self.view}; eval.py --fit-temperature fits another"
            )
        return float(row["temperature"]) if row else 1.0

    def autoencoder(self) -> MaskedAutoencoder:
        """The whole model of a run that reconstructs images, with its decoder; see `model`."""
        model: Any = trained_model(task_of(self.recipe), build(self.recipe), self.recipe)
        load_exactly(model, model_state(self.state, self.path), self.path)
        return model

    def tensors(self, weights: str) -> dict[str, Tensor]:
        """The weights "model" or "ema" under this package's names; see `model_state`."""
        with building(str(self.path), "model"):
            tensors = model_state(self.state, self.path, weights)
            if self.brings_recipe:
                tensors = without_decoder(tensors)
            tensors = self.reader.native(tensors, self.recipe.model.options)
        rows = rows_of(tensors)
        if rows and self.classes and rows != len(self.classes):
            raise CheckpointError(
                f"{self.path}: names {len(self.classes)} classes, and its "
                f"classifier has {rows} rows"
            )
        return tensors

    def assumptions(self, weights: str = "model", *, files: bool = True) -> str:
        """A line on what is assumed of the model of a checkpoint that contains no recipe. files:
        those beside it were read into the recipe.
        """
        prefix, _ = without_prefix(stored_tensors(self.state, self.path, weights))
        without = f"'{prefix}' taken off the names; " if prefix else ""
        return without + self.reader.assumptions(self.recipe, files=files)


def without_decoder(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a run that reconstructed images the encoder's tensors, which are those of a ViT."""
    if not any(name.startswith("decoder.") for name in tensors):
        return tensors
    return {
        name.removeprefix("encoder."): value
        for name, value in tensors.items()
        if name.startswith("encoder.")
    }


def rows_of(tensors: Mapping[str, Tensor]) -> int:
    """How many rows the classifier has; 0 if there is none."""
    for name in ("head.weight", "head.fc.weight"):
        if name in tensors and tensors[name].ndim:
            return tensors[name].shape[0]
    return 0


def open_file(
    path: Path, classes: str | Path = "", *, described: bool = False
) -> tuple[Path, Table, Any]:
    """The file of a checkpoint, by path or name (see `by_name`), its contents, and its reader.
    classes: a file of the names of its classes, if it contains none; "": there is no such file.
    described: by a recipe that is given, which counts more than one of a .safetensors file.
    """
    # Tensors stay on disk until a model copies them; no model needs those of the optimiser.
    path = by_name(path)
    if not path.exists():
        raise NoCheckpoint(
            f"{path}: no such checkpoint; expected a run's folder, a file of weights, or a name such "
            "as cifar10_small"
        )
    state, path = read_checkpoint(path, mmap=True)
    state = {
        key: part
        for key, part in state.items()
        if part is not None and key not in ("optimizer", "scaler")
    }
    if described and path.suffix == ".safetensors":
        state.pop("recipe", None)
    if classes:
        if state.get("classes"):
            raise CheckpointError(
                f"{path}: names its classes itself; {classes} is for checkpoints that do not"
            )
        # A bare state dict holds tensors alone.
        state = {"model": state, **state, "classes": read_classes(classes)}
    return path, state, find(READERS["tensors"])(path, state)


def open_saved(
    path: Path,
    *,
    recipe: str | None = None,
    changes: Sequence[Override] = (),
    changeable: Sequence[str] = (),
    image_size: Any = None,
    classes: str | Path = "",
) -> Saved:
    """Open a checkpoint, a run folder, or a model of recipes/trained (see `read_checkpoint`).

    Args:
        recipe: the name or the file of a recipe, for a checkpoint that contains none.
        changes: of the recipe; where the checkpoint contains it, only of the keys `changeable`.
        image_size: in pixels: 288 or (192, 256); None: that of the recipe.
        classes: see `open_file`.

    Raises CheckpointError if the file cannot be read, and RecipeError if there is no recipe, or two
    of them, or a value is invalid.
    """
    path, state, reader = open_file(path, classes, described=recipe is not None)
    if "recipe" in state:
        if recipe is not None:
            raise RecipeError(
                f"{path}: brings its own recipe; the recipe {recipe} that was given "
                "is for checkpoints that hold none"
            )
        for change in changes:
            if change.key not in changeable:
                raise RecipeError(
                    f"{change.text}: the checkpoint brings its own recipe, of which "
                    f"only how to evaluate can change{nearest(change.key, changeable)}"
                )
        resolved = from_dict(state["recipe"], str(path), changes)
        where = RunFolder(path.parent).data_of(-1)  # a relative path was relative to elsewhere
        resolved = resolved.with_data(root=where.get("root", resolved.data.root))
    else:
        stated = []
        if reader.config:
            recipe = recipe or reader.config.recipe
            origin = str(reader.config.file)
            values = reader.config.values.items()
            stated = [Override(key, value, origin) for key, value in values]
        if not recipe:
            raise RecipeError(
                f"{path}: holds no recipe; say with --recipe what it is a checkpoint "
                "of (recipe=… in Python)"
            )
        resolved = load_recipe(recipe, [*stated, *changes])
    if not resolved.data.num_classes and resolved.task.kind.learns_classes:
        raise RecipeError(
            f"{path}: recipe {resolved.name} has data.num_classes = 0, which only "
            "training takes from the data; expected the checkpoint's number"
        )
    if resolved.automatic_keys:  # which a run's recipe never has
        resolved = resolved.with_automatic(automatic_values(this_device()))
    try:
        size = convert(resolved.data.image_size if image_size is None else image_size, Size)
    except TypeError as error:
        raise RecipeError(f"the image size is {error}") from None
    return Saved(path, state, resolved, size, reader)


class Weights(NamedTuple):
    """A file at ADDRESS, whose name ends with the first digits of its SHA-256, and its model."""

    file: str
    model: str


PUBLISHED = {
    "deit_tiny": Weights("deit_tiny_patch16_224-a1311bcf.pth", "vit_tiny"),
    "deit_small": Weights("deit_small_patch16_224-cd65a155.pth", "vit_small"),
    "deit_base": Weights("deit_base_patch16_224-b5f2ef4d.pth", "vit_base"),
    "deit_base_384": Weights("deit_base_patch16_384-8de9b5d1.pth", "vit_base"),
}


def published_weights(name: str) -> Weights | None:
    """The published weights of this name; None if there are none, or a path of this name exists."""
    return None if Path(name).exists() else PUBLISHED.get(name)


def kept_file(weights: Weights) -> Path:
    """Where torch.hub keeps these weights, whether or not they are there yet."""
    return Path(torch.hub.get_dir(), "checkpoints", weights.file)


def fetch_published(weights: Weights) -> None:
    """Fetch published weights into torch.hub's folder, unless they are there.

    Raises CheckpointError, and leaves no file, if that fails or the file has another hash.
    """
    file = kept_file(weights)
    if file.exists():
        return
    address = ADDRESS + weights.file
    digest = file.stem.rpartition("-")[2]
    say(f"fetch   {address} → {file}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with raising_signals():  # or the part that is there would stay
            torch.hub.download_url_to_file(address, str(file), hash_prefix=digest, progress=False)
    except (OSError, RuntimeError, ValueError, HTTPException) as error:
        raise CheckpointError(
            f"{address}: cannot be fetched ({in_brief(error)}); put the file at {file}, "
            "or give the path of one in place of the name"
        ) from None


def by_name(path: Path) -> Path:
    """The path as it is, or, where nothing exists at a mere name, the model in recipes/trained, or
    the file of published weights; NoCheckpoint if that is not there.
    """
    if path.parent != Path(".") or path.exists():
        return path
    weights = published_weights(path.name)
    if weights:
        file = kept_file(weights)
        if not file.exists():
            raise NoCheckpoint(
                f"{path}: expected its weights at {file}, where training with "
                f"init.checkpoint={path} puts them"
            )
        return file
    boxed = BOXED / path
    return boxed if boxed.is_dir() else path
