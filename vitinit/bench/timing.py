"""Honest times: in turn with an alternative, on a clock that other programs do not move."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from ..train.device import keep_freed_memory

ROUNDS = 7
Clock = Callable[[], float]


def clock_of(device: torch.device) -> Clock:
    """A clock in seconds for the work of this process on a device.

    On a GPU it is the wall clock, read when the GPU has done all its work. On a CPU it is the
    processor time of one thread, which other programs hardly change, with freed memory kept as in
    train.py.
    """
    torch.set_num_threads(1)
    if device.type == "cpu":
        keep_freed_memory()
        return time.process_time

    def read() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return read


def interleave(actions: Mapping[str, Callable[[], object]], clock: Clock, rounds: int = ROUNDS
               ) -> dict[str, list[float]]:
    """The seconds of each action in each round, by name.

    The actions run in turn, in every second round in the opposite order, so that what disturbs the
    machine affects all of them alike. A first round, for caches and compilers, does not count.
    """
    found: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name in list(actions) if number % 2 else reversed(actions):
            began = clock()
            actions[name]()
            if number:
                found[name].append(clock() - began)
    return found


def times_as_fast(ours: Sequence[float], others: Sequence[float]) -> str:
    """How many times as fast as the other ours is: the median of all rounds, and their range."""
    ratios = [other / own for own, other in zip(ours, others, strict=True)]
    return f"{statistics.median(ratios):.3g} ({min(ratios):.3g} to {max(ratios):.3g})"
