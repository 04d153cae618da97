"""The device in words, and what to do where its memory ends."""

from __future__ import annotations

import platform
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..messages import OneLineError


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


class OutOfMemory(OneLineError):
    """One process has no memory left. It says so itself, since the others cannot know."""

    of_one_process = True


@contextmanager
def memory_for(key: str, value: int, rank: int) -> Iterator[None]:
    """Where memory runs out in here, OutOfMemory says to lower the recipe's `key` from `value`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:     # torch.OutOfMemoryError is a RuntimeError
        if not ran_out_of_memory(error):
            raise
        where = "the GPU" if isinstance(error, torch.OutOfMemoryError) else "this machine"
        raise OutOfMemory(
            f"process {rank} ran out of memory on {where}; lower {key}, for example --set "
            f"{key}={max(1, value // 2)} where it takes {value} images now") from None


def ran_out_of_memory(error: Exception) -> bool:
    """CUDA's, the host's as torch says it, and Python's own."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) \
        or "can't allocate memory" in str(error) or "not enough memory" in str(error)
