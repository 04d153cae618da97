"""How fast a model is by itself: images a second of its forward pass, no loader beside it."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import nn

from .device import peak_memory
from .engine import autocast
from .metrics import ProgressBar


WARMUP_PASSES, TIMED_PASSES = 10, 40    # as many as in timm's benchmark.py


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
