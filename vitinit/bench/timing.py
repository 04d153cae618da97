"""How seconds are taken."""

from __future__ import annotations

import time
from collections.abc import Callable


def best_seconds(action: Callable[[], object], repeats: int = 3) -> float:
    """The fastest of some repeats: what the machine can do when nothing disturbs it."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return min(times)
