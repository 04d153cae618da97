"""How many operations a model needs per image, and how fast its forward pass alone is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from .device import peak_gib
from .engine import autocast
from .metrics import ProgressBar

BACKWARD_COST = 2               # in forward passes: gradients of the inputs and of the weights
WARMUP_PASSES, TIMED_PASSES = 10, 40    # as in timm's benchmark.py


@torch.no_grad()
def forward_flops(model: nn.Module, shape: Sequence[int]) -> int:
    """The number of floating-point operations of one forward pass over images (B, 3, H, W).

    shape: (B, 3, H, W). A multiplication followed by an addition counts as two operations. torch
    counts matrix products, attention and convolutions from the shapes of their operands; all other
    operations are negligible. The pass runs on the meta device: nothing is computed, and the
    model's weights are not changed.
    """
    weights = {name: torch.empty_like(value, device="meta")
               for name, value in (*model.named_parameters(), *model.named_buffers())}
    with FlopCounterMode(display=False) as counter:
        functional_call(model, weights, (torch.empty(*shape, device="meta"),))
    return counter.get_total_flops()


def training_flops(model: nn.Module, batch_size: int, size: tuple[int, int]) -> float:
    """The model FLOPs of training per image: its share of one forward and one backward pass.

    size: (H, W). Operations that activation checkpointing or a kernel repeats do not count, as in
    PaLM's "model FLOPs utilization" (arXiv 2204.02311, appendix B).
    """
    forward = forward_flops(model, (batch_size, 3, *size)) / batch_size
    return (1 + BACKWARD_COST) * forward


@dataclass(frozen=True)
class Throughput:
    """The speed of a model's forward pass."""

    images_per_second: float    # of the median pass
    milliseconds: float         # of the median pass
    batch_size: int
    peak_memory: str            # in words; on a CPU, of the whole process so far


@torch.no_grad()
def throughput(model: nn.Module, *, batch_size: int, size: tuple[int, int], device: torch.device,
               amp: str, channels_last: bool, bar: ProgressBar) -> Throughput:
    """Time TIMED_PASSES forward passes, after WARMUP_PASSES that do not count; return the median.

    The batch is Gaussian noise (batch_size, 3, *size). Each pass is timed separately, and the
    device is idle before and after it.

    model: already on `device`, compiled or not. size: (H, W). amp: "off", "bf16" or "fp16".
    """
    cuda = device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = torch.randn(batch_size, 3, *size, device=device).contiguous(memory_format=layout)
    model.eval().to(memory_format=layout)
    seconds = []
    for _ in range(WARMUP_PASSES + TIMED_PASSES):
        wait()
        began = time.perf_counter()
        with autocast(device, amp):
            model(images)
        wait()
        seconds.append(time.perf_counter() - began)
        bar.advance()
    median = statistics.median(seconds[WARMUP_PASSES:])
    return Throughput(batch_size / median, 1e3 * median, batch_size,
                      f"{peak_gib(device):.2f} GiB")
