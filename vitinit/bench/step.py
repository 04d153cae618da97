"""The speed of training steps, beside the device's matrix rate and torchvision's ViT."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..command_line import building
from ..data.datasets import LooseImages, Source
from ..data.draw import SampleDraws
from ..data.pipeline import training_batches
from ..data.sampler import TrainSampler, plan_batches
from ..init import init_weights
from ..models import build_model
from ..train.device import describe_device, peak_memory
from ..train.ema import Ema
from ..train.engine import AMP_DTYPES, autocast, set_precision, tune_convolutions
from ..train.optim import adamw
from ..train.state import TrainState
from ..train.throughput import TIMED_PASSES, WARMUP_PASSES, training_flops
from .data import deit_device_part
from .item import Row
from .timing import best_seconds, device_to_time
from .training import GivenStep, Part, state_of, train_on

CLASSES = 1000
OPTIMISER = dict(weight_decay=0.05, betas=(0.9, 0.999), eps=1e-8)
RATE = 1e-4                     # learning rate


class StepBench:
    """A model and its optimiser on the device, to time training steps as train.py makes them."""

    def __init__(self, name: str, *, batch: int, image_size: int, amp: str, compiled: bool) -> None:
        """name: of a model. amp: precision, as in `engine.amp`. compiled: use torch.compile."""
        self.device, self.wait = device_to_time()
        self.name, self.batch, self.image_size, self.amp = name, batch, image_size, amp
        set_precision(tf32=True)
        with building("step", "model"):
            model = build_model(name, num_classes=CLASSES, image_size=image_size)
            init_weights(model, "default", generator=torch.Generator().manual_seed(0))
        self.model = model.to(self.device)
        tune_convolutions(model)
        self.forward = torch.compile(self.model) if compiled else self.model
        self.state = state_of(self.model, adamw(self.model, **OPTIMISER))
        self.part = synthetic_batch(batch, image_size, self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def seconds(self, steps: Iterable | None = None, passes: tuple[int, int] | None = None) -> float:
        """Mean time of a step of the engine, in seconds.

        steps: the steps to make; None: the same synthetic batch over and over.
        passes: number of warm-up steps, and number of timed steps.
        """
        if steps is None:
            steps = (GivenStep(number, [self.part]) for number in itertools.count())
        return engine_seconds(self.state, self.forward, steps, amp=self.amp,
                              passes=passes or passes_on(self.device), wait=self.wait)

    def tflops(self, seconds: float) -> float:
        """The model's TFLOP/s if a step takes `seconds`."""
        size = (self.image_size, self.image_size)
        return self.batch * training_flops(self.model, self.batch, size) / seconds / 1e12


def passes_on(device: torch.device) -> tuple[int, int]:
    """Number of warm-up steps and of timed steps, which together take a minute or two at most."""
    return (WARMUP_PASSES, TIMED_PASSES) if device.type == "cuda" else (1, 3)


def synthetic_batch(batch: int, image_size: int, device: torch.device) -> Part:
    """Noise images in channels-last layout, as from data/to_device.py, and one-hot targets."""
    images = torch.randn(batch, 3, image_size, image_size, device=device)
    targets = torch.eye(CLASSES, device=device)[torch.arange(batch, device=device) % CLASSES]
    return images.contiguous(memory_format=torch.channels_last), targets


def engine_seconds(state: TrainState, forward: Callable[..., Tensor], steps: Iterable, *, amp: str,
                   passes: tuple[int, int], wait: Callable[[], None]) -> float:
    """Mean time of a step of the engine, in seconds.

    The clock runs from the start of the first timed step to the start of the step after the last.
    So what the engine does once per epoch, such as a check of all weights, is not included.
    passes: number of warm-up steps, and number of timed steps. wait: waits for the device.
    """
    warmup, count = passes
    beginnings: list[float] = []

    def at_beginning(number: int) -> float:
        """The learning rate, for which `train_epoch` asks at the beginning of each step."""
        if len(beginnings) in (warmup, warmup + count):
            wait()
        beginnings.append(time.perf_counter())
        return RATE
    train_on(state, itertools.islice(steps, warmup + count + 1), forward=forward, lr=at_beginning,
             amp=amp)
    return (beginnings[warmup + count] - beginnings[warmup]) / count


def host_milliseconds(*, amp: str, compiled: bool, steps: int = 200) -> float:
    """Median CPU time that a training step of ViT-T with a moving average takes, in milliseconds.

    The model has ViT-T's operations but a width of 12, and gets two images of 8×8 pixels, so that
    nearly all of the time is Python and dispatch. A GPU waits for these if its own work takes less.
    CPU time is measured, not wall time, since other processes may use the machine.
    """
    device, _ = device_to_time()
    model = build_model("vit_tiny", num_classes=7, image_size=8, patch_size=4, embed_dim=12,
                        num_heads=3).to(device)
    forward = torch.compile(model) if compiled else model
    state = state_of(model, adamw(model, **OPTIMISER), ema=Ema(model, decay=0.999, warmup=False))
    part = torch.randn(2, 3, 8, 8, device=device), torch.eye(7, device=device)[:2]
    moments: list[float] = []

    def at_beginning(number: int) -> float:
        moments.append(time.process_time())
        return RATE
    train_on(state, [GivenStep(number, [part]) for number in range(WARMUP_PASSES + steps)],
             forward=forward, lr=at_beginning, amp=amp)
    return 1e3 * statistics.median(
        after - before for before, after in pairwise(moments[WARMUP_PASSES:]))


def bare_seconds(model: nn.Module, part: Part, *, amp: str, compiled: bool,
                 wait: Callable[[], None]) -> float:
    """Mean time of a step in a bare training loop, in seconds: the reference for the engine.

    The loop is forward pass, cross-entropy, backward pass and fused AdamW, for any model.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.05, fused=True)
    forward = torch.compile(model) if compiled else model
    forward.train()
    images, targets = part
    warmup, count = passes_on(images.device)
    for number in range(warmup + count):
        if number == warmup:
            wait()
            began = time.perf_counter()
        with autocast(images.device, amp):
            loss = F.cross_entropy(forward(images).float(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    wait()
    return (time.perf_counter() - began) / count


def product_tflops(amp: str) -> float:
    """TFLOP/s of this device in large matrix products of precision `amp`: about its best."""
    device, wait = device_to_time()
    side = 8192 if device.type == "cuda" else 2048
    matrix = torch.randn(side, side, device=device, dtype=AMP_DTYPES[amp])

    def multiply() -> None:
        for _ in range(10 if device.type == "cuda" else 2):
            matrix @ matrix
        wait()
    multiply()
    return (10 if device.type == "cuda" else 2) * 2 * side**3 / best_seconds(multiply) / 1e12


def steps_from_files(source: Source, *, image_size: int, batch: int, workers: int,
                     device: torch.device) -> Iterator:
    """Steps of one micro-batch with DeiT's augmentation, epoch after epoch, for `train_epoch`."""
    # An odd batch has no pairs, so each image is a group of its own; mixing costs the same.
    plan = plan_batches(batch, batch, 1, group=batch if batch % 2 == 0 else 1)
    sampler = TrainSampler(len(source), plan, rank=0, seed=0, repeats=-(-batch // len(source)))
    batches = training_batches(source, sampler=sampler,
                               draws=SampleDraws(0, (image_size, image_size)),
                               prepare=deit_device_part(device), budget_gib=0.0, workers=workers)
    for epoch in itertools.count():
        yield from batches.steps(epoch=epoch)


def against_torchvision(*, batch: int, image_size: int, amp: str, compiled: bool) -> Row:
    """Images/s of our ViT-B/16 in the engine, and of torchvision's in a bare loop, on one batch.

    The two are timed in turn, so that noise of the machine affects both alike; each counts with the
    better of two rounds.
    """
    from torchvision.models import vit_b_16
    ours = StepBench("vit_base", batch=batch, image_size=image_size, amp=amp, compiled=compiled)
    theirs = vit_b_16(image_size=image_size).to(ours.device)
    found: list[tuple[float, float]] = []
    for _ in range(2):
        found.append((ours.seconds(), bare_seconds(theirs, ours.part, amp=amp, compiled=compiled,
                                                   wait=ours.wait)))
    seconds, other = map(min, zip(*found))
    return {"ours, images/s": batch / seconds, "torchvision's": batch / other,
            "× torchvision's": other / seconds}


def bench_step(name: str, *, batch: int, image_size: int, amp: str, compiled: bool,
               folder: Path | None, workers: int) -> None:
    """Print the speed of the engine's step on synthetic images, beside the device's matrix rate.

    folder: if given, the step is also measured on its images, with DeiT's whole augmentation and
    `workers` loader processes.
    """
    bench = StepBench(name, batch=batch, image_size=image_size, amp=amp, compiled=compiled)
    seconds = bench.seconds()
    tflops, best = bench.tflops(seconds), product_tflops(amp)
    print(f"{name}, batch {batch}, {image_size} px, amp {amp}, compile {compiled}, "
          f"{describe_device(bench.device)}\n"
          f"{batch / seconds:.1f} images/s, {1e3 * seconds:.1f} ms per step, peak memory "
          f"{peak_memory(bench.device)}\n"
          f"{tflops:.2f} TFLOP/s, {100 * tflops / best:.0f} % of this device's measured "
          f"{best:.2f} TFLOP/s in large {amp} products")
    if folder is not None:
        source = LooseImages(folder, 100_000)
        fed = bench.seconds(steps_from_files(source, image_size=image_size, batch=batch,
                                             workers=workers, device=bench.device))
        print(f"from {len(source)} files with {workers} workers: {batch / fed:.1f} images/s, "
              f"{100 * (fed / seconds - 1):+.1f} % of the synthetic step")
