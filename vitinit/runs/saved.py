"""Checkpoints as they are opened, with what is known about them, before a model is built."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import Tensor

from ..base.messages import nearest
from ..base.values import Size, convert, show
from ..data.sources import are_names, rows_by_name
from ..interop.weights import readers
from ..interop.weights.names import native_tensors
from ..models.layers import Classifier
from ..models.masked_autoencoder import MaskedAutoencoder
from ..recipe.files import Override, RecipeError, building, from_dict, load_recipe
from ..recipe.sections import Recipe
from ..train.checkpoint import CheckpointError, model_state, stored_tensors, without_prefix
from ..train.device import fastest_amp, this_device
from ..train.transfer import load_exactly, start_from
from .checkpoints import BOXED, published, read_checkpoint
from .folder import RunFolder
from .model import build, for_task


class Saved(NamedTuple):
    """An opened checkpoint, whose tensors are still on disk, and what is known about it."""

    path: Path                  # of the checkpoint file
    state: dict[str, Any]       # the checkpoint's contents, without optimiser and loss scaling
    recipe: Recipe
    size: tuple[int, int]       # (height, width) of the images that the model is to take
    description: readers.ForeignConfig | None   # of another project's files beside it

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
        average = self.state.get("ema")
        return ["model", "ema"] if isinstance(average, Mapping) and average else ["model"]

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
        place = f"{self.path} at {self.size[0]}×{self.size[1]}"
        resized = build(recipe.with_data(image_size=self.size), place)
        start_from(resized, model.state_dict(), place, model.grid)
        return resized

    def autoencoder(self) -> MaskedAutoencoder:
        """The whole model of a run that reconstructs images, with its decoder; see `model`."""
        model = cast(MaskedAutoencoder, for_task(build(self.recipe), self.recipe))
        load_exactly(model, model_state(self.state, self.path), self.path)
        return model

    def tensors(self, weights: str) -> dict[str, Tensor]:
        """The weights "model" or "ema" under this package's names; see `model_state`."""
        options = self.recipe.model.options
        if not self.brings_recipe:
            readers.require_known(self.path, self.state.get("arch", ""),
                                  rotary="rope" in options.get("pos_embed", ""))
        with building(str(self.path), "model"):
            tensors = model_state(self.state, self.path, weights)
            tensors = native_tensors(without_decoder(tensors) if self.brings_recipe else tensors,
                                     options)
        if self.classes and rows_of(tensors) not in (0, len(self.classes)):
            raise CheckpointError(f"{self.path}: names {len(self.classes)} classes, and its "
                                  f"classifier has {rows_of(tensors)} rows")
        return tensors

    def assumptions(self, weights: str = "model") -> str:
        """A line on what is assumed of the model of a checkpoint that contains no recipe."""
        prefix, _ = without_prefix(stored_tensors(self.state, self.path, weights))
        without = f"'{prefix}' taken off the names; " if prefix else ""
        return without + readers.assumptions(self.recipe, self.description)


def without_decoder(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a run that reconstructed images the encoder's tensors, which are those of a ViT."""
    if not any(name.startswith("decoder.") for name in tensors):
        return tensors
    return {name.removeprefix("encoder."): value for name, value in tensors.items()
            if name.startswith("encoder.")}


def rows_of(tensors: Mapping[str, Tensor]) -> int:
    """How many rows the classifier has; 0 if there is none."""
    return next((value.shape[0] for name, value in tensors.items()
                 if name in ("head.weight", "head.fc.weight") and value.ndim), 0)


def _open(path: Path) -> tuple[Path, dict[str, Any], readers.ForeignConfig | None]:
    """The file of a checkpoint, its contents, and what files of another project beside it say."""
    # Tensors stay on disk until a model copies them; no model needs those of the optimiser.
    state, path = read_checkpoint(path, mmap=True)
    state = {key: part for key, part in state.items() if key not in ("optimizer", "scaler")}
    if not isinstance(state.get("recipe", {}), Mapping):
        raise CheckpointError(f"{path}: its 'recipe' is {show(state['recipe'])}, expected a table")
    return path, state, None if "recipe" in state else readers.read_description(path)


def open_saved(path: Path, *, recipe: str | None = None, changes: Sequence[Override] = (),
               changeable: Sequence[str] = (), image_size: Any = None) -> Saved:
    """Open a checkpoint, a run folder, or a model of recipes/trained (see `read_checkpoint`).

    Args:
        recipe: the name or the file of a recipe, for a checkpoint that contains none.
        changes: of the recipe; where the checkpoint contains it, only of the keys `changeable`.
        image_size: in pixels: 288 or (192, 256); None: that of the recipe.

    Raises CheckpointError if the file cannot be read, and RecipeError if there is no recipe, or two
    of them, or a value is invalid.
    """
    path, state, description = _open(path)
    if "recipe" in state:
        if recipe is not None:
            raise RecipeError(f"{path}: brings its own recipe; the recipe {recipe} that was given "
                              "is for checkpoints that hold none")
        for change in changes:
            if change.key not in changeable:
                raise RecipeError(f"{change.text}: the checkpoint brings its own recipe, of which "
                                  "only how to evaluate can change"
                                  f"{nearest(change.key, changeable)}")
        resolved = from_dict(state["recipe"], str(path), changes)
        where = RunFolder(path.parent).data_of(-1)   # a relative path was relative to elsewhere
        resolved = resolved.with_data(root=str(where.get("root", resolved.data.root)))
    else:
        recipe = recipe or (description and description.recipe)
        if not recipe:
            raise RecipeError(f"{path}: holds no recipe; say with --recipe what it is a checkpoint "
                              "of (recipe=… in Python)")
        stated = [Override(key, value, str(description.file))
                  for key, value in description.values.items()] if description else []
        resolved = load_recipe(recipe, [*stated, *changes])
    if not resolved.data.num_classes and resolved.task.name == "classify":
        raise RecipeError(f"{path}: recipe {resolved.name} has data.num_classes = 0, which only "
                          "training takes from the data; expected the checkpoint's number")
    if resolved.engine.amp == "auto":                # which a run's recipe never states
        resolved = resolved.with_amp(fastest_amp(this_device()))
    try:
        size = convert(resolved.data.image_size if image_size is None else image_size, Size)
    except TypeError as error:
        raise RecipeError(f"the image size is {error}") from None
    return Saved(path, state, resolved, size, description)


def fine_tune(model: Classifier, recipe: Recipe, classes: Sequence[str] = ()) -> list[str]:
    """Start a run from the weights of init.checkpoint: load them into `model`, as initialised.
    classes: the names of the run's classes, if it has any. Returns lines for the summary. Raises
    CheckpointError if the checkpoint does not fit, or computes another function.
    """
    weights = published(recipe.init.checkpoint)
    if weights and weights.model != recipe.model.name:
        raise CheckpointError(f"init.checkpoint = {recipe.init.checkpoint}, of a {weights.model}, "
                              f"with model.name = {recipe.model.name}; expected --set "
                              f"model.name={weights.model}")
    path, state, description = _open(Path(recipe.init.checkpoint))
    saved = Saved(path, state, recipe, recipe.data.image_size, description)
    stated = description.values if description else state.get("recipe", {})
    differences = readers.differences(stated, recipe, description.file if description else path)
    kind, grid = recipe.init.checkpoint_weights, state.get("grid")
    if description and "data.image_size" in stated:  # in patches as large as the model's
        grid = tuple(side * count // pixels for side, count, pixels in zip(
            stated["data.image_size"], model.grid, saved.size))
    tensors = saved.tensors(kind)
    rows, words = _classifier_rows(saved, tensors, classes or [*map(str, range(model.num_classes))])
    transfer = start_from(model, tensors, path, grid, rows)
    notes = [f"start   {recipe.init.checkpoint}: {transfer}", f"head    {words}"]
    if recipe.task.name == "reconstruct":
        notes[1] = "decoder as drawn: none is read from a checkpoint"
    if not saved.brings_recipe:                      # all is assumed from the run's
        notes.append(f"note    {saved._replace(description=None).assumptions(kind)}")
    return notes + differences


def _classifier_rows(saved: Saved, tensors: Mapping[str, Tensor], classes: Sequence[str]
                     ) -> tuple[list[int | None], str]:
    """For each class of a run the row of the classifiers that it starts from, or None for the
    init's; and in words. saved: with the run's recipe.
    """
    choice, known = saved.recipe.init.checkpoint_head, saved.classes
    wanted, count = len(classes), rows_of(tensors)
    if not count:
        why = "the checkpoint has none"
    elif choice == "drop":
        why = "init.checkpoint_head is drop"
    elif choice == "match" and are_names(known) and are_names(classes):
        rows = list(map(rows_by_name(known).get, classes))
        lost = rows.count(None)
        return rows, f"{wanted - lost} of {wanted} rows by class name, {lost} as drawn"
    elif count != wanted:
        why = f"the checkpoint's has {count} rows, and {wanted} are expected"
    elif choice == "match" and saved.recipe.data.name != "imagenet":
        why = ("not all classes have names; if they are the same, init.checkpoint_head=keep takes "
               f"its {count} rows")
    else:
        return [*range(count)], f"all {count} rows, taken for the same classes"
    return [None] * wanted, f"as drawn: {why}"
