"""What a run prints before its first step: its parts in words, cautions, and a rehearsal."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..command_line import building
from ..data.images import dark_in_16_bits
from ..data.pipeline import Data
from ..data.sources import ImageFiles
from ..recipe.sections import Recipe
from ..train.device import describe_device
from ..train.distributed import Processes
from ..train.state import TrainState
from ..values import to_toml

REHEARSED_IMAGES = 8            # of a dry run's forward pass, which a CPU has to do in seconds
CPU_INFO = Path("/proc/cpuinfo")
FEW_UPDATES = 2_000             # steps; fewer than that from scratch give a warning


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
    """Describe the run in lines. notes: on the first weights. lr_at: step → learning rate."""
    schedule, augment, mix, optim = recipe.schedule, recipe.augment, recipe.mix, recipe.optim
    steps_per_epoch, epochs = data.train_batches.steps_per_epoch, schedule.total_epochs
    part = f" of {len(data.whole_set):,}" if len(data.train_set) < len(data.whole_set) else ""
    height, width = recipe.data.image_size
    weights = {True: 0, False: 0}                    # trained by Muon, by AdamW
    for group in optimizer.param_groups:
        weights[group["muon"]] += sum(p.numel() for p in group["params"])
    trained_by = f"AdamW for {weights[False]:,}{'' if weights[True] else ' weights'}"
    if weights[True]:
        trained_by = (f"Muon (factor {optim.muon_factor:g}, momentum {optim.muon_momentum:g}) for "
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


def rehearsal(recipe: Recipe, data: Data, state: TrainState, teacher: Any) -> str:
    """What a dry run says of a forward pass, and of what a `LearnFromTeacher`'s adds, if any."""
    with building(f"recipe {recipe.name}", "model"), torch.no_grad():
        images = next(iter(data.val_batches))[0][:REHEARSED_IMAGES]
        logits = state.model.eval()(images)
        cost = f"{teacher.cost(images)}\n" if teacher else ""
    return (f"{cost}dry run: images {tuple(images.shape)} → logits {tuple(logits.shape)}; nothing "
            "was written; --read-images decodes all images, and lists those that cannot be read")
