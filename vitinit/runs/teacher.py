"""Open the teacher of a recipe: a model of ours, one of torchvision's, or an exported program."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import is_zipfile

import torch
import torchvision
from torch import Tensor, nn
from torch.export.passes import move_to_device_pass

from ..base.files import parse_json
from ..base.messages import in_brief, nearest
from ..base.values import PositiveNumber, convert
from ..data.augment import IMAGENET_MEAN, IMAGENET_STD
from ..data.classes import class_indices, read_classes
from ..data.datasets import unnamed_classes
from ..data.images import DataError
from ..recipe.files import RecipeError
from ..recipe.sections import Recipe
from ..tasks.distillation import Distillation, Teacher
from .checkpoint import model_state, read_checkpoint, weights_digest
from .trained import load
from .transfer import load_exactly

TORCHVISION = "torchvision:"


class Opened(NamedTuple):
    """A model that was opened, before it is compared with the student."""

    teacher: Teacher
    classes: Sequence[str] | None  # of its logits; None: unknown
    outputs: int  # number of its logits


class SomeLogits(nn.Module):
    """A model with some of its logits, in another order: images → (B, K)."""

    def __init__(self, model: nn.Module, columns: Sequence[int]) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("columns", torch.tensor(columns))

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)[:, self.columns]


def open_teacher(
    recipe: Recipe, classes: Sequence[str], device: torch.device, *, trusted: bool
) -> Teacher:
    """The recipe's teacher, frozen, on the device. Raises a OneLineError if the teacher cannot be
    opened, or does not know these classes.

    classes: the student's, in order. trusted: whether the user, and not only the recipe, says that
        a program of torch.export may be read, which executes whatever its file asks for.
    """
    name, weights = recipe.distill.teacher, recipe.distill.weights
    if name.startswith(TORCHVISION):
        opened = of_torchvision(name.removeprefix(TORCHVISION), weights)
    elif not name.endswith(".pt2"):
        opened = of_run(name, weights)
    elif weights:
        raise RecipeError(f"distill.weights is {weights}, but {name} contains its weights")
    elif not trusted:
        raise RecipeError(
            f"distill.teacher {name}: is a program of torch.export, whose file "
            "can execute any code; if you trust where it is from, train with "
            "--trust-teacher (trust_teacher=True of vitinit.Run)"
        )
    else:
        opened = program(Path(name), recipe, device)
    model = opened.teacher.model
    digest = weights_digest(model.state_dict())
    file = recipe.distill.classes
    if file:
        names = read_classes(file)
        if opened.classes or len(names) != opened.outputs:
            raise RecipeError(
                f"distill.classes {file}: has {len(names)} names; expected {opened.outputs}, of a "
                "teacher that does not name its classes itself"
            )
        opened = opened._replace(classes=names)
    columns, order = columns_for(name, opened, classes)
    if file:  # which may be another one by the time that the run goes on
        digest += weights_digest({"columns": torch.tensor(columns)})
    if columns != list(range(opened.outputs)):
        model = SomeLogits(model, columns)
    model.requires_grad_(False).to(device)
    if recipe.engine.channels_last:
        model = model.to(memory_format=torch.channels_last)
    name = f"{name}, {opened.outputs} classes {order}"
    return replace(opened.teacher, model=model, digest=digest, name=name)


def learn_from_teacher(
    recipe: Recipe, classes: Sequence[str], device: torch.device, *, trusted: bool = False
) -> Distillation:
    """The task of a recipe with a teacher; arguments and errors as of `open_teacher`."""
    data = recipe.data
    teacher = open_teacher(recipe, classes, device, trusted=trusted)
    if len(teacher.mean) != data.channels:
        raise RecipeError(
            f"distill.teacher {recipe.distill.teacher}: takes images of {len(teacher.mean)} channels, "
            f"and data.mean has {data.channels} values; expected as many"
        )
    return Distillation(
        classes,
        teacher,
        recipe.distill,
        mean=data.mean,
        std=data.std,
        size=data.image_size,
        device=device,
        two_heads=recipe.model.options.get("distilled", False),
        compile=recipe.engine.compile,
    )


def of_run(name: str, weights: Any) -> Opened:
    """A model of ours, by what `vitinit.load` takes."""
    if weights not in ("", "model", "ema"):
        raise RecipeError(f"distill.weights is {weights}, expected model or ema for {name}")
    trained = load(name, weights=weights or "model")
    trained.require_classifier()
    data = trained.recipe.data
    teacher = Teacher(trained.model, data.mean, data.std, trained.image_size)
    return Opened(teacher, trained.classes if trained.named else None, len(trained.classes))


def of_torchvision(name: str, weights: str) -> Opened:
    """torchvision's model `name` with the weights in a file, which is read without unpickling code;
    they are taken to be of ImageNet, with its mean, std and order of classes.
    """
    models = torchvision.models.list_models(torchvision.models)
    if name not in models:
        raise RecipeError(
            f"distill.teacher: torchvision has no classifier '{name}'{nearest(name, models)}"
        )
    if not weights:
        raise RecipeError(
            "distill.weights is empty; expected the file of torchvision's weights "
            f"for {name}, which are not downloaded"
        )
    state, path = read_checkpoint(Path(weights))
    tensors = model_state(state, path)
    options: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    with torch.random.fork_rng([]):  # so that this one draws nothing of the run's
        names = list(torchvision.models.get_model(name, **options).state_dict())
    # The classifier's, with a row per class. None, or a scalar, is no classifier's: see below.
    last = tensors.get(names[-1], torch.tensor(0))
    outputs = len(last) if last.ndim else 1
    model = torchvision.models.get_model(name, num_classes=outputs, **options).eval()
    load_exactly(model, tensors, path)
    size = None
    if hasattr(model, "image_size"):  # vit_b_16 and such
        size = (model.image_size, model.image_size)
    teacher = Teacher(model, IMAGENET_MEAN, IMAGENET_STD, size)
    return Opened(teacher, None, outputs)


def program(path: Path, recipe: Recipe, device: torch.device) -> Opened:
    """A program of torch.export: images (B, 3, H, W) → logits (B, K), for any batch size. One that
    `vitinit export` wrote contains its classes, mean and std; any other takes the student's views.

    torch reads such a file by unpickling parts of it, and by evaluating its texts (shapes, guards).
    """
    try:
        return _read_program(path, recipe, device)
    except Exception as error:  # of many classes, for a file that is none
        raise RecipeError(
            f"{path}: expected a program of torch.export from images (B, 3, H, W) float32, any "
            "number of them, to logits (B, K), such as vitinit export writes without --normalise "
            f"({in_brief(error)})"
        ) from None


def _read_program(path: Path, recipe: Recipe, device: torch.device) -> Opened:
    if not path.is_file() or not is_zipfile(path):  # torch would print a traceback, too
        raise ValueError("there is no such archive")
    notes = {"vitinit.json": ""}
    exported = torch.export.load(path, extra_files=notes)
    described = convert(parse_json(notes["vitinit.json"].encode() or b"{}"), Mapping[str, Any])
    inputs = exported.graph_signature.user_inputs
    images = next(
        node.meta["val"]
        for node in exported.graph.nodes
        if node.op == "placeholder" and node.name in inputs
    )
    if images.dtype != torch.float32:
        raise ValueError(f"it takes {images.dtype}")
    data = recipe.data
    height, width = (
        side if isinstance(side, int) else default
        for side, default in zip(images.shape[2:], data.image_size, strict=True)
    )
    model = move_to_device_pass(exported, device).module()
    with torch.no_grad():
        _, two = (
            model(torch.zeros(batch, data.channels, height, width, device=device)).shape
            for batch in (3, 2)
        )
    if len(two) != 2:
        raise ValueError(f"its output is {tuple(two)}")
    outputs = two[1]
    mean = convert(described.get("mean", data.mean), tuple[float, ...])
    std = convert(described.get("std", data.std), tuple[PositiveNumber, ...])
    if not len(mean) == len(std) == data.channels:
        raise ValueError(f"its mean has {len(mean)} values, its std {len(std)}")
    classes = convert(described.get("classes"), tuple[str, ...] | None)
    if classes is not None and len(classes) != outputs:
        raise ValueError(f"it names {len(classes)} classes")
    return Opened(Teacher(model, mean, std, (height, width)), classes, outputs)


def columns_for(name: str, opened: Opened, classes: Sequence[str]) -> tuple[list[int], str]:
    """For each class of the student the teacher's logit, and in words how they were matched: by
    name if the teacher's are known, and else by position.
    """
    known = opened.classes or unnamed_classes(opened.outputs)
    if known:
        try:
            return class_indices(known, classes), "matched by name"
        except DataError as error:
            raise RecipeError(
                f"distill.teacher {name}: {error}; where a teacher does not name its classes, "
                "distill.classes=FILE does, a name per line"
            ) from None
    if len(classes) != opened.outputs:
        raise RecipeError(
            f"distill.teacher {name}: has {opened.outputs} classes without names, "
            f"and the student {len(classes)}; expected the same ones in the same "
            "order"
        )
    words = "without names, assumed to be in the student's order; distill.classes states another"
    return list(range(opened.outputs)), words
