"""The device on which measurements run, and how their time is taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch


def device_to_time() -> tuple[torch.device, Callable[[], None]]:
    """A GPU if there is one, else the CPU; and a function that waits for all work of the device."""
    if torch.cuda.is_available():
        return torch.device("cuda"), torch.cuda.synchronize
    return torch.device("cpu"), lambda: None


def best_seconds(action: Callable[[], object], repeats: int = 3) -> float:
    """The time of the fastest of `repeats` calls: what the machine needs if nothing disturbs it."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return min(times)


def best_seconds_each(actions: Mapping[str, Callable[[], object]], repeats: int = 3
                      ) -> dict[str, float]:
    """The time of the fastest of `repeats` calls of each action, by name.

    The actions run in turn, so that noise of the machine affects all alike and differences between
    them are meaningful.
    """
    rounds = [{name: best_seconds(action, 1) for name, action in actions.items()}
              for _ in range(repeats)]
    return {name: min(found[name] for found in rounds) for name in actions}
