"""Measurements: each against what a user would pick instead, as a ratio in the same run.

    python -m vitinit.bench init
    python -m vitinit.bench decode --data-dir /data/imagenet
    python -m vitinit.bench step --model vit_base --batch 64 --amp bf16 --compile
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torchvision.transforms import InterpolationMode, RandomResizedCrop

from .data.datasets import EXTENSIONS
from .data.draw import SampleKey, draw_view
from .data.images import crop_and_flip, decode_image
from .filters import convolution_matrix, impulse_kernel, ordered_offsets
from .init import init_weights
from .init.impulse import normalised_code
from .models import MODELS, build_model
from .train.engine import AMP_DTYPES, autocast
from .train.optim import adamw
from .train.run_folder import describe_device, peak_memory


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
          f"mimetic, whole call                       {seconds('mimetic'):7.3f} s")


# ---------------------------------------------------------------------------------------------
# decode
# ---------------------------------------------------------------------------------------------


def bench_decode(folder: Path, size: int) -> None:
    """Images a second on one core: decoding, and decoding with a random resized crop."""
    torch.set_num_threads(1)
    paths = sorted(str(path) for path in folder.rglob("*")
                   if path.suffix.lower() in EXTENSIONS)[:400]
    if not paths:
        raise SystemExit(f"vitinit.bench: no pictures in {folder}")
    pillow_crop = RandomResizedCrop(size, interpolation=InterpolationMode.BICUBIC)

    def ours(index: int, path: str) -> None:
        picture = decode_image(path)
        view = draw_view(SampleKey(0, index), *picture.shape[1:], seed=0, scale=(0.08, 1.0),
                         ratio=(3 / 4, 4 / 3), padding=0, flip=0.5)
        crop_and_flip(picture, view.box, view.flip, (size, size), "bicubic")

    def pillows(index: int, path: str) -> None:
        np.asarray(pillow_crop(Image.open(path).convert("RGB")))

    rates = {}
    for label, work in (("decode alone", lambda index, path: decode_image(path)),
                        ("decode, crop, flip", ours), ("Pillow: decode, crop", pillows)):
        rates[label] = len(paths) / best_seconds(
            lambda: [work(index, path) for index, path in enumerate(paths)])
        print(f"{label:22} {rates[label]:7.0f} images/s/core")
    print(f"ours is {rates['decode, crop, flip'] / rates['Pillow: decode, crop']:.2f} × Pillow's "
          f"and {100 * rates['decode, crop, flip'] / rates['decode alone']:.0f} % of decoding alone "
          f"({len(paths)} pictures)")


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
               warmup: int = 10, steps: int = 40) -> None:
    """Forward, backward and AdamW on synthetic pictures, beside the matrix rate of the device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        warmup, steps = 1, 3
    torch.set_float32_matmul_precision("high")
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    model = build_model(name, num_classes=1000, image_size=image_size)
    init_weights(model, "impulse", generator=torch.Generator().manual_seed(0))
    model.to(device)
    optimizer = adamw(model, weight_decay=0.05, betas=(0.9, 0.999), eps=1e-8)
    images = torch.randn(batch, 3, image_size, image_size, device=device)
    labels = torch.arange(batch, device=device) % 1000
    flops = 3.0 * forward_flops(model, images)       # backward costs twice the forward
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        with autocast(device, amp):
            loss = F.cross_entropy(forward(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(warmup):
        step()
    wait()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    seconds = (time.perf_counter() - began) / steps

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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m vitinit.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    benches = parser.add_subparsers(dest="bench", required=True)
    init = benches.add_parser("init", help="seconds of each init")
    decode = benches.add_parser("decode", help="images a second and core, against Pillow")
    decode.add_argument("--data-dir", type=Path, required=True)
    decode.add_argument("--image-size", type=int, default=224)
    step = benches.add_parser("step", help="images a second of a training step")
    step.add_argument("--batch", type=int, default=64)
    step.add_argument("--image-size", type=int, default=224)
    step.add_argument("--amp", choices=list(AMP_DTYPES), default="bf16")
    step.add_argument("--compile", action="store_true")
    for bench in (init, step):
        bench.add_argument("--model", choices=list(MODELS), default="vit_base")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores")
    if args.bench == "init":
        bench_init(args.model)
    elif args.bench == "decode":
        bench_decode(args.data_dir, args.image_size)
    else:
        bench_step(args.model, batch=args.batch, image_size=args.image_size, amp=args.amp,
                   compiled=args.compile)


if __name__ == "__main__":
    main()
