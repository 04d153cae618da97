"""Images a second of a training step, beside the matrix rate of the device."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from ..command_line import building
from ..data.datasets import LoosePictures
from ..data.draw import SampleDraws
from ..data.pipeline import training_batches
from ..data.sampler import TrainSampler, plan_batches
from ..init import init_weights
from ..models import build_model
from ..train.engine import AMP_DTYPES, autocast
from ..train.optim import adamw
from ..train.device import describe_device, peak_memory
from ..train.throughput import TIMED_PASSES, WARMUP_PASSES, training_flops
from .data import deit_device_part
from .timing import best_seconds, device_to_time


def from_files(source: LoosePictures, size: int, batch: int, workers: int, device: torch.device
               ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches with DeiT's augmentation, epoch after epoch, as training takes them."""
    # An odd batch is not of pairs; what its mixing costs is the same.
    plan = plan_batches(batch, batch, 1, group=batch if batch % 2 == 0 else 1)
    sampler = TrainSampler(len(source), plan, rank=0, seed=0,
                           repeats=-(-batch // len(source)))
    batches = training_batches(source, sampler=sampler, draws=SampleDraws(0, (size, size)),
                               prepare=deit_device_part(device), budget_gib=0.0, workers=workers)
    for epoch in itertools.count():
        for step in batches.steps(epoch=epoch):
            for images, targets, _ in step:
                yield images, targets


def bench_step(name: str, *, batch: int, image_size: int, amp: str, compiled: bool,
               folder: Path | None, workers: int) -> None:
    """Forward, backward and AdamW on synthetic pictures, beside the matrix rate of the device; then
    on pictures from files with DeiT's whole augmentation, if there are any."""
    device, wait = device_to_time()
    warmup, steps = (WARMUP_PASSES, TIMED_PASSES) if device.type == "cuda" else (1, 3)
    torch.set_float32_matmul_precision("high")
    with building("step", "model"):
        model = build_model(name, num_classes=1000, image_size=image_size)
        init_weights(model, "default", generator=torch.Generator().manual_seed(0))
    model.to(device)
    optimizer = adamw(model, weight_decay=0.05, betas=(0.9, 0.999), eps=1e-8)
    images = torch.randn(batch, 3, image_size, image_size, device=device)
    targets = torch.eye(1000, device=device)[torch.arange(batch, device=device) % 1000]
    flops = batch * training_flops(model, batch, (image_size, image_size))
    forward = torch.compile(model) if compiled else model

    def step(images: torch.Tensor, targets: torch.Tensor) -> None:
        with autocast(device, amp):
            loss = F.cross_entropy(forward(images).float(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def seconds_a_step(batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> float:
        for _ in range(warmup):
            step(*next(batches))
        wait()
        began = time.perf_counter()
        for _ in range(steps):
            step(*next(batches))
        wait()
        return (time.perf_counter() - began) / steps

    seconds = seconds_a_step(itertools.repeat((images, targets)))
    side = 8192 if device.type == "cuda" else 2048
    matrix = torch.randn(side, side, device=device, dtype=AMP_DTYPES[amp])

    def multiply() -> None:
        for _ in range(10):
            matrix @ matrix
        wait()
    multiply()
    matrix_rate = 10 * 2 * side**3 / best_seconds(multiply)
    print(f"{name}, batch {batch}, {image_size} px, amp {amp}, compile {compiled}, "
          f"{describe_device(device)}\n"
          f"{batch / seconds:.1f} images/s, {1e3 * seconds:.1f} ms a step, peak memory "
          f"{peak_memory(device)}\n"
          f"{flops / seconds / 1e12:.2f} TFLOP/s, {100 * flops / seconds / matrix_rate:.0f} % of "
          f"this device's measured {matrix_rate / 1e12:.2f} TFLOP/s in a {side}³ {amp} product")
    if folder is not None:
        source = LoosePictures(folder, 100_000)
        fed = seconds_a_step(from_files(source, image_size, batch, workers, device))
        print(f"from {len(source)} files with {workers} workers: {batch / fed:.1f} images/s, "
              f"{100 * (fed / seconds - 1):+.1f} % of the synthetic step")
