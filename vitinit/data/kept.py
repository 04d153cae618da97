"""A cache of evaluation views. Views never change, so the first complete pass decodes and stores them.

    first pass      files → workers: decode, resize, crop → (B, 3, H, W) uint8 → stored and yielded
    later passes    the stored views, batch by batch, without workers

Either all views of this process's share are stored or none: on the device if they fit there, else
in the memory of the process. If they fit nowhere, every pass decodes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from .loader import Batch, EvalViews
from .resident import GIB

MIB = 2**20


class KeptViews:
    """The evaluation views of this process's share, and memory to store all of them.

    device: where they are stored; None: they are not stored.
    """

    def __init__(self, views: EvalViews, device: torch.device | None) -> None:
        self.views, self.device = views, device
        self.filled = False                          # set by the first pass that is complete
        if device is not None:
            self.images = torch.empty(len(views), 3, *views.size, dtype=torch.uint8, device=device)
            self.labels = torch.tensor(views.labels, device=device)         # (n,)

    def in_batches(self, size: int, decoded: Iterable[Batch]) -> Iterator[Batch]:
        """Yield all views in order, `size` at a time; the last batch may be smaller.

        decoded: the same batches, decoded by workers. It is used until a pass has been completed;
            what an interrupted pass has stored is not used.
        """
        if self.device is None:
            yield from decoded
            return
        parts = [slice(start, start + size) for start in range(0, len(self.views), size)]
        if not self.filled:
            for part, batch in zip(parts, decoded, strict=True):
                self.images[part].copy_(batch.images, non_blocking=True)
                yield Batch(self.images[part], self.labels[part])
            self.filled = True
            return
        for part in parts:
            yield Batch(self.images[part], self.labels[part])

    def in_words(self) -> str:
        """Where the views are stored and how large they are, in words for the start of a run."""
        size = f"{self.views.nbytes / MIB:,.0f} MiB per process"
        if self.device is None:
            return f"decoded for every validation: {size} would be more than eval.cache_gib"
        where = "in memory" if self.device.type == "cpu" else "on the device"
        return f"decoded by the first validation, then kept {where}: {size}"


def kept_views(views: EvalViews, device: torch.device, *, on_device_gib: float,
               cache_gib: float) -> KeptViews:
    """The views, with memory for all of them on `device` or else in the process, if they fit.

    on_device_gib, cache_gib: the most GiB that they may take there.
    """
    budgets = [(device, on_device_gib), (torch.device("cpu"), cache_gib)]
    fits = [candidate for candidate, gib in budgets if views.nbytes <= gib * GIB]
    return KeptViews(views, fits[0] if fits else None)
