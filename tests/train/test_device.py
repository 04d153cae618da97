"""What systems say in their own ways: memory, and the cores of a process."""

from __future__ import annotations

import os
import resource
import sys
from types import SimpleNamespace

import pytest
import torch

from vitinit.train.device import cores, peak_gib


@pytest.mark.parametrize("system, unit", [("linux", 2**10), ("darwin", 1)])
def test_peak_memory_is_in_gib_in_the_unit_of_the_system(monkeypatch, system, unit):
    """getrusage(2): ru_maxrss is in kilobytes on Linux, and in bytes on macOS."""
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(
        ru_maxrss=3 * 2**30 // unit))
    assert peak_gib(torch.device("cpu")) == 3.0


def test_cores_are_those_of_the_process_or_all(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 17)
    assert cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")                         # as on macOS
    assert cores() == 17
