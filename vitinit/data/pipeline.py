"""The whole way from a source of images to batches on the device that the model can take.

Images reach the device in one of three ways; there, `to_device` augments and normalises them:

    files → worker processes: decode, crop, flip → (B, 3, H, W) uint8   ┐
    or: a small training set, stored whole on the device, cropped there ┤
    or: evaluation views that an earlier pass has stored                ┴→ to_device → images, targets

On a GPU the next micro-batch is prepared while the model still trains on the current one
(ahead.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor

from .ahead import Ahead
from .cache import KeptViews, cut, decode_to_device, only_moves_pixels
from .datasets import Source
from .draw import SampleDraws
from .loader import Loader, TrainBatch, TrainViews, eval_loader, train_loader
from .sampler import BatchPlan, TrainSampler
from .to_device import ToDevice, TrainToDevice


class MicroBatch(NamedTuple):
    """What one forward and one backward pass work on; its images have been loaded."""

    prepare: Callable[[], tuple[Tensor, Tensor]]     # → images (B, 3, H, W) and targets (B, K) on the
                                                     # device; called once, in the order of training
    positions: np.ndarray                            # (B,), of its images in the global batch


class TrainingBatches:
    """The training set as a sequence of steps, epoch by epoch, starting at any step of an epoch.

    resident: the images, if all are stored on the device; `batches` then describes views of them.
    """

    def __init__(self, batches: Loader, sampler: TrainSampler, prepare: TrainToDevice,
                 resident: Tensor | None = None) -> None:
        self.batches, self.sampler, self.prepare = batches, sampler, prepare
        self.images_on_device = resident

    @property
    def resident(self) -> bool:
        """Whether the whole training set is stored on the device."""
        return self.images_on_device is not None

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of each epoch, the same on all processes."""
        return self.sampler.steps_per_epoch

    def steps(self, epoch: int, done: int = 0) -> Iterator[tuple[int, list[MicroBatch]]]:
        """Yield the steps of `epoch` (counted from 0), without the first `done`.

        Each is its number within the run and this process's micro-batches, all of which have been
        loaded, so that an image that cannot be read (DataError) never leaves half a step.
        """
        self.sampler.start(epoch=epoch, step=done)
        plan, rank, ahead = self.sampler.plan, self.sampler.rank, Ahead(self.prepare.device)
        shares = [(plan.positions(rank, micro_step), plan.mixing_groups(rank, micro_step))
                  for micro_step in range(plan.accumulation)]            # the same in every step
        loaded = iter(self.batches)
        for step in range(epoch * self.steps_per_epoch + done, (epoch + 1) * self.steps_per_epoch):
            yield step, [MicroBatch(partial(ahead, self._prepared, next(loaded), step, groups),
                                    positions) for positions, groups in shares]

    def _prepared(self, batch: TrainBatch, step: int, groups: np.ndarray) -> tuple[Tensor, Tensor]:
        if self.images_on_device is not None:
            windows = batch.images.to(self.prepare.device, non_blocking=True)        # (B, 4)
            batch = batch._replace(images=cut(self.images_on_device, windows))
        return self.prepare(batch, step, groups)


class EvaluationBatches:
    """This process's share of an evaluation set, in which each image occurs exactly once.

    Iterating yields normalised images (B, 3, H, W) and labels (B,) on the device, and raises
    DataError for an image that cannot be read. `len` is the number of batches.
    """

    def __init__(self, kept: KeptViews, *, batch_size: int, workers: int, prepare: ToDevice) -> None:
        self.kept, self.batch_size, self.prepare = kept, batch_size, prepare
        self.decoded = eval_loader(kept.views, batch_size=batch_size, workers=workers,
                                   pin_memory=prepare.device.type == "cuda",
                                   again=kept.device is None)

    def __len__(self) -> int:
        return len(self.decoded)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        batches = map(self.prepare, self.kept.in_batches(self.batch_size, self.decoded))
        ahead = Ahead(self.prepare.device)
        while (batch := ahead(next, batches, None)) is not None:
            yield batch


class Data(NamedTuple):
    """The data that a run trains on and is validated on."""

    whole_set: Source           # the training set before data.subset reduces it to `train_set`
    train_set: Source
    val_set: Source
    plan: BatchPlan
    train_batches: TrainingBatches
    val_batches: EvaluationBatches


def training_batches(source: Source, *, sampler: TrainSampler, draws: SampleDraws,
                     prepare: TrainToDevice, budget_gib: float, workers: int,
                     advance: Callable[[], None] = lambda: None) -> TrainingBatches:
    """Build the batches that a run trains on.

    If the whole set fits on the device and its crops only move pixels (they resize nothing, see
    cache.py), the images are stored there and cropped there. Otherwise worker processes decode
    and crop them.

    source: the training set.
    budget_gib: how much of the device's memory the whole set may take, in GiB.
    workers: the number of loader processes of this process.
    advance: called after each image that is decoded for storage on the device (to show progress).
    """
    device, resident = prepare.device, None
    if only_moves_pixels(draws.augment, draws.size):
        resident = decode_to_device(source, device, draws.size, budget_gib, advance)
    loader = train_loader(TrainViews(source, draws, decode=resident is None), sampler,
                          workers=workers, pin_memory=device.type == "cuda",
                          accumulation=sampler.plan.accumulation)
    return TrainingBatches(loader, sampler, prepare, resident)
