"""The whole way from a source of images to batches on the device that the model can take.

Images reach the device in one of three ways; there, `to_device` augments and normalises them:

    files → worker processes: decode, crop, flip → (B, 3, H, W) uint8   ┐
    or: a small training set, stored whole on the device, cropped there ┤
    or: evaluation views that an earlier pass has stored                ┴→ to_device → images, targets

On a GPU the next micro-batch is prepared while the model still trains on the current one
(ahead.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from .ahead import made_ahead
from .datasets import Source
from .draw import SampleDraws
from .kept import KeptViews
from .loader import TrainBatch, TrainViews, eval_loader, train_loader
from .resident import ResidentTrainLoader, only_moves_pixels, resident_source
from .sampler import BatchPlan, TrainSampler
from .to_device import ToDevice, TrainToDevice


class Prepared(NamedTuple):
    """A micro-batch on the device, ready for the model."""

    step: int                   # the step that it belongs to, counted from 0 over the whole run
    images: Tensor              # (B, 3, H, W)
    targets: Tensor             # (B, K)
    positions: np.ndarray       # (B,), where its images stand in the global batch


@dataclass(frozen=True)
class TrainingStep:
    """This process's share of one global batch, as an iterable over its micro-batches.

    Each micro-batch is a tuple: images (B, 3, H, W) and targets (B, K) on the device, and the
    positions (B,) of these images in the global batch. Micro-batches are made during the iteration,
    so a step can be iterated over only once, and the steps of an epoch only in order. Raises
    DataError for an image that cannot be read, and RuntimeError for steps out of order.
    """

    number: int                 # counted from 0 over the whole run
    plan: BatchPlan
    prepared: Iterator[Prepared]        # shared by all steps of the epoch; this step's come next

    @property
    def global_batch(self) -> int:
        """The number of images in the step, over all processes."""
        return self.plan.global_batch

    def __len__(self) -> int:
        return self.plan.accumulation

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, np.ndarray]]:
        for number, *parts in itertools.islice(self.prepared, len(self)):
            if number != self.number:
                raise RuntimeError(f"a micro-batch of step {number} came in step {self.number}: "
                                   "steps are iterated over in order, and each to its end")
            yield tuple(parts)


class TrainingBatches:
    """The training set as a sequence of steps, epoch by epoch, starting at any step of an epoch."""

    def __init__(self, batches: Iterable[TrainBatch], sampler: TrainSampler,
                 prepare: TrainToDevice) -> None:
        self.batches, self.sampler, self.prepare = batches, sampler, prepare

    @property
    def resident(self) -> bool:
        """Whether the whole training set is stored on the device."""
        return isinstance(self.batches, ResidentTrainLoader)

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps of each epoch, the same on all processes."""
        return self.sampler.steps_per_epoch

    def steps(self, *, epoch: int, done: int = 0) -> Iterator[TrainingStep]:
        """Yield the steps of `epoch` (counted from 0), without the first `done`."""
        self.sampler.start(epoch=epoch, step=done)
        numbers = range(epoch * self.steps_per_epoch + done, (epoch + 1) * self.steps_per_epoch)
        prepared = made_ahead(self._prepared(numbers), self.prepare.device)
        for number in numbers:
            yield TrainingStep(number, self.sampler.plan, prepared)

    def _prepared(self, numbers: Iterable[int]) -> Iterator[Prepared]:
        """Yield the micro-batches of the steps with these numbers, one after the other."""
        plan, rank, batches = self.sampler.plan, self.sampler.rank, iter(self.batches)
        micro_steps = [(plan.positions(rank, micro_step), plan.mixing_groups(rank, micro_step))
                       for micro_step in range(plan.accumulation)]       # the same in every step
        for number, (positions, groups) in itertools.product(numbers, micro_steps):
            yield Prepared(number, *self.prepare(next(batches), number, groups), positions)


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
        batches = self.kept.in_batches(self.batch_size, self.decoded)
        return made_ahead(map(self.prepare, batches), self.prepare.device)


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
    resident.py), the images are stored there and cropped there. Otherwise worker processes decode
    and crop them.

    source: the training set.
    budget_gib: how much of the device's memory the whole set may take, in GiB.
    workers: the number of loader processes of this process.
    advance: called after each image that is decoded for storage on the device (to show progress).
    """
    device = prepare.device
    if only_moves_pixels(draws.crop, draws.size):
        resident = resident_source(source, device, draws.size, budget_gib, advance)
        if resident is not None:
            windows = train_loader(TrainViews(source, draws, decode=False), sampler,
                                   workers=workers, pin_memory=False,
                                   accumulation=sampler.plan.accumulation)
            return TrainingBatches(ResidentTrainLoader(resident, windows), sampler, prepare)
    loader = train_loader(TrainViews(source, draws), sampler, workers=workers,
                          pin_memory=device.type == "cuda",
                          accumulation=sampler.plan.accumulation)
    return TrainingBatches(loader, sampler, prepare)
