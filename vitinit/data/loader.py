"""Batches for this process: worker processes decode and cut, the loader stacks."""

from __future__ import annotations

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
    """What evaluation loads."""

    images: Tensor          # (B, 3, H, W) uint8
    labels: Tensor          # (B,) int64


class TrainBatch(NamedTuple):
    """What training loads: cropped and flipped, with everything that is still to be done."""

    images: Tensor          # (B, 3, H, W) uint8; (B, 4) int64 where they are still to be cut out
    labels: Tensor          # (B,) int64
    draws: Draws            # B of them, on the host


class TrainViews(Dataset):
    """Training views by sample key: an image, its label, and the draws that are still to be done.

    decode: False where all images stand on the device and are as large as the model sees them. Then
        a view is described instead of made: (image index, top, left, 1 if it is mirrored).
    """

    def __init__(self, source: Source, draws: SampleDraws, *, decode: bool = True) -> None:
        self.draws, self.decode, self.labels = draws, decode, source.labels
        self.source = source if decode else None     # nor are workers sent what they need not decode

    def __getitem__(self, key: SampleKey) -> tuple[Tensor, int, Draws]:
        """One sample alone: (3, H, W) or (4,), its label, its draws."""
        images, labels, draws = self.__getitems__([key])
        return images[0], int(labels[0]), Draws(*(part[0, ...] for part in draws))

    def __getitems__(self, keys: Sequence[SampleKey]) -> TrainBatch:
        """What the loader asks for: a whole batch, whose draws cost a third of what each alone does."""
        indices = np.array([key.index for key in keys])                  # (B,)
        images = self._views(keys) if self.decode else self._windows(keys, indices)
        return TrainBatch(images, torch.from_numpy(self.labels[indices]),
                          self.draws.batch_for_device(keys))

    def _views(self, keys: Sequence[SampleKey]) -> Tensor:
        """(B, 3, H, W) uint8: each image is decoded, cut and let go before the next."""
        views = []
        for key in keys:
            image = self.source.image(key.index)                         # (3, h, w)
            box, flip, interpolation = self.draws.view(key, *image.shape[1:])
            views.append(crop_and_flip(image, box, flip, self.draws.size, interpolation))
        return _stack_images(views)

    def _windows(self, keys: Sequence[SampleKey], indices: np.ndarray) -> Tensor:
        """(B, 4) int64."""
        views = self.draws.views(keys, itertools.repeat(self.draws.size))
        corners = [(box.top, box.left, flip) for box, flip, _ in views]
        return torch.from_numpy(np.column_stack([indices, corners]))


class EvalViews(Dataset):
    """Evaluation views of this process' share: images rank, rank + world_size, …, each once."""

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
        """Of all views together."""
        return len(self) * 3 * self.size[0] * self.size[1]

    @property
    def ready_made(self) -> bool:
        """Whether the images are in memory and as the model sees them: no work for workers."""
        return (isinstance(self.source, ImagesInMemory) and self.crop_pct == 1.0
                and tuple(self.source.images.shape[2:]) == self.size)

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        view = resize_and_centre_crop(self.source.image(self.indices[position]), self.size,
                                      self.crop_pct, self.interpolation)
        return view, int(self.labels[position])


def train_loader(views: TrainViews, sampler: TrainSampler, *, workers: int, pin_memory: bool,
                 accumulation: int = 1) -> Loader:
    """Micro-batches in the sampler's order; `sampler.start` before each iteration.

    accumulation: of how many a step is made up. Workers are ahead by a step, and at least by two
        micro-batches each, as torch has it.
    """
    workers = min(workers, len(sampler))             # more would have nothing to do
    ahead = {"prefetch_factor": max(2, math.ceil(accumulation / workers)),
             "persistent_workers": True} if workers else {}
    return batch_loader(views, _as_it_is, workers, pin_memory, batch_sampler=sampler, **ahead)


def eval_loader(views: EvalViews, *, batch_size: int, workers: int, pin_memory: bool,
                again: bool = True) -> Loader:
    """All views in order; the last batch may be smaller.

    again: whether there will be many passes, between which workers wait; else they end after one.
    """
    workers = 0 if views.ready_made else min(workers, math.ceil(len(views) / batch_size))
    return batch_loader(views, _stack, workers, pin_memory, batch_size=batch_size,
                        persistent_workers=again and workers > 0)


class Loader(DataLoader):
    """torch's, but what ends its worker processes is a DataError, raised where a batch is awaited."""

    def __iter__(self) -> Iterator[Batch | TrainBatch]:
        try:
            batches = super().__iter__()
            if self.num_workers:
                # torch would raise a worker's death out of a signal handler, amid a step.
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            yield from batches
        except (RuntimeError, OSError, EOFError, MemoryError) as error:
            raise DataError(self._explained(error)) from None

    def check_worker_number_rationality(self) -> None:
        """torch warns at more workers than cores, in five lines; train.py has a line of its own."""

    def _explained(self, error: Exception) -> str:
        """One line for what workers die of. Raises `error` again if it is something else."""
        text = own_words(str(error))
        no_memory = isinstance(error, MemoryError) or "can't allocate memory" in text
        if not self.num_workers:
            if no_memory:
                return ("memory ran out while images were loaded; lower optim.max_batch_per_process "
                        "or eval.batch_size, or make room")
            raise error
        lower = f"lower data.workers, now {self.num_workers}"
        # Whoever fetches a batch from a worker that is gone may find that out before torch does.
        hung_up = isinstance(error, (ConnectionError, EOFError))
        if hung_up or "exited unexpectedly" in text or "killed by signal" in text:
            return (f"a worker process of the loader was killed, for example because memory ran out; "
                    f"{lower}, or make room")
        if "No space left on device" in text or "unable to mmap" in text:
            return ("batches find no room in /dev/shm on their way from the worker processes; "
                    f"{lower}, or optim.max_batch_per_process, or give /dev/shm more room (a "
                    "container's --shm-size); data.workers=0 needs none")
        if no_memory:
            return f"a worker process of the loader ran out of memory; {lower}"
        raise error


def batch_loader(views: Dataset, stack: Callable, workers: int, pin_memory: bool,
                 **batching) -> Loader:
    """A loader whose workers leave signals to the training process and end with it."""
    expect_workers(workers)
    return Loader(views, num_workers=workers, pin_memory=pin_memory, collate_fn=stack,
                  worker_init_fn=begin_work, **batching)


def _stack(samples: list[tuple[Tensor, int]]) -> Batch:
    images, labels = zip(*samples)
    return Batch(_stack_images(images), torch.tensor(labels))


def _as_it_is(batch: TrainBatch) -> TrainBatch:
    """Made whole already."""
    return batch


def _stack_images(images: Sequence[Tensor]) -> Tensor:
    batch = torch.empty(len(images), *images[0].shape, dtype=images[0].dtype)
    if torch.utils.data.get_worker_info() is not None:
        batch.share_memory_()       # written once, where the training process reads it
    return torch.stack(images, out=batch)
