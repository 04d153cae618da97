"""Which images each micro-batch holds: epoch → global batches → mixing groups → micro-batches.

An epoch is an order of the training set, cut into global batches, one per step. With repeated
augmentation each image of the order stands for several views, and only its beginning is used.
`BatchPlan` divides each global batch in two ways: into groups that share a draw of mixup or cutmix,
and into the micro-batches of all processes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from ..base.messages import counted
from .draw import SampleKey, Samples, balanced_order, epoch_order


@dataclass(frozen=True)
class BatchPlan:
    """How one global batch is mixed, and how it is divided among processes and micro-batches.

    **Groups.** The images of a group share one draw of mixup or cutmix. There are
    G = global_batch / group groups. Group g holds the images g, g + G, g + 2G, … of the global
    batch, and image k of a group is mixed with image group − 1 − k of it. The views of one image
    (augment.repeats) stand side by side in the global batch, so they are in different groups if
    there are enough. In DeiT's code each process forms one such group.

    **Pairs.** Two images that are mixed with each other are always in the same micro-batch. Pair p
    is image p of the global batch and its partner; with group = 1 nothing is mixed, and it is the
    image alone. Of the micro-batches of all processes, of P pairs each, number c holds the
    pairs from c · P on: neighbours, so that the views of an image meet and it is decoded once. Of
    these process r of W has the numbers r, r + W, …. So the number of processes and the size of
    micro-batches change neither which images are mixed nor how. With a global batch of 16, groups
    of 8, 2 processes and micro-batches of 4, process 0 has [0, 1, 15, 14] and [4, 5, 11, 10], and
    process 1 has [2, 3, 13, 12] and [6, 7, 9, 8].

    strided: instead micro-batch c of C takes the pairs c, c + C, c + 2C, …, which are of more
        different images: better for BatchNorm, whose statistics are those of a micro-batch. Runs
        that began before there was a choice have strided pairs.
    """

    global_batch: int
    world_size: int
    micro_batch_size: int
    group: int
    strided: bool = False

    @property
    def accumulation(self) -> int:
        """How many micro-batches each process has per step; their gradients are accumulated."""
        return self.global_batch // self.world_size // self.micro_batch_size

    @property
    def groups(self) -> int:
        return self.global_batch // self.group

    def positions(self, rank: int, micro_step: int) -> ndarray:
        """The positions in the global batch of the images of one micro-batch, (B,) int64.

        The partner of image i of the micro-batch is its image B − 1 − i.
        """
        pairs = np.arange(self.global_batch // min(self.group, 2))  # or single images
        count = self.world_size * self.accumulation  # of micro-batches
        number = micro_step * self.world_size + rank
        first = pairs[number::count] if self.strided else np.split(pairs, count)[number]
        if self.group == 1:
            return first
        k, g = np.divmod(first, self.groups)  # image k of group g, as above
        partners = (self.group - 1 - k) * self.groups + g
        return np.concatenate([first, partners[::-1]])

    def cautions(self, *, repeats: int, max_batch_per_process: int) -> list[str]:
        """Warnings about settings that are valid but probably not intended, one line each."""
        lines = []
        if self.group > 1 and self.groups < repeats:
            lines.append(
                f"some of the mix.group = {self.group} images that share a draw of mixing are views "
                f"of the same image: optim.global_batch = {self.global_batch} has fewer groups "
                f"({self.groups}) than augment.repeats = {repeats}"
            )
        per_process = self.global_batch // self.world_size
        if 2 * self.micro_batch_size < min(max_batch_per_process, per_process):
            lines.append(
                f"micro-batches have {counted(self.micro_batch_size, 'image')}: no larger size up "
                f"to optim.max_batch_per_process = {max_batch_per_process} divides the "
                f"{per_process} images of each process evenly"
            )
        return lines


def plan_batches(
    global_batch: int,
    max_batch_per_process: int,
    world_size: int,
    *,
    group: int,
    strided: bool = False,
) -> BatchPlan:
    """The plan with the largest micro-batches that divide evenly; ValueError if nothing divides."""
    unit = min(group, 2)  # images that must be in the same micro-batch
    if group % unit:
        raise ValueError(f"mix.group = {group} is odd, but images are mixed in pairs")
    multiple = math.lcm(group, unit * world_size)
    if global_batch % multiple:
        if global_batch % group:
            what = f"groups of mix.group = {group} images"
        elif unit == 2:
            what = f"mixed pairs for each of {world_size} processes"
        else:
            what = f"{world_size} processes"
        raise ValueError(
            f"optim.global_batch = {global_batch} does not divide into {what}; "
            f"expected a multiple of {multiple}"
        )
    if max_batch_per_process < unit:
        raise ValueError(
            f"optim.max_batch_per_process = {max_batch_per_process}, but images are "
            "mixed in pairs; expected at least 2, or mix.probability = 0"
        )
    per_process = global_batch // world_size
    micro_batch_size = next(
        size
        for size in range(min(max_batch_per_process, per_process), 0, -1)
        if per_process % size == 0 and size % unit == 0
    )
    return BatchPlan(global_batch, world_size, micro_batch_size, group, strided)


@dataclass
class TrainSampler:
    """Yields the samples of each micro-batch of this process, for one epoch at a time.

    Each epoch has a new random order of all `count` images. In this order each image stands
    `repeats` times in a row, once for each of its views: repeated augmentation (Hoffer et al.,
    arXiv 1901.09335), as in DeiT. The epoch ends after count // global_batch steps, as without
    repeats, so that it has some of the images in all their views; or after one step, if a smaller
    set's repeated views fill it; else ValueError. A last, incomplete batch is left out.

    labels: the class of each image, if all classes are to have as many places in the order, and with
    repeats on average as many in an epoch, which has its beginning; None: each image has one place.
    See `balanced_order`.
    """

    count: int
    plan: BatchPlan
    rank: int
    seed: int
    repeats: int
    labels: ndarray | None = None

    def __post_init__(self) -> None:
        global_batch = self.plan.global_batch
        if self.count * self.repeats < global_batch:
            views = f" in {self.repeats} views each" if self.repeats > 1 else ""
            raise ValueError(
                f"the training set has {self.count} images{views}, fewer than "
                f"optim.global_batch = {global_batch}"
            )
        self.steps_per_epoch = max(1, self.count // global_batch)
        self.start(epoch=0, step=0)

    def start(self, *, epoch: int, step: int) -> None:
        """Let the next iteration go through `epoch`, beginning at its step `step` (both from 0)."""
        self.epoch = epoch
        self.first_step = step

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.first_step) * self.plan.accumulation

    def __iter__(self) -> Iterator[Samples]:
        plan = self.plan
        if self.labels is None:
            order = epoch_order(self.seed, self.epoch, self.count)
            copies = np.zeros_like(order)
        else:
            order, copies = balanced_order(self.seed, self.epoch, self.labels)
        for step in range(self.first_step, self.steps_per_epoch):
            step_of_run = self.epoch * self.steps_per_epoch + step
            for micro_step in range(plan.accumulation):
                positions = plan.positions(self.rank, micro_step)  # in the global batch
                # View v of the epoch is number v % repeats of the image at place v // repeats.
                views = step * plan.global_batch + positions
                places, repeat_of = np.divmod(views, self.repeats)
                repeat_of += copies[places] * self.repeats  # so each copy has draws of its own
                keys = [
                    SampleKey(self.epoch, image, repeat)
                    for image, repeat in zip(order[places].tolist(), repeat_of.tolist())
                ]
                yield Samples(step_of_run, keys, positions % plan.groups)
