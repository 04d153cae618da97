"""Items of `bench all` that measure speed, with sizes that suit the device.

On a CPU, batches are so small that an item ends in seconds. Its numbers serve to compare parts with
each other; they are not what one would train with.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from ..data.datasets import LooseImages, ImageFiles
from ..data.draw import SampleDraws, SampleKey
from ..data.passes import FEW_LAUNCHES
from ..train.device import matrix_rate, peak_gib
from ..train.ema import Ema
from ..train.optim import adamw, hidden_matrices, muon
from .data import augment_milliseconds, deit_device_part, loader_rates, noise_batch
from .drawn import draw_photographs
from .init import init_seconds
from .item import Conditions, Row
from .launches import launches_of
from .listing import listing_seconds
from .step import (OPTIMISER, StepBench, against_torchvision, host_milliseconds, product_tflops,
                   steps_from_files)
from .timing import best_seconds
from .training import GivenStep, train_on

SIZE = 224
BATCHES = {                     # batch sizes on a GPU with 80 GB and on a CPU
    "vit_tiny": (1024, 8), "vit_small": (512, 4), "vit_base": (256, 2), "swin_tiny": (256, 2),
    "mixer_b16": (256, 2), "convmixer_768_32": (128, 1),
}
WORKERS = (0, 1, 2, 4, 8, 16)
T = TypeVar("T")


def batch_for(name: str, conditions: Conditions) -> int:
    """The batch size of a model's step on the device."""
    return BATCHES[name][0 if conditions.on_gpu else 1]


def amp_on(conditions: Conditions) -> str:
    """The precision in which one would train on the device."""
    return "bf16" if conditions.on_gpu else "off"


def as_large_as_fits(measure: Callable[[int], T], batch: int) -> T:
    """Call `measure(batch)`, and again with half of the batch for as long as memory runs out."""
    while True:
        gc.collect()                                 # frees what an earlier measurement left
        try:
            return measure(batch)
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
        batch //= 2                  # not inside `except`, where the exception still holds tensors
        torch.cuda.empty_cache()


# ---------------------------------------------------------------------------------------------
# Steps
# ---------------------------------------------------------------------------------------------


def step(name: str, conditions: Conditions) -> list[Row]:
    """A training step on synthetic images at 224 px, from forward pass to optimiser.

    It is made by the engine, as in train.py. On a GPU, and for vit_tiny on a CPU, the compiled step
    is measured, too. name: a key of BATCHES.
    """
    amp = amp_on(conditions)
    best, card = product_tflops(amp), matrix_rate(conditions.torch_device)
    # On a CPU, compiling the larger models takes minutes.
    ways = (False, True) if conditions.on_gpu or name == "vit_tiny" else (False,)

    def measured(compiled: bool, batch: int) -> Row:
        bench = StepBench(name, batch=batch, image_size=SIZE, amp=amp, compiled=compiled)
        seconds = bench.seconds()
        tflops = bench.tflops(seconds)
        return {"model": name, "way": f"{'compiled' if compiled else 'eager'}, amp {amp}",
                "batch": batch, "images/s": batch / seconds, "ms per step": 1e3 * seconds,
                "peak GiB": peak_gib(bench.device), "TFLOP/s": tflops,
                "% of a large product": 100 * tflops / best} | (
                    {"% of the card's bf16 rate": 100 * tflops / card} if card else {})
    return [as_large_as_fits(partial(measured, compiled), batch_for(name, conditions))
            for compiled in ways]


def torchvision_vit(conditions: Conditions) -> list[Row]:
    """ViT-B/16: a step of our model in our engine against torchvision's model in a bare loop."""
    amp, ways = amp_on(conditions), (False, True) if conditions.on_gpu else (False,)

    def measured(compiled: bool, batch: int) -> Row:
        return {"way": f"{'compiled' if compiled else 'eager'}, amp {amp}", "batch": batch} | \
            against_torchvision(batch=batch, image_size=SIZE, amp=amp, compiled=compiled)
    return [as_large_as_fits(partial(measured, compiled), batch_for("vit_base", conditions) // 2)
            for compiled in ways]


def launches(conditions: Conditions) -> list[Row]:
    """Operations of a step, except views, and on a GPU the kernels and copies that it launches.

    The step is ViT-B/16's, eager; augmentation is DeiT's on 64 images, in the few passes of a GPU.
    """
    batch = 64 if conditions.on_gpu else 4
    bench = StepBench("vit_base", batch=batch, image_size=SIZE, amp=amp_on(conditions),
                      compiled=False)
    bench.state.ema = Ema(bench.model, decay=0.999, warmup=False)
    prepare = deit_device_part(bench.device, passes=FEW_LAUNCHES)
    loaded = noise_batch(64, SIZE, bench.device)     # so many that every operation occurs
    parts = {"augmentation": lambda: prepare(loaded, 0, np.zeros(64, np.int64)),
             "forward, backward, optimiser, EMA": lambda: train_on(
                 bench.state, [GivenStep(0, [bench.part])], amp=bench.amp)}
    rows = []
    for name, action in parts.items():
        action()                                     # not counted: work that is done only once
        counted = launches_of(action)
        rows.append({"part": name, "operations beside views": counted.count,
                     "copies to the device": counted.uploads, "and back": counted.downloads})
        if conditions.on_gpu:
            rows[-1]["launched"] = launched(action)
    return rows


def updates(conditions: Conditions) -> list[Row]:
    """An update by AdamW, by Muon with AdamW and by torch.optim.Muon, beside a step of the model.

    torch.optim.Muon gets the matrices alone, and goes through them one by one.
    """
    rows = []
    for name in ("vit_tiny", "vit_small", "vit_base") if conditions.on_gpu else ("vit_tiny",):
        batch = batch_for(name, conditions)
        bench = StepBench(name, batch=batch, image_size=SIZE, amp=amp_on(conditions), compiled=False)
        seconds = bench.seconds()
        for parameter in bench.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        matrices = [bench.model.get_parameter(name) for name in hidden_matrices(bench.model)]
        for way, optimizer in {
                "AdamW": adamw(bench.model, **OPTIMISER),
                "Muon with AdamW": muon(bench.model, factor=1.0, momentum=0.95, **OPTIMISER),
                "torch.optim.Muon": torch.optim.Muon(matrices)}.items():
            optimizer.step()                         # not counted: its state is made

            def update() -> None:
                optimizer.step()
                bench.wait()
            milliseconds = 1e3 * best_seconds(update, 3 if conditions.on_gpu else 1)
            rows.append({"model": name, "optimiser": way, "batch": batch,
                         "operations beside views": launches_of(optimizer.step).count,
                         "ms": milliseconds, "% of a step": milliseconds / seconds / 10})
            if conditions.on_gpu:
                rows[-1]["launched"] = launched(update)
    return rows


def launched(action: Callable[[], object]) -> int:
    """The number of kernels, copies and fills that `action` launches, by torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU,
                                            torch.profiler.ProfilerActivity.CUDA]) as found:
        action()
        torch.cuda.synchronize()
    return sum(event.count for event in found.key_averages() if "LaunchKernel" in event.key
               or event.key.startswith(("cudaMemcpy", "cudaMemset")))


def host_time(conditions: Conditions) -> list[Row]:
    """CPU time of Python and dispatch in a ViT-T step with EMA, measured on a tiny model."""
    torch.set_num_threads(1)                         # idle threads spin, which counts as CPU time
    return [{"way": "compiled" if compiled else "eager", "ms per step, median of 200":
             host_milliseconds(amp=amp_on(conditions), compiled=compiled)}
            for compiled in (False, True)]


# ---------------------------------------------------------------------------------------------
# Images
# ---------------------------------------------------------------------------------------------


def photographs(conditions: Conditions, count: int) -> tuple[LooseImages, str]:
    """At most `count` photographs of --data-dir, or 100 drawn ones; and a description of them."""
    if conditions.photographs is None:
        folder = draw_photographs(conditions.scratch / "photographs", 100)
        return LooseImages(folder, count), "100 drawn JPEGs of 500×375"
    source = LooseImages(conditions.photographs, count)
    return source, f"{len(source)} of the given photographs"


def repeated(source: LooseImages, count: int) -> ImageFiles:
    """A set of `count` files, made of those of `source` as often as necessary.

    So one epoch lasts for the whole measurement, which shall not include how a loader starts anew
    for the next epoch.
    """
    paths = list(itertools.islice(itertools.cycle(source.paths), count))
    return ImageFiles(paths, np.zeros(count, np.int64), source.classes)


def augmentation_share(conditions: Conditions) -> list[Row]:
    """DeiT's augmentation on the device, as a share of vit_tiny's step with the same batch."""
    amp = amp_on(conditions)

    def measured(batch: int) -> Row:
        parts = augment_milliseconds(batch, SIZE)
        total = parts.popitem()[1]                   # the last entry is all parts together
        bench = StepBench("vit_tiny", batch=batch, image_size=SIZE, amp=amp,
                          compiled=conditions.on_gpu)
        milliseconds = 1e3 * bench.seconds()
        return {"batch": batch} | {f"{name}, ms": each for name, each in parts.items()} | {
            "all, ms": total, "step, ms": milliseconds, "% of the step": 100 * total / milliseconds}
    return [as_large_as_fits(measured, 1024 if conditions.on_gpu else 16)]


def loader_fed(conditions: Conditions) -> list[Row]:
    """A step fed from JPEG files with DeiT's augmentation against a synthetic one, by workers."""
    name = "vit_small" if conditions.on_gpu else "vit_tiny"
    batch = 512 if conditions.on_gpu else 4
    files, description = photographs(conditions, 2000)
    bench = StepBench(name, batch=batch, image_size=SIZE, amp=amp_on(conditions),
                      compiled=conditions.on_gpu)
    bench.seconds(passes=(1, 1))                     # not counted: compiling
    rows = []
    for workers in WORKERS:
        if workers > len(os.sched_getaffinity(0)):
            break
        # Workers start together and so deliver together; several rounds of deliveries are timed.
        passes = (workers + 2, max(10 if conditions.on_gpu else 3, 2 * workers))
        source = repeated(files, batch * (sum(passes) + 2))
        synthetic = bench.seconds(passes=(1, passes[1]))
        fed = bench.seconds(steps_from_files(source, image_size=SIZE, batch=batch, workers=workers,
                                             device=bench.device), passes)
        rows.append({"workers": workers, "model": name, "batch": batch, "images": description,
                     "synthetic, images/s": batch / synthetic, "fed, images/s": batch / fed,
                     "fed/synthetic": synthetic / fed})
    return rows


def loader(conditions: Conditions) -> list[Row]:
    """JPEG files that one core prepares to 224 px, in images/s, beside torchvision's pipeline."""
    source, description = photographs(conditions, 200)
    rates = loader_rates(source, SIZE)
    words = {"decode": "decoding alone", "worker": "a worker's part: + draws, crop, flip, stack",
             "through": "the same out of another process",
             "whole": "whole: + RandAugment, normalise, erase, mix on the same core",
             "torchvision": "torchvision's whole pipeline on Pillow; its RandAugment is milder"}
    return [{"of " + description: words[name], "images/s": rate, "× torchvision's":
             rate / rates["torchvision"]} for name, rate in rates.items()]


# ---------------------------------------------------------------------------------------------
# The rest
# ---------------------------------------------------------------------------------------------


def listing(conditions: Conditions) -> list[Row]:
    """Listing a folder of 30,000 files in 300 classes, beside scandir alone and torchvision."""
    return listing_seconds(30_000, 300)


def draws(conditions: Conditions) -> list[Row]:
    """Random draws of the training stream, per image on one core of the host."""
    sample = SampleDraws(0, (SIZE, SIZE))
    keys = [SampleKey(0, index) for index in range(256)]
    ways = {"crop and flip": lambda: list(sample.views(keys, itertools.repeat((375, 500)))),
            "RandAugment and erasing": lambda: sample.batch_for_device(keys)}
    return [{"draws in batches of 256": name, "µs per image": 1e6 * best_seconds(action) / len(keys)}
            for name, action in ways.items()]


def inits(conditions: Conditions) -> list[Row]:
    """Seconds that each init of ViT-B takes; all of them run on the CPU."""
    return init_seconds("vit_base")
