"""Who takes which image: nothing depends on the number of processes, micro-batches or resumes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vitinit.data.draw import SampleKey, epoch_order
from vitinit.data.sampler import BatchPlan, TrainSampler, plan_batches

COUNT, SEED = 101, 13
IMAGENET = 1_281_167


def sampler(rank: int, world_size: int, *, global_batch: int = 18, max_batch: int = 3,
            count: int = COUNT, seed: int = SEED, repeats: int = 1) -> TrainSampler:
    plan = plan_batches(global_batch, max_batch, world_size)
    return TrainSampler(count, plan, rank=rank, seed=seed, repeats=repeats)


def share(one: TrainSampler) -> list[SampleKey]:
    """What one process takes in an epoch, one after another."""
    return [key for micro_batch in one for key in micro_batch]


def global_batches(world_size: int, *, epoch: int, global_batch: int = 18,
                   **options: int) -> list[list[SampleKey]]:
    """Each step's samples in the order of the global batch: the processes take turns."""
    processes = [sampler(rank, world_size, global_batch=global_batch, **options)
                 for rank in range(world_size)]
    for one in processes:
        one.start(epoch=epoch, step=0)
    turns = zip(*map(share, processes), strict=True)
    keys = [key for turn in turns for key in turn]
    return [keys[first:first + global_batch] for first in range(0, len(keys), global_batch)]


def views_in_order(order: np.ndarray, repeats: int) -> np.ndarray:
    """(N · repeats, 2): every image `repeats` times in a row, with the number of the view."""
    return np.column_stack([np.repeat(order, repeats), np.tile(np.arange(repeats), len(order))])


def deits_share(order: np.ndarray, *, repeats: int, rank: int, world_size: int) -> np.ndarray:
    """DeiT's RASampler, step by step; the 256 is its own, whatever the batch."""
    views = views_in_order(order, repeats)
    per_process = math.ceil(len(order) * repeats / world_size)
    views = np.concatenate([views, views[:per_process * world_size - len(views)]])
    return views[rank::world_size][:len(order) // 256 * 256 // world_size]


@pytest.mark.parametrize("global_batch, max_batch, world_size, micro_batch, accumulation", [
    (1024, 256, 1, 256, 4), (1024, 256, 8, 128, 1), (1024, 100, 4, 64, 4), (18, 5, 1, 3, 6),
    (18, 99, 2, 9, 1), (7, 6, 1, 1, 7), (6, 1, 2, 1, 3), (30, 10, 1, 10, 3)])
def test_the_micro_batch_is_the_largest_that_divides(global_batch, max_batch, world_size,
                                                     micro_batch, accumulation):
    plan = plan_batches(global_batch, max_batch, world_size)
    assert plan == BatchPlan(global_batch, world_size, micro_batch)
    assert plan.accumulation == accumulation
    assert plan.per_process == global_batch // world_size


@pytest.mark.parametrize("max_batch", [1, 2, 5, 7, 12, 100])
@pytest.mark.parametrize("global_batch, world_size", [(12, 1), (30, 5), (26, 2), (60, 3)])
def test_micro_batches_fit_and_make_up_the_global_batch(global_batch, max_batch, world_size):
    plan = plan_batches(global_batch, max_batch, world_size)
    assert 1 <= plan.micro_batch <= max_batch
    assert plan.micro_batch * plan.accumulation * world_size == global_batch


@pytest.mark.parametrize("global_batch, world_size, below, above", [(100, 3, 99, 102),
                                                                   (7, 5, 5, 10), (2, 3, 3, 3)])
def test_a_global_batch_that_does_not_divide_is_refused(global_batch, world_size, below, above):
    with pytest.raises(ValueError) as error:
        plan_batches(global_batch, 17, world_size)
    line = str(error.value)
    assert "\n" not in line and f"global_batch = {global_batch} " in line
    assert f"{below} and {above}" in line and below % world_size == above % world_size == 0


@pytest.mark.parametrize("world_size, max_batch", [(1, 30), (1, 7), (2, 4), (3, 5), (6, 1)])
def test_a_process_takes_every_world_sizeth_image_of_the_global_batch(world_size, max_batch):
    plan = plan_batches(30, max_batch, world_size)
    shares = [[position for micro_step in range(plan.accumulation)
               for position in range(30)[plan.positions(rank, micro_step)]]
              for rank in range(world_size)]
    assert shares == [[rank + k * world_size for k in range(plan.per_process)]
                      for rank in range(world_size)]
    assert sorted(sum(shares, [])) == list(range(30))


@pytest.mark.parametrize("world_size, max_batch", [(1, 30), (1, 7), (2, 4), (3, 5), (6, 1)])
def test_every_micro_step_takes_one_micro_batch_of_the_positions(world_size, max_batch):
    plan = plan_batches(30, max_batch, world_size)
    for rank in range(world_size):
        for micro_step in range(plan.accumulation):
            assert len(range(30)[plan.positions(rank, micro_step)]) == plan.micro_batch


@pytest.mark.parametrize("repeats", [1, 2, 3, 7])
@pytest.mark.parametrize("world_size, max_batch", [(1, 3), (1, 18), (2, 3), (2, 4), (3, 2), (6, 1)])
def test_global_batches_are_the_same_for_any_number_of_processes(world_size, max_batch, repeats):
    views = views_in_order(epoch_order(SEED, 2, COUNT), repeats).tolist()
    expected = [[SampleKey(2, *view) for view in views[step * 18:(step + 1) * 18]]
                for step in range(5)]                        # 101 // 18
    assert global_batches(world_size, epoch=2, max_batch=max_batch, repeats=repeats) == expected


def test_without_repeats_an_epoch_is_the_order_of_the_images_cut_into_batches():
    order = epoch_order(SEED, 2, COUNT).tolist()
    assert global_batches(1, epoch=2, repeats=1) == [
        [(2, index, 0) for index in order[first:first + 18]] for first in range(0, 90, 18)]


def test_every_batch_is_a_full_micro_batch_and_the_rest_is_dropped():
    batches = list(sampler(1, 2))
    assert {len(batch) for batch in batches} == {3}
    assert len(batches) == len(sampler(1, 2)) == 5 * 3       # 5 steps of 3 micro-batches
    seen = {key.index for step in global_batches(2, epoch=0) for key in step}
    assert len(seen) == 90 and seen < set(range(COUNT))      # 90 different images, 11 left out


def test_other_images_are_left_out_in_another_epoch():
    left_out = [set(range(COUNT)) - {key.index for step in global_batches(1, epoch=epoch)
                                     for key in step} for epoch in (0, 1)]
    assert left_out[0] != left_out[1]


@pytest.mark.parametrize("step", [0, 1, 3, 5])
def test_starting_at_a_step_gives_the_tail_of_the_epoch(step):
    whole, tail = sampler(1, 2), sampler(1, 2)
    whole.start(epoch=4, step=0)
    tail.start(epoch=4, step=step)
    assert list(tail) == list(whole)[step * 3:]
    assert len(tail) == (5 - step) * 3


def test_a_sampler_starts_at_the_first_epoch_and_repeats_until_told_otherwise():
    one = sampler(0, 1)
    first = list(one)
    assert {key.epoch for batch in first for key in batch} == {0}
    assert list(one) == first


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("other", [{"epoch": 1, "seed": SEED}, {"epoch": 0, "seed": SEED + 1}])
def test_epochs_and_seeds_differ(other, repeats):
    one, two = sampler(0, 1, repeats=repeats), sampler(0, 1, seed=other["seed"], repeats=repeats)
    two.start(epoch=other["epoch"], step=0)
    indices = [[key.index for key in share(each)] for each in (one, two)]
    assert sum(i == j for i, j in zip(*indices)) < 10        # of 90; about one by chance


def test_fewer_images_than_a_global_batch_are_refused():
    assert list(sampler(0, 1, count=18)) != []
    with pytest.raises(ValueError) as error:
        sampler(0, 1, count=17)
    assert "17 images, " in str(error.value) and "global_batch = 18" in str(error.value)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------
# Repeated augmentation
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("world_size, per_process", [(4, 320_256), (8, 160_128), (16, 80_064)])
def test_an_imagenet_epoch_is_as_long_as_deits(world_size, per_process, repeats):
    for rank in (0, world_size - 1):
        one = sampler(rank, world_size, count=IMAGENET, global_batch=1024, max_batch=64,
                      repeats=repeats)
        assert one.steps_per_epoch == 1251
        assert len(one) * one.plan.micro_batch == per_process


def test_an_imagenet_epoch_of_one_process_is_deits():
    one = sampler(11, 16, count=IMAGENET, global_batch=1024, max_batch=64, repeats=3)
    expected = deits_share(epoch_order(SEED, 0, IMAGENET), repeats=3, rank=11, world_size=16)
    assert len(expected) == 80_064
    assert share(one) == [(0, *view) for view in expected.tolist()]


def test_an_imagenet_epoch_with_three_repeats_sees_a_third_of_the_images():
    one = sampler(0, 1, count=IMAGENET, global_batch=1024, max_batch=256, repeats=3)
    assert len({key.index for micro_batch in one for key in micro_batch}) == 427_008


@pytest.mark.parametrize("repeats", [1, 2, 3, 5])
@pytest.mark.parametrize("world_size, max_batch", [(1, 256), (2, 64), (8, 5)])
def test_each_process_takes_what_deits_sampler_gives_it(world_size, max_batch, repeats):
    for rank in range(world_size):                           # a batch of 256: lengths agree, too
        one = sampler(rank, world_size, count=1009, global_batch=256, max_batch=max_batch,
                      repeats=repeats)
        one.start(epoch=7, step=0)
        expected = deits_share(epoch_order(SEED, 7, 1009), repeats=repeats, rank=rank,
                               world_size=world_size)
        assert share(one) == [(7, *view) for view in expected.tolist()]


@pytest.mark.parametrize("repeats, whole, rest", [(1, 90, 0), (2, 45, 0), (3, 30, 0), (7, 12, 6)])
def test_every_image_that_is_seen_is_seen_in_all_its_views_once(repeats, whole, rest):
    views: dict[int, list[int]] = {}
    for step in global_batches(2, epoch=1, repeats=repeats):
        for key in step:
            views.setdefault(key.index, []).append(key.repeat)
    *others, last = views.values()                           # the epoch may end within the last
    assert all(one == list(range(repeats)) for one in others)
    assert last == list(range(rest or repeats))
    assert len(views) == whole + (rest > 0)


@pytest.mark.parametrize("world_size, repeats", [(2, 2), (3, 2), (3, 3), (6, 3), (9, 7)])
def test_views_of_one_image_go_to_different_processes_if_there_are_enough(world_size, repeats):
    for rank in range(world_size):
        indices = [key.index for key in share(sampler(rank, world_size, repeats=repeats))]
        assert len(indices) == 90 // world_size == len(set(indices))


@pytest.mark.parametrize("repeats", [2, 3])
@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_no_two_processes_take_the_same_view(world_size, repeats):
    taken = [key for rank in range(world_size)
             for key in share(sampler(rank, world_size, repeats=repeats))]
    assert len(taken) == 90 == len(set(taken))


@pytest.mark.parametrize("count, global_batch, repeats, world_size", [
    (7, 18, 3, 1), (17, 18, 3, 2), (1, 3, 3, 3), (2, 6, 3, 2), (2, 2, 1, 2), (1, 1, 1, 1),
    (1, 1, 3, 1), (2, 5, 3, 5)])
def test_a_small_set_makes_one_step_as_long_as_its_repeats_fill_it(count, global_batch, repeats,
                                                                   world_size):
    step, = global_batches(world_size, epoch=0, count=count, global_batch=global_batch,
                           repeats=repeats)
    views = views_in_order(epoch_order(SEED, 0, count), repeats)[:global_batch]
    assert step == [(0, *view) for view in views.tolist()]


@pytest.mark.parametrize("count, global_batch, repeats", [(5, 18, 3), (1, 3, 2), (2, 7, 3),
                                                          (0, 1, 3)])
def test_a_set_whose_repeats_do_not_fill_a_batch_is_refused(count, global_batch, repeats):
    with pytest.raises(ValueError) as error:
        sampler(0, 1, count=count, global_batch=global_batch, repeats=repeats)
    line = str(error.value)
    assert f"{count} images in {repeats} views each, " in line and "\n" not in line
    assert f"global_batch = {global_batch}" in line


def test_any_set_gives_as_many_whole_batches_as_without_repeats_but_at_least_one():
    for count in range(1, 14):
        for repeats in range(1, 5):
            for global_batch in range(1, min(12, count * repeats) + 1):
                one = sampler(0, 1, count=count, global_batch=global_batch, repeats=repeats)
                keys = share(one)
                assert len(keys) == max(1, count // global_batch) * global_batch
                assert len(one) == len(list(one)) == len(keys) // one.plan.micro_batch
                assert len(set(keys)) == len(keys)


def test_starting_at_a_step_within_an_images_views_goes_on_with_the_others():
    whole, tail = (sampler(1, 3, repeats=7) for _ in range(2))
    whole.start(epoch=4, step=0)
    tail.start(epoch=4, step=1)                              # position 18: the fifth view of seven
    assert share(tail) == share(whole)[6:]
    assert share(tail)[0].repeat == (18 + 1) % 7
