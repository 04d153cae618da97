"""Why training is slow: what it waits for, or what bounds its steps, in a line."""

import math
import os
from collections.abc import Sequence

import torch

from ..recipe.sections import Recipe
from ..train.device import cores
from ..train.distributed import Processes
from ..train.metrics import Pace

NOTEWORTHY = 0.1  # share of the time
# What a step may be bound by, and what helps then.
BOUNDS = {
    "launches": "engine.compile=true, or more images per step, helps",
    "matrix products": "engine.amp, or a smaller model, helps",
    "memory": "engine.compile=true, which joins what reads and writes it, helps",
}


def waits_for(paces: Sequence[Pace], device: torch.device, *, images: int, workers: int) -> str:
    """What the processes (one pace each) wait for and what would help; "" if for nothing for long.
    device: of this one. images, workers: of a step, per process.
    """
    slow = max(range(len(paces)), key=lambda rank: paces[rank].loading)
    step, alone, _, loading = paces[slow]
    share = min(loading, 1 - alone / step)
    if share > NOTEWORTHY:
        whose = f" of process {slow}" if loading > 2 * min(pace.loading for pace in paces) else ""
        each = images / step / (workers or loading)  # images/s; by the process itself, if 0
        needed = math.ceil(images / alone / each)
        free = cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of this machine
        busy = torch.get_num_threads() if device.type == "cpu" else 0
        advice = f"data.workers={needed} would feed it"
        if needed + busy > free:
            advice = (
                f"data.workers={needed} needs more than {free} cores: smaller files help, or "
                "data.on_device_gib"
            )
        return (
            f"waiting {100 * share:.0f} % of the time for images{whose}: a step takes "
            f"{images / alone:,.0f}/s, a worker loads {each:,.0f}/s; {advice}"
        )
    for_others = [pace.waiting - pace.loading for pace in paces]
    share = max(for_others)
    if share > NOTEWORTHY and len(paces) > 1:
        slow = for_others.index(min(for_others))
        return f"waiting {100 * share:.0f} % of the time for process {slow}, whose steps are slower"
    return ""


def bound_of(*, launches: float, products: float) -> str:
    """Which of `BOUNDS` holds a step back. launches: the share of its time that launching kernels
    takes, whatever the number of images; products: that of matrix products at their best rate.
    """
    if launches > 0.5:
        return "launches"
    return "matrix products" if products > 0.5 else "memory"


class WaitingWatcher:
    """Prints once what a run waits for, if it waits for long."""

    def paced(self, paces: Sequence[Pace], recipe: Recipe, processes: Processes) -> list[str]:
        line = waits_for(
            paces,
            processes.device,
            workers=recipe.data.workers,
            images=recipe.optim.global_batch // processes.world_size,
        )
        return [line] if line else []
