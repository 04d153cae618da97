"""What a run says before its first step: its parts in words, cautions, and a rehearsal."""

import math
import os
import platform
from collections.abc import Sequence
from functools import partial
from textwrap import fill
from typing import cast

import torch

from ..base.messages import counted, shortened, times
from ..base.values import to_toml
from ..data.images import jpeg_decoder
from ..data.pipeline import Data
from ..data.sources import ImageFiles
from ..models.layers import Classifier
from ..recipe.files import building
from ..recipe.sections import Recipe
from ..tasks import Task
from ..train.device import cores, describe_device, fastest_amp, for_people, on_apples_gpu
from ..train.loop import Training
from ..train.state import TrainState
from .data import REHEARSED_IMAGES
from .folder import RunFolder
from .watching import Watchers

FEW_UPDATES = 1_000  # steps; fewer than that from scratch give a warning
FEW_IMAGES = 1_000  # to train on; with fewer, such a warning advises to fine-tune
SMALL_GRID = 6  # patches along a side; fewer than that give a warning
WIDTH = 80  # characters of a line on the terminal, where longer ones go on in the next
MOST_LINES, MOST_CAUTIONS = 8, 6  # there; all of them are in the run's folder
# How the lines begin that are shown there; the last ones give way to others.
AT_A_GLANCE = (
    "recipe",
    "data",
    "mass",
    "start",
    "head",
    "teacher",
    "steps",
    "run",
    "model",
    "init",
    "batch",
)


def faster_amp(amp: str, device: torch.device) -> list[str]:
    """A line if another precision would be faster."""
    fastest = fastest_amp(device)
    if amp == "bf16" != fastest and (device.type == "cuda" or platform.machine() == "x86_64"):
        return [f"bf16 is slow on this device: engine.amp={fastest} is faster"]
    if amp == "off" and fastest == "bf16" and device.type == "cpu":
        return ["this CPU computes bf16: engine.amp=bf16 is faster than off (a ViT 2 times)"]
    return []


def crowded(device: torch.device) -> list[str]:
    """A line if this process's threads have to share cores with other programs.

    Threads of one operation wait for the last of them, which waits for a core: two threads beside
    two other programs took eight times the processor time per step that one thread took.
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1 or not hasattr(os, "getloadavg"):
        return []
    busy, _, _ = os.getloadavg()  # cores, over the last minute
    if busy + threads < cores() + 1:
        return []
    return [
        f"{threads} threads, and other programs use {busy:.1f} of {cores()} cores: threads that "
        "wait for one another take several times as long; OMP_NUM_THREADS=1 does not wait"
    ]


def summary(recipe: Recipe, data: Data, training: Training, notes: Sequence[str]) -> list[str]:
    """Describe the run in lines. notes: on the first weights, and the task."""
    device = for_people(describe_device(training.processes.device))
    precision = recipe.engine.amp.replace("off", "float32")
    model, init = training.state.model, recipe.init
    weights = sum(parameter.numel() for parameter in model.parameters())
    options = recipe.model.options
    layers = times(cast(Classifier, model).grid) + " patches"
    if "depth" in options:
        layers += f", {options['depth']} blocks of width {options['embed_dim']}"
    return [
        f"recipe  {recipe.name}, seed {recipe.run.seed}, in {precision} on {device}",
        *lines_on_data(recipe, data),
        f"model   {recipe.model.name}: {weights:,} weights, {layers}",
        f"init    {init.name}",
        f"options model: {to_toml(options)}",
        f"options init: {to_toml(init.options)}",
        *notes,
        *lines_on_steps(recipe, data, training),
    ]


def lines_on_data(recipe: Recipe, data: Data) -> list[str]:
    """The images in words, and what becomes of them."""
    section, augment, mix = recipe.data, recipe.augment, recipe.mix
    images = f"{len(data.train_set):,}"
    if len(data.train_set) < len(data.whole_set):
        images += f" of {len(data.whole_set):,}"
    classes = section.num_classes or "no"
    use = "held out" if section.holds_out else "to validate"
    lines = [
        f"data    {section.name}: {images} images, {classes} classes, {times(section.image_size)}; "
        f"{len(data.val_set):,} {use}"
    ]
    if section.root:
        lines.append(f"root    {section.root}")
    if isinstance(data.whole_set, ImageFiles):
        lines.append(line_on_decoder())
    views = f"validation: {data.val_batches.in_words()}"
    if data.train_batches.resident:
        views = f"training: all images on the device; {views}"
    lines.append(f"views   {views}")
    randomly = f"{recipe.rand_augment.layers} × magnitude {recipe.rand_augment.magnitude:g}"
    three = recipe.three_augment
    lines.append(
        f"augment {counted(augment.repeats, 'view')} per image, RandAugment {randomly}, "
        f"3-Augment {three.probability:g} with jitter {three.color_jitter:g}, "
        f"erasing {augment.erase_probability:g}, mixup {mix.mixup_alpha:g}, "
        f"cutmix {mix.cutmix_alpha:g}, label smoothing {mix.label_smoothing:g}"
    )
    return lines


def line_on_decoder() -> str:
    """Which library decodes JPEGs; Pillow, the slowest, not without a word on the terminal."""
    decoder = jpeg_decoder()
    if decoder is not None:
        return f"decode  JPEGs by {decoder.name}"
    return (
        "note    JPEGs are decoded by Pillow, 1.4 to 2.8 times as slow as torchcodec, which "
        "pip install 'vitinit[torchcodec]' installs"
    )


def lines_on_steps(recipe: Recipe, data: Data, training: Training) -> list[str]:
    """Batches, steps, optimiser and learning rate in words."""
    optim, plan, learning_rate = recipe.optim, data.plan, training.learning_rate
    by_muon = others = 0  # weights
    for group in training.state.optimizer.param_groups:
        weights = sum(parameter.numel() for parameter in group["params"])
        if group["muon"]:
            by_muon += weights
        else:
            others += weights
    optimisers = "LAMB" if optim.name == "lamb" else "AdamW"
    trained_by = f"{optimisers} for {others:,} weights"
    if by_muon:
        optimisers = "Muon and AdamW"
        dtype = optim.muon_dtype.replace("_", " ")
        settings = f"factor {optim.muon_factor:g}, momentum {optim.muon_momentum:g}, in {dtype}"
        trained_by = f"Muon ({settings}) for {by_muon:,} weights, AdamW for {others:,}"
    if optim.layer_decay != 1.0:
        trained_by += f"; × {optim.layer_decay:g} per layer from the head down"
    if optim.train == "head":
        optimisers += " of the head alone"
    steps_per_epoch, epochs = data.steps_per_epoch, recipe.schedule.total_epochs
    steps = steps_per_epoch * epochs
    processes = counted(training.processes.world_size, "process")
    micro_batches = counted(plan.accumulation, "micro-batch")
    return [
        f"batch   {optim.global_batch:,} = {processes} × {micro_batches} × "
        f"{counted(plan.micro_batch_size, 'image')}",
        f"steps   {steps:,} = {counted(epochs, 'epoch')} × {steps_per_epoch:,}, by {optimisers}, "
        f"learning rate up to {optim.peak_lr:g}",
        f"optim   {trained_by}",
        f"lr      peak {optim.peak_lr:g}; first step {learning_rate(0):g}, last step "
        f"{learning_rate(steps - 1):g}, changing every {recipe.schedule.step_on}",
    ]


def start_lines(
    recipe: Recipe,
    data: Data,
    task: Task,
    training: Training,
    notes: Sequence[str],
    folder: RunFolder,
    watchers: Watchers,
    *,
    resumed: bool,
) -> list[str]:
    """All that there is to say at the start of a run, line by line: the run in words, then cautions.
    notes: on the first weights. watchers: some of them look at a new run's images, now.
    """
    processes, grid = training.processes, cast(Classifier, training.state.model).grid
    lines = summary(recipe, data, training, [*notes, *task.notes()])
    seen = []
    if processes.is_main and not resumed:
        seen = watchers.tell("opened", data, recipe)
    warnings = [line for line in seen if line.startswith("warning ")]
    lines += [line for line in seen if line not in warnings]
    run = f"run     {folder.path}"
    if resumed:
        run += f", resumed at step {training.state.progress.step:,}"
    lines.append(run)
    cautious = cautions(recipe, data, grid, processes.device)
    return [*lines, *warnings, *(f"warning {line}" for line in cautious)]


def at_a_glance(lines: Sequence[str], elsewhere: str) -> list[str]:
    """Of all that there is to say at the start, what a terminal shows: at most MOST_LINES, none of
    them cut, and MOST_CAUTIONS. elsewhere: where all of it is.
    """
    kinds = [kind for kind in AT_A_GLANCE if any(line.startswith(kind) for line in lines)]
    shown = [line for line in lines if line.startswith(tuple(kinds[:MOST_LINES]))]
    warnings = [line for line in lines if line.startswith(("note", "warning"))]
    if len(warnings) > MOST_CAUTIONS:
        hidden = len(warnings) - MOST_CAUTIONS + 1
        warnings = warnings[: MOST_CAUTIONS - 1]
        warnings.append(f"warning and {hidden} more, {elsewhere}")
    folded = partial(
        fill, width=WIDTH, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False
    )
    return [*map(folded, shown), *warnings]


def cautions(recipe: Recipe, data: Data, grid: tuple[int, int], device: torch.device) -> list[str]:
    """One line for each value that is valid but probably a mistake, and for what is left out.
    grid: rows and columns of the model's patches.
    """
    steps = data.steps_per_epoch
    updates = recipe.schedule.total_epochs * steps
    left_out = f"{data.whole_set.left_out}\n{data.val_set.left_out}".split("\n")
    lines = list(dict.fromkeys(filter(None, left_out)))
    lines += data.plan.cautions(
        repeats=recipe.augment.repeats, max_batch_per_process=recipe.optim.max_batch_per_process
    )
    if not recipe.eval.every_epochs:
        lines.append(
            "nothing is validated, as eval.every_epochs is 0: no number will say how good the model "
            "is, and there will be no best.pt"
        )
    else:
        lines += without_images(data)
    # Fine-tuning needs few steps, and `shapes`, made to be learned within minutes, needs hundreds.
    if updates < FEW_UPDATES and not recipe.init.checkpoint and recipe.data.name != "shapes":
        lines.append(few_updates(recipe, len(data.train_set), updates, steps))
    if recipe.schedule.warmup_epochs == recipe.schedule.epochs:
        lines.append(
            "all epochs are warm-up, so that the learning rate never falls: more schedule.epochs, or "
            "fewer schedule.warmup_epochs, let it"
        )
    if min(grid) < SMALL_GRID:
        height, width = recipe.data.image_size
        largest = min(height, width) // SMALL_GRID
        sizes = [size for size in range(1, largest + 1) if height % size == width % size == 0]
        lines.append(
            f"{times(grid)} patches per image show a model little: --set "
            f"model.options.patch_size={max(sizes, default=1)} makes more"
        )
    lines += on_apples_gpu(device)
    return lines + faster_amp(recipe.engine.amp, device) + crowded(device)


def few_updates(recipe: Recipe, images: int, updates: int, steps: int) -> str:
    """A line on what helps where so few images, in so few `updates`, train a model from scratch.
    steps: of an epoch.
    """
    if images < FEW_IMAGES and recipe.task.kind.learns_classes and recipe.data.channels == 3:
        return (
            f"{counted(images, 'image')}, few for a model from scratch, which more epochs let it "
            "learn by heart: --recipe photos_finetune starts from DeiT's weights, which it fetches"
        )
    epochs = math.ceil(FEW_UPDATES / steps)
    return (
        f"{counted(updates, 'update')} in all: from scratch, such a model needs thousands; "
        f"--set schedule.epochs={epochs} makes {FEW_UPDATES:,}, and where training loss falls far "
        "below validation loss, --set rand_augment.layers=2 augments more"
    )


def without_images(data: Data) -> list[str]:
    """A line on classes that are learned, and of which there is no image to validate on."""
    images = data.val_set.class_images
    names = [name for name, number in zip(data.classes, images) if not number]
    if not names:
        return []
    return [
        f"no image to validate on of {counted(len(names), 'class')}: {shortened(names)}; what is "
        "measured is of the others"
    ]


def rehearsal(recipe: Recipe, data: Data, state: TrainState, task: Task) -> str:
    """What a dry run says of a forward pass, and of what the task costs beside it."""
    with building(f"recipe {recipe.name}", "model"), torch.no_grad():
        if len(data.val_batches) > 0:  # this process' own
            batch = next(iter(data.val_batches))
        else:
            _, micro_batches = next(data.train_batches.steps(0))
            batch = micro_batches[0].prepare()
        images, targets = (part[:REHEARSED_IMAGES] for part in batch)
        name, output = task.rehearsed(state.model.eval(), images, targets)
        cost = task.cost(images)
    return (
        f"{cost}dry run: images {tuple(images.shape)} → {name} {tuple(output.shape)}; nothing "
        "was written; --read-images decodes all images, and lists those that cannot be read"
    )
