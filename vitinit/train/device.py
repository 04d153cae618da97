"""The device: its name, peak rate and memory, copies to it, and running out of its memory."""

import ctypes
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..base.messages import OneLineError, environment_rank, ran_out_of_memory

# Peak TFLOP/s of dense matrix products in bfloat16 with float32 accumulation, by the card's name in
# CUDA; in float16 for V100 and T4, which have no bfloat16. From the manufacturers' data sheets and
# white papers; halved where these assume sparsity.
# fmt: off
MATRIX_RATES = {
    "NVIDIA B200": 2250.0, "NVIDIA H200": 989.0, "NVIDIA H200 NVL": 835.0,
    "NVIDIA H100 80GB HBM3": 989.0, "NVIDIA H100 PCIe": 756.0, "NVIDIA H100 NVL": 835.0,
    "NVIDIA A100-SXM4-40GB": 312.0, "NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0, "NVIDIA L40S": 362.0, "NVIDIA L4": 121.0, "NVIDIA A10": 125.0,
    "NVIDIA RTX A6000": 155.0, "NVIDIA GeForce RTX 4090": 165.0, "NVIDIA GeForce RTX 3090": 71.0,
    "Tesla V100-SXM2-16GB": 125.0, "Tesla V100-SXM2-32GB": 125.0, "Tesla T4": 65.0,
}
# fmt: on
CPU_INFO = Path("/proc/cpuinfo")
RESERVED = 0.25  # of a machine's memory, for a heap in large pages
MADV_HUGEPAGE = 14  # Linux's number for: large pages here, please


def cores() -> int:
    """How many CPU cores this process may use; of a system that does not say, all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_device(device: torch.device) -> str:
    """The GPU's name; for a CPU the number of threads and the architecture."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return "Apple's GPU"
    return f"CPU, {torch.get_num_threads()} threads, {platform.machine()}"


def for_people(description: str) -> str:
    """What `describe_device` says, without the plural of one. run.json keeps the plural, or new runs
    would differ from older ones in a comparison.
    """
    return description.replace(" 1 threads", " 1 thread")


def matrix_rate(device: torch.device) -> float | None:
    """The card's peak TFLOP/s in `MATRIX_RATES`; None for a CPU, and a card that is not listed."""
    return MATRIX_RATES.get(describe_device(device))


def fastest_amp(device: torch.device) -> str:
    """What engine.amp = "auto" is on a device: bf16 if that is computed faster than float32.

    On a CPU with AMX, and on AMD's with avx512_bf16, bf16 takes .4 of float32's time for a step of
    cifar10_small. Intel's avx512_bf16 alone has half of the rate of float32's products.
    """
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    if device.type == "mps":
        return "off"
    cpu = CPU_INFO.read_text() if CPU_INFO.is_file() else ""
    return "bf16" if "amx_bf16" in cpu or "avx512_bf16" in cpu and "AuthenticAMD" in cpu else "off"


def automatic_values(device: torch.device) -> dict[str, str]:
    """What the keys of a recipe that may be "auto" are on a device, by key: what is fastest."""
    amp = fastest_amp(device)
    return {"engine.amp": amp, "optim.muon_dtype": "bf16" if amp == "bf16" else "float32"}


def peak_gib(device: torch.device) -> float:
    """The most memory so far in GiB: torch's on the GPU; on a CPU, the process's resident one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource  # which Windows has not

    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def forget_peak(device: torch.device) -> None:
    """Let a GPU's peak begin anew, with what is allocated now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


@cache  # once for a process
def keep_freed_memory() -> None:
    """Let the C library keep what tensors free for the next ones, in large pages, if it is glibc.

    By default the system zeroes large blocks anew: a third of the time of an evaluation on a CPU,
    and 4 % of that of a training step (cifar10_small, one thread of two of an AMD EPYC).
    """
    with suppress(OSError, AttributeError, TypeError):  # another library, or Windows
        library = ctypes.CDLL(None)
        library.mallopt(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks
        library.mallopt(-4, 0)  # M_MMAP_MAX: all blocks are in the heap
        ask_for_large_pages(library)


def ask_for_large_pages(library: ctypes.CDLL) -> None:
    """Ask Linux for pages of 2 MiB in place of 4 KiB where the heap of glibc will grow.

    The processor looks addresses up page by page; on a virtual machine whose host was busy that took
    over half of a training step's time (README.md, "On a CPU"). Many systems give large pages only to
    those who ask, and only for addresses that are there: so the heap grows once by RESERVED of the
    memory, of which nothing is taken before it is used.
    """
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    page = os.sysconf("SC_PAGE_SIZE")
    pages = int(RESERVED * os.sysconf("SC_PHYS_PAGES"))
    block = library.malloc(pages * page)
    if block is None:  # more than the system promises to a process
        return
    first = -(-block // page) * page  # the first whole page in it
    library.madvise(first, (pages - 1) * page, MADV_HUGEPAGE)
    library.free(block)  # its addresses stay the heap's


def this_device(number: int = 0) -> torch.device:
    """This machine's GPU `number` if it has one, else its CPU, with freed memory kept; Apple's GPU
    only where VITINIT_DEVICE in the environment is mps, and OneLineError if there is none.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", number)
    keep_freed_memory()
    asked = os.environ.get("VITINIT_DEVICE", "cpu")
    if asked != "cpu" and (asked != "mps" or not torch.backends.mps.is_available()):
        raise OneLineError(
            f"VITINIT_DEVICE={asked} in the environment; expected cpu, or mps where torch sees Apple's GPU"
        )
    return torch.device(asked)


def on_apples_gpu(device: torch.device) -> list[str]:
    """A line where Apple's GPU is taken, or is there and the CPU is taken."""
    if device.type == "mps":
        return ["Apple's GPU is taken, on which nobody has tested training: untested"]
    if device.type == "cpu" and torch.backends.mps.is_available():
        return ["Apple's GPU is there, and the CPU is taken: VITINIT_DEVICE=mps takes it, untested"]
    return []


def dtype_of_sums(device: torch.device) -> torch.dtype:
    """In which type to sum over many images: float64, which Apple's GPUs have not."""
    return torch.float32 if device.type == "mps" else torch.float64


def copy_to(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to `device` without waiting for it: a GPU copies so from pinned memory."""
    if device.type == "cuda":
        values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)
    return values.to(device, non_blocking=True)


class OutOfMemory(OneLineError):
    of_one_process = True  # that process prints the message itself: the others do not know


@contextmanager
def memory_for(key: str, value: int) -> Iterator[None]:
    """A context in which too little memory is OutOfMemory: lower `key`, now `value` images."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not ran_out_of_memory(error):
            raise
        where = "the GPU" if "CU" in str(error) else "this machine"  # CUDA, CUBLAS, CUDNN
        raise OutOfMemory(
            f"process {environment_rank()} ran out of memory on {where}; lower {key}, for example "
            f"--set {key}={max(1, value // 2)} where it takes {value} images now"
        ) from None
