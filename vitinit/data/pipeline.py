"""The whole way from a source of images to batches on the device that the model can take.

Images reach the device in one of three ways; there they are augmented and normalised (augment.py):

    files → worker processes: decode, crop, flip → (B, 3, H, W) uint8   ┐
    or: a small training set, stored whole on the device, cropped there ┤
    or: evaluation views that an earlier pass has stored                ┴→ images, targets

On a GPU the next micro-batch is prepared while the model still trains on the current one.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from numpy import ndarray
from torch import Tensor

from .augment import ToDevice, TrainToDevice
from .draw import Augmentation
from .encoded import views_of
from .loader import Batch, EvalViews, Loader, TrainViews
from .sampler import BatchPlan, TrainSampler
from .sources import Source

GIB = 2**30


@cache
def preparing_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of batches, one per device: torch reuses memory freed in it for it alone."""
    return torch.cuda.Stream(device)


@cache
def decoding_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of images that a GPU decodes, one per device."""
    return torch.cuda.Stream(device)


def decoded_apart(decode: Callable[[], Tensor], device: torch.device) -> Tensor:
    """decode(), which a thread calls at any time: on a GPU in a stream of its own, and to its end.

    A decoder writes from yet another stream, which does not wait for what still reads the memory
    that it is given. So nothing may be left to do when the next images are decoded.
    """
    if device.type != "cuda":
        return decode()
    stream = decoding_stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):  # a thread begins on the first GPU
        views = decode()
    stream.synchronize()
    views.record_stream(preparing_stream(device))  # their memory is not used again before it has
    return views


class Ahead:
    """Calls functions that prepare batches: on a GPU in a stream of their own, elsewhere as usual.

    Work on a GPU waits in queues, called streams. The host launches work and goes on; events tell
    each stream what it has to wait for.

        host              prepare 1 | launch training on 1 | prepare 2 | launch training on 2 | …
        training stream         . . . . . . . . [ 1 ################ ] [ 2 ################ ] [ 3 …
        preparing stream   [ 1 ] . . . . . . . [ 2 ] . . . . . . . .  [ 3 ] . . . .

    The caller must launch all work on one batch before it asks for the next, and not use it after
    that: its memory is that of the batch after the next. So at most two batches are on the device
    beside the one that is being prepared, however far the host is ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.asked: torch.cuda.Event | None = None  # when the last batch was asked for
        self.batch: Any = None

    def __call__(self, prepare: Callable, *arguments: Any) -> Any:
        """prepare(*arguments), a batch that work in the current stream may use."""
        if self.device.type != "cuda":
            return prepare(*arguments)
        training = torch.cuda.current_stream(self.device)
        preparing = preparing_stream(self.device)
        # `before` follows all work on the batch before the current one, whose memory is then free.
        before = self.asked
        self.asked = training.record_event()
        preparing.wait_event(before or self.asked)
        with torch.cuda.stream(preparing):
            self.batch = prepare(*arguments)  # the current batch is kept alive until here
        training.wait_stream(preparing)
        return self.batch


def one_ahead(batches: Iterator[Any], make: Callable[[Any], Any]) -> Iterator[Any]:
    """Yield `make` of each batch, which a thread computes while the one before is worked on."""

    def made() -> Any:
        batch = next(batches, None)
        return None if batch is None else make(batch)

    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(made)
        while (batch := following.result()) is not None:
            following = thread.submit(made)
            yield batch


class MicroBatch(NamedTuple):
    """What one forward and one backward pass work on; its images have been loaded."""

    # → images (B, 3, H, W) and targets (B, K) on the device, or visible patches (B, n); called
    # once, in training's order.
    prepare: Callable[[], tuple[Tensor, Tensor]]
    positions: ndarray  # (B,), of its images in the global batch


class TrainingBatches:
    """The training set as a sequence of steps, epoch by epoch, starting at any step of an epoch.

    If the whole set fits on the device and crops only move pixels, images are stored and cropped
    there, and workers only draw; else workers decode and crop. Batches are the same, bit for bit.
    If the device decodes, it does so for every step.

    budget_gib: how much of the device's memory the whole set may take, in GiB. workers: how many
    processes prepare, together at least one step in advance, and each at least two micro-batches,
    which is torch's default. on_device: decode JPEGs there, whose pixels are slightly others.
    advance: called after each image that is decoded to be stored.
    """

    def __init__(
        self,
        source: Source,
        sampler: TrainSampler,
        prepare: TrainToDevice,
        *,
        budget_gib: float = 0.0,
        workers: int = 0,
        on_device: bool = False,
        advance: Callable[[], object] = lambda: None,
    ) -> None:
        self.source, self.on_device = source, on_device
        self.sampler = sampler
        self.prepare = prepare
        drawn = prepare.augmentation
        self.stored: Tensor | None = None  # all images, on the device
        if not on_device:
            self.stored = decode_to_device(source, prepare.device, drawn, budget_gib, advance)
        workers = min(workers, len(sampler))  # more workers would have nothing to do
        ahead = max(2, math.ceil(sampler.plan.accumulation / workers)) if workers else None
        self.resident = self.stored is not None
        self.steps_per_epoch = sampler.steps_per_epoch
        self.loader = Loader(
            TrainViews(source, drawn, decode=not self.resident, encoded=on_device),
            workers=workers,
            batch_size=None,
            sampler=sampler,
            prefetch_factor=ahead,
            persistent_workers=workers > 0,
            pin_memory=prepare.device.type == "cuda",
        )

    def steps(self, epoch: int, done: int = 0) -> Iterator[tuple[int, list[MicroBatch]]]:
        """Yield the steps of `epoch` (counted from 0), without the first `done`.

        Each is its number within the run and this process's micro-batches. All have been loaded, so
        that an image that cannot be read (DataError) never leaves half a step.
        """
        self.sampler.start(epoch=epoch, step=done)
        plan = self.sampler.plan
        ahead = Ahead(self.prepare.device)
        loaded = iter(self.loader)
        if self.on_device:
            loaded = one_ahead(loaded, self._with_views)
        for step in range(epoch * self.steps_per_epoch + done, (epoch + 1) * self.steps_per_epoch):
            micro_batches = []
            for micro_step in range(plan.accumulation):
                prepare = partial(ahead, self._prepared, next(loaded))
                positions = plan.positions(self.sampler.rank, micro_step)
                micro_batches.append(MicroBatch(prepare, positions))
            yield step, micro_batches

    def _prepared(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if self.stored is not None:
            windows = batch.images.to(self.prepare.device, non_blocking=True)  # (B, 4)
            batch = batch._replace(images=cut(self.stored, windows))
        return self.prepare(batch)

    def _with_views(self, batch: Batch) -> Batch:
        """The batch of files with its views, made on the device."""
        device, size = self.prepare.device, self.prepare.augmentation.size
        decode = partial(views_of, batch.images, size, device, self.source)
        return batch._replace(images=decoded_apart(decode, device))


def decode_to_device(
    source: Source,
    device: torch.device,
    drawn: Augmentation,
    budget_gib: float,
    advance: Callable[[], object],
) -> Tensor | None:
    """All images of `source` on `device`, (N, 3, H, W) uint8; None if views are resized.

    Likewise if images take more than `budget_gib` GiB, or if one has not the size of a view.
    advance: called after each. Raises DataError if one cannot be decoded.
    """
    augment = drawn.augment
    size = drawn.size
    only_moved = augment.crop_scale == augment.crop_ratio == (1.0, 1.0) and size[0] == size[1]
    nbytes = len(source) * source.channels * size[0] * size[1]
    if not only_moved or nbytes > budget_gib * GIB:
        return None
    images = torch.empty(len(source), source.channels, *size, dtype=torch.uint8)
    for index in range(len(source)):
        image = source.image(index)
        if tuple(image.shape[1:]) != size:
            return None
        images[index] = image
        advance()
    return images.to(device)


def cut(images: Tensor, windows: Tensor) -> Tensor:
    """Cut `windows` (B, 4), as of `TrainViews`, out of images (N, 3, H, W); black outside them."""
    channels, height, width = images.shape[1:]
    index, top, left, flip = windows[..., None, None, None].unbind(1)  # (B, 1, 1, 1) each
    planes, rows, columns = (
        torch.arange(count, device=images.device) for count in (channels, height, width)
    )
    rows = top + rows[:, None]  # (B, 1, H, 1)
    columns = left + torch.where(flip == 1, columns.flip(0), columns)  # (B, 1, 1, W)
    inside = ((rows >= 0) & (rows < height)) & ((columns >= 0) & (columns < width))
    # The place of each value among those of all images: (B, 3, H, W).
    rows = (channels * index + planes[:, None, None]) * height + rows.clamp(0, height - 1)
    places = rows * width + columns.clamp(0, width - 1)
    return images.view(-1).index_select(0, places.flatten()).view(places.shape).mul_(inside)


class EvaluationBatches:
    """This process's share of an evaluation set, in which each image occurs exactly once.

    Iterating yields normalised images (B, 3, H, W) and labels (B,) on the device, and raises
    DataError for an image that cannot be read. `len` is the number of batches.

    Views never change, so the first complete pass stores them: on the device up to `on_device_gib`
    GiB, else in memory (pinned for a GPU) up to `cache_gib` GiB; else every pass decodes them.
    """

    def __init__(
        self,
        views: EvalViews,
        prepare: ToDevice,
        *,
        batch_size: int,
        workers: int,
        on_device_gib: float = 0.0,
        cache_gib: float = 0.0,
    ) -> None:
        self.views = views
        self.prepare = prepare
        self.batch_size = batch_size
        self.nbytes = len(views) * views.source.channels * views.size[0] * views.size[1]
        self.place: torch.device | None = None  # where they are stored; None: nowhere
        if self.nbytes <= on_device_gib * GIB:
            self.place = prepare.device
        elif self.nbytes <= cache_gib * GIB:
            self.place = torch.device("cpu")
        self.stored: list[list[Tensor]] | None = None  # all batches, after the first pass
        workers = min(workers, math.ceil(len(views) / batch_size))
        # Workers wait for the next pass only if there is something left for them to do.
        self.loader = Loader(
            views,
            workers=workers,
            batch_size=batch_size,
            pin_memory=prepare.device.type == "cuda",
            persistent_workers=workers > 0 and self.place is None,
        )

    def in_words(self) -> str:
        """Where the views are stored and how large they are, for the start of a run."""
        size = f"{self.nbytes / 2**20:,.0f} MiB per process"
        if self.place is None:
            return f"decoded for every validation: {size} would be more than eval.cache_gib"
        where = "in memory" if self.place.type == "cpu" else "on the device"
        return f"decoded by the first validation, then kept {where}: {size}"

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = map(self.prepare, self._loaded())
        ahead = Ahead(self.prepare.device)
        while (batch := ahead(next, batches, None)) is not None:
            yield batch

    def _loaded(self) -> Iterator[list[Tensor]]:
        """The batches on the host, or stored. A pass that is not completed stores nothing."""
        if self.stored is not None:
            yield from self.stored
            return
        stored = []
        for batch in self.loader:
            if self.place is not None:
                # A copy, because /dev/shm is small; but what lies in pinned memory may stay there.
                if self.place.type != "cpu" or not batch[0].is_pinned():
                    batch = [part.to(self.place, copy=True, non_blocking=True) for part in batch]
                stored.append(batch)
            yield batch
        self.stored = stored or None


class Data(NamedTuple):
    whole_set: Source  # the training set before data.subset reduces it to `train_set`
    train_set: Source
    val_set: Source
    plan: BatchPlan
    train_batches: TrainingBatches
    val_batches: EvaluationBatches
    classes: list[str]  # that are learned, in the order of the labels; []: none are

    @property
    def steps_per_epoch(self) -> int:
        return self.train_batches.steps_per_epoch
