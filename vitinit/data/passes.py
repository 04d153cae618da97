"""How a batch goes through per-image operations on a device, and how their arguments get there.

The host knows which operation was drawn for which image. It groups the images of a batch into
passes: a pass is a set of images that go through the same function together. The best size of a
pass depends on the device. On a GPU every kernel launch and every copy has a fixed cost, so a pass
takes as many images as memory allows, and the arguments of all passes travel in one tensor. On a
CPU memory traffic costs most, so a pass takes only as many images as fit into the cache. The
results are equal, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

WORD = 8                        # alignment of packed arrays, in bytes: the size of int64 and float64


class Passes(NamedTuple):
    """The limits on the size of a pass; which limits are best depends on the device."""

    pixels: int                 # most pixels per pass of RandAugment; a pass has at least one image
    finished_pixels: int        # most pixels that are normalised, erased and mixed together; at
                                # least one pair of images
    at_once: bool               # whether functions work on all boxes, or all neighbours of a pixel,
                                # at once (few launches, more memory) or on one after the other


# For GPUs. A geometric operation takes 280 bytes of memory per pixel and all others at most 50, so
# a pass takes 4.4 GiB at most. 2^24 pixels are 334 images of 224×224; with DeiT's settings about
# 171 of 1024 images go through a geometric operation in one layer.
FEW_LAUNCHES = Passes(pixels=2**24, finished_pixels=2**40, at_once=True)
# For CPUs: 2.6 images of 224×224.
IN_CACHE = Passes(pixels=2**17, finished_pixels=2**17, at_once=False)


def passes_on(device: torch.device) -> Passes:
    """The limits that suit `device`: the only place where the size of passes depends on the device."""
    return IN_CACHE if device.type == "cpu" else FEW_LAUNCHES


class Pass(NamedTuple):
    """Some images of a batch that go through one function together."""

    rows: np.ndarray            # (n,) int64: which images of the batch; no image twice
    change: Callable[..., Tensor]       # (n, 3, H, W) and the arguments → (n, 3, H, W)
    arguments: tuple            # arrays and numbers, possibly in nested tuples

    def __call__(self, images: Tensor) -> None:
        """Change these rows of `images` in place. `put` must have moved the arrays to the device."""
        part = images.index_select(0, self.rows)
        images.index_copy_(0, self.rows, self.change(part, *self.arguments))


class Call(NamedTuple):
    """A function that changes a whole batch in place, with the arguments that the host computed."""

    function: Callable[..., Tensor]     # called as function(images, *more, *arguments)
    arguments: tuple

    def __call__(self, images: Tensor, *more: Any) -> Tensor:
        return self.function(images, *more, *self.arguments)


def parts(rows: np.ndarray, size: tuple[int, int], passes: Passes) -> Iterator[np.ndarray]:
    """Split the rows of images of `size` = (height, width) into as many as one pass may take."""
    step = max(1, passes.pixels // (size[0] * size[1]))
    for start in range(0, len(rows), step):
        yield rows[start:start + step]


def put(plan: Any, device: torch.device) -> Any:
    """Move all arrays in a tree of nested tuples to the device, in one copy.

    Returns the tree with each numpy array replaced by a tensor on `device`; whatever is neither a
    tuple nor an array stays as it is. The host does not wait for work that is queued on the device.
    """
    arrays = list(_arrays(plan))
    ends = np.cumsum([-(-array.nbytes // WORD) * WORD for array in arrays], dtype=np.int64).tolist()
    packed = np.zeros(ends[-1] if ends else 0, np.uint8)
    for array, start in zip(arrays, [0, *ends]):
        packed[start:start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    host = torch.from_numpy(packed)
    if device.type == "cuda" and torch.cuda.is_available():
        # From pinned memory, so that the host need not wait for the copy. (Tensor.pin_memory would
        # do the same, but it is not implemented for fake tensors.)
        host = torch.empty(len(packed), dtype=torch.uint8, pin_memory=True).copy_(host)
    there = host.to(device, non_blocking=True)
    return _with_tensors(plan, (
        there[start:start + array.nbytes].view(_torch_dtype(array)).view(array.shape)
        for array, start in zip(arrays, [0, *ends])))


def _torch_dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


def _arrays(plan: Any) -> Iterator[np.ndarray]:
    """Yield all arrays in the tree, in order."""
    if isinstance(plan, np.ndarray):
        yield plan
    elif isinstance(plan, tuple):
        for part in plan:
            yield from _arrays(part)


def _with_tensors(plan: Any, tensors: Iterator[Tensor]) -> Any:
    """The tree with each array replaced by the next tensor of `tensors`."""
    if isinstance(plan, np.ndarray):
        return next(tensors)
    if isinstance(plan, tuple):
        parts = [_with_tensors(part, tensors) for part in plan]
        return type(plan)(*parts) if hasattr(plan, "_fields") else tuple(parts)
    return plan
