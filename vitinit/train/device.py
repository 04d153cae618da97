"""The device in words."""

from __future__ import annotations

import platform
import resource

import torch


def describe_device(device: torch.device) -> str:
    """Its name; of a CPU the number of threads and the architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads, {platform.machine()}"


def peak_memory(device: torch.device) -> str:
    """The most memory this process held so far, in words."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB on the GPU"
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"{kibibytes / 2**20:.2f} GiB"
