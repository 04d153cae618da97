"""Profiled steps give the same results as any others; the profile is written and printed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from vitinit.messages import OneLineError
from vitinit.train.profile import StepProfiler, first_profiled


@pytest.mark.parametrize("count, done, per_epoch, total, first", [
    (3, 100, 97, 970, 110), (87, 0, 97, 970, 10),
    (88, 0, 97, 970, 97),                            # the tenth would end in the second epoch
    (97, 0, 97, 97, 0),                              # an epoch whole, if need be the first
    (5, 0, 7, 7, 2), (1, 13, 7, 14, 13), (1, 0, 1, 50, 10)])
def test_the_steps_lie_in_one_epoch_after_ten_others_if_they_can(count, done, per_epoch, total,
                                                                 first):
    assert first_profiled(count, done=done, per_epoch=per_epoch, total=total) == first
    assert done <= first and first // per_epoch == (first + count - 1) // per_epoch
    assert first + count <= total


@pytest.mark.parametrize("count, done, words", [
    (8, 0, "--profile 8: expected at most 7, the steps of an epoch"),
    (4, 11, "--profile 4: expected at most 3, the steps that the run has left"),
    (1, 14, "--profile 1: expected at most 0, the steps that the run has left")])
def test_more_steps_than_there_are_is_one_line(count, done, words):
    with pytest.raises(OneLineError) as caught:
        first_profiled(count, done=done, per_epoch=7, total=14)
    assert str(caught.value) == words


def of_steps(count: int, first: int, folder: Path) -> StepProfiler:
    return StepProfiler(count, done=first - 10, per_epoch=1000, total=1000, folder=folder,
                        device=torch.device("cpu"))


def test_the_steps_are_under_the_profiler_and_no_others(tmp_path, capsys):
    """Each step is a matrix product of its own shape."""
    def step(number: int) -> None:
        profiler.begin(number)
        torch.ones(number) @ torch.ones(number)
        profiler.end(number)
    with of_steps(3, 29, tmp_path) as profiler:
        for number in range(21, 57):
            step(number)
    trace = gzip.decompress((tmp_path / "profile_000029.json.gz").read_bytes())
    assert json.dumps(json.loads(trace)).count('"aten::dot"') == 3
    assert capsys.readouterr().out.startswith("profile 3 step(s) from step 29 on, ")
    with of_steps(3, 29, tmp_path / "stopped") as profiler:              # in the midst of them
        step(29)
    with of_steps(1, 17, tmp_path) as profiler:                          # so another can be started
        step(17)
    assert "profile 1 step(s) from step 17 on" in capsys.readouterr().out
    assert len(list(tmp_path.iterdir())) == 2


def test_a_trace_that_cannot_be_written_costs_no_training(tmp_path, capsys):
    profiler = of_steps(1, 11, tmp_path / "gone")
    profiler.begin(11)
    torch.ones(3) @ torch.ones(3)
    profiler.end(11)
    printed = capsys.readouterr().out
    assert printed.startswith(f"warning {tmp_path / 'gone'}/profile_000011.json.gz: cannot be written")
    assert "aten::dot" in printed
