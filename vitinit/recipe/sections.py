"""What a recipe holds: one frozen dataclass a section, one typed and bounded field a key.

A field has no default: every recipe states every key. Standard library only.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .upgrade import VERSION
from .values import PAIR, number, plain


COUNT = 2**31                   # beyond what a list, a tensor's side or a C integer counts
TINIEST, LARGEST = 2.0**-149, 2.0**128      # of float32, in which training calculates; exclusive

LINEAR_SCALING_BATCH = 512      # what lr_scaling = "linear" divides the global batch by

RandAugmentOperation = Literal["AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize",
                               "SolarizeAdd", "Color", "Contrast", "Brightness", "Sharpness",
                               "ShearX", "ShearY", "TranslateX", "TranslateY"]


@dataclass(frozen=True)
class RunSection:
    seed: int = number(minimum=0, below=2**63)      # keys every random draw of the run


@dataclass(frozen=True)
class DataSection:
    name: Literal["shapes", "image_folder", "imagenet", "cifar10", "cifar100", "stl10", "svhn",
                  "food101", "flowers102", "pets", "tiny_imagenet"]
    root: str                                       # folder of the data set; "" for `shapes`
    num_classes: int = number(minimum=2, below=COUNT)
    subset: float = number(above=0.0, maximum=1.0)  # share of each class that is trained on
    images_per_class: int = number(minimum=0, below=COUNT)  # the same as a number; 0: no such limit
    subset_seed: int = number(minimum=0, below=2**63)  # keys which images those are
    image_size: PAIR = number(minimum=1, below=COUNT)  # (height, width) that the model sees
    mean: tuple[float, float, float] = number(minimum=0.0, maximum=1.0)  # per channel, of [0, 1]
    std: tuple[float, float, float] = number(minimum=TINIEST, below=LARGEST)
    workers: int = number(minimum=0, below=COUNT)   # loader processes, per training process
    on_device_gib: float = number(minimum=0.0)      # small sets live on the device up to this size


@dataclass(frozen=True)
class AugmentSection:
    """One random crop, resized to the image size, then a flip; after normalisation, erasing.

    Pad-and-shift is the special case crop_scale = crop_ratio = [1, 1] with crop_padding > 0.
    """

    repeats: int = number(minimum=1, below=COUNT)   # views of an image side by side in an epoch
    crop_scale: tuple[float, float] = number(above=0.0, maximum=1.0)  # share of the image's area
    crop_ratio: tuple[float, float] = number(above=0.0)               # width over height
    crop_padding: int = number(minimum=0, below=2**31)  # black pixels on each side before the crop
    flip: float = number(minimum=0.0, maximum=1.0)  # probability of a horizontal flip
    interpolation: Literal["bilinear", "bicubic", "random"]           # random: by sample
    erase_probability: float = number(minimum=0.0, maximum=1.0)
    erase_area: tuple[float, float] = number(above=0.0, maximum=1.0)  # share of the image's area
    erase_ratio: tuple[float, float] = number(above=0.0)              # height over width
    erase_fill: Literal["pixel", "rand", "const"]   # noise by value, noise by channel, zeros
    erase_after_mix: bool                           # else before, as in DeiT


@dataclass(frozen=True)
class RandAugmentSection:
    """RandAugment; timm's string rand-m9-mstd0.5-inc1 spelt out. layers = 0: none."""

    layers: int = number(minimum=0, below=2**16)    # operations drawn for an image
    probability: float = number(minimum=0.0, maximum=1.0)  # that a drawn one is applied
    magnitude: float = number(minimum=0.0, maximum=10.0)   # mean of what is drawn, out of 10
    magnitude_std: float = number(minimum=0.0)
    fill: tuple[int, int, int] = number(minimum=0, maximum=255)  # colour from outside the image
    interpolation: Literal["bilinear", "bicubic", "random"]     # random: by application
    operations: tuple[RandAugmentOperation, ...]    # what is drawn from, with replacement
    rotate_degrees: float = number(minimum=0.0)     # from here on: an operation's extent at
    shear_factor: float = number(minimum=0.0)       # magnitude 10
    translate_share: float = number(minimum=0.0)    # of the image's side
    enhance_factor: float = number(minimum=0.0)     # colour, contrast, brightness, sharpness
    posterize_bits: int = number(minimum=0, maximum=8)
    solarize_levels: int = number(minimum=0, maximum=256)
    solarize_add_levels: int = number(minimum=0, maximum=255)


@dataclass(frozen=True)
class MixSection:
    """Mixup and cutmix of groups of images, and the targets."""

    mixup_alpha: float = number(minimum=0.0)        # of Beta(α, α); 0: no mixup
    cutmix_alpha: float = number(minimum=0.0)       # likewise
    probability: float = number(minimum=0.0, maximum=1.0)         # that a group is mixed
    switch_probability: float = number(minimum=0.0, maximum=1.0)  # cutmix where both are on
    label_smoothing: float = number(minimum=0.0, below=1.0)
    group: int = number(minimum=2, below=COUNT)  # images per draw: even, divides global_batch


@dataclass(frozen=True)
class EvalSection:
    crop_pct: float = number(above=0.0, maximum=1.0)  # resize to image_size / crop_pct, then crop
    interpolation: Literal["bilinear", "bicubic"]
    batch_size: int = number(minimum=1, below=COUNT)  # images a process and forward pass
    cache_gib: float = number(minimum=0.0)          # decoded views stay in each process' memory up to
                                                    # this size; 0: they are decoded every time
    every_epochs: int = number(minimum=1, below=COUNT)           # the last epoch is always evaluated


@dataclass(frozen=True)
class ModelSection:
    name: str
    options: Mapping[str, Any]                      # keyword sizes of that model


@dataclass(frozen=True)
class InitSection:
    name: str
    checkpoint: str                                 # weights to start from; "": none
    checkpoint_weights: Literal["model", "ema"]     # which of those in it
    checkpoint_fit: Literal["exact", "select"]      # select: a larger model's, thinned out evenly
    options: Mapping[str, Any]                      # departures from that init's defaults


@dataclass(frozen=True)
class OptimSection:
    global_batch: int = number(minimum=1, below=COUNT)  # images a step, over all processes
    max_batch_per_process: int = number(minimum=1, below=COUNT)  # a forward pass; the rest adds up
    base_lr: float = number(above=0.0, below=LARGEST)
    lr_scaling: Literal["linear", "none"]           # linear: base_lr · global_batch / 512
    weight_decay: float = number(minimum=0.0, below=LARGEST)
    betas: tuple[float, float] = number(minimum=0.0, below=1.0)
    eps: float = number(minimum=TINIEST, below=LARGEST)
    clip_norm: float = number(minimum=0.0)          # global gradient norm; 0: no clipping


@dataclass(frozen=True)
class ScheduleSection:
    shape: Literal["cosine", "one_cycle"]           # one_cycle rises for ⅖ of the epochs by itself
    epochs: int = number(minimum=1, below=COUNT)                 # length of warm-up and decay together
    cooldown_epochs: int = number(minimum=0, below=COUNT)        # further epochs at min_lr
    warmup_epochs: int = number(minimum=0, below=COUNT)
    warmup_lr: float = number(minimum=0.0)          # where the rise starts; at most the peak
    min_lr: float = number(minimum=0.0)             # where the decay ends, likewise
    step_on: Literal["epoch", "update"]             # when the learning rate changes


@dataclass(frozen=True)
class EmaSection:
    decay: float = number(minimum=0.0, below=1.0)   # 0: no moving average is kept
    warmup: bool                                    # decay min(decay, 1 - (1 + update)^(-2/3))


@dataclass(frozen=True)
class EngineSection:
    amp: Literal["off", "bf16", "fp16"]             # autocast; fp16 adds a GradScaler
    compile: bool                                   # torch.compile
    channels_last: bool                             # memory format of the input batch
    tf32: bool                                      # TensorFloat-32 matrix products on CUDA


@dataclass(frozen=True)
class CheckpointSection:
    every_epochs: int = number(minimum=1, below=COUNT)           # last.pt; the last epoch always writes it
    every_steps: int = number(minimum=0, below=COUNT)            # last.pt also every so many steps; 0: never
    keep_epochs: tuple[int, ...] = number(minimum=0, below=COUNT)  # kept for good; 0: as initialised
    best_by: Literal["val_top1", "val_loss", "ema_top1"]


@dataclass(frozen=True)
class Recipe:
    name: str                                       # the file's stem, not a key
    run: RunSection
    data: DataSection
    augment: AugmentSection
    rand_augment: RandAugmentSection
    mix: MixSection
    eval: EvalSection
    model: ModelSection
    init: InitSection
    optim: OptimSection
    schedule: ScheduleSection
    ema: EmaSection
    engine: EngineSection
    checkpoint: CheckpointSection

    def as_dict(self) -> dict[str, Any]:
        """Plain nested containers, with the version; `from_dict` reads them back."""
        sections = {name: ({key: plain(value) for key, value in vars(section).items()}
                           if dataclasses.is_dataclass(section) else section)
                    for name, section in vars(self).items()}
        return {"version": VERSION} | sections


# What belongs to the machine and not to the experiment: it may change while a run is resumed.
MACHINE_KEYS = ("data.workers", "data.on_device_gib", "eval.batch_size", "eval.cache_gib",
                "optim.max_batch_per_process", "engine.compile", "checkpoint.every_steps")

SECTIONS = {name: kind for name, kind in typing.get_type_hints(Recipe).items() if name != "name"}


def contradictions(recipe: Recipe) -> Iterable[tuple[tuple[str, ...], str]]:
    """(keys, what is wrong with the first) for values that are fine alone, impossible together."""
    total = recipe.schedule.epochs + recipe.schedule.cooldown_epochs
    for key in ("crop_scale", "crop_ratio", "erase_area", "erase_ratio"):
        low, high = getattr(recipe.augment, key)
        if low > high:
            yield (f"augment.{key}",), f"is [{low:g}, {high:g}], expected the smaller value first"
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
    yield from _rate_contradictions(recipe)
    if recipe.ema.decay == 0.0 and recipe.ema.warmup:
        yield ("ema.warmup", "ema.decay"), "is true, but ema.decay = 0 keeps no moving average"
    if recipe.ema.decay == 0.0 and recipe.checkpoint.best_by == "ema_top1":
        yield (("checkpoint.best_by", "ema.decay"),
               'is "ema_top1", but ema.decay = 0 keeps no moving average')
    for epoch in recipe.checkpoint.keep_epochs:
        if epoch > total:
            yield (("checkpoint.keep_epochs", "schedule.epochs", "schedule.cooldown_epochs"),
                   f"holds {epoch}, but the run ends after {total} epochs")


def _rate_contradictions(recipe: Recipe) -> Iterable[tuple[tuple[str, ...], str]]:
    """Likewise of the learning rate, which rises to its peak and falls from it."""
    optim, schedule = recipe.optim, recipe.schedule
    peak, words = optim.base_lr, f"optim.base_lr = {optim.base_lr:g}"
    if optim.lr_scaling == "linear":
        peak = optim.base_lr * optim.global_batch / LINEAR_SCALING_BATCH
        words += f" · {optim.global_batch} / {LINEAR_SCALING_BATCH} = {peak:g}"
    causes = ("optim.base_lr", "optim.lr_scaling", "optim.global_batch")
    if peak >= LARGEST:
        yield causes, f"makes the learning rate's peak, {words}, more than float32 holds"
    for key in ("warmup_lr", "min_lr"):
        rate = getattr(schedule, key)
        if rate > peak:
            yield ((f"schedule.{key}", *causes),
                   f"is {rate:g}, above the learning rate's peak, {words}")
