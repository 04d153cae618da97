"""All keys of a recipe: one frozen dataclass per section, one field with a type and bounds per key.

Sections that a module takes as they are stand in that module, such as `Optim` in train/optim.py.
"""

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

from ..base.table import find
from ..base.values import (
    LARGEST,
    TINIEST,
    AtLeastOne,
    BelowOne,
    Bounds,
    Count,
    Fraction,
    NonNegative,
    Proportion,
    Size,
    Table,
    flat,
    plain,
    to_toml,
)
from ..data import datasets
from ..data.draw import Augment, Mix
from ..data.rand_augment import RandAugment
from ..data.three_augment import NO_THREE_AUGMENT, ThreeAugment
from ..tasks import TASKS, Contradiction, Loss, Task
from ..train.optim import Distill, Optim, Schedule

# Of the keys: a change of one, or of an option's default, adds one; a new one in absent.py does not.
VERSION = 12
VERSION_WITH_BASE = 13  # of a file that states a part of them; runs write all
# What augment.fit leaves no choice of, where it is not "crop".
WHOLE_IMAGE: Table = {
    "augment.crop_scale": [1.0, 1.0],
    "augment.crop_ratio": [1.0, 1.0],
    "augment.crop_padding": 0,
    "eval.crop_pct": 1.0,
}
Seed = Annotated[int, Bounds(minimum=0, below=2**63)]
Deviation = Annotated[float, Bounds(minimum=TINIEST, below=LARGEST)]


@dataclass(frozen=True)
class RunSection:
    seed: Seed  # keys every random draw of the run


@dataclass(frozen=True)
class DataSection:
    name: str  # in `vitinit.data.datasets.DATA_SETS`
    root: str  # folder of the data set; "" for one that is drawn
    num_classes: Count  # 0: as many as the data set has
    subset: Fraction  # share of each class that is trained on
    images_per_class: Count  # number of images instead; 0: no limit
    # Decides which images those are; "run": run.seed does, and the held-out images are those of 0.
    subset_seed: Seed | Literal["run"]
    # shuffled: all images once per epoch; balanced: as many of each class.
    sampling: Literal["shuffled", "balanced"]
    held_out_per_class: Count  # training images to validate on; 0: test set
    held_out: BelowOne  # share of each class instead; 0: none
    image_size: Size  # (height, width) that the model takes
    mean: tuple[Proportion, ...]  # per channel, in [0, 1]: as many as images have channels
    std: tuple[Deviation, ...]
    apply_exif_orientation: bool  # turn photographs upright; false: as stored
    # Where JPEGs become pixels: on a CPU, exactly and everywhere alike, or on an NVIDIA GPU, which
    # needs few cores, and whose pixels differ a little.
    decode: Literal["cpu", "cuda"]
    workers: Count  # loader processes per training process
    on_device_gib: NonNegative  # sets up to this size are stored on the device

    @property
    def channels(self) -> int:
        """How many channels the model's images have: 3 are RGB, 1 is grey."""
        return len(self.mean)

    @property
    def holds_out(self) -> bool:
        """Whether training images are held out, to validate on them."""
        return self.held_out_per_class > 0 or self.held_out > 0.0


@dataclass(frozen=True)
class EvalSection:
    # Resize to image_size / crop_pct, then crop, unless augment.fit takes the whole image.
    crop_pct: Annotated[float, Bounds(minimum=0.1, maximum=1.0)]
    interpolation: Literal["bilinear", "bicubic"]
    batch_size: AtLeastOne  # images per process and forward pass
    cache_gib: NonNegative  # of views decoded once, per process; 0: none
    every_epochs: Count  # the last epoch is always evaluated; 0: none is


@dataclass(frozen=True)
class ModelSection:
    """The model, by its name in `vitinit.models.MODELS`."""

    name: str
    options: Mapping[str, Any]  # keyword arguments of that model


@dataclass(frozen=True)
class InitSection:
    """The initialisation, by its name in `vitinit.init.INITS`, and a checkpoint to start from."""

    name: str
    checkpoint: str  # weights to start from; "": none
    checkpoint_weights: Literal["model", "ema"]  # which weights in the checkpoint
    # match: its classifier's rows by class name; keep: all rows, if as many as classes; drop: none.
    checkpoint_head: Literal["match", "keep", "drop"]
    checkpoint_classes: str  # a file of its classes' names, one per line, if it has none; or ""
    # How its positions are resized to another grid: bicubic, antialiased as in timm, or as in DeiT.
    checkpoint_positions: Literal["antialiased", "plain"]
    options: Mapping[str, Any]  # keyword arguments of that init


@dataclass(frozen=True)
class TaskSection:
    """What is learned, by its name in `vitinit.tasks.TASKS`."""

    name: str
    options: Mapping[str, Any]  # keyword arguments of what the task takes

    @property
    def kind(self) -> type[Task]:
        """The task's class. With a teacher the task is a `Distillation`, see runs/teacher.py."""
        return find(TASKS[self.name])


@dataclass(frozen=True)
class EmaSection:  # the exponential moving average of the weights
    decay: BelowOne  # 0: no moving average is kept
    warmup: bool  # decay min(decay, 1 - (1 + update)^(-2/3))


@dataclass(frozen=True)
class EngineSection:
    amp: Literal["auto", "off", "bf16", "fp16"]  # autocast; auto: what is fastest at the start
    compile: bool  # torch.compile
    compile_mode: Literal["default", "max-autotune", "reduce-overhead"]  # torch.compile's
    recompute: bool  # compute blocks again in the backward pass, which takes less memory
    channels_last: bool  # memory format of images and convolutions
    tf32: bool  # TensorFloat-32 matrix products on CUDA


@dataclass(frozen=True)
class CheckpointSection:
    every_epochs: AtLeastOne  # between two last.pt; also at the end
    every_steps: Count  # also within an epoch; 0: never
    keep_epochs: tuple[Count, ...]  # for good; 0: as initialised
    best_by: Literal["val_top1", "val_loss", "ema_top1", "val_map", "ema_map"]


@dataclass(frozen=True)
class Recipe:
    name: str  # the file's stem, not a key
    run: RunSection
    data: DataSection
    augment: Augment
    rand_augment: RandAugment
    three_augment: ThreeAugment  # may be left out: none
    mix: Mix
    loss: Loss  # may be left out: cross-entropy
    distill: Distill  # may be left out: no teacher
    task: TaskSection  # may be left out: classify
    eval: EvalSection
    model: ModelSection
    init: InitSection
    optim: Optim
    schedule: Schedule
    ema: EmaSection
    engine: EngineSection
    checkpoint: CheckpointSection

    def as_dict(self) -> Table:
        """The recipe as nested dicts and lists, with its version; `from_dict` reads them back."""
        return {"version": VERSION} | plain(self)

    def as_toml(self) -> str:
        """The recipe as TOML, which `load_recipe` reads back as an equal recipe of another name."""
        lines = [f"version = {VERSION}"]
        for title in SECTIONS:
            body = plain(getattr(self, title))
            tables = {title: body}
            if "options" in body:
                tables[f"{title}.options"] = body.pop("options")
            for header, table in tables.items():
                lines += ["", f"[{header}]"]
                lines += [f"{key} = {to_toml(value)}" for key, value in table.items()]
        return "\n".join(lines) + "\n"

    def with_data(self, **values: Any) -> Self:
        """The recipe with other values of [data], such as the number of classes of the data set."""
        return replace(self, data=replace(self.data, **values))

    @property
    def automatic_keys(self) -> list[str]:
        """The keys, of those that this recipe uses, whose values are left to the device."""
        used = ["engine.amp"]
        if self.optim.name == "muon":
            used.append("optim.muon_dtype")
        return [key for key in used if self.keys[key] == "auto"]

    def with_automatic(self, values: Mapping[str, Any]) -> Self:
        """The recipe with these values of those keys, by key, that it leaves to the device."""
        engine, optim = self.engine, self.optim
        if engine.amp == "auto":
            engine = replace(engine, amp=values["engine.amp"])
        if optim.muon_dtype == "auto":
            optim = replace(optim, muon_dtype=values["optim.muon_dtype"])
        return replace(self, engine=engine, optim=optim)

    @property
    def keys(self) -> Table:
        """ "section.key" → value, and "model.options.key" → value, in the order of the file."""
        return flat({title: plain(getattr(self, title)) for title in SECTIONS})


SECTIONS = typing.get_type_hints(Recipe)  # title → dataclass, in the order of the file
del SECTIONS["name"]

# Keys that describe the machine and not the experiment: they may change when a run is resumed.
MACHINE_KEYS = (
    "data.workers",
    "data.on_device_gib",
    "eval.batch_size",
    "eval.cache_gib",
    "optim.max_batch_per_process",
    "engine.compile",
    "engine.recompute",
    "checkpoint.every_steps",
)


def contradictions(recipe: Recipe) -> Iterator[Contradiction]:
    """Yield the keys whose values contradict each other, that of most weight first."""
    yield from _of_augmentation(recipe)
    yield from _of_images(recipe)
    yield from _of_decoding(recipe)
    if recipe.augment.fit != "crop":
        for key, value in WHOLE_IMAGE.items():
            if recipe.keys[key] != value:
                yield (key, "augment.fit"), f"{to_toml(value)}, as the whole image is taken"
    yield from _of_schedule(recipe)
    yield from _of_weights(recipe)
    yield from recipe.task.kind.contradictions(recipe)


def _of_augmentation(recipe: Recipe) -> Iterator[Contradiction]:
    for key in ("crop_scale", "crop_ratio", "erase_area", "erase_ratio"):
        low, high = getattr(recipe.augment, key)
        if low > high:
            yield [f"augment.{key}"], "the smaller value first"
    if recipe.rand_augment.layers and not recipe.rand_augment.operations:
        yield ("rand_augment.operations", "rand_augment.layers"), "some, or 0 layers"
    if recipe.three_augment != NO_THREE_AUGMENT and recipe.data.channels not in (1, 3):
        keys = "three_augment.probability", "three_augment.color_jitter", "data.mean"
        yield keys, "0 and 0, as they are defined for RGB and grey"


def _of_images(recipe: Recipe) -> Iterator[Contradiction]:
    data = recipe.data
    if not data.channels or len(data.std) != data.channels:
        yield ("data.std", "data.mean"), "as many values of both as images have channels"
    if data.images_per_class and data.subset < 1.0:
        yield ("data.images_per_class", "data.subset"), "0, or a subset of 1.0"
    if data.held_out and data.held_out_per_class:
        yield ("data.held_out", "data.held_out_per_class"), "0.0, or 0 per class"
    if data.sampling == "balanced" and data.name == "images":
        yield ("data.sampling", "data.name"), "shuffled, as these have no classes"
    data_set = datasets.DATA_SETS.get(data.name)  # a set of one's own may not be imported here
    if not data.root and data_set and not data_set.drawn:
        yield ("data.root", "data.name"), "a folder, given by --data-dir"


def _of_decoding(recipe: Recipe) -> Iterator[Contradiction]:
    data = recipe.data
    if data.decode == "cpu":
        return
    if data.channels != 3:
        yield ("data.decode", "data.mean"), "cpu, as a GPU decodes to RGB alone"
    if recipe.augment.fit == "pad":
        yield ("data.decode", "augment.fit"), "cpu, as a GPU pads nothing"
    if recipe.augment.crop_padding:
        yield ("data.decode", "augment.crop_padding"), "cpu, as a GPU crops no padding"


def _of_schedule(recipe: Recipe) -> Iterator[Contradiction]:
    schedule, peak = recipe.schedule, recipe.optim.peak_lr
    if schedule.warmup_epochs > schedule.epochs:
        yield ("schedule.warmup_epochs", "schedule.epochs"), "no more than these"
    if schedule.shift_epochs:
        if schedule.shift_epochs >= schedule.total_epochs:
            yield ("schedule.shift_epochs", "schedule.epochs"), "fewer than these, for attention"
        if recipe.optim.train == "head":
            yield (
                ("schedule.shift_epochs", "optim.train"),
                "0, as the head reads attention's tokens",
            )
    if schedule.shape == "one_cycle":
        if schedule.warmup_epochs:
            yield ("schedule.warmup_epochs", "schedule.shape"), "0, as it has a warm-up of its own"
        if schedule.cosine_after_warmup:
            yield ("schedule.cosine_after_warmup", "schedule.shape"), "false, as it has no cosine"
    for key in ("warmup_lr", "min_lr"):
        if getattr(schedule, key) > peak:
            of_peak = "optim.base_lr", "optim.lr_scaling", "optim.global_batch"
            yield (f"schedule.{key}", *of_peak), f"at most the learning rate's peak, {peak:g}"


def _of_weights(recipe: Recipe) -> Iterator[Contradiction]:
    for key in ("weights", "classes"):
        if getattr(recipe.distill, key) and not recipe.distill.teacher:
            yield (f"distill.{key}", "distill.teacher"), "none, as there is no teacher"
    if recipe.engine.recompute and recipe.model.name.startswith("convmixer"):
        yield ("engine.recompute", "model.name"), "false, as BatchNorm would count images twice"
    if recipe.optim.train == "head" and recipe.model.name.startswith("convmixer"):
        yield ("optim.train", "model.name"), "all, as the BatchNorm below would go on changing"
    best_by, score = recipe.checkpoint.best_by, recipe.task.kind.score
    measured = {"val_loss": None, f"val_{score}": None, f"ema_{score}": None}
    if best_by not in measured:
        expected = "val_loss" if score == "loss" else " or ".join(measured)
        yield ("checkpoint.best_by", "task.name"), expected
    if not recipe.ema.decay:
        if recipe.ema.warmup:
            yield ("ema.warmup", "ema.decay"), "false, as no moving average is kept"
        if best_by.startswith("ema_"):
            yield ("checkpoint.best_by", "ema.decay"), "another one, as no moving average is kept"
    if max(recipe.checkpoint.keep_epochs, default=0) > recipe.schedule.total_epochs:
        keys = "checkpoint.keep_epochs", "schedule.epochs", "schedule.cooldown_epochs"
        yield keys, "none after the last epoch"
