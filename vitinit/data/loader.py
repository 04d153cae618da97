"""Loaders of uint8 batches on the host: worker processes decode and crop images and stack them.

Training and evaluation each have a data set of views (`TrainViews`, `EvalViews`) and a function
that makes a loader of it. A view is an image as it is cut out and resized for the model.
"""

from __future__ import annotations

import errno
import itertools
import math
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..messages import own_words
from .datasets import ImagesInMemory, Source
from .draw import Draws, SampleDraws, SampleKey
from .images import DataError, crop_and_flip, resize_and_centre_crop
from .sampler import TrainSampler
from .workers import begin_work, expect_workers


class Batch(NamedTuple):
    """A batch that the evaluation loader gives."""

    images: Tensor          # (B, 3, H, W) uint8
    labels: Tensor          # (B,) int64


class TrainBatch(NamedTuple):
    """A batch that the training loader gives, with the draws of what the device still has to do."""

    images: Tensor          # (B, 3, H, W) uint8, cropped and flipped; or (B, 4) int64, descriptions of
                            # views that the device cuts out, see `TrainViews`
    labels: Tensor          # (B,) int64
    draws: Draws            # those of the B samples


class TrainViews(Dataset):
    """Training batches, indexed by sample keys: views, labels, and draws for the device.

    decode: False if all images are stored on the device, at the size that the model takes. Then a
        view is not made but described, by (image index, top, left, 1 if it is flipped).
    """

    def __init__(self, source: Source, draws: SampleDraws, *, decode: bool = True) -> None:
        self.draws, self.decode, self.labels = draws, decode, source.labels
        self.source = source if decode else None     # not sent to workers that need not decode it

    def __getitems__(self, keys: Sequence[SampleKey]) -> TrainBatch:
        """A whole batch. DataLoader calls this if it exists; draws are faster for a batch at once."""
        indices = np.array([key.index for key in keys])                  # (B,)
        if self.decode:
            images = _stack_images([self._view(key) for key in keys])
        else:
            views = self.draws.views(keys, itertools.repeat(self.draws.size))
            corners = [(box.top, box.left, flip) for box, flip, _ in views]
            images = torch.from_numpy(np.column_stack([indices, corners]))
        return TrainBatch(images, torch.from_numpy(self.labels[indices]), self.draws.for_device(keys))

    def _view(self, key: SampleKey) -> Tensor:
        """The view itself, (3, H, W) uint8; no two decoded images are in memory at once."""
        image = self.source.image(key.index)                             # (3, h, w)
        view, = self.draws.views([key], [image.shape[1:]])
        return crop_and_flip(image, view.box, view.flip, self.draws.size, view.interpolation)


class EvalViews(Dataset):
    """Evaluation views of this process's share: the images rank, rank + world_size, …, once each."""

    def __init__(self, source: Source, *, rank: int, world_size: int, size: tuple[int, int],
                 crop_pct: float, interpolation: str) -> None:
        self.source, self.size = source, size
        self.crop_pct, self.interpolation = crop_pct, interpolation
        self.indices = range(rank, len(source), world_size)
        self.labels = source.labels[rank::world_size]                    # (n,) int64

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def nbytes(self) -> int:
        """The size of all views together, in bytes."""
        return len(self) * 3 * self.size[0] * self.size[1]

    @property
    def ready_made(self) -> bool:
        """Whether the images are in memory and are their own views, so that workers have no work."""
        return (isinstance(self.source, ImagesInMemory) and self.crop_pct == 1.0
                and tuple(self.source.images.shape[2:]) == self.size)

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        view = resize_and_centre_crop(self.source.image(self.indices[position]), self.size,
                                      self.crop_pct, self.interpolation)
        return view, int(self.labels[position])


def train_loader(views: TrainViews, sampler: TrainSampler, *, workers: int, pin_memory: bool,
                 accumulation: int = 1) -> Loader:
    """Load micro-batches in the sampler's order; call `sampler.start` before each iteration.

    accumulation: the number of micro-batches per step. The workers together prepare at least one
        step in advance, and each at least two micro-batches, which is torch's default.
    """
    workers = min(workers, len(sampler))             # more workers would have nothing to do
    ahead = {"prefetch_factor": max(2, math.ceil(accumulation / workers)),
             "persistent_workers": True} if workers else {}
    return batch_loader(views, _as_it_is, workers, pin_memory, batch_sampler=sampler, **ahead)


def eval_loader(views: EvalViews, *, batch_size: int, workers: int, pin_memory: bool,
                again: bool = True) -> Loader:
    """Load all views in order; the last batch may be smaller.

    again: whether there will be further passes. If so, workers wait for the next pass; else they
        end after this one.
    """
    workers = 0 if views.ready_made else min(workers, math.ceil(len(views) / batch_size))
    return batch_loader(views, _stack, workers, pin_memory, batch_size=batch_size,
                        persistent_workers=again and workers > 0)


class Loader(DataLoader):
    """torch's DataLoader, but the death of a worker is a DataError, raised while awaiting a batch."""

    def __iter__(self) -> Iterator[Batch | TrainBatch]:
        try:
            batches = super().__iter__()
            if self.num_workers:
                # torch's handler would raise an error when a worker dies, in the middle of a step.
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            yield from batches
        except (RuntimeError, OSError, EOFError, MemoryError) as error:
            raise DataError(self._explained(error)) from None

    def check_worker_number_rationality(self) -> None:
        """Omit torch's warning of more workers than cores: five lines, where train.py prints one."""

    def _explained(self, error: Exception) -> str:
        """One line that explains why a worker died. Raises `error` again if the cause is not known."""
        text = own_words(str(error))
        no_memory = isinstance(error, MemoryError) or "can't allocate memory" in text
        if not self.num_workers:
            if no_memory:
                return ("memory ran out while images were loaded; lower optim.max_batch_per_process "
                        "or eval.batch_size, or make room")
            raise error
        lower = f"lower data.workers, now {self.num_workers}"
        # Fetching a batch from a worker that has died may fail before torch notices its death.
        hung_up = isinstance(error, (ConnectionError, EOFError))
        if hung_up or "exited unexpectedly" in text or "killed by signal" in text:
            return (f"a worker process of the loader was killed, for example because memory ran out; "
                    f"{lower}, or make room")
        # multiprocessing makes the workers' locks in /dev/shm, and its errors name no file.
        if getattr(error, "errno", None) in (errno.ENOENT, errno.EROFS, errno.EACCES) and (
                error.filename is None):
            return ("worker processes need /dev/shm, which is missing or cannot be written here "
                    f"({error.strerror}); data.workers=0, now {self.num_workers}, needs none")
        if "No space left on device" in text or "unable to mmap" in text:
            return ("batches find no room in /dev/shm on their way from the worker processes; "
                    f"{lower}, or optim.max_batch_per_process, or give /dev/shm more room (a "
                    "container's --shm-size); data.workers=0 needs none")
        if no_memory:
            return f"a worker process of the loader ran out of memory; {lower}"
        raise error


def batch_loader(views: Dataset, stack: Callable, workers: int, pin_memory: bool,
                 **batching) -> Loader:
    """Make a loader whose workers leave signals to the training process and end when it ends.

    stack: turns what `views` returns for a batch into a batch (torch's `collate_fn`).
    """
    expect_workers(workers)
    return Loader(views, num_workers=workers, pin_memory=pin_memory, collate_fn=stack,
                  worker_init_fn=begin_work, **batching)


def _stack(samples: list[tuple[Tensor, int]]) -> Batch:
    images, labels = zip(*samples)
    return Batch(_stack_images(images), torch.tensor(labels))


def _as_it_is(batch: TrainBatch) -> TrainBatch:
    """Return the batch unchanged, because `TrainViews` stacks images itself."""
    return batch


def _stack_images(images: Sequence[Tensor]) -> Tensor:
    batch = torch.empty(len(images), *images[0].shape, dtype=images[0].dtype)
    if torch.utils.data.get_worker_info() is not None:
        batch.share_memory_()       # so images are written once, where the training process reads them
    return torch.stack(images, out=batch)
