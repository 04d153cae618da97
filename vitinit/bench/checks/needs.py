"""Checks of what a training step requires of a GPU: its memory, and that the host does not wait."""

from __future__ import annotations

import warnings

import torch

from ...models import build_model
from ...train.ema import Ema
from ...train.engine import autocast
from ...train.optim import adamw
from ..item import Conditions, Row, Skipped
from ..memory import saved_bytes
from ..training import GivenStep, state_of, train_on
from .families import batch_of, drop_path_of, small_model


def peak_memory(conditions: Conditions) -> list[Row]:
    """Memory that a GPU holds for the backward pass is 0.8 to 1.6 times what `bench memory` counts.

    The two differ because a GPU also holds workspace of kernels and rounds each tensor's size up.
    """
    if not conditions.on_gpu:
        raise Skipped("a CPU does not count what it holds")
    device, rows = conditions.torch_device, []
    for name in ("vit_tiny", "swin_tiny", "mixer_b16", "convmixer_768_32"):
        model = build_model(name, num_classes=1000, image_size=224)
        images = torch.zeros(16, 3, 224, 224, device=device)
        model.to(device)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with autocast(device, "bf16"):
            loss = model(images).float().square().mean()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        counted = saved_bytes(model, images, "bf16")
        rows.append({"model": name, "counted MiB": counted / 2**20, "held MiB": held / 2**20,
                     "peak MiB": (torch.cuda.max_memory_allocated() - before) / 2**20})
        del model, images, loss
        torch.cuda.empty_cache()
    for row in rows:
        assert 0.8 < row["held MiB"] / row["counted MiB"] < 1.6, row
    return rows


def no_waiting(conditions: Conditions) -> list[Row]:
    """The host waits for the device less than once per training step, as torch's debug mode counts.

    The engine reads its losses every ten steps and checks the weights at the end of an epoch.
    Nothing else may make the host wait.
    """
    if not conditions.on_gpu:
        raise Skipped("on a CPU there is nothing to wait for")
    device = conditions.torch_device
    model = small_model("vit_tiny").to(device)
    part = tuple(tensor.to(device) for tensor in batch_of())
    state = state_of(model, adamw(model, weight_decay=0.05, betas=(0.9, 0.999), eps=1e-8),
                     ema=Ema(model, decay=0.9, warmup=False))
    train_on(state, [GivenStep(0, [part])], drop_path=drop_path_of(model), amp="bf16", clip_norm=1.0)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            train_on(state, [GivenStep(number, [part]) for number in range(1, 21)],
                     drop_path=drop_path_of(model), amp="bf16", clip_norm=1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = [f"{warning.filename.rpartition('/')[2]}:{warning.lineno}" for warning in waits
             if "synchroniz" in str(warning.message)]
    assert len(lines) < 20, f"{len(lines)} waits in 20 steps, at {', '.join(sorted(set(lines)))}"
    return [{"steps": 20, "waits": len(lines), "at": ", ".join(sorted(set(lines)))}]
