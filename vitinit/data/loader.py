"""Loaders of uint8 batches on the host: worker processes decode, crop and flip images.

A view is an image as it is cut out and resized for the model. Workers are copies of the training
process (fork, the default on Linux before Python 3.14), or of a server process that has imported
the modules (forkserver, the default since, and where several processes train together).
"""

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import groupby, islice
from multiprocessing import forkserver
from multiprocessing.queues import Queue
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy import ndarray
from numpy.random import Generator
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from ..base.keys import Purpose, keyed_generator, keyed_generators
from ..base.messages import in_brief, own_words
from .draw import Augmentation, Masks, Samples, draw_view
from .encoded import Encoded, encoded
from .images import DataError, HeightWidth, crop_and_flip
from .sources import Source

# What torch's and Python's errors say where a worker was killed, or found no memory to work in.
NO_ROOM = (
    "exited unexpectedly",
    "killed by signal",
    "allocate",
    "No space left",
    "unable to mmap",
    "Too many open files",
)
OPEN_FILES = 10_240  # as many as every system allows


class Batch(NamedTuple):
    """A training batch, with the draws of what the device still has to do."""

    # (B, 3, H, W) uint8, cropped and flipped, channels-last if resized; or what the device makes
    # them of: (B, 4) int64, descriptions of views, see `TrainViews`, or `Encoded` files.
    images: Any
    labels: Tensor  # as of `Source`, (B,) or (B, K); or (B, n), the visible patches, of `Masks`
    draws: Tensor  # (B, …) float64, see `Augmentation.draws`


class TrainViews(Dataset):
    """Training batches, indexed by samples: views, labels, and draws for the device.

    decode: False if all images are stored on the device, at the model's size. Then a view is not
        made but described, by (image index, top, left, 1 if it is flipped). encoded: whether the
        device decodes, too, so that views are `Encoded`.
    """

    def __init__(
        self,
        source: Source,
        augmentation: Augmentation,
        *,
        decode: bool = True,
        encoded: bool = False,
    ) -> None:
        self.augmentation = augmentation
        self.labels = source.labels
        self.source = source if decode else None  # not sent to workers that need not decode it
        self.encoded = encoded

    def __getitem__(self, samples: Samples) -> Batch:
        augmentation = self.augmentation
        images: Tensor | Encoded
        indices = np.array([key.image for key in samples.keys])
        generators = keyed_generators(augmentation.seed, Purpose.CROP_AND_FLIP, samples.keys)
        if self.source is None:
            drawn = [draw_view(rng, augmentation.augment, *augmentation.size) for rng in generators]
            corners = [(box.top, box.left, flip) for box, flip, _ in drawn]
            images = torch.from_numpy(np.column_stack([indices, corners]))
        elif self.encoded:
            images = encoded(self.source, indices, generators, augmentation.augment)
        else:
            images = self.decoded(self.source, indices, generators)
        if augmentation.masks is None:
            labels = self.labels[indices]
        else:
            generators = keyed_generators(augmentation.seed, Purpose.MASK, samples.keys)
            labels = augmentation.masks.draw(generators)
        return Batch(images, torch.from_numpy(labels), augmentation.draws(samples))

    def decoded(self, source: Source, indices: ndarray, generators: Iterator[Generator]) -> Tensor:
        """The views of images, (B, 3, H, W) uint8; an image is decoded once for its neighbours."""
        views = []
        for index, same in groupby(indices.tolist()):
            rngs = islice(generators, len(list(same)))
            views += source.image(index, partial(self.views, rngs=rngs))
        if views[0].stride(0) == 1:  # channels-last, as resized views are
            batch = default_collate([view.permute(1, 2, 0) for view in views])
            return batch.permute(0, 3, 1, 2)
        return default_collate(views)  # padded ones

    def views(self, image: Tensor, rngs: Iterable[Generator]) -> list[Tensor]:
        """The views of an image (3, h, w) by the draws of each generator, (3, H, W) uint8."""
        views, drawn = [], self.augmentation
        for rng in rngs:
            box, flip, interpolation = draw_view(rng, drawn.augment, *image.shape[1:])
            views.append(crop_and_flip(image, box, flip, drawn.size, interpolation, drawn.border))
        return views


class EvalViews(Dataset):
    """Evaluation views of this process's share: the images rank, rank + world_size, …, once each.

    Each is what `view` makes of an image, (3, H, W) uint8, and its label; a batch is (B, 3, H, W) and labels (B,) int64, or
    (B, K) uint8 if an image has several.
    masks: in place of labels, the visible patches, (n,) int64, by which image of the set it is.
    """

    def __init__(
        self,
        source: Source,
        *,
        rank: int,
        world_size: int,
        size: HeightWidth,
        view: Callable[[Tensor], Tensor],
        masks: Masks | None = None,
    ) -> None:
        self.source = source
        self.size = size
        self.view = view
        self.indices = range(rank, len(source), world_size)
        self.masks = masks

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> tuple[Tensor, Any]:
        index = self.indices[position]
        label = self.source.labels[index]
        if self.masks is not None:
            (label,) = self.masks.draw([keyed_generator(0, Purpose.EVAL_MASK, index)])
        return self.source.image(index, self.view), label


class Loader(DataLoader):
    """torch's DataLoader, whose workers leave signals to this process and end when it ends.

    Raises DataError, while awaiting a batch, where a worker was killed or found no memory.
    """

    def __init__(self, views: Dataset, *, workers: int, **options: Any) -> None:
        prepare_workers(workers)
        super().__init__(
            views,
            num_workers=workers,
            worker_init_fn=begin_work,
            **options,
            multiprocessing_context=start_method() if workers else None,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's is of a class
        try:
            if self.num_workers:
                with ExitStack() as files:  # with too few, or no locks, workers would hang
                    for _ in range(16 + 8 * self.num_workers):
                        files.enter_context(open(os.devnull))
                    self.multiprocessing_context.Lock()  # in /dev/shm
            batches = super().__iter__()
            if self.num_workers and threading.current_thread() is threading.main_thread():
                # torch's handler would raise an error when a worker dies, in the middle of a step.
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            yield from batches
        except (RuntimeError, OSError, EOFError, MemoryError) as error:
            # Fetching a batch from a worker that has died may fail before torch notices its death.
            lost = lost_worker(error)
            if not self.num_workers or not lost:
                raise
            raise DataError(
                f"a worker process of the loader was killed or found no room ({lost}); lower "
                f"data.workers, now {self.num_workers}, or make room in memory, in /dev/shm (a "
                "container's --shm-size) and for open files (ulimit -n); data.workers=0 needs less"
            ) from None

    def check_worker_number_rationality(self) -> None:
        """Omit torch's warning of more workers than cores: five lines; train.py prints one."""


def lost_worker(error: Exception) -> str:
    """An error's words, if it says that a worker was killed or found no room; else ""."""
    text = own_words(str(getattr(error, "strerror", None) or error))
    of_the_system = isinstance(error, (OSError, EOFError, MemoryError))
    if of_the_system or any(sign in text for sign in NO_ROOM):
        return in_brief(text or error)
    return ""


def start_method() -> str:
    """How workers are started: as Python does, but not by a fork where processes train together.

    A fork copies the locks that other threads hold at that moment. torch's threads of communication
    take one of Python's own to release a tensor; a worker forked just then waits for it for ever.
    """
    method = multiprocessing.get_start_method()
    return "forkserver" if method == "fork" and dist.is_initialized() else method


def prepare_workers(workers: int) -> None:
    """Allow this process more open files, of which workers need many, and let it end them. If they
    are started by a fork server, let it import torch early, once for all, and not hear Ctrl-C.
    """
    if not workers:
        return
    import resource  # which Windows has not

    atexit.register(end_workers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if start_method() == "forkserver":
        forkserver.set_forkserver_preload(["__main__", __name__])
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def end_workers() -> None:
    """Kill workers at exit: multiprocessing would wait for them, and they ignore its SIGTERM."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report a crash
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def begin_work(worker: int) -> None:
    """Let a worker ignore signals to end, which often reach all; it ends with its parent, or if it
    cannot send a batch, for which its parent waits.
    """
    Queue._on_queue_feeder_error = lambda *error: os._exit(1)  # type: ignore[attr-defined]
    signal.set_wakeup_fd(-1)  # a forked worker inherits the parent's
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """End this worker once the training process has ended: a fork server, its parent, lives on."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
