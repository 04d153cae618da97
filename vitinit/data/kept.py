"""Evaluation views never change: a first whole pass decodes them, every later one finds them kept.

    first pass      files → workers: decode, resize, cut → (B, 3, H, W) uint8 → kept, and given out
    later passes    what is kept, batch by batch; there are no workers any more

All views of this process' share are kept or none: on the device if they fit there, else in the memory
of the process, else nowhere, and every pass decodes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from .loader import Batch, EvalViews
from .resident import GIB

MIB = 2**20


class KeptViews:
    """The views of this process' share, and room for all of them.

    place: where the room is; None: there is none.
    """

    def __init__(self, views: EvalViews, place: torch.device | None) -> None:
        self.views, self.place = views, place
        self.filled = False                          # by a pass that came to its end
        if place is not None:
            self.images = torch.empty(len(views), 3, *views.size, dtype=torch.uint8, device=place)
            self.labels = torch.tensor(views.labels, device=place)         # (n,)

    def in_batches(self, size: int, decoded: Iterable[Batch]) -> Iterator[Batch]:
        """All views in order, `size` at a time; the last batch may be smaller.

        decoded: just these batches, as workers make them; asked for until a pass has come to its
            end. A pass that is broken off leaves nothing behind that a later one would give out.
        """
        if self.place is None:
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
        """For the line that a run says of them."""
        size = f"{self.views.nbytes / MIB:,.0f} MiB per process"
        if self.place is None:
            return f"decoded for every validation: {size} would be more than eval.cache_gib"
        where = "in memory" if self.place.type == "cpu" else "on the device"
        return f"decoded by the first validation, then kept {where}: {size}"


def kept_views(views: EvalViews, device: torch.device, *, on_device_gib: float,
               cache_gib: float) -> KeptViews:
    """With room on `device` or in memory, up to so many GiB of the one or the other."""
    budgets = [(device, on_device_gib), (torch.device("cpu"), cache_gib)]
    fits = [place for place, gib in budgets if views.nbytes <= gib * GIB]
    return KeptViews(views, fits[0] if fits else None)
