"""How much a model computes for an image, and how fast its forward pass is by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from .device import peak_memory
from .engine import autocast
from .metrics import ProgressBar


BACKWARD_COST = 2               # of a forward pass: gradients of the inputs and of the weights
WARMUP_PASSES, TIMED_PASSES = 10, 40    # as many as in timm's benchmark.py


@torch.no_grad()
def forward_flops(model: nn.Module, shape: Sequence[int]) -> int:
    """Floating-point operations of one forward pass over images of `shape` (B, 3, H, W).

    A multiplication and an addition are two. torch counts those of matrix products, attention and
    convolutions by the operators' shapes; everything else is small beside them. On the meta device
    nothing is computed and no weight is touched.
    """
    weights = {name: torch.empty_like(value, device="meta")
               for name, value in (*model.named_parameters(), *model.named_buffers())}
    with FlopCounterMode(display=False) as counter:
        functional_call(model, weights, (torch.empty(*shape, device="meta"),))
    return counter.get_total_flops()


def training_flops(model: nn.Module, batch_size: int, size: tuple[int, int]) -> float:
    """Likewise of training on one image of a batch, forward and backward: model FLOPs.

    What activation checkpointing or a kernel computes twice does not count, as in PaLM's
    "model FLOPs utilization" (arXiv 2204.02311, appendix B).
    """
    forward = forward_flops(model, (batch_size, 3, *size)) / batch_size
    return (1 + BACKWARD_COST) * forward


@dataclass(frozen=True)
class Throughput:
    images_per_second: float    # of the median pass
    milliseconds: float         # a median pass
    batch_size: int
    peak_memory: str            # in words; on a CPU that of the whole process so far


@torch.no_grad()
def throughput(model: nn.Module, *, batch_size: int, size: tuple[int, int], device: torch.device,
               amp: str, channels_last: bool, bar: ProgressBar) -> Throughput:
    """The median of TIMED_PASSES forward passes after WARMUP_PASSES that do not count.

    model: on `device` already, compiled or not. The batch is noise (B, 3, *size); each pass is
    timed by itself, from an idle device to an idle device.
    """
    cuda = device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    images = torch.randn(batch_size, 3, *size, device=device).contiguous(
        memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    model.eval()
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
    return Throughput(batch_size / median, 1e3 * median, batch_size, peak_memory(device))
