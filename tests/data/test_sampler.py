"""Which process gets which image, and which images are mixed with which. The global batch and its
mixing must not depend on the number of processes or on micro-batches."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from refused import refused

from vitinit.data.draw import balanced_order, epoch_order
from vitinit.data.sampler import BatchPlan, TrainSampler, plan_batches

SEED = 13


def micro_batches(plan: BatchPlan) -> list[list[list[int]]]:
    """The positions in the global batch, by process and micro-step."""
    return [
        [plan.positions(rank, micro_step).tolist() for micro_step in range(plan.accumulation)]
        for rank in range(plan.world_size)
    ]


def views_in_order(order: np.ndarray, repeats: int) -> np.ndarray:
    """(N · repeats, 2): every image `repeats` times in a row, with the number of the view."""
    return np.column_stack([np.repeat(order, repeats), np.tile(np.arange(repeats), len(order))])


def plans(count: int = 60) -> Iterator[tuple[BatchPlan, int]]:
    """Plans of random sizes, and the most images that each allowed per micro-batch."""
    rng = np.random.default_rng(7)
    for _ in range(count):
        world_size = int(rng.choice([1, 2, 3, 5, 6]))
        group = int(rng.choice([1, 2, 4, 6, 10, 12, 60]))
        batch = math.lcm(group, min(group, 2) * world_size) * int(rng.integers(1, 5))
        max_batch = int(rng.integers(min(group, 2), batch + 3))
        yield (
            plan_batches(batch, max_batch, world_size, group=group, strided=bool(rng.integers(2))),
            max_batch,
        )


def test_micro_batches_are_the_largest_that_divide_and_partners_mirrored_images_of_a_group():
    """The definition: group g is every G-th image from g on, and is mixed with itself reversed."""
    for plan, max_batch in plans():
        unit, share = min(plan.group, 2), plan.global_batch // plan.world_size
        assert plan.micro_batch_size == max(
            size for size in range(1, max_batch + 1) if share % size == size % unit == 0
        )
        assert share == plan.accumulation * plan.micro_batch_size
        positions = micro_batches(plan)
        assert sorted(sum(sum(positions, []), [])) == list(range(plan.global_batch))
        assert {len(one) for process in positions for one in process} == {plan.micro_batch_size}
        images = list(range(plan.global_batch))
        groups = [images[first :: plan.groups] for first in range(plan.groups)]
        partner = {image: other for one in groups for image, other in zip(one, reversed(one))}
        for part in sum(positions, []):
            assert plan.group == 1 or [partner[image] for image in part] == part[::-1]


def test_cautions_are_of_views_of_an_image_in_one_group_and_of_micro_batches_half_as_large():
    for plan, max_batch in plans():
        share = plan.global_batch // plan.world_size
        for repeats in (1, 2, 3, 7):
            images = [view // repeats for view in range(plan.global_batch)]
            groups = [images[first :: plan.groups] for first in range(plan.groups)]
            expected = ["some of the mix.group"] * any(len({*one}) < len(one) for one in groups)
            expected += ["micro-batches have"] * any(
                size > 2 * plan.micro_batch_size and size <= share
                for size in range(1, max_batch + 1)
            )
            lines = plan.cautions(repeats=repeats, max_batch_per_process=max_batch)
            assert [
                " ".join(line.split()[: len(words.split())])
                for line, words in zip(lines, expected, strict=True)
            ] == expected


def test_pairs_of_a_micro_batch_are_neighbours_or_as_far_apart_as_can_be():
    """Neighbours, as three views of an image are: 44 images are decoded for 128 views, not 128."""
    for plan, _ in plans():
        count = plan.global_batch // plan.micro_batch_size
        pairs = np.arange(plan.global_batch // min(plan.group, 2))
        in_turn = np.concatenate(
            [  # of the micro-batches 0, 1, 2, …
                plan.positions(number % plan.world_size, number // plan.world_size)[
                    : len(pairs) // count
                ]
                for number in range(count)
            ]
        )
        assert (
            in_turn.tolist()
            == (pairs.reshape(-1, count).T.ravel() if plan.strided else pairs).tolist()
        )
    for strided, images in ((False, 44), (True, 128)):
        plan = plan_batches(1024, 128, 8, group=64, strided=strided)
        assert len(set((plan.positions(0, 0) // 3).tolist())) == images


@pytest.mark.parametrize(
    "global_batch, world_size, group, words",
    [
        (100, 3, 1, "does not divide into 3 processes; expected a multiple of 3"),
        (96, 5, 32, "into mixed pairs for each of 5 processes; expected a multiple of 160"),
        (100, 1, 64, "into groups of mix.group = 64 images; expected a multiple of 64"),
        (126, 1, 63, "mix.group = 63 is odd, but images are mixed in pairs"),
    ],
)
def test_a_global_batch_that_does_not_divide_is_refused(global_batch, world_size, group, words):
    assert refused(ValueError, plan_batches, global_batch, 17, world_size, group=group).endswith(
        words
    )
    assert plan_batches(12, 1, 2, group=1).micro_batch_size == 1  # no pair, and none needed


def test_by_any_plan_an_epoch_is_the_views_of_its_order_in_global_batches():
    """From any step on. The rest is dropped, but a set whose repeats fill a batch gives one."""
    rng = np.random.default_rng(3)
    for plan, _ in plans():
        size, repeats, epoch = plan.global_batch, int(rng.integers(1, 5)), int(rng.integers(9))
        count = int(rng.integers(math.ceil(size / repeats), 4 * size))
        steps = max(1, count // size)
        done = int(rng.integers(steps + 1))
        found = np.full((steps, size, 3), -1)
        for rank in range(plan.world_size):
            one = TrainSampler(count, plan, rank=rank, seed=SEED, repeats=repeats)
            one.start(epoch=epoch, step=done)
            assert len(one) == len(list(one)) == (steps - done) * plan.accumulation
            for number, samples in enumerate(one, done * plan.accumulation):
                step, micro_step = divmod(number, plan.accumulation)
                positions = plan.positions(rank, micro_step)
                assert (found[step, positions] == -1).all()
                found[step, positions] = samples.keys
                assert samples.step == epoch * steps + step
                assert samples.groups.tolist() == [place % plan.groups for place in positions]
        views = views_in_order(epoch_order(SEED, epoch, count), repeats)
        assert (found[:done] == -1).all() and (found[done:, :, 0] == epoch).all()
        assert np.array_equal(found[done:, :, 1:].reshape(-1, 2), views[done * size : steps * size])


def repeated_by_deit(order: np.ndarray, repeats: int, rank: int, world_size: int) -> np.ndarray:
    """The images of one process in an epoch of this order, by the RASampler of DeiT's samplers.py."""
    views = np.repeat(order, repeats)
    of_each = math.ceil(len(views) / world_size)
    padded = np.concatenate([views, views[: of_each * world_size - len(views)]])
    return padded[rank::world_size][: len(order) // 256 * 256 // world_size]


@pytest.mark.parametrize("world_size, images", [(2, 128), (4, 64), (16, 32)])
def test_mixing_groups_are_the_batches_of_deits_processes_with_repeats(
    world_size, images, held_against
):
    """From the same order, and for global batches that 256 divides, to which its sampler rounds."""
    count, repeats, epoch = 2027, 3, 5
    plan = plan_batches(world_size * images, 32, 2, group=images)
    found = np.full((count // plan.global_batch, plan.global_batch), -1)
    for rank in range(2):
        sampler = TrainSampler(count, plan, rank=rank, seed=SEED, repeats=repeats)
        sampler.start(epoch=epoch, step=0)
        for number, samples in enumerate(sampler):
            step, micro_step = divmod(number, plan.accumulation)
            indices = [key.image for key in samples.keys]
            found[step, plan.positions(rank, micro_step)] = indices
    for process in range(world_size):
        order = epoch_order(SEED, epoch, count)
        theirs = repeated_by_deit(order, repeats, process, world_size)
        whole = len(theirs) // images * images  # drop_last
        ours, theirs = found[:, process::world_size], theirs[:whole].reshape(-1, images)
        assert np.array_equal(ours, theirs)
        held_against(ours, theirs, cases=len(theirs))


@pytest.mark.parametrize("count, global_batch, repeats", [(17, 18, 1), (5, 18, 3), (0, 1, 3)])
def test_a_set_whose_repeats_do_not_fill_a_batch_is_refused(count, global_batch, repeats):
    line = refused(
        ValueError,
        TrainSampler,
        count,
        plan_batches(global_batch, 3, 1, group=1),
        rank=0,
        seed=SEED,
        repeats=repeats,
    )
    views = f" in {repeats} views each" * (repeats > 1)
    assert f"{count} images{views}, fewer" in line and f"global_batch = {global_batch}" in line


def test_balanced_epochs_have_as_many_places_for_each_class_whatever_the_plan():
    """And of each image of a class, to one place; no two places of an image have the same draws."""
    labels = np.repeat([0, 2, 3], [31, 5, 11])  # a class without images has no place
    count, repeats = len(labels), 2
    order, copies = balanced_order(SEED, 4, labels)
    places = np.bincount(labels[order])
    assert sorted(places.tolist()) == [0, 15, 16, 16] and len(order) == count
    for label in (0, 2, 3):
        of_each = np.bincount(order, minlength=count)[labels == label]
        assert of_each.max() - of_each.min() <= 1
    assert len({*zip(order.tolist(), copies.tolist())}) == count and copies.max() > 1
    assert not np.array_equal(order, balanced_order(SEED, 5, labels)[0])
    of_plans = set()
    for plan in (plan_batches(12, 12, 1, group=2), plan_batches(12, 2, 3, group=2)):
        found = {}
        for rank in range(plan.world_size):
            one = TrainSampler(count, plan, rank=rank, seed=SEED, repeats=repeats, labels=labels)
            one.start(epoch=4, step=1)
            for number, samples in enumerate(one, plan.accumulation):
                step, micro_step = divmod(number, plan.accumulation)
                for place, key in zip(plan.positions(rank, micro_step).tolist(), samples.keys):
                    found[step, place] = tuple(key)
        views = np.repeat(np.column_stack([order, copies * repeats]), repeats, axis=0)
        views[1::2, 1] += 1
        expected = [(4, *view) for view in views[12 : 3 * 12].tolist()]
        assert [found[divmod(number, 12)] for number in range(12, 36)] == expected
        assert len({*found.values()}) == len(found)
        of_plans.add(tuple(sorted(found.items())))
    assert len(of_plans) == 1
