"""Arguments reach the device unchanged in one copy; rows are divided into passes without loss."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vitinit.bench.launches import launches_of
from vitinit.data.passes import FEW_LAUNCHES, IN_CACHE, Call, Pass, Passes, parts, passes_on, put

CPU = torch.device("cpu")


class Tree(NamedTuple):
    one: np.ndarray
    rest: tuple


def arrays() -> list[np.ndarray]:
    """Arrays of every type that is used, in sizes that need aligning; some empty, one not contiguous."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (3, 5), np.uint8), rng.normal(size=(2, 7, 3)),
            rng.integers(-2**63, 2**63 - 1, 11), np.array([True, False, True]),
            rng.normal(size=13).astype(np.float32), np.zeros((0, 4), np.int64),
            rng.integers(0, 9, (5, 3), np.int32).T, np.array(-7)]


def test_every_array_of_a_tree_arrives_and_all_else_stays():
    one, *others = arrays()
    tree = Tree(one, (3, None, "name", sum, tuple(others), ()))
    there = put(tree, CPU)
    assert type(there) is Tree and there.rest[:4] == (3, None, "name", sum) and there.rest[5] == ()
    for tensor, array in zip((there.one, *there.rest[4]), (one, *others), strict=True):
        assert tensor.shape == array.shape and tensor.dtype == torch.from_numpy(array.copy()).dtype
        assert np.array_equal(tensor.numpy(), array)
    assert put((), CPU) == () and put(5, CPU) == 5


@pytest.mark.parametrize("driver", [False, True])
def test_a_tree_is_one_copy_whatever_it_holds(driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: driver)      # then it is pinned
    with FakeTensorMode():
        launches = launches_of(lambda: put(Tree(arrays()[0], tuple(arrays())),
                                           torch.device("cuda", 0)))
    assert (launches.uploads, launches.downloads) == (1, 0)


@pytest.mark.parametrize("pixels, step", [(0, 1), (34, 1), (35, 1), (70, 2), (104, 2), (2**40, 13)])
def test_parts_hold_as_many_images_as_a_pass_may_take_and_at_least_one(pixels, step):
    rows = np.arange(13) * 3
    found = list(parts(rows, (5, 7), Passes(pixels, pixels, False)))
    assert np.array_equal(np.concatenate(found), rows)
    assert {len(part) for part in found[:-1]} <= {step} and len(found[0]) == step


def test_a_pass_changes_its_rows_in_place_and_no_others():
    images = torch.arange(5 * 3 * 2 * 2).view(5, 3, 2, 2)
    doubled = put(Pass(np.array([3, 1]), lambda part, factors: part * factors,
                       (np.array([2, 5])[:, None, None, None],)), CPU)
    before = images.clone()
    doubled(images)
    assert torch.equal(images[[0, 2, 4]], before[[0, 2, 4]])
    assert torch.equal(images[3], 2 * before[3]) and torch.equal(images[1], 5 * before[1])


def test_a_call_has_its_own_arguments_last():
    assert Call(lambda *all: all, (3, 5))("images", 2) == ("images", 2, 3, 5)


def test_only_a_cpu_goes_through_the_cache():
    assert passes_on(CPU) is IN_CACHE
    assert passes_on(torch.device("cuda", 1)) is passes_on(torch.device("mps")) is FEW_LAUNCHES
