"""All keys of a recipe: one frozen dataclass per section, one field with a type and bounds per key.

A recipe states every key, so fields have no defaults. Sections that a module takes as they are
stand in that module, such as `Optim` in train/optim.py.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..bounds import COUNT, LARGEST, PAIR, TINIEST, number
from ..data.draw import Augment, RandAugment
from ..data.mix import Mix
from ..train.distill import Distill
from ..train.optim import LINEAR_SCALING_BATCH, Optim, Schedule
from .values import plain

VERSION = 12                    # of the keys; a change of keys, or of an option's default, adds one


@dataclass(frozen=True)
class RunSection:
    """The run itself."""

    seed: int = number(minimum=0, below=2**63)      # keys every random draw of the run


@dataclass(frozen=True)
class DataSection:
    """The data set, which part of it is trained on, and how images are loaded."""

    name: Literal["shapes", "image_folder", "imagenet", "cifar10", "cifar100", "stl10", "svhn",
                  "food101", "flowers102", "pets", "tiny_imagenet"]
    root: str                                       # folder of the data set; "" for `shapes`
    num_classes: int = number(minimum=0, below=COUNT)  # 0: as many as the data set has
    subset: float = number(above=0.0, maximum=1.0)  # share of each class that is trained on
    images_per_class: int = number(minimum=0, below=COUNT)  # number of images instead; 0: no limit
    subset_seed: int = number(minimum=0, below=2**63)  # decides which images those are
    held_out_per_class: int = number(minimum=0, below=COUNT)  # training images per class on which the
                                                    # run is validated instead; 0: the test set
    image_size: PAIR = number(minimum=1, below=COUNT)  # (height, width) that the model takes
    mean: tuple[float, float, float] = number(minimum=0.0, maximum=1.0)  # per channel, in [0, 1]
    std: tuple[float, float, float] = number(minimum=TINIEST, below=LARGEST)
    apply_exif_orientation: bool                    # turn photographs upright; false: as stored
    workers: int = number(minimum=0, below=COUNT)   # loader processes per training process
    on_device_gib: float = number(minimum=0.0)      # sets up to this size are stored on the device


@dataclass(frozen=True)
class EvalSection:
    """How and when the model is validated."""

    crop_pct: float = number(above=0.0, maximum=1.0)  # resize to image_size / crop_pct, then crop
    interpolation: Literal["bilinear", "bicubic"]
    batch_size: int = number(minimum=1, below=COUNT)  # images per process and forward pass
    cache_gib: float = number(minimum=0.0)          # views up to this size per process are decoded
                                                    # once and stored; 0: decoded every time
    every_epochs: int = number(minimum=1, below=COUNT)           # the last epoch is always evaluated


@dataclass(frozen=True)
class ModelSection:
    """The model, by its name in `vitinit.models.MODELS`."""

    name: str
    options: Mapping[str, Any]                      # keyword arguments of that model


@dataclass(frozen=True)
class InitSection:
    """The initialisation, by its name in `vitinit.init.INITS`, and a checkpoint to start from."""

    name: str
    checkpoint: str                                 # weights to start from; "": none
    checkpoint_weights: Literal["model", "ema"]     # which weights in the checkpoint
    checkpoint_fit: Literal["exact", "select"]      # select: weight selection from a larger model
    options: Mapping[str, Any]                      # keyword arguments of that init


@dataclass(frozen=True)
class EmaSection:
    """The exponential moving average of the weights."""

    decay: float = number(minimum=0.0, below=1.0)   # 0: no moving average is kept
    warmup: bool                                    # decay min(decay, 1 - (1 + update)^(-2/3))


@dataclass(frozen=True)
class EngineSection:
    """Precision, compilation and memory format."""

    amp: Literal["off", "bf16", "fp16"]             # autocast; fp16 adds a GradScaler
    compile: bool                                   # torch.compile
    channels_last: bool                             # memory format of images and convolutions
    tf32: bool                                      # TensorFloat-32 matrix products on CUDA


@dataclass(frozen=True)
class CheckpointSection:
    """When checkpoints are written, which are kept for good, and which is the best."""

    every_epochs: int = number(minimum=1, below=COUNT)  # between two last.pt; also after the last epoch
    every_steps: int = number(minimum=0, below=COUNT)   # also within an epoch; 0: never
    keep_epochs: tuple[int, ...] = number(minimum=0, below=COUNT)  # kept for good; 0: as initialised
    best_by: Literal["val_top1", "val_loss", "ema_top1"]


@dataclass(frozen=True)
class Recipe:
    """A complete recipe: one field per section."""

    name: str                                       # the file's stem, not a key
    run: RunSection
    data: DataSection
    augment: Augment
    rand_augment: RandAugment
    mix: Mix
    distill: Distill                                # may be left out: no teacher
    eval: EvalSection
    model: ModelSection
    init: InitSection
    optim: Optim
    schedule: Schedule
    ema: EmaSection
    engine: EngineSection
    checkpoint: CheckpointSection

    def as_dict(self) -> dict[str, Any]:
        """The recipe as nested dicts and lists, with its version; `from_dict` reads them back."""
        sections = {name: ({key: plain(value) for key, value in vars(section).items()}
                           if dataclasses.is_dataclass(section) else section)
                    for name, section in vars(self).items()}
        return {"version": VERSION} | sections


# Keys that describe the machine and not the experiment: they may change when a run is resumed.
MACHINE_KEYS = ("data.workers", "data.on_device_gib", "eval.batch_size", "eval.cache_gib",
                "optim.max_batch_per_process", "engine.compile", "checkpoint.every_steps")

SECTIONS = {name: kind for name, kind in typing.get_type_hints(Recipe).items() if name != "name"}


def contradictions(recipe: Recipe) -> Iterable[tuple[tuple[str, ...], str]]:
    """Values that are valid on their own but contradict each other.

    Yields for each contradiction the keys, and in words what is wrong with the first of them.
    """
    for key in ("crop_scale", "crop_ratio", "erase_area", "erase_ratio"):
        low, high = getattr(recipe.augment, key)
        if low > high:
            yield (f"augment.{key}",), f"is [{low:g}, {high:g}], expected the smaller value first"
    if recipe.data.num_classes == 1:
        yield (("data.num_classes",), "is 1, expected two classes at least, or 0 for as many as "
               "the data set has")
    if recipe.rand_augment.layers and not recipe.rand_augment.operations:
        yield (("rand_augment.operations", "rand_augment.layers"),
               f"is empty, but rand_augment.layers = {recipe.rand_augment.layers}; 0 layers switch "
               "RandAugment off")
    if recipe.data.subset < 1.0 and recipe.data.images_per_class:
        yield (("data.images_per_class", "data.subset"),
               f"is {recipe.data.images_per_class}, but data.subset = {recipe.data.subset:g} already "
               "says which share of a class is trained on; expected 0, or data.subset = 1.0")
    if recipe.data.root == "" and recipe.data.name != "shapes":
        yield (("data.root", "data.name"), f'is empty, but data.name = "{recipe.data.name}" needs '
               "a folder; give it by --data-dir")
    if recipe.schedule.warmup_epochs > recipe.schedule.epochs:
        yield (("schedule.warmup_epochs", "schedule.epochs"),
               f"is {recipe.schedule.warmup_epochs}, more than schedule.epochs = "
               f"{recipe.schedule.epochs}")
    if recipe.schedule.shape == "one_cycle" and recipe.schedule.warmup_epochs:
        yield (("schedule.warmup_epochs", "schedule.shape"),
               f'is {recipe.schedule.warmup_epochs}, but schedule.shape = "one_cycle" has a warm-up of '
               "its own; expected 0")
    peak, words = recipe.optim.peak_lr, f"optim.base_lr = {recipe.optim.base_lr:g}"
    if recipe.optim.lr_scaling == "linear":
        words += f" · {recipe.optim.global_batch} / {LINEAR_SCALING_BATCH} = {peak:g}"
    causes = ("optim.base_lr", "optim.lr_scaling", "optim.global_batch")
    if peak >= LARGEST:
        yield causes, f"makes the learning rate's peak, {words}, more than float32 holds"
    for key in ("warmup_lr", "min_lr"):
        rate = getattr(recipe.schedule, key)
        if rate > peak:
            yield ((f"schedule.{key}", *causes),
                   f"is {rate:g}, above the learning rate's peak, {words}")
    if recipe.distill.weights and not recipe.distill.teacher:
        yield ("distill.weights", "distill.teacher"), "is given, but distill.teacher is empty"
    if recipe.ema.decay == 0.0 and recipe.ema.warmup:
        yield ("ema.warmup", "ema.decay"), "is true, but ema.decay = 0 keeps no moving average"
    if recipe.ema.decay == 0.0 and recipe.checkpoint.best_by == "ema_top1":
        yield (("checkpoint.best_by", "ema.decay"),
               'is "ema_top1", but ema.decay = 0 keeps no moving average')
    for epoch in recipe.checkpoint.keep_epochs:
        if epoch > recipe.schedule.total_epochs:
            yield (("checkpoint.keep_epochs", "schedule.epochs", "schedule.cooldown_epochs"),
                   f"holds {epoch}, but the run ends after {recipe.schedule.total_epochs} "
                   "epochs")
