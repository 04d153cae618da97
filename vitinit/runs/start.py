"""The start of a run: its images, its model, its folder, and what is printed then."""

from __future__ import annotations

import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..command_line import building
from ..data.augment import normalise
from ..data.datasets import DATA_SETS
from ..data.images import DataError, dark_in_16_bits, resize_and_centre_crop
from ..data.pipeline import Data
from ..data.sources import ImageFiles, Source
from ..init import init_weights, reads_images
from ..init.mass import has_targets, mass_on_images
from ..keys import Stream, keyed_generator
from ..models import build_model
from ..recipe.sections import Recipe
from ..recipe.values import to_toml
from ..train.checkpoint import write_text_atomically
from ..train.device import describe_device
from ..train.distributed import Processes
from ..train.metrics import ProgressBar
from ..train.state import TrainState
from .folder import RunFolder
from .resume import RunLock

INIT_IMAGES = 512               # training images that an init may read
MASS_IMAGES = 64                # on which the mass on the init's targets is measured
REHEARSED_IMAGES = 8            # of a dry run's forward pass, which a CPU has to do in seconds
CPU_INFO = Path("/proc/cpuinfo")
FEW_UPDATES = 2_000             # steps; fewer than that from scratch give a warning


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


def training_views(recipe: Recipe, source: Source, count: int) -> Tensor:
    """`count` training images, or all if there are fewer: normalised evaluation views (n, 3, H, W).

    Which ones is keyed by the run's seed.
    """
    order = keyed_generator(recipe.run.seed, Stream.INIT_IMAGES).permutation(len(source))
    return as_input(torch.stack([evaluation_view(source.image(int(index)), recipe)
                                 for index in order[:count]]), recipe)


def build(recipe: Recipe, source: str = "") -> nn.Module:
    """The recipe's model, as its constructor draws it.

    Raises RecipeError, which begins with `source`, by default "recipe NAME".
    """
    with building(source or f"recipe {recipe.name}", "model"):
        return build_model(recipe.model.name, num_classes=recipe.data.num_classes,
                           image_size=recipe.data.image_size, **recipe.model.options)


def without_data(recipe: Recipe) -> Recipe:
    """The recipe with a number of classes, for a model that is built without its data set.

    Where it is to be taken from the data (0), it is that of the published set, or 2.
    """
    return recipe.with_data(num_classes=recipe.data.num_classes
                     or DATA_SETS[recipe.data.name].num_classes or 2)


def initialise(model: nn.Module, recipe: Recipe, source: Source | None) -> None:
    """Apply the recipe's init to its model, on the CPU, from a generator of the run's seed.

    source: the training images, of which some inits read INIT_IMAGES; None: there are none. Raises
    RecipeError, and DataError for an image that cannot be read.
    """
    init = recipe.init
    with building(f"recipe {recipe.name}", "init"):
        images = (training_views(recipe, source, INIT_IMAGES)
                  if source is not None and not init.checkpoint    # which replaces what they show
                  and reads_images(init.name, model.family) else None)
        init_weights(model, init.name, **init.options, images=images,
                     generator=torch.Generator().manual_seed(recipe.run.seed))


def set_up_folder(folder: RunFolder, lock: RunLock, recipe: Recipe, state: TrainState, *,
                  resumed: bool, starts_again: bool) -> None:
    """Lock a run's folder, and write what it holds before the first step.

    In a resumed run, what is newer than its checkpoint is removed. starts_again: a new run may find
    recipe.toml and run.json there. Raises CheckpointError if the folder cannot be used.
    """
    progress = state.progress
    folder.make()
    lock.take(folder.path)
    if resumed:
        folder.tidy(epochs=progress.epochs, steps=progress.step)
    else:
        folder.require_unused(starts_again=starts_again)
        write_text_atomically(recipe.as_toml(), folder.recipe)
        folder.save(state.state_dict(), folder.last)     # so that a restart finds a run to resume
    if progress.step == 0 and 0 in recipe.checkpoint.keep_epochs:
        folder.save(state.weights(), folder.kept(0))


# What train.py prints before training ---------------------------------------------------------


def measure_mass(model: nn.Module, recipe: Recipe, train_set: Source) -> list[str]:
    """A line about how much attention lies on the init's targets, in MASS_IMAGES training images.

    An empty list for inits without targets.
    """
    name, options = recipe.init.name, recipe.init.options
    if not has_targets(model, name, options):
        return []
    try:
        images = training_views(recipe, train_set, MASS_IMAGES)
    except DataError:                                # training will say so when it needs the image
        return []
    mass = mass_on_images(model, name, options, images)
    return [f"mass    {mass}, on {len(images)} training images"]


def faster_amp(amp: str, device: torch.device) -> list[str]:
    """A line if another precision would be faster. On a CPU with instructions for bf16, or without
    them, a step of cifar10_small takes .4 or 9 times that in float32 (attention.py::attend).
    """
    if device.type == "cuda" and amp == "bf16" and not torch.cuda.is_bf16_supported(
            including_emulation=False):
        return ["amp     bf16, which this GPU only emulates: engine.amp=fp16 is faster"]
    if device.type != "cpu" or platform.machine() != "x86_64" or not CPU_INFO.is_file():
        return []                                    # not known
    computes_bf16 = "avx512_bf16" in CPU_INFO.read_text()
    if amp == "bf16" and not computes_bf16:
        return ["amp     bf16, which this CPU has no instructions for: engine.amp=off is faster"]
    if amp == "off" and computes_bf16:
        return ["amp     off; this CPU computes bf16: engine.amp=bf16 is faster (a ViT 2 times)"]
    return []


def summary(recipe: Recipe, data: Data, model: nn.Module, notes: list[str],
            optimizer: torch.optim.Optimizer, lr_at: Callable[[int], float], processes: Processes
            ) -> str:
    """Describe the run: recipe, data, model, init, batches, steps, optimiser and learning rates.

    notes: lines about the weights that training starts from. lr_at: step → learning rate.
    """
    schedule, augment, mix, optim = recipe.schedule, recipe.augment, recipe.mix, recipe.optim
    steps_per_epoch = data.train_batches.steps_per_epoch
    epochs = schedule.total_epochs
    part = f" of {len(data.whole_set):,}" if len(data.train_set) < len(data.whole_set) else ""
    height, width = recipe.data.image_size
    weights = {True: 0, False: 0}                    # trained by Muon, by AdamW
    for group in optimizer.param_groups:
        weights[group["muon"]] += sum(p.numel() for p in group["params"])
    trained_by = f"AdamW for {weights[False]:,}{'' if weights[True] else ' weights'}"
    if weights[True]:
        trained_by = (f"Muon (factor {optimizer.factor:g}, momentum {optimizer.momentum:g}) for "
                      f"{weights[True]:,} weights, {trained_by}")
    if optim.layer_decay != 1.0:
        trained_by += f"; × {optim.layer_decay:g} per layer from the head down"
    return "\n".join([
        f"recipe  {recipe.name}, seed {recipe.run.seed}",
        f"data    {recipe.data.name}{recipe.data.root and ' ' + recipe.data.root}: "
        f"{len(data.train_set):,}{part} to train on, {len(data.val_set):,} "
        f"{'held out of them ' if recipe.data.held_out_per_class else ''}to validate, "
        f"{recipe.data.num_classes} classes, {height}×{width}"
        f"{', all on the device' if data.train_batches.resident else ''}",
        *dict.fromkeys(line for source in (data.whole_set, data.val_set)
                       for line in source.left_out.splitlines()),
        f"views   {data.val_batches.in_words()}",
        f"augment {augment.repeats} view(s) per image, RandAugment {recipe.rand_augment.layers} × "
        f"magnitude {recipe.rand_augment.magnitude:g}, erasing {augment.erase_probability:g}, "
        f"mixup {mix.mixup_alpha:g}, cutmix {mix.cutmix_alpha:g}, "
        f"label smoothing {mix.label_smoothing:g}",
        f"model   {recipe.model.name}: {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"{to_toml(recipe.model.options)}",
        f"init    {recipe.init.name}: {to_toml(recipe.init.options)}",
        *notes,
        f"batch   {optim.global_batch} = {processes.world_size} process(es) × "
        f"{data.plan.accumulation} micro-batch(es) × {data.plan.micro_batch_size} images, on "
        f"{describe_device(processes.device)}",
        *faster_amp(recipe.engine.amp, processes.device),
        f"steps   {steps_per_epoch:,} per epoch × {epochs} epochs = {steps_per_epoch * epochs:,}",
        f"optim   {trained_by}",
        f"lr      peak {optim.peak_lr:g}; first step {lr_at(0):g}, last step "
        f"{lr_at(steps_per_epoch * epochs - 1):g}, changing every {schedule.step_on}"])


def cautions(recipe: Recipe, data: Data) -> list[str]:
    """One line for each value that is valid but probably a mistake."""
    updates = recipe.schedule.total_epochs * data.train_batches.steps_per_epoch
    lines = data.plan.cautions(repeats=recipe.augment.repeats,
                               max_batch_per_process=recipe.optim.max_batch_per_process)
    # Fine-tuning needs few steps, and `shapes`, made to be learned within minutes, needs hundreds.
    if updates < FEW_UPDATES and not recipe.init.checkpoint and recipe.data.name != "shapes":
        lines.append(f"{updates:,} update(s) in all: from scratch, such a model needs thousands; "
                     "more schedule.epochs or a smaller optim.global_batch make more of them")
    if isinstance(images := data.train_set, ImageFiles):     # of all classes
        part = images.part(np.arange(0, len(images), len(images) // 64 + 1))
        lines += filter(None, [dark_in_16_bits(part.paths)])
    return lines


def read_images(recipe: Recipe, data: Data, processes: Processes) -> int:
    """Decode each image of the run once, print a line for each that cannot be, and count these.

    Each process decodes its share, in data.workers threads: decoders do not hold Python's lock.
    """
    def problem(image: tuple[Source, int]) -> str:
        source, index = image
        try:
            source.image(index)
        except DataError as error:
            return str(error)
        return ""
    images = [(source, index) for source in (data.train_set, data.val_set)
              for index in range(processes.rank, len(source), processes.world_size)]
    broken = 0
    with (ProgressBar("read", len(images), shown=processes.is_main) as bar,
          ThreadPoolExecutor(recipe.data.workers or 1) as pool):
        for start in range(0, len(images), 1_024):   # all at once, they would take gigabytes
            for line in filter(None, bar.over(pool.map(problem, images[start:start + 1_024]))):
                print(line, flush=True)
                broken += 1
    total, broken = processes.sum(torch.tensor([len(images), broken])).tolist()
    processes.say(f"images  {broken:,} of {total:,} cannot be read; nothing was written" if broken
                  else f"images  all {total:,} can be read")
    return broken


def rehearsal(recipe: Recipe, data: Data, state: TrainState, teacher: Any) -> str:
    """A forward pass of a few images, what a dry run says of it, and of what the teacher's adds.

    teacher: a `LearnFromTeacher`, or None.
    """
    with building(f"recipe {recipe.name}", "model"), torch.no_grad():
        images = next(iter(data.val_batches))[0][:REHEARSED_IMAGES]
        logits = state.model.eval()(images)
        cost = f"{teacher.cost(images)}\n" if teacher else ""
    return (f"{cost}dry run: images {tuple(images.shape)} → logits {tuple(logits.shape)}; nothing "
            "was written; --read-images decodes all images, and lists those that cannot be read")
