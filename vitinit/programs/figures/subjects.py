"""The models that figures show, `fresh` from recipes or `of_runs`, and images as their inputs."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ...base.files import CheckpointError
from ...data.datasets import data_set_of, open_split
from ...data.images import decode_image
from ...data.sources import LooseImages, Source, folder_of, read_as
from ...init import reads_images, stated_family
from ...models.layers import Classifier
from ...models.simple_vit import SimpleViT
from ...models.vit import VisionTransformer
from ...recipe.files import RecipeError, load_recipe, overrides
from ...recipe.sections import Recipe
from ...runs.data import as_input, evaluation_view, open_training_set
from ...runs.folder import RunFolder
from ...runs.load import open_saved
from ...runs.model import build, without_data
from ...runs.start import initialise
from ..shared.plot import FigureError

Vit = VisionTransformer | SimpleViT
VITS = (VisionTransformer, SimpleViT)


class Subject(NamedTuple):
    """A model and the name under which a figure shows it."""

    recipe: Recipe
    state: str  # "impulse", "impulse, epoch 10", "deit_tiny, impulse"
    model: Classifier  # in eval mode
    classes: Sequence[str]  # of its logits; () where they are not known
    alone: bool  # whether all of a figure are of its recipe; else states say which

    def heading(self, words: str) -> str:
        """The heading of the figure, with the recipe's name if there is one recipe alone."""
        return f"{self.recipe.name}: {words}" if self.alone else words


def fresh(
    recipes: Sequence[str], inits: Sequence[str | None], *, seed: int | None, sets: Sequence[str]
) -> Iterator[Subject]:
    """Build each recipe's model with each init, exactly as `train.py` would start it.

    recipes: names in recipes/ or paths. inits: names of inits; None stands for the recipe's own.
    seed: replaces the recipe's run.seed if given. sets: overrides, "section.key=value".
    Raises RecipeError for a recipe that starts from a checkpoint.
    """
    for name in recipes:
        for init in inits:
            recipe = load_recipe(name, overrides(init=init, seed=seed, sets=sets))
            if recipe.init.checkpoint:
                raise RecipeError(
                    f"recipe {recipe.name} starts from init.checkpoint = "
                    f"{recipe.init.checkpoint}; show a run of it, by --run and "
                    "--epochs 0"
                )
            source = None
            family = stated_family(recipe.model.name, recipe.model.options)
            reads = reads_images(recipe.init.name, family)
            if reads or not recipe.data.num_classes:
                if folder_of(recipe.data.root).is_dir():
                    _, source = open_training_set(recipe.data, recipe.run.seed)
                    recipe = recipe.with_data(num_classes=len(source.classes))
                elif reads:
                    print(
                        f"note    recipe {recipe.name}: its init reads training images, and "
                        f"there is no folder {recipe.data.root}: noise stands in for them; --set "
                        "data.root=FOLDER says where they are"
                    )
            recipe = without_data(recipe)
            model = build(recipe)
            initialise(model, recipe, source)
            alone = len(recipes) == 1
            state = recipe.init.name if alone else f"{recipe.name}, {recipe.init.name}"
            yield Subject(recipe, state, model.eval(), source.classes if source else (), alone)


def of_runs(
    runs: Sequence[Path], epochs: Sequence[int] | Literal["all"], weights: str
) -> Iterator[Subject]:
    """Load each run's model at each of `epochs`, or from its last checkpoint if there are none.

    runs: run folders; without `epochs`, checkpoint files are accepted as well.
    epochs: epochs of which the run kept a checkpoint; "all" of these, and then the last one.
    weights: "model" or "ema".
    Raises CheckpointError for an epoch of which there is no checkpoint, with those there are.
    """
    for run in runs:
        kept = sorted(run.glob("epoch_*.pt"), key=lambda path: (len(path.name), path.name))
        if epochs == "all":
            paths = [*kept, run]
        else:
            paths = [RunFolder(run).kept(epoch) for epoch in epochs] or [run]
        for path in paths:
            if path not in (*kept, run):
                numbers = ", ".join(described(path).removeprefix("epoch ") for path in kept)
                found = numbers or "none, which checkpoint.keep_epochs would have kept"
                raise CheckpointError(f"{run}: keeps no {described(path)}; it has {found}")
        steps = set()
        for saved in map(open_saved, paths):
            step = saved.state.get("step")
            if epochs == "all" and step in steps:
                continue  # last.pt, of an epoch that was kept
            steps.add(step)
            alone = len(runs) == 1
            name = saved.recipe.init.name if alone else saved.path.parent.name
            state = f"{name}, {described(saved.path)}"
            model = saved.model(weights).eval()
            yield Subject(saved.recipe, state, model, saved.classes or (), alone)


def described(path: Path) -> str:
    """A checkpoint's name for a figure: "epoch 10" for epoch_0010.pt, else the file's name."""
    number = path.stem.removeprefix("epoch_")
    return f"epoch {int(number)}" if number.isdigit() else path.name


def fitting(
    subjects: Iterable[Subject], figure: str, kinds: tuple[type[Classifier], ...] = VITS
) -> Iterator[Subject]:
    """The subjects, whose models are to be of these kinds; FigureError, by the figure's name."""
    for subject in subjects:
        if not isinstance(subject.model, kinds):
            raise FigureError(
                f"recipe {subject.recipe.name} makes a "
                f"{type(subject.model).__name__}; figure '{figure}' is defined for "
                f"{' and '.join(kind.__name__ for kind in kinds)}"
            )
        yield subject


def indices(what: Literal["block", "head"], wanted: Sequence[int] | None, count: int) -> list[int]:
    """The blocks or heads that are asked for, or all `count`; FigureError for one not there."""
    numbers = [*(range(count) if wanted is None else wanted)]
    for number in numbers:
        if number not in range(count):
            raise FigureError(
                f"{what} {number} is asked for, but the model has {what}s 0…{count - 1}"
            )
    return numbers


def view_of(photograph: Path, recipe: Recipe) -> Tensor:
    """A photograph as the recipe's evaluation takes it: (3, H, W) uint8."""
    return evaluation_view(recipe)(decode_image(str(photograph), channels=recipe.data.channels))


def photographs(folder: Path | None, count: int, recipe: Recipe) -> Tensor:
    """The first `count` photographs under `folder` as the model's inputs, (count, 3, H, W).

    They are resized, cropped and normalised as the recipe does for evaluation. folder: None for a
    recipe whose data set is drawn, of which validation images are taken. Raises FigureError if there
    are fewer than `count`.
    """
    source: Source
    if folder:
        source = LooseImages(folder, count)
    elif data_set_of(recipe.data.name).drawn:
        source = open_split(recipe.data.name, "", "val", recipe.data.num_classes)
    else:
        raise FigureError(
            f"recipe {recipe.name} has no images of its own: --data-dir names a "
            "folder with photographs"
        )
    if len(source) < count:
        raise FigureError(
            f"{folder or recipe.data.name}: holds {len(source)} images, and {count} are asked for"
        )
    source = read_as(source, recipe.data.channels, True)
    views = [source.image(index, evaluation_view(recipe)) for index in range(count)]
    return as_input(torch.stack(views), recipe)
