"""Paths are read back unchanged, and take no more memory than their own bytes."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from vitinit.data.images import DataError
from vitinit.data.paths import Paths

PATHS = ["/data/a/1.jpg", "", "b c/é.png", os.fsdecode(b"caf\xe9.jpg"), "/" + 5 * "long/" + "x.gif",
         "7", "日本.jpeg"]


def test_paths_come_back_as_they_were():
    paths = Paths(PATHS)
    assert len(paths) == 7 and list(paths) == PATHS
    assert [paths[index] for index in range(7)] == PATHS


@pytest.mark.parametrize("none", [Paths([]), Paths(PATHS).part([])])
def test_no_paths_are_paths_too(none):
    assert len(none) == 0 and list(none) == []


def test_a_part_has_the_paths_that_were_asked_for_in_that_order():
    part = Paths(PATHS).part(np.array([6, 0, 3, 0]))
    assert list(part) == [PATHS[index] for index in (6, 0, 3, 0)]


def test_a_long_path_takes_no_more_room_than_its_own_bytes():
    short, long = ["a/1.jpg"] * 101, "b/" + 211 * "x"
    paths = Paths([*short, long])
    assert paths.content.dtype == torch.uint8 and paths.ends.dtype == torch.int64
    assert len(paths.content) == 101 * 8 + 213 + 1 and paths.ends.shape == (102,)
    assert paths[101] == long and paths[100] == "a/1.jpg"


def test_a_zero_byte_which_no_path_holds_is_refused():
    with pytest.raises(DataError) as caught:
        Paths(["a/1.jpg", "b/\0.jpg", "c"])
    assert str(caught.value) == r"b/\x00.jpg: a path holds no zero byte"
