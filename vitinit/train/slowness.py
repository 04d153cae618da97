"""Why training is slow: what it waits for, or what bounds its steps, in a line."""

import math
from collections.abc import Sequence
from typing import NamedTuple

NOTEWORTHY = 0.1                # share of the time
# What a step may be bound by, and what helps then.
BOUNDS = {"launches": "engine.compile=true, or more images per step, helps",
          "matrix products": "engine.amp, or a smaller model, helps",
          "memory": "engine.compile=true, which joins what reads and writes it, helps"}


class Pace(NamedTuple):
    """The steps of one process."""

    step: float                 # seconds from one to the next
    alone: float                # seconds of a step by itself, once its images are loaded
    waiting: float              # share of the time: for its images and other processes
    loading: float              # share of the time: for its images


def waits_for(paces: Sequence[Pace], *, images: int, workers: int, cores: int, busy: int) -> str:
    """What the processes (one pace each) wait for and what would help; "" if for nothing for long.

    Per process: images of a step, workers, cores of its machine, and how many of these compute.
    """
    slow = max(range(len(paces)), key=lambda rank: paces[rank].loading)
    step, alone, _, loading = paces[slow]
    if (share := min(loading, 1 - alone / step)) > NOTEWORTHY:
        whose = f" of process {slow}" if loading > 2 * min(pace.loading for pace in paces) else ""
        each = images / step / (workers or loading)  # images/s; by the process itself, if 0
        needed = math.ceil(images / alone / each)
        advice = (f"data.workers={needed} would feed it" if needed + busy <= cores else
                  f"data.workers={needed} needs more than {cores} cores: smaller files help, or "
                  "data.on_device_gib")
        return (f"waiting {100 * share:.0f} % of the time for images{whose}: a step takes "
                f"{images / alone:,.0f}/s, a worker loads {each:,.0f}/s; {advice}")
    if (share := max(pace.waiting for pace in paces)) > NOTEWORTHY:
        slow = min(range(len(paces)), key=lambda rank: paces[rank].waiting)
        return f"waiting {100 * share:.0f} % of the time for process {slow}, whose steps are slower"
    return ""


def bound_of(*, launches: float, products: float) -> str:
    """Which of `BOUNDS` holds a step back: by the shares of its time that launches, which do not
    depend on the number of images, and matrix products at their best rate take.
    """
    return "launches" if launches > 0.5 else "matrix products" if products > 0.5 else "memory"
