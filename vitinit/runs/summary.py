"""What a run says before its first step: its parts in words, cautions, and a rehearsal."""

import math
import platform
from collections.abc import Sequence
from typing import cast

import torch

from ..base.messages import counted, one_line
from ..base.values import to_toml
from ..data.images import dark_in_16_bits
from ..data.pipeline import Data
from ..data.sources import ImageFiles
from ..models.layers import Classifier
from ..recipe.files import building
from ..recipe.sections import Recipe
from ..tasks import Task
from ..train.device import describe_device, fastest_amp
from ..train.loop import Training
from ..train.state import TrainState
from .folder import RunFolder
from .watching import Watchers

REHEARSED_IMAGES = 8  # of a dry run's forward pass, which a CPU has to do in seconds
FEW_UPDATES = 1_000  # steps; fewer than that from scratch give a warning
SMALL_GRID = 6  # patches along a side; fewer than that give a warning
WIDTH = 80  # characters of a line on the terminal
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


def summary(recipe: Recipe, data: Data, training: Training, notes: Sequence[str]) -> list[str]:
    """Describe the run in lines. notes: on the first weights, and the task."""
    processes, lr_at = training.processes, training.learning_rate
    model, optimizer = training.state.model, training.state.optimizer
    schedule, augment, mix, optim = recipe.schedule, recipe.augment, recipe.mix, recipe.optim
    steps_per_epoch, epochs = data.train_batches.steps_per_epoch, schedule.total_epochs
    part = f" of {len(data.whole_set):,}" if len(data.train_set) < len(data.whole_set) else ""
    height, width = recipe.data.image_size
    weights = {True: 0, False: 0}  # trained by Muon, by AdamW
    for group in optimizer.param_groups:
        weights[group["muon"]] += sum(p.numel() for p in group["params"])
    trained_by = f"AdamW for {weights[False]:,}{'' if weights[True] else ' weights'}"
    if weights[True]:
        trained_by = (
            f"Muon (factor {optim.muon_factor:g}, momentum {optim.muon_momentum:g}) for "
            f"{weights[True]:,} weights, {trained_by}"
        )
    if optim.layer_decay != 1.0:
        trained_by += f"; × {optim.layer_decay:g} per layer from the head down"
    # run.json keeps the plural, or new runs would differ from older ones in a comparison.
    device = describe_device(processes.device).replace(" 1 threads", " 1 thread")
    return [
        f"recipe  {recipe.name}, seed {recipe.run.seed}, in "
        f"{recipe.engine.amp.replace('off', 'float32')} on {device}",
        f"data    {recipe.data.name}: {len(data.train_set):,}{part} images, "
        f"{recipe.data.num_classes or 'no'} classes, {height}×{width}; {len(data.val_set):,} "
        f"{'held out' if recipe.data.held_out_per_class else 'to validate'}",
        *([f"root    {recipe.data.root}"] if recipe.data.root else []),
        f"views   {'training: all images on the device; ' * data.train_batches.resident}"
        f"validation: {data.val_batches.in_words()}",
        f"augment {counted(augment.repeats, 'view')} per image, "
        f"RandAugment {recipe.rand_augment.layers} × "
        f"magnitude {recipe.rand_augment.magnitude:g}, erasing {augment.erase_probability:g}, "
        f"mixup {mix.mixup_alpha:g}, cutmix {mix.cutmix_alpha:g}, "
        f"label smoothing {mix.label_smoothing:g}",
        f"model   {recipe.model.name}: {sum(p.numel() for p in model.parameters()):,} weights, "
        f"{to_toml(dict([*recipe.model.options.items()][::-1]))}",  # first without default
        f"init    {recipe.init.name}: {to_toml(recipe.init.options)}",
        *notes,
        f"batch   {optim.global_batch:,} = {counted(processes.world_size, 'process')} × "
        f"{counted(data.plan.accumulation, 'micro-batch')} × "
        f"{counted(data.plan.micro_batch_size, 'image')}",
        f"steps   {steps_per_epoch * epochs:,} = {counted(epochs, 'epoch')} × {steps_per_epoch:,}, "
        f"by {'Muon and ' if weights[True] else ''}AdamW"
        f"{' of the head alone' if optim.train == 'head' else ''}, learning rate up to "
        f"{optim.peak_lr:g}",
        f"optim   {trained_by}",
        f"lr      peak {optim.peak_lr:g}; first step {lr_at(0):g}, last step "
        f"{lr_at(steps_per_epoch * epochs - 1):g}, changing every {schedule.step_on}",
    ]


def start_lines(
    recipe: Recipe,
    data: Data,
    task: Task,
    training: Training,
    notes: Sequence[str],
    folder: RunFolder,
    watchers: Watchers,
) -> list[str]:
    """All that there is to say at the start of a run, line by line: the run in words, then cautions.
    notes: on the first weights. watchers: of which some look at a new run's images.
    """
    processes, grid = training.processes, cast(Classifier, training.state.model).grid
    lines = summary(recipe, data, training, [*notes, *task.notes()])
    seen = []
    if folder.step is None and processes.is_main:
        seen = watchers.tell("opened", data, recipe)
    warnings = [line for line in seen if line.startswith("warning ")]
    lines += [line for line in seen if line not in warnings]
    resumed = "" if folder.step is None else f", resumed at step {folder.step:,}"
    lines.append(f"run     {folder.path}{resumed}")
    cautious = cautions(recipe, data, grid, processes.device)
    return [*lines, *warnings, *(f"warning {line}" for line in cautious)]


def at_a_glance(lines: Sequence[str], elsewhere: str) -> list[str]:
    """Of all that there is to say at the start, what a terminal shows: at most MOST_LINES, cut to
    WIDTH, and MOST_CAUTIONS. elsewhere: where all of it is.
    """
    there = [word for word in AT_A_GLANCE if any(line.startswith(word) for line in lines)]
    shown = [line for line in lines if line.startswith(tuple(there[:MOST_LINES]))]
    warnings = [line for line in lines if line.startswith(("note", "warning"))]
    if hidden := len(warnings[MOST_CAUTIONS:]):
        warnings[MOST_CAUTIONS - 1 :] = [f"warning and {hidden + 1} more, {elsewhere}"]
    *others, run = shown
    return [
        *(line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…" for line in others),
        one_line(run, WIDTH),
        *warnings,
    ]


def cautions(recipe: Recipe, data: Data, grid: tuple[int, int], device: torch.device) -> list[str]:
    """One line for each value that is valid but probably a mistake, and for what is left out.
    grid: rows and columns of the model's patches.
    """
    steps = data.train_batches.steps_per_epoch
    updates = recipe.schedule.total_epochs * steps
    lines = list(
        dict.fromkeys(
            line
            for source in (data.whole_set, data.val_set)
            for line in source.left_out.splitlines()
        )
    )
    lines += data.plan.cautions(
        repeats=recipe.augment.repeats, max_batch_per_process=recipe.optim.max_batch_per_process
    )
    # Fine-tuning needs few steps, and `shapes`, made to be learned within minutes, needs hundreds.
    if updates < FEW_UPDATES and not recipe.init.checkpoint and recipe.data.name != "shapes":
        lines.append(
            f"{counted(updates, 'update')} in all: from scratch, such a model needs "
            f"thousands; --set schedule.epochs={math.ceil(FEW_UPDATES / steps)} makes "
            f"{FEW_UPDATES:,}"
        )
    if min(grid) < SMALL_GRID:
        sides = recipe.data.image_size
        patch = max(
            (
                size
                for size in range(1, min(sides) // SMALL_GRID + 1)
                if all(side % size == 0 for side in sides)
            ),
            default=1,
        )
        lines.append(
            f"{grid[0]}×{grid[1]} patches per image show a model little: --set "
            f"model.options.patch_size={patch} makes more"
        )
    if isinstance(data.train_set, ImageFiles):
        lines += filter(None, [dark_in_16_bits(data.train_set.some_paths())])
    return lines + faster_amp(recipe.engine.amp, device)


def rehearsal(recipe: Recipe, data: Data, state: TrainState, task: Task) -> str:
    """What a dry run says of a forward pass, and of what the task costs beside it."""
    with building(f"recipe {recipe.name}", "model"), torch.no_grad():
        views = (
            data.val_batches
            if len(data.val_set)
            else [micro_batch.prepare() for micro_batch in next(data.train_batches.steps(0))[1][:1]]
        )
        images, targets = (part[:REHEARSED_IMAGES] for part in next(iter(views)))
        name, output = task.rehearsed(state.model.eval(), images, targets)
        cost = task.cost(images)
    return (
        f"{cost}dry run: images {tuple(images.shape)} → {name} {tuple(output.shape)}; nothing "
        "was written; --read-images decodes all images, and lists those that cannot be read"
    )
