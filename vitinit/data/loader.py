"""Loaders of uint8 batches on the host: worker processes decode, crop and flip images.

A view is an image as it is cut out and resized for the model. `TrainViews` and `EvalViews` make
them, for training and for evaluation, and `Loader` does so in worker processes. Python starts these
in one of three ways (start methods), all of which give the same batches:

    fork          copies of the training process; the default on Linux before Python 3.14
    forkserver    copies of a server process that has imported the modules; the default from 3.14
                  on, and where several processes train together
    spawn         new processes, each of which imports all modules again
"""

from __future__ import annotations

import atexit
import errno
import itertools
import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from ..keys import Stream, keyed_generators
from ..messages import own_words
from .draw import Augmentation, SampleKey, Samples, draw_view
from .images import DataError, crop_and_flip, resize_and_centre_crop
from .sources import Source

GRACE_SECONDS = 60          # how long a worker lives on after a SIGTERM
FILES_PER_WORKER = 8        # open files of the training process per worker: both ends of its queue
                            # and two pipes that show whether it is alive, and the same once more
                            # for a worker of the evaluation loader
OTHER_FILES = 256           # open files that the training process may need for everything else


class Batch(NamedTuple):
    """A training batch, with the draws of what the device still has to do."""

    images: Tensor          # (B, 3, H, W) uint8, cropped and flipped; or (B, 4) int64, descriptions
                            # of views that the device cuts out, see `TrainViews`
    labels: Tensor          # (B,) int64
    draws: Tensor           # (B, …) float64, see `Augmentation.draws`


class TrainViews(Dataset):
    """Training batches, indexed by samples: views, labels, and draws for the device.

    A whole batch is drawn at once, which is faster.

    decode: False if all images are stored on the device, at the size that the model takes. Then a
        view is not made but described, by (image index, top, left, 1 if it is flipped).
    """

    def __init__(self, source: Source, augmentation: Augmentation, *, decode: bool = True) -> None:
        self.augmentation, self.decode, self.labels = augmentation, decode, source.labels
        self.source = source if decode else None     # not sent to workers that need not decode it

    def __getitem__(self, samples: Samples) -> Batch:
        keys = samples.keys
        indices = np.array([key.index for key in keys])                  # (B,)
        if self.decode:
            images = default_collate(list(self.views(keys)))
        else:
            views = self.augmentation.views(keys, itertools.repeat(self.augmentation.size))
            corners = [(box.top, box.left, flip) for box, flip, _ in views]
            images = torch.from_numpy(np.column_stack([indices, corners]))
        return Batch(images, torch.from_numpy(self.labels[indices]),
                     self.augmentation.draws(samples))

    def views(self, keys: list[SampleKey]) -> Iterator[Tensor]:
        """Yield the views themselves, (3, H, W) uint8; one decoded image is in memory at a time."""
        settings = self.augmentation
        generators = keyed_generators(settings.seed, Stream.CROP_AND_FLIP, keys)
        for key, rng in zip(keys, generators):
            image = self.source.image(key.index)                         # (3, h, w)
            box, flip, interpolation = draw_view(rng, settings.augment, *image.shape[1:])
            yield crop_and_flip(image, box, flip, settings.size, interpolation)


class EvalViews(Dataset):
    """Evaluation views of this process's share: the images rank, rank + world_size, …, once each.

    Each is a view (3, H, W) uint8 and its label; a batch is (B, 3, H, W) and labels (B,) int64.
    """

    def __init__(self, source: Source, *, rank: int, world_size: int, size: tuple[int, int],
                 crop_pct: float, interpolation: str) -> None:
        self.source, self.size = source, size
        self.crop_pct, self.interpolation = crop_pct, interpolation
        self.indices = range(rank, len(source), world_size)
        self.labels = source.labels[rank::world_size]                    # (n,) int64

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        image = self.source.image(self.indices[position])
        return (resize_and_centre_crop(image, self.size, self.crop_pct, self.interpolation),
                int(self.labels[position]))


class Loader(DataLoader):
    """torch's DataLoader, whose workers leave signals to this process and end when it ends.

    The death of a worker is a DataError, raised while awaiting a batch. workers: how many. options:
    those of DataLoader. Raises DataError if workers need more open files than this process may
    have.
    """

    def __init__(self, views: Dataset, *, workers: int, **options: Any) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if limit != resource.RLIM_INFINITY and OTHER_FILES + FILES_PER_WORKER * workers > limit:
            raise DataError(f"data.workers = {workers} need more than the {limit} files that this "
                            "process may have open (ulimit -n); expected at most "
                            f"{max(0, (limit - OTHER_FILES) // FILES_PER_WORKER)}")
        if workers:
            atexit.unregister(end_workers)           # so that it is registered only once
            atexit.register(end_workers)
        start_fork_server(workers)
        super().__init__(views, num_workers=workers, worker_init_fn=begin_work, **options,
                         multiprocessing_context=start_method() if workers else None)

    def __iter__(self) -> Iterator[Any]:
        try:
            batches = super().__iter__()
            if self.num_workers:
                # torch's handler would raise an error when a worker dies, in the middle of a step.
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            yield from batches
        except (RuntimeError, OSError, EOFError, MemoryError) as error:
            raise DataError(self._explained(error)) from None

    def check_worker_number_rationality(self) -> None:
        """Omit torch's warning of more workers than cores: five lines; train.py prints one."""

    def _explained(self, error: Exception) -> str:
        """One line that explains why a worker died. Raises `error` again if that is not known."""
        text = own_words(str(error))
        no_memory = isinstance(error, MemoryError) or "can't allocate memory" in text
        if no_memory and not self.num_workers:
            return ("memory ran out while images were loaded; lower optim.max_batch_per_process or "
                    "eval.batch_size, or make room")
        if not self.num_workers:
            raise error
        lower = f"lower data.workers, now {self.num_workers}"
        # Fetching a batch from a worker that has died may fail before torch notices its death.
        if isinstance(error, (ConnectionError, EOFError)) or (
                "exited unexpectedly" in text or "killed by signal" in text):
            return ("a worker process of the loader was killed, for example because memory ran "
                    f"out; {lower}, or make room")
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


# ---------------------------------------------------------------------------------------------
# Worker processes: how they start, how they treat signals, and when they end
# ---------------------------------------------------------------------------------------------


def start_method() -> str:
    """How workers are started: as Python does, but not by a fork where processes train together.

    A fork copies a process together with the locks that its other threads hold at that moment.
    torch's threads of communication take one of Python's own whenever they release a tensor. A
    worker that was forked just then waits for that lock for ever, and all processes for the worker.
    """
    method = multiprocessing.get_start_method()
    return "forkserver" if method == "fork" and dist.is_initialized() else method


def start_fork_server(workers: int) -> None:
    """If workers are started by a fork server, start the server and let it import their modules.

    Otherwise each worker would import torch and this package itself. The server imports while this
    process goes on, so it should be started early. Workers need the modules of this package that
    this process has imported by now.
    """
    if workers and start_method() == "forkserver":
        package = __name__.partition(".")[0]
        forkserver.set_forkserver_preload(["__main__", *(
            name for name in sys.modules
            if name.partition(".")[0] == package and not name.endswith(".__main__"))])
        forkserver.ensure_running()


def end_workers() -> None:
    """Kill the workers of loaders that are still open when the program exits.

    multiprocessing would send them a SIGTERM, which they ignore for a while, and wait for them.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)    # torch's handler would report a crash
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def begin_work(worker: int) -> None:
    """What each worker does first (torch's `worker_init_fn`). Its number, `worker`, is not used.

    It ignores the signals that ask a run to end, which often reach all of its processes: the
    training process decides what to do. After a SIGTERM a worker lives on for GRACE_SECONDS, so
    that the training process can finish its step and write a checkpoint.
    """
    sys.excepthook = report_error
    signal.set_wakeup_fd(-1)                         # a forked worker inherits the parent's
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(GRACE_SECONDS))
    threading.Thread(target=end_with_parent, daemon=True).start()


def report_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print an uncaught error of a worker, unless its parent has gone and hung up.

    A thread of the worker sends batches to the parent, which may end in the meantime.
    """
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)


def end_with_parent() -> None:
    """Wait until the training process ends, however it ends, then end this worker.

    torch's own check does not suffice: it watches the process that the worker was forked from, and
    a fork server lives on for as long as its workers do.
    """
    multiprocessing.parent_process().join()
    os._exit(1)
