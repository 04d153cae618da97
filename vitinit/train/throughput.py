"""How fast a model's forward pass alone is."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import nn

from .device import peak_gib
from .engine import autocast
from .metrics import ProgressBar

WARMUP_PASSES, TIMED_PASSES = 10, 40    # as in timm's benchmark.py


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
