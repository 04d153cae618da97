"""What train.py prints before training: everything it will do, and warnings about doubtful values."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn

from ..command_line import building
from ..data.draw import ALL_OPERATIONS
from ..data.pipeline import Data
from ..recipe.sections import Recipe
from ..recipe.values import to_toml
from ..train.device import describe_device
from ..train.distributed import Processes
from ..train.optim import scaled_lr
from ..train.state import TrainState
from .folder import disk_space

CROWDED = 8                     # loader workers per CPU core; more than that gives a warning
FEW_UPDATES = 2_000             # steps; fewer than that from scratch give a warning


def summary(recipe: Recipe, data: Data, model: nn.Module, notes: list[str],
            optimizer: torch.optim.Optimizer, lr_at: Callable[[int], float], processes: Processes
            ) -> str:
    """Describe the run: recipe, data, model, init, batches, steps, optimiser and learning rates.

    notes: lines about the weights that training starts from. lr_at: step → learning rate.
    """
    schedule, augment, mix = recipe.schedule, recipe.augment, recipe.mix
    peak = scaled_lr(recipe.optim.base_lr, recipe.optim.lr_scaling, recipe.optim.global_batch)
    steps_per_epoch = data.train_batches.steps_per_epoch
    epochs = schedule.epochs + schedule.cooldown_epochs
    part = f" of {len(data.whole_set):,}" if len(data.train_set) < len(data.whole_set) else ""
    left_out = dict.fromkeys([data.whole_set.left_out, data.val_set.left_out])
    where = ", all on the device" if data.train_batches.resident else ""
    return (
        f"recipe  {recipe.name}, seed {recipe.run.seed}\n"
        f"data    {recipe.data.name}{recipe.data.root and ' ' + recipe.data.root}: "
        f"{len(data.train_set):,}{part} to train on, {len(data.val_set):,} "
        f"{'held out of them ' if recipe.data.held_out_per_class else ''}to validate, "
        f"{recipe.data.num_classes} classes, "
        f"{recipe.data.image_size[0]}×{recipe.data.image_size[1]}{where}\n"
        + "".join(f"{line}\n" for line in left_out if line) +
        f"views   {data.val_batches.kept.in_words()}\n"
        f"augment {augment.repeats} view(s) per image, RandAugment {recipe.rand_augment.layers} × "
        f"magnitude {recipe.rand_augment.magnitude:g}, erasing {augment.erase_probability:g}, mixup "
        f"{mix.mixup_alpha:g}, cutmix {mix.cutmix_alpha:g}, label smoothing "
        f"{mix.label_smoothing:g}\n"
        f"model   {recipe.model.name}: {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"{to_toml(recipe.model.options)}\n"
        f"init    {recipe.init.name}: {to_toml(recipe.init.options)}\n"
        + "".join(f"{note}\n" for note in notes) +
        f"batch   {recipe.optim.global_batch} = {processes.world_size} process(es) × "
        f"{data.plan.accumulation} micro-batch(es) × {data.plan.micro_batch_size} images, on "
        f"{describe_device(processes.device)}\n"
        f"steps   {steps_per_epoch:,} per epoch × {epochs} epochs = {steps_per_epoch * epochs:,}\n"
        f"{optimiser_line(optimizer, recipe.optim.layer_decay)}\n"
        f"lr      peak {peak:g}; first step {lr_at(0):g}, last step "
        f"{lr_at(steps_per_epoch * epochs - 1):g}, changing every {schedule.step_on}")


def optimiser_line(optimizer: torch.optim.Optimizer, layer_decay: float) -> str:
    """Which optimiser trains how many weights, and the factor on the learning rate per layer."""
    counts = {True: 0, False: 0}                     # by Muon, by AdamW
    for group in optimizer.param_groups:
        counts[group["muon"]] += sum(p.numel() for p in group["params"])
    line = f"optim   AdamW for {counts[False]:,} weights"
    if counts[True]:
        line = (f"optim   Muon (factor {optimizer.factor:g}, momentum {optimizer.momentum:g}) for "
                f"{counts[True]:,} weights, AdamW for {counts[False]:,}")
    return line + (f"; × {layer_decay:g} per layer from the head down" if layer_decay != 1.0 else "")


def cautions(recipe: Recipe, data: Data) -> list[str]:
    """One line for each value that is valid but probably a mistake."""
    layers, workers, cores = recipe.rand_augment.layers, recipe.data.workers, os.cpu_count() or 1
    epochs = recipe.schedule.epochs + recipe.schedule.cooldown_epochs
    updates = epochs * data.train_batches.steps_per_epoch
    lines = data.plan.cautions(repeats=recipe.augment.repeats,
                               max_batch_per_process=recipe.optim.max_batch_per_process)
    if layers > len(ALL_OPERATIONS):
        lines.append(f"rand_augment.layers = {layers:,}: every image goes through that many "
                     f"operations, of which there are {len(ALL_OPERATIONS)} kinds")
    if workers > CROWDED * cores:
        lines.append(f"data.workers = {workers:,} on a machine of {cores} cores")
    # Fine-tuning needs few steps, and `shapes`, made to be learned within minutes, needs hundreds.
    if updates < FEW_UPDATES and not recipe.init.checkpoint and recipe.data.name != "shapes":
        lines.append(f"{updates:,} update(s) in all: from scratch, such a model needs thousands; "
                     "more schedule.epochs or a smaller optim.global_batch make more of them")
    return lines


def rehearsal(recipe: Recipe, data: Data, state: TrainState) -> str:
    """The last lines of a dry run: the disk space of the checkpoints, and one forward pass."""
    with building(f"recipe {recipe.name}", "model"), torch.no_grad():
        images, _ = next(iter(data.val_batches))
        logits = state.model.eval()(images[:data.plan.micro_batch_size])
    space = disk_space(state.model, state.optimizer, ema=state.ema is not None,
                       kept=len(recipe.checkpoint.keep_epochs))
    return (f"disk    {space}\n"
            f"dry run: images {tuple(images.shape)} → logits {tuple(logits.shape)}; nothing was "
            "written")
