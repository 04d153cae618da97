"""Measurements: each against what a user would pick instead, as a ratio in the same run.

    python -m vitinit.bench init
    python -m vitinit.bench loader --data-dir /data/imagenet/train
    python -m vitinit.bench augment
    python -m vitinit.bench step --model vit_base --batch 64 --amp bf16 --compile
    python -m vitinit.bench step --model vit_base --batch 64 --amp bf16 --compile \\
        --data-dir /data/imagenet/train --workers 16
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from .data.augment import IMAGENET_MEAN, IMAGENET_STD, rand_augment
from .data.datasets import LoosePictures
from .data.draw import (CropAndFlip, Erasing, RandAugment, SampleKey, draw_for_device, stack_draws)
from .data.images import DataError
from .data.loader import TrainBatch, TrainViews, train_loader
from .data.mix import Mix, Mixing, mix_images
from .data.to_device import TrainToDevice
from .filters import convolution_matrix, impulse_kernel, ordered_offsets
from .init import init_weights
from .init.impulse import normalised_code
from .models import MODELS, VisionTransformer, build_model
from .train.engine import AMP_DTYPES, autocast
from .train.optim import adamw
from .train.run_folder import describe_device, peak_memory
from .train.throughput import TIMED_PASSES, WARMUP_PASSES


def best_seconds(action: Callable[[], object], repeats: int = 3) -> float:
    """The fastest of some repeats: what the machine can do when nothing disturbs it."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return min(times)


# ---------------------------------------------------------------------------------------------
# init
# ---------------------------------------------------------------------------------------------


def transcribed_impulse(model: torch.nn.Module) -> None:
    """Q and K as the formulas read, D×D matrices and all: what the fast path is measured against.

    One pseudo-inverse a block and one full SVD of a D×D matrix a head.
    """
    code = normalised_code(model).detach()
    for block in model.blocks:
        attention = block.attn
        left, values, right = torch.linalg.svd(code.T @ code)
        rank = attention.head_dim
        inverse = right.T[:, :rank] / values[:rank] @ left[:, :rank].T @ code.T
        for head in range(attention.num_heads):
            offset = ordered_offsets(3)[head % 9]
            impulses = convolution_matrix(impulse_kernel(offset, 3), model.grid)
            maps = 1000.0 * impulses + torch.randn(impulses.shape) * (impulses == 0)
            torch.linalg.svd(inverse @ maps @ inverse.T)


def bench_init(name: str) -> None:
    """Seconds of each init on the CPU, best of three."""
    model = build_model(name, num_classes=1000, image_size=224)

    def seconds(init: str, **options) -> float:
        return best_seconds(lambda: init_weights(
            model, init, generator=torch.Generator().manual_seed(0), **options))
    base = seconds("default")
    queries = seconds("impulse", value_init="base") - base
    slow = best_seconds(lambda: transcribed_impulse(model), repeats=1)
    print(f"{name} on {describe_device(torch.device('cpu'))}, best of three\n"
          f"base 'default' alone                      {base:7.3f} s\n"
          f"impulse, pos_embed and all Q, K           {queries:7.3f} s\n"
          f"the same transcribed (D×D SVDs), once     {slow:7.3f} s, {slow / queries:.0f} times "
          f"as long\n"
          f"impulse, whole call with mimetic V, proj  {seconds('impulse'):7.3f} s\n"
          f"deep_impulse, pos_embed and all Q, K      "
          f"{seconds('deep_impulse', value_init='base') - base:7.3f} s\n"
          f"deep_impulse, whole call                  {seconds('deep_impulse'):7.3f} s\n"
          f"mimetic, whole call                       {seconds('mimetic'):7.3f} s")


# ---------------------------------------------------------------------------------------------
# loader and augment
# ---------------------------------------------------------------------------------------------


def deit_views(source: LoosePictures, size: int) -> TrainViews:
    """DeiT's augmentation, the workers' part; repeats count on where the pictures are used up."""
    return TrainViews(source, seed=0, size=(size, size), crop=CropAndFlip(),
                      rand_augment=RandAugment(), erasing=Erasing())


def deit_device_part(device: torch.device, num_classes: int = 1000) -> TrainToDevice:
    return TrainToDevice(device, mean=IMAGENET_MEAN, std=IMAGENET_STD, channels_last=True,
                         fill=RandAugment().fill, erase_fill="pixel", erase_after_mix=False,
                         mixing=Mixing(), num_classes=num_classes, seed=0, rank=0)


def torchvisions_pipeline(size: int) -> transforms.Compose:
    """What a user would write instead, on Pillow; its RandAugment is milder than DeiT's."""
    return transforms.Compose([
        transforms.RandomResizedCrop(size, interpolation=InterpolationMode.BICUBIC),
        transforms.RandomHorizontalFlip(), transforms.RandAugment(2, 9), transforms.ToTensor(),
        transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        transforms.RandomErasing(0.25, value="random")])


def batches_of_keys(count: int, batch: int, batches: int) -> list[list[SampleKey]]:
    """Keys that go through `count` pictures again and again."""
    return [[SampleKey(0, place % count, place // count)
             for place in range(number * batch, (number + 1) * batch)] for number in range(batches)]


def bench_loader(folder: Path, size: int, batch: int = 50) -> None:
    """Images a second and core: what workers do, what is left to the device, and torchvision's."""
    torch.set_num_threads(1)
    source = LoosePictures(folder, 400)
    views, prepare = deit_views(source, size), deit_device_part(torch.device("cpu"))
    pipeline = torchvisions_pipeline(size)
    keys = batches_of_keys(len(source), batch, max(1, len(source) // batch))
    count = batch * len(keys)
    indices = [key.index for some in keys for key in some]

    def rate(action: Callable[[], object]) -> float:
        return count / best_seconds(action)

    def loaded() -> Iterator[TrainBatch]:
        return iter(train_loader(views, keys, workers=0, pin_memory=False))

    def theirs() -> None:
        for index in indices:
            pipeline(Image.open(source.paths[index]).convert("RGB"))

    def seconds_through_a_worker() -> float:
        """From the arrival of a first batch, its warm-up, so that it has not worked ahead."""
        batches = iter(train_loader(views, keys[:1] + keys, workers=1, pin_memory=False))
        next(batches)
        began = time.perf_counter()
        deque(batches, maxlen=0)
        return time.perf_counter() - began

    decode = rate(lambda: [source.picture(index) for index in indices])
    worker = rate(lambda: deque(loaded(), maxlen=0))
    through = count / min(seconds_through_a_worker() for _ in range(3))
    whole = rate(lambda: [prepare(some, 0, number) for number, some in enumerate(loaded())])
    pillow = rate(theirs)
    print(f"{len(source)} pictures to {size} px in batches of {batch}, images/s/core, best of three\n"
          f"decode alone                               {decode:6.0f}\n"
          f"workers' part: + draws, crop, flip, stack  {worker:6.0f}   "
          f"{100 * worker / decode:.0f} % of decoding alone, {worker / pillow:.2f} × torchvision's\n"
          f"the same out of another process            {through:6.0f}   "
          f"{1e6 / through - 1e6 / worker:+.0f} µs an image between processes\n"
          f"whole: + RandAugment, normalise, erase, mix, here on the same core\n"
          f"                                           {whole:6.0f}   {whole / pillow:.2f} × "
          f"torchvision's\n"
          f"torchvision's whole pipeline on Pillow     {pillow:6.0f}")


def bench_augment(batch: int, size: int) -> None:
    """Milliseconds of the device's part of DeiT's augmentation, noise images."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    prepare = deit_device_part(device)
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (batch, 3, size, size), dtype=np.uint8))
    draws = stack_draws([draw_for_device(SampleKey(0, index), size, size, seed=0,
                                         rand_augment=RandAugment(), erasing=Erasing())
                         for index in range(batch)])
    loaded = TrainBatch(images.to(device), torch.arange(batch, device=device) % 1000, draws)
    floats = prepare.normalised(loaded.images)

    def milliseconds(action: Callable[[], object]) -> float:
        def waited() -> None:
            action()
            wait()
        waited()
        return 1e3 * best_seconds(waited)

    parts = {
        "RandAugment": lambda: rand_augment(loaded.images, draws, prepare.fill),
        "normalise": lambda: prepare.normalised(loaded.images),
        "erase": lambda: prepare.erased(floats, loaded),
        "mixup": lambda: mix_images(floats, Mix(0.3, None)),
        "all, as in training": lambda: prepare(loaded, 0, 0),
    }
    print(f"{batch}×3×{size}×{size} on {describe_device(device)}, ms, best of three")
    for name, action in parts.items():
        print(f"{name:20} {milliseconds(action):8.2f}")


# ---------------------------------------------------------------------------------------------
# step
# ---------------------------------------------------------------------------------------------


def forward_flops(model: torch.nn.Module, images: torch.Tensor) -> float:
    """Floating-point operations of one forward pass, counted by torch on the operators it ran."""
    # Attention written out, since not every version counts every fused kernel.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(images)
    return counter.get_total_flops()


def bench_step(name: str, *, batch: int, image_size: int, amp: str, compiled: bool,
               folder: Path | None, workers: int) -> None:
    """Forward, backward and AdamW on synthetic pictures, beside the matrix rate of the device; then
    on pictures from files with DeiT's whole augmentation, if there are any."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    warmup, steps = (WARMUP_PASSES, TIMED_PASSES) if device.type == "cuda" else (1, 3)
    torch.set_float32_matmul_precision("high")
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    model = build_model(name, num_classes=1000, image_size=image_size)
    init_weights(model, "default", generator=torch.Generator().manual_seed(0))
    model.to(device)
    optimizer = adamw(model, weight_decay=0.05, betas=(0.9, 0.999), eps=1e-8)
    images = torch.randn(batch, 3, image_size, image_size, device=device)
    targets = torch.eye(1000, device=device)[torch.arange(batch, device=device) % 1000]
    flops = 3.0 * forward_flops(model, images)       # backward costs twice the forward
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
        source, prepare = LoosePictures(folder, 100_000), deit_device_part(device)
        loader = train_loader(deit_views(source, image_size),
                              batches_of_keys(len(source), batch, warmup + steps),
                              workers=workers, pin_memory=device.type == "cuda")
        fed = seconds_a_step(prepare(some, number, 0) for number, some in enumerate(loader))
        print(f"from {len(source)} files with {workers} workers: {batch / fed:.1f} images/s, "
              f"{100 * (fed / seconds - 1):+.1f} % of the synthetic step")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m vitinit.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    benches = parser.add_subparsers(dest="bench", required=True)
    init = benches.add_parser("init", help="seconds of each init")
    loader = benches.add_parser("loader", help="images a second and core, against torchvision")
    loader.add_argument("--data-dir", type=Path, required=True)
    augment = benches.add_parser("augment", help="milliseconds of the device's part")
    augment.add_argument("--batch", type=int, default=256)
    for bench in (loader, augment):
        bench.add_argument("--image-size", type=int, default=224)
    step = benches.add_parser("step", help="images a second of a training step")
    step.add_argument("--batch", type=int, default=64)
    step.add_argument("--image-size", type=int, default=224)
    step.add_argument("--amp", choices=list(AMP_DTYPES), default="bf16")
    step.add_argument("--compile", action="store_true")
    step.add_argument("--data-dir", type=Path, help="also feed it from the pictures in this folder")
    step.add_argument("--workers", type=int, default=os.cpu_count())
    vits = [name for name, (family, _) in MODELS.items() if family is VisionTransformer]
    for bench, models in ((init, vits), (step, list(MODELS))):
        bench.add_argument("--model", choices=models, default="vit_base")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores")
    try:
        if args.bench == "init":
            bench_init(args.model)
        elif args.bench == "loader":
            bench_loader(args.data_dir, args.image_size)
        elif args.bench == "augment":
            bench_augment(args.batch, args.image_size)
        else:
            bench_step(args.model, batch=args.batch, image_size=args.image_size, amp=args.amp,
                       compiled=args.compile, folder=args.data_dir, workers=args.workers)
    except DataError as error:
        raise SystemExit(f"vitinit.bench: {error}") from None


if __name__ == "__main__":
    main()
