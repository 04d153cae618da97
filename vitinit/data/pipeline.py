"""The one door to batches: from a source of images to what the model takes.

    files → workers: decode, crop, flip → (B, 3, H, W) uint8 ┐
    or: the whole set on the device, cut there               ┤
    or: evaluation views that an earlier pass has kept       ┴→ to_device → images, targets
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from .datasets import Source
from .draw import SampleDraws
from .kept import KeptViews
from .loader import TrainBatch, TrainViews, eval_loader, train_loader
from .resident import ResidentTrainLoader, only_moves_pixels, resident_source
from .sampler import BatchPlan, TrainSampler
from .to_device import ToDevice, TrainToDevice


@dataclass(frozen=True)
class Step:
    """This process' share of one global batch, here as a whole and on the host.

    Iterating gives for each micro-batch: images (B, 3, H, W) and targets (B, K) on the device, and
    which of the global batch they are, (B,).
    """

    number: int                 # global, from 0
    batches: list[TrainBatch]
    prepare: TrainToDevice
    plan: BatchPlan
    rank: int

    @property
    def global_batch(self) -> int:
        return self.plan.global_batch

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, np.ndarray]]:
        for micro_step, batch in enumerate(self.batches):
            groups = self.plan.mixing_groups(self.rank, micro_step)
            yield (*self.prepare(batch, self.number, groups),
                   self.plan.positions(self.rank, micro_step))


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

    def steps(self, *, epoch: int, done: int = 0) -> Iterator[Step]:
        """Those of `epoch`, counted from 0, without the first `done`. Raises DataError."""
        self.sampler.start(epoch=epoch, step=done)
        plan, rank = self.sampler.plan, self.sampler.rank
        batches = iter(self.batches)
        for number in range(epoch * self.steps_per_epoch + done, (epoch + 1) * self.steps_per_epoch):
            yield Step(number, list(itertools.islice(batches, plan.accumulation)), self.prepare,
                       plan, rank)


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
        return map(self.prepare, self.kept.in_batches(self.batch_size, self.decoded))


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
                                   workers=workers, pin_memory=False)
            return TrainingBatches(ResidentTrainLoader(resident, windows), sampler, prepare)
    loader = train_loader(TrainViews(source, draws), sampler, workers=workers,
                          pin_memory=device.type == "cuda")
    return TrainingBatches(loader, sampler, prepare)
