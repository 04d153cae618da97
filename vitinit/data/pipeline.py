"""The one door to batches: from a source of images to what the model takes.

    files → workers: decode, crop, flip → (B, 3, H, W) uint8 ┐
    or: the whole set on the device, cut there               ┤
    or: evaluation views that an earlier pass has kept       ┴→ to_device → images, targets

A GPU does its part while the model still trains on the batch before (ahead.py).
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
    """A micro-batch on the device."""

    step: int                   # global, from 0
    images: Tensor              # (B, 3, H, W)
    targets: Tensor             # (B, K)
    positions: np.ndarray       # of the images in the global batch, (B,)


@dataclass(frozen=True)
class TrainingStep:
    """This process' share of one global batch, which is made while it is iterated over, once.

    Iterating gives for each micro-batch: images (B, 3, H, W) and targets (B, K) on the device, and
    which of the global batch they are, (B,). Raises DataError.
    """

    number: int                 # global, from 0
    plan: BatchPlan
    prepared: Iterator[Prepared]        # those of this step come next, once it is iterated over

    @property
    def global_batch(self) -> int:
        """Images of all processes."""
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
    """The steps of an epoch, from whichever batch of it."""

    def __init__(self, batches: Iterable[TrainBatch], sampler: TrainSampler,
                 prepare: TrainToDevice) -> None:
        self.batches, self.sampler, self.prepare = batches, sampler, prepare

    @property
    def resident(self) -> bool:
        """Whether the whole set is on the device."""
        return isinstance(self.batches, ResidentTrainLoader)

    @property
    def steps_per_epoch(self) -> int:
        return self.sampler.steps_per_epoch

    def steps(self, *, epoch: int, done: int = 0) -> Iterator[TrainingStep]:
        """Those of `epoch`, counted from 0, without the first `done`."""
        self.sampler.start(epoch=epoch, step=done)
        numbers = range(epoch * self.steps_per_epoch + done, (epoch + 1) * self.steps_per_epoch)
        prepared = made_ahead(self._prepared(numbers), self.prepare.device)
        for number in numbers:
            yield TrainingStep(number, self.sampler.plan, prepared)

    def _prepared(self, numbers: Iterable[int]) -> Iterator[Prepared]:
        """The micro-batches of these steps, one after the other."""
        plan, rank, batches = self.sampler.plan, self.sampler.rank, iter(self.batches)
        carried = [(plan.positions(rank, micro_step), plan.mixing_groups(rank, micro_step))
                   for micro_step in range(plan.accumulation)]       # the same in every step
        for number, (positions, groups) in itertools.product(numbers, carried):
            yield Prepared(number, *self.prepare(next(batches), number, groups), positions)


class EvaluationBatches:
    """This process' share of a set, each image once: images (B, 3, H, W) and labels (B,)."""

    def __init__(self, kept: KeptViews, *, batch_size: int, workers: int, prepare: ToDevice) -> None:
        self.kept, self.batch_size, self.prepare = kept, batch_size, prepare
        self.decoded = eval_loader(kept.views, batch_size=batch_size, workers=workers,
                                   pin_memory=prepare.device.type == "cuda",
                                   again=kept.place is None)

    def __len__(self) -> int:
        return len(self.decoded)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Raises DataError while images are decoded."""
        batches = self.kept.in_batches(self.batch_size, self.decoded)
        return made_ahead(map(self.prepare, batches), self.prepare.device)


class Data(NamedTuple):
    """What a run trains and is measured on."""

    whole_set: Source           # of which `train_set` is a part
    train_set: Source
    val_set: Source
    plan: BatchPlan
    train_batches: TrainingBatches
    val_batches: EvaluationBatches


def training_batches(source: Source, *, sampler: TrainSampler, draws: SampleDraws,
                     prepare: TrainToDevice, budget_gib: float, workers: int,
                     advance: Callable[[], None] = lambda: None) -> TrainingBatches:
    """From the device if the set fits there and its crops only move pixels, else from workers.

    budget_gib: of the device's memory, for the whole set. advance: called after each image that is
    decoded to stand on the device.
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
