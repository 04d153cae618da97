"""Which image goes where: epochs → global steps → processes → micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .draw import SampleKey, epoch_order


@dataclass(frozen=True)
class BatchPlan:
    """How one global batch is shared out.

    Process r takes the images [r·b, (r + 1)·b) of the global batch, b = global_batch / processes,
    in `accumulation` micro-batches of `micro_batch` images one after another.
    """

    global_batch: int
    world_size: int
    micro_batch: int

    @property
    def per_process(self) -> int:
        return self.global_batch // self.world_size

    @property
    def accumulation(self) -> int:
        return self.per_process // self.micro_batch

    def positions(self, rank: int, micro_step: int) -> slice:
        """Which images of the global batch this process takes in this micro-step."""
        start = rank * self.per_process + micro_step * self.micro_batch
        return slice(start, start + self.micro_batch)


def plan_batches(global_batch: int, max_batch_per_process: int, world_size: int) -> BatchPlan:
    """The largest micro-batch of at most `max_batch_per_process` that divides evenly.

    Raises ValueError if the global batch does not divide into the processes.
    """
    if global_batch % world_size:
        raise ValueError(f"optim.global_batch = {global_batch} does not divide into {world_size} "
                         f"processes; the nearest that do are "
                         f"{global_batch // world_size * world_size or world_size} and "
                         f"{-(-global_batch // world_size) * world_size}")
    per_process = global_batch // world_size
    micro_batch = next(size for size in range(min(max_batch_per_process, per_process), 0, -1)
                       if per_process % size == 0)
    return BatchPlan(global_batch, world_size, micro_batch)


class TrainSampler:
    """Lists of sample keys, one a micro-batch of this process, for one epoch at a time.

    An epoch is a fresh order of all images, cut into len // global_batch steps; the remainder is
    left out (drop_last), different images every epoch. `start` says where to begin.
    """

    def __init__(self, count: int, plan: BatchPlan, *, rank: int, seed: int) -> None:
        if count < plan.global_batch:
            raise ValueError(f"the training set has {count} images, fewer than "
                             f"optim.global_batch = {plan.global_batch}")
        self.count, self.plan, self.rank, self.seed = count, plan, rank, seed
        self.steps_per_epoch = count // plan.global_batch
        self.start(epoch=0, step=0)

    def start(self, *, epoch: int, step: int) -> None:
        """The next iteration goes through `epoch` (from 0), beginning at `step` of it."""
        self.epoch, self.first_step = epoch, step

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.first_step) * self.plan.accumulation

    def __iter__(self) -> Iterator[list[SampleKey]]:
        order = epoch_order(self.seed, self.epoch, self.count)
        for step in range(self.first_step, self.steps_per_epoch):
            batch = order[step * self.plan.global_batch:(step + 1) * self.plan.global_batch]
            for micro_step in range(self.plan.accumulation):
                yield [SampleKey(self.epoch, int(index))
                       for index in batch[self.plan.positions(self.rank, micro_step)]]
