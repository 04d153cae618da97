"""What is timed on, and how seconds are taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch


def device_to_time() -> tuple[torch.device, Callable[[], None]]:
    """A GPU if there is one; and what waits until all that was given to it is done."""
    if torch.cuda.is_available():
        return torch.device("cuda"), torch.cuda.synchronize
    return torch.device("cpu"), lambda: None


def best_seconds(action: Callable[[], object], repeats: int = 3) -> float:
    """The fastest of some repeats: what the machine can do when nothing disturbs it."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return min(times)


def best_seconds_each(actions: Mapping[str, Callable[[], object]], repeats: int = 3
                      ) -> dict[str, float]:
    """Of several actions, in turn, so that noise meets all alike and their differences mean something.
    """
    rounds = [{name: best_seconds(action, 1) for name, action in actions.items()}
              for _ in range(repeats)]
    return {name: min(found[name] for found in rounds) for name in actions}
