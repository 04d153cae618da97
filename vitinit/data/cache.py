"""Images that are decoded once: small training sets on the device, and evaluation views.

**Training.** A set whose crops only move pixels (all images have the size that the model takes, and
are shifted over a padded border) may be stored on the device, where it is cropped and flipped batch
by batch. This gives the same batches, bit for bit, as the loader with worker processes
(loader.py), from the same draws; workers, if there are any, then only make draws.

**Evaluation.** Views never change, so the first complete pass decodes and stores them: on the
device if they fit there, else in the memory of the process. If they fit nowhere, every pass decodes
them.

    first pass      files → workers: decode, resize, crop → (B, 3, H, W) uint8 → stored and yielded
    later passes    the stored views, batch by batch, without workers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from .datasets import ImagesInMemory, Source
from .draw import Augment
from .loader import Batch, EvalViews

MIB, GIB = 2**20, 2**30


def only_moves_pixels(augment: Augment, size: tuple[int, int]) -> bool:
    """Whether no view of an image of `size` = (height, width) is resized, only shifted and flipped."""
    return augment.crop_scale == augment.crop_ratio == (1.0, 1.0) and size[0] == size[1]


def decode_to_device(source: Source, device: torch.device, size: tuple[int, int], budget_gib: float,
                     advance: Callable[[], None] = lambda: None) -> Tensor | None:
    """Store all images of `source` on `device`, (N, 3, H, W) uint8.

    Returns None if they take more than `budget_gib` GiB or do not all have the same `size`.
    advance: called after each image that is decoded. Raises DataError for an image that cannot be
    decoded.
    """
    if len(source) * 3 * size[0] * size[1] > budget_gib * GIB:
        return None
    if isinstance(source, ImagesInMemory):
        return (source.images.to(device).contiguous() if tuple(source.images.shape[2:]) == size
                else None)
    images = torch.empty(len(source), 3, *size, dtype=torch.uint8)
    for index in range(len(source)):
        image = source.image(index)
        if tuple(image.shape[1:]) != size:
            return None
        images[index] = image
        advance()
    return images.to(device)


def cut(images: Tensor, windows: Tensor) -> Tensor:
    """Crop and flip some of `images`, (N, 3, H, W): views (B, 3, H, W), black outside the images.

    windows: (B, 4), for each view the index of its image, the top and left of its crop, in pixels,
        and 1 if it is mirrored, else 0.
    """
    height, width = images.shape[2:]
    index, top, left, flip = (column[:, None] for column in windows.unbind(1))
    rows = top + torch.arange(height, device=images.device)              # (B, H)
    columns = torch.arange(width, device=images.device)
    columns = left + torch.where(flip == 1, columns.flip(0), columns)    # (B, W)
    inside = ((rows >= 0) & (rows < height))[:, :, None] \
        & ((columns >= 0) & (columns < width))[:, None, :]               # (B, H, W)
    picked = images.permute(0, 2, 3, 1)[index[..., None], rows.clamp(0, height - 1)[:, :, None],
                                        columns.clamp(0, width - 1)[:, None, :]]     # (B, H, W, 3)
    return (picked * inside[..., None]).permute(0, 3, 1, 2).contiguous()


class KeptViews:
    """The evaluation views of this process's share, and memory to store all of them.

    device: the device to which they go. They are stored there if they take at most `on_device_gib`
        GiB, else in the process if they take at most `cache_gib` GiB, in pinned memory where the
        device is a GPU, so that the host need not wait for copies.
    """

    def __init__(self, views: EvalViews, device: torch.device, *, on_device_gib: float,
                 cache_gib: float) -> None:
        self.views = views
        places = [(device, on_device_gib), (torch.device("cpu"), cache_gib)]
        # Where they are stored; None: nowhere.
        self.device = next((place for place, gib in places if views.nbytes <= gib * GIB), None)
        self.filled = False                          # set by the first pass that is complete
        if self.device is not None:
            pinned = device.type == "cuda" and self.device.type == "cpu"
            self.images = torch.empty(len(views), 3, *views.size, dtype=torch.uint8,
                                      device=self.device, pin_memory=pinned)
            labels = torch.from_numpy(views.labels)                      # (n,)
            self.labels = labels.pin_memory() if pinned else labels.to(self.device)

    def in_batches(self, size: int, decoded: Iterable[Batch]) -> Iterator[Batch]:
        """Yield all views in order, `size` at a time; the last batch may be smaller.

        decoded: the same batches, decoded by workers. It is used until a pass has been completed;
            what an interrupted pass has stored is not used.
        """
        if self.device is None:
            yield from decoded
            return
        parts = [slice(start, start + size) for start in range(0, len(self.views), size)]
        if self.filled:
            for part in parts:
                yield Batch(self.images[part], self.labels[part])
            return
        for part, batch in zip(parts, decoded, strict=True):
            self.images[part].copy_(batch.images, non_blocking=True)
            yield Batch(self.images[part], self.labels[part])
        self.filled = True

    def in_words(self) -> str:
        """Where the views are stored and how large they are, in words for the start of a run."""
        size = f"{self.views.nbytes / MIB:,.0f} MiB per process"
        if self.device is None:
            return f"decoded for every validation: {size} would be more than eval.cache_gib"
        where = "in memory" if self.device.type == "cpu" else "on the device"
        return f"decoded by the first validation, then kept {where}: {size}"
