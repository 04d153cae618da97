"""Which image goes where: epochs → global steps → mixing groups → processes → micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .draw import SampleKey, epoch_order


@dataclass(frozen=True)
class BatchPlan:
    """How one global batch is mixed and shared out.

    **Groups** share a draw of mixing. Of G = global_batch / group groups, group g has the images g,
    g + G, g + 2G, … of the global batch; within it image k is mixed with image group − 1 − k. So
    three views of an image, which stand side by side, are in three groups, if there are that many:
    as on DeiT's machines, where a process was a group.

    **Pairs** of such images are what is carried: pair p is the image p of the global batch and its
    partner, both of group p mod G. Of all C micro-batches of a step the c-th carries the pairs c,
    c + C, c + 2C, … and process r of W has the micro-batches r, r + W, …. So who carries what
    changes neither what is mixed with what nor how; and micro-batches of `group` images are the
    groups themselves, in order.

    group = 1 means that nothing is mixed: each image is its own partner and is carried alone.
    """

    global_batch: int
    world_size: int
    micro_batch_size: int
    group: int

    @property
    def per_process(self) -> int:
        return self.global_batch // self.world_size

    @property
    def accumulation(self) -> int:
        return self.per_process // self.micro_batch_size

    @property
    def groups(self) -> int:
        return self.global_batch // self.group

    def positions(self, rank: int, micro_step: int) -> np.ndarray:
        """Which images of the global batch this process carries in this micro-step, (B,) int64.

        Partners stand opposite each other: that of image i of the micro-batch is image B − 1 − i.
        """
        units = self.global_batch // min(self.group, 2)          # pairs, or images alone
        first = np.arange(micro_step * self.world_size + rank, units,
                          self.world_size * self.accumulation)
        if self.group == 1:
            return first
        place, group = np.divmod(first, self.groups)
        partners = (self.group - 1 - place) * self.groups + group
        return np.concatenate([first, partners[::-1]])

    def mixing_groups(self, rank: int, micro_step: int) -> np.ndarray:
        """The group of each of these images, (B,) int64."""
        return self.positions(rank, micro_step) % self.groups

    def cautions(self, *, repeats: int, max_batch_per_process: int) -> list[str]:
        """What is possible but hardly meant, a line for each.

        repeats: how many views of an image stand side by side in the global batch.
        """
        lines = []
        shared = np.arange(self.group) * self.groups // repeats          # images of the first group
        again = self.group - len(np.unique(shared))
        if self.group > 1 and again:
            lines.append(f"{again} of the mix.group = {self.group} images that share a draw of "
                         "mixing are further views of the others: optim.global_batch = "
                         f"{self.global_batch} has fewer groups ({self.groups}) than "
                         f"augment.repeats = {repeats}")
        if 2 * self.micro_batch_size < min(max_batch_per_process, self.per_process):
            lines.append(f"micro-batches have {self.micro_batch_size} image(s): of a process' "
                         f"{self.per_process} no larger part up to optim.max_batch_per_process = "
                         f"{max_batch_per_process} divides them evenly")
        return lines


def plan_batches(global_batch: int, max_batch_per_process: int, world_size: int, *,
                 group: int) -> BatchPlan:
    """The largest micro-batch of at most `max_batch_per_process` that divides evenly.

    group: images that share a draw of mixing, an even divisor of the global batch; 1: nothing is
        mixed, and images are carried alone.
    Raises ValueError if the global batch does not divide into groups, or its pairs not into the
    processes.
    """
    unit = min(group, 2)                             # images that are carried together
    _require_even_shares(global_batch, world_size, group, unit)
    if max_batch_per_process < unit:
        raise ValueError(f"optim.max_batch_per_process = {max_batch_per_process}, but images are "
                         "mixed in pairs; expected at least 2, or mix.probability = 0")
    per_process = global_batch // world_size
    micro_batch_size = next(size for size in range(min(max_batch_per_process, per_process), 0, -1)
                            if per_process % size == 0 and size % unit == 0)
    return BatchPlan(global_batch, world_size, micro_batch_size, group)


def _require_even_shares(global_batch: int, world_size: int, group: int, unit: int) -> None:
    """ValueError unless the batch is whole groups of pairs, and equally many pairs per process."""
    if group % unit:
        raise ValueError(f"mix.group = {group} is odd, but images are mixed in pairs; the nearest "
                         f"that are even are {group - 1} and {group + 1}")
    if global_batch % group == 0 and global_batch % (unit * world_size) == 0:
        return
    multiple = math.lcm(group, unit * world_size)
    fits = sorted({max(global_batch // multiple, 1) * multiple,
                   (global_batch // multiple + 1) * multiple})
    nearest = f"the nearest batches that do are {' and '.join(map(str, fits))}"
    if global_batch % group == 0:
        what = f"its {global_batch // 2} mixed pairs do" if unit == 2 else "it does"
        raise ValueError(f"optim.global_batch = {global_batch}: {what} not divide into "
                         f"{world_size} processes; {nearest}")
    sizes = [size for size in range(2, global_batch + 1, 2) if global_batch % size == 0]
    groups = ([size for size in sizes if size < group][-1:]
              + [size for size in sizes if size > group][:1])
    other = f", or mix.group = {' or '.join(map(str, groups))}" if groups else ""
    raise ValueError(f"optim.global_batch = {global_batch} does not divide into groups of "
                     f"mix.group = {group} images; {nearest}{other}")


def require_full_batch(count: int, repeats: int, global_batch: int) -> None:
    """ValueError unless `count` images in `repeats` views fill a batch."""
    if count * repeats < global_batch:
        views = f" in {repeats} views each" if repeats > 1 else ""
        raise ValueError(f"the training set has {count} images{views}, fewer than "
                         f"optim.global_batch = {global_batch}")


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
        require_full_batch(count, repeats, plan.global_batch)
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
            for micro_step in range(self.plan.accumulation):
                places = (step * self.plan.global_batch
                          + self.plan.positions(self.rank, micro_step)).tolist()
                yield [SampleKey(self.epoch, int(order[place // self.repeats]),
                                 place % self.repeats) for place in places]
