"""Which image goes where: epochs → global steps → processes → micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .draw import SampleKey, epoch_order


@dataclass(frozen=True)
class BatchPlan:
    """How one global batch is shared out.

    Of W processes, process r takes the images r, r + W, r + 2W, … of the global batch, in
    `accumulation` micro-batches of `micro_batch` images one after another. So, as in DeiT, repeated
    views of an image, which stand side by side, go to different processes.
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
        taken = self.world_size * self.micro_batch   # by all processes in one micro-step
        return slice(micro_step * taken + rank, (micro_step + 1) * taken, self.world_size)


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

    An epoch is a fresh order of all `count` images, in which each stands `repeats` times in a row,
    in that many views: repeated augmentation (Hoffer et al., arXiv 1901.09335), as DeiT has it. The
    epoch is the first count // global_batch steps of that, so it has the length that it has without
    repeats and sees about count / repeats different images, different ones every epoch. Without
    repeats it leaves out less than one batch (drop_last). A set smaller than a batch makes epochs of
    one step, as long as its repeats fill it.

    `start` says where to begin. A step's images depend neither on the number of processes nor on
    where the run was resumed. Raises ValueError if a single batch cannot be filled.
    """

    def __init__(self, count: int, plan: BatchPlan, *, rank: int, seed: int, repeats: int) -> None:
        if count * repeats < plan.global_batch:
            views = f" in {repeats} views each" if repeats > 1 else ""
            raise ValueError(f"the training set has {count} images{views}, fewer than "
                             f"optim.global_batch = {plan.global_batch}")
        self.count, self.plan, self.rank, self.seed = count, plan, rank, seed
        self.repeats = repeats
        self.steps_per_epoch = max(1, count // plan.global_batch)
        self.start(epoch=0, step=0)

    def start(self, *, epoch: int, step: int) -> None:
        """The next iteration goes through `epoch` (from 0), beginning at `step` of it."""
        self.epoch, self.first_step = epoch, step

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.first_step) * self.plan.accumulation

    def __iter__(self) -> Iterator[list[SampleKey]]:
        order = epoch_order(self.seed, self.epoch, self.count)
        for step in range(self.first_step, self.steps_per_epoch):
            batch = range(step * self.plan.global_batch, (step + 1) * self.plan.global_batch)
            for micro_step in range(self.plan.accumulation):
                yield [SampleKey(self.epoch, int(order[place // self.repeats]),
                                 place % self.repeats)
                       for place in batch[self.plan.positions(self.rank, micro_step)]]
