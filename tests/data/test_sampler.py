"""Who takes which image: nothing depends on the number of processes, micro-batches or resumes."""

from __future__ import annotations

import pytest

from vitinit.data.draw import SampleKey, epoch_order
from vitinit.data.sampler import BatchPlan, TrainSampler, plan_batches

COUNT, SEED = 101, 13


def sampler(rank: int, world_size: int, *, global_batch: int = 18, max_batch: int = 3,
            count: int = COUNT, seed: int = SEED) -> TrainSampler:
    plan = plan_batches(global_batch, max_batch, world_size)
    return TrainSampler(count, plan, rank=rank, seed=seed)


def global_batches(world_size: int, *, epoch: int, max_batch: int = 3) -> list[list[SampleKey]]:
    """Each step's samples, process after process, as the gradients of the step see them."""
    steps: list[list[SampleKey]] = [[] for _ in range(COUNT // 18)]
    for rank in range(world_size):
        one = sampler(rank, world_size, max_batch=max_batch)
        one.start(epoch=epoch, step=0)
        for number, micro_batch in enumerate(one):
            steps[number // one.plan.accumulation] += micro_batch
    return steps


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
def test_shares_are_disjoint_and_cover_the_global_batch_in_order(world_size, max_batch):
    plan = plan_batches(30, max_batch, world_size)
    taken = [position for rank in range(world_size) for micro_step in range(plan.accumulation)
             for position in range(30)[plan.positions(rank, micro_step)]]
    assert taken == list(range(30))


@pytest.mark.parametrize("world_size, max_batch", [(1, 3), (1, 18), (2, 3), (2, 4), (3, 2), (6, 1)])
def test_global_batches_are_the_same_for_any_number_of_processes(world_size, max_batch):
    order = epoch_order(SEED, 2, COUNT)
    expected = [[SampleKey(2, int(index)) for index in order[step * 18:(step + 1) * 18]]
                for step in range(5)]                        # 101 // 18
    assert global_batches(world_size, epoch=2, max_batch=max_batch) == expected


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


@pytest.mark.parametrize("other", [{"epoch": 1, "seed": SEED}, {"epoch": 0, "seed": SEED + 1}])
def test_epochs_and_seeds_differ(other):
    one, two = sampler(0, 1), sampler(0, 1, seed=other["seed"])
    two.start(epoch=other["epoch"], step=0)
    indices = [[key.index for batch in batches for key in batch] for batches in (one, two)]
    assert sum(i == j for i, j in zip(*indices)) < 10        # of 90; about one by chance


def test_fewer_images_than_a_global_batch_are_refused():
    assert list(sampler(0, 1, count=18)) != []
    with pytest.raises(ValueError) as error:
        sampler(0, 1, count=17)
    assert "17 images" in str(error.value) and "global_batch = 18" in str(error.value)
    assert "\n" not in str(error.value)
