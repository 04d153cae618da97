"""How a batch goes through an operation on a device, and how its arguments get there.

What is drawn for each image is sorted on the host into passes: images that go through one function
together. A GPU pays for every launch and every copy, whatever its size, so there a pass takes as many
images as memory allows, and the arguments of all passes travel in one tensor. A CPU pays for its way
to memory, so there a pass takes what fits into the cache. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

WORD = 8                        # bytes to which arrays are aligned: the largest number that travels


class Passes(NamedTuple):
    """What is dear on a device: its launches, or its way to memory."""

    pixels: int                 # through an operation at once at most, but at least one image
    finished_pixels: int        # normalised, erased and mixed at once at most, but at least one pair
    at_once: bool               # all that an operation reads at once, though that takes more memory


# A geometric operation takes 280 bytes of memory per pixel, others at most 50, so 4.4 GiB is the limit:
# 2^24 pixels are 334 images of 224×224, where about 171 of 1024 go through one at DeiT's settings.
FEW_LAUNCHES = Passes(pixels=2**24, finished_pixels=2**40, at_once=True)
# 2.6 images of 224×224.
IN_CACHE = Passes(pixels=2**17, finished_pixels=2**17, at_once=False)


def passes_on(device: torch.device) -> Passes:
    """The one place where a device decides."""
    return IN_CACHE if device.type == "cpu" else FEW_LAUNCHES


class Pass(NamedTuple):
    """Images of a batch that go through a function together."""

    rows: np.ndarray            # (n,) int64, which of the batch; no image twice
    change: Callable[..., Tensor]       # (n, …) and the arguments → (n, …)
    arguments: tuple            # arrays and numbers, in tuples of tuples if need be

    def __call__(self, images: Tensor) -> None:
        """In place, once its arrays are where the images are."""
        part = images.index_select(0, self.rows)
        images.index_copy_(0, self.rows, self.change(part, *self.arguments))


class Call(NamedTuple):
    """A function of a whole batch, in place, and what it needs of the host."""

    function: Callable[..., Tensor]     # images, and what else it is called with, and the arguments
    arguments: tuple

    def __call__(self, images: Tensor, *more: Any) -> Tensor:
        return self.function(images, *more, *self.arguments)


def parts(rows: np.ndarray, size: tuple[int, int], passes: Passes) -> Iterator[np.ndarray]:
    """Rows of images of `size`, as many at once as a pass may take."""
    step = max(1, passes.pixels // (size[0] * size[1]))
    for start in range(0, len(rows), step):
        yield rows[start:start + step]


def put(plan: Any, device: torch.device) -> Any:
    """A tree of tuples with its arrays as tensors on the device, carried there by one copy.

    Nobody waits for the work that is queued there. What is neither a tuple nor an array stays.
    """
    arrays = list(_arrays(plan))
    ends = np.cumsum([-(-array.nbytes // WORD) * WORD for array in arrays], dtype=np.int64).tolist()
    packed = np.zeros(ends[-1] if ends else 0, np.uint8)
    for array, start in zip(arrays, [0, *ends]):
        packed[start:start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    host = torch.from_numpy(packed)
    if device.type == "cuda" and torch.cuda.is_available():
        # From pinned memory, so that the copy is not waited for. Fake tensors know no other way to it.
        host = torch.empty(len(packed), dtype=torch.uint8, pin_memory=True).copy_(host)
    there = host.to(device, non_blocking=True)
    return _with_tensors(plan, (
        there[start:start + array.nbytes].view(_torch_dtype(array)).view(array.shape)
        for array, start in zip(arrays, [0, *ends])))


def _torch_dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


def _arrays(plan: Any) -> Iterator[np.ndarray]:
    if isinstance(plan, np.ndarray):
        yield plan
    elif isinstance(plan, tuple):
        for part in plan:
            yield from _arrays(part)


def _with_tensors(plan: Any, tensors: Iterator[Tensor]) -> Any:
    """The tree with each array replaced by the next of the tensors."""
    if isinstance(plan, np.ndarray):
        return next(tensors)
    if isinstance(plan, tuple):
        parts = [_with_tensors(part, tensors) for part in plan]
        return type(plan)(*parts) if hasattr(plan, "_fields") else tuple(parts)
    return plan
