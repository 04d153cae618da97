"""Which process gets which image, and which images are mixed with which.

The global batch and its mixing must not depend on the number of processes or on micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from vitinit.data.draw import SampleKey, epoch_order
from vitinit.data.sampler import BatchPlan, TrainSampler, plan_batches

COUNT, SEED = 101, 13


def sampler(rank: int, world_size: int, *, global_batch: int = 18, max_batch: int = 3,
            count: int = COUNT, seed: int = SEED, repeats: int = 1, group: int = 1) -> TrainSampler:
    plan = plan_batches(global_batch, max_batch, world_size, group=group)
    return TrainSampler(count, plan, rank=rank, seed=seed, repeats=repeats)


def share(one: TrainSampler) -> list[SampleKey]:
    """The samples of one process in an epoch, in the order of its micro-batches."""
    return [key for samples in one for key in samples.keys]


def by_position(one: TrainSampler) -> list[dict[int, SampleKey]]:
    """The samples of one process in an epoch, by step and position in the global batch."""
    plan, found = one.plan, []
    for number, (_, keys, _) in enumerate(one):
        micro_step = number % plan.accumulation
        if micro_step == 0:
            found.append({})
        positions = plan.positions(one.rank, micro_step).tolist()
        assert not found[-1].keys() & set(positions)
        found[-1] |= dict(zip(positions, keys, strict=True))
    return found


def in_order(one: TrainSampler) -> list[SampleKey]:
    """The samples of one process in an epoch, each step in the order of the global batch."""
    return [key for step in by_position(one) for _, key in sorted(step.items())]


def global_batches(world_size: int, *, epoch: int, global_batch: int = 18,
                   **options: int) -> list[list[SampleKey]]:
    """The samples of all processes, step by step, in the order of the global batch."""
    processes = [sampler(rank, world_size, global_batch=global_batch, **options)
                 for rank in range(world_size)]
    for one in processes:
        one.start(epoch=epoch, step=0)
    batches = []
    for shares in zip(*map(by_position, processes), strict=True):
        batch = {position: key for one in shares for position, key in one.items()}
        assert sorted(batch) == list(range(global_batch)) and sum(map(len, shares)) == global_batch
        batches.append([batch[position] for position in range(global_batch)])
    return batches


def micro_batches(plan: BatchPlan) -> list[list[list[int]]]:
    """The positions in the global batch, by process and micro-step."""
    return [[plan.positions(rank, micro_step).tolist() for micro_step in range(plan.accumulation)]
            for rank in range(plan.world_size)]


def views_in_order(order: np.ndarray, repeats: int) -> np.ndarray:
    """(N · repeats, 2): every image `repeats` times in a row, with the number of the view."""
    return np.column_stack([np.repeat(order, repeats), np.tile(np.arange(repeats), len(order))])


def deits_share(order: np.ndarray, *, repeats: int, rank: int, world_size: int) -> np.ndarray:
    """What DeiT's RASampler gives one process; its 256 does not depend on the batch size."""
    views = views_in_order(order, repeats)
    per_process = math.ceil(len(order) * repeats / world_size)
    views = np.concatenate([views, views[:per_process * world_size - len(views)]])
    return views[rank::world_size][:len(order) // 256 * 256 // world_size]


# ---------------------------------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------------------------------


def plans(count: int = 60) -> Iterator[tuple[BatchPlan, int]]:
    """Plans of random sizes, and the most images that each allowed per micro-batch."""
    rng = np.random.default_rng(7)
    for _ in range(count):
        world_size = int(rng.choice([1, 2, 3, 5, 6]))
        group = int(rng.choice([1, 2, 4, 6, 10, 12, 60]))
        batch = math.lcm(group, min(group, 2) * world_size) * int(rng.integers(1, 5))
        max_batch = int(rng.integers(min(group, 2), batch + 3))
        yield plan_batches(batch, max_batch, world_size, group=group), max_batch


def test_micro_batches_are_the_largest_that_divide_into_pairs_and_each_image_is_in_one():
    for plan, max_batch in plans():
        unit, share = min(plan.group, 2), plan.global_batch // plan.world_size
        assert plan.micro_batch_size == max(
            size for size in range(1, max_batch + 1) if share % size == size % unit == 0)
        assert plan.per_process == share == plan.accumulation * plan.micro_batch_size
        positions = micro_batches(plan)
        assert sorted(sum(sum(positions, []), [])) == list(range(plan.global_batch))
        assert {len(one) for process in positions for one in process} == {plan.micro_batch_size}


def test_partners_are_the_mirrored_images_of_a_group_and_opposite_each_other():
    """The definition: group g is every G-th image from g on, and is mixed with itself reversed."""
    for plan, _ in plans():
        images = list(range(plan.global_batch))
        groups = [images[first::plan.groups] for first in range(plan.groups)]
        partner = {image: other for one in groups for image, other in zip(one, reversed(one))}
        group_of = {image: number for number, one in enumerate(groups) for image in one}
        for rank, process in enumerate(micro_batches(plan)):
            one = TrainSampler(plan.global_batch, plan, rank=rank, seed=SEED, repeats=1)
            for positions, samples in zip(process, one, strict=True):
                assert plan.group == 1 or [partner[image] for image in positions] == positions[::-1]
                assert samples.groups.tolist() == [group_of[image] for image in positions]


@pytest.mark.parametrize("global_batch, world_size, group, words", [
    (100, 3, 1, "does not divide into 3 processes; the nearest batches that do are 99 and 102"),
    (96, 5, 32, "into mixed pairs for each of 5 processes; the nearest batches that do are 160"),
    (100, 1, 64, "into groups of mix.group = 64 images; the nearest batches that do are 64 and "
     "128"),
    (30, 2, 8, "the nearest batches that do are 24 and 32"),
    (126, 1, 63, "images are mixed in pairs; the nearest that are even are 62 and 64")])
def test_a_global_batch_that_does_not_divide_is_refused_with_the_nearest(global_batch, world_size,
                                                                         group, words):
    with pytest.raises(ValueError) as error:
        plan_batches(global_batch, 17, world_size, group=group)
    assert str(error.value).endswith(words) and "\n" not in str(error.value)


def test_a_micro_batch_of_one_holds_no_pair():
    assert plan_batches(12, 1, 2, group=1).micro_batch_size == 1
    with pytest.raises(ValueError, match=r"max_batch_per_process = 1, .* pairs"):
        plan_batches(12, 1, 2, group=4)


@pytest.mark.parametrize("plan, repeats, most, words", [
    (plan_batches(64, 64, 1, group=32), 3, 64, "has fewer groups (2) than augment.repeats = 3"),
    (plan_batches(64, 64, 1, group=16), 3, 64, None),
    (plan_batches(64, 64, 1, group=1), 9, 64, None),
    (plan_batches(1021, 256, 1, group=1), 1, 256, "micro-batches have 1 image(s): no larger size"),
    (plan_batches(34, 33, 1, group=34), 1, 33, "micro-batches have 2 image(s): no larger size"),
    (plan_batches(58, 30, 1, group=1), 1, 30, None)])
def test_views_of_one_image_in_a_group_and_small_micro_batches_are_cautions(plan, repeats, most,
                                                                            words):
    lines = plan.cautions(repeats=repeats, max_batch_per_process=most)
    assert len(lines) == (words is not None)
    assert all(words in line and "\n" not in line for line in lines)
    views = np.arange(plan.group) * plan.groups // repeats           # the images of group 0
    assert (len(set(views)) < plan.group) == bool(words and "groups" in words)


# ---------------------------------------------------------------------------------------------
# The epoch
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("world_size, max_batch, group", [(6, 1, 1), (3, 6, 6), (9, 2, 6)])
def test_global_batches_are_the_same_for_any_number_of_processes(world_size, max_batch, group,
                                                                 repeats):
    views = views_in_order(epoch_order(SEED, 2, COUNT), repeats).tolist()
    expected = [[SampleKey(2, *view) for view in views[step * 18:(step + 1) * 18]]
                for step in range(5)]                        # 101 // 18
    assert global_batches(world_size, epoch=2, max_batch=max_batch, repeats=repeats,
                          group=group) == expected


def test_every_batch_is_a_full_micro_batch_and_the_rest_is_dropped():
    batches = list(sampler(1, 2))
    assert {len(batch.keys) for batch in batches} == {3}
    assert [batch.step for batch in batches[::3]] == list(range(5))
    assert len(batches) == len(sampler(1, 2)) == 5 * 3       # 5 steps of 3 micro-batches
    seen = {key.index for step in global_batches(2, epoch=0) for key in step}
    assert len(seen) == 90 and seen < set(range(COUNT))      # 90 different images, 11 left out


def test_starting_at_a_step_gives_the_tail_of_the_epoch():
    whole, tail = sampler(1, 2), sampler(1, 2)
    whole.start(epoch=4, step=0)
    for step in (0, 1, 5):
        tail.start(epoch=4, step=step)
        assert share(tail) == share(whole)[step * 9:]
        assert len(tail) == (5 - step) * 3
        assert [samples.step for samples in tail][::3] == list(range(4 * 5 + step, 5 * 5))


# ---------------------------------------------------------------------------------------------
# Repeated augmentation
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size, max_batch, repeats, group", [(2, 64, 3, 32), (8, 5, 2, 1)])
def test_each_process_takes_what_deits_sampler_gives_it(world_size, max_batch, repeats, group):
    for rank in range(world_size):                           # with batch 256 lengths agree, too
        one = sampler(rank, world_size, count=1009, global_batch=256, max_batch=max_batch,
                      repeats=repeats, group=group)
        one.start(epoch=7, step=0)
        expected = deits_share(epoch_order(SEED, 7, 1009), repeats=repeats, rank=rank,
                               world_size=world_size)
        assert in_order(one) == [(7, *view) for view in expected.tolist()]


@pytest.mark.parametrize("count, global_batch, repeats", [(17, 18, 1), (5, 18, 3), (0, 1, 3)])
def test_a_set_whose_repeats_do_not_fill_a_batch_is_refused(count, global_batch, repeats):
    with pytest.raises(ValueError) as error:
        sampler(0, 1, count=count, global_batch=global_batch, repeats=repeats)
    line = str(error.value)
    views = f" in {repeats} views each" * (repeats > 1)
    assert f"{count} images{views}, fewer" in line and "\n" not in line
    assert f"global_batch = {global_batch}" in line


def test_any_set_gives_as_many_whole_batches_as_without_repeats_but_at_least_one():
    for count in range(1, 14):
        for repeats in range(1, 5):
            for global_batch in range(1, min(12, count * repeats) + 1):
                one = sampler(0, 1, count=count, global_batch=global_batch, repeats=repeats)
                keys = share(one)
                assert len(keys) == max(1, count // global_batch) * global_batch
                assert len(one) == len(list(one)) == len(keys) // one.plan.micro_batch_size
                assert len(set(keys)) == len(keys)
