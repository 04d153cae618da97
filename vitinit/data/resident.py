"""Small training sets live on the device: decoded once, gathered and cut there, batch by batch.

The same draws and the same bits as the way through worker processes (loader.py). It works where crop
and flip only move pixels: images of one size, which is the size that the model sees, shifted over a
padded border. There the workers, if there are any, make draws alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .datasets import ImagesInMemory, Source
from .draw import CropAndFlip
from .loader import Loader, TrainBatch

GIB = 2**30


class Resident(NamedTuple):
    """A set on the device."""

    images: Tensor          # (N, 3, H, W) uint8
    labels: Tensor          # (N,) int64

    def cut(self, indices: Tensor, windows: Tensor) -> Tensor:
        """Views of the images `indices`, (B,): (B, 3, H, W), black where a window leaves an image.

        windows: (B, 3), the top and left of what is cut out, in pixels of the image, and 1 for a
            view that is mirrored.
        """
        height, width = self.images.shape[2:]
        top, left, flip = (column[:, None] for column in windows.unbind(1))
        device = self.images.device
        rows = top + torch.arange(height, device=device)                 # (B, H)
        columns = torch.arange(width, device=device)
        columns = left + torch.where(flip == 1, columns.flip(0), columns)    # (B, W)
        inside = ((rows >= 0) & (rows < height))[:, :, None] \
            & ((columns >= 0) & (columns < width))[:, None, :]           # (B, H, W)
        picked = self.images.permute(0, 2, 3, 1)[
            indices[:, None, None], rows.clamp(0, height - 1)[:, :, None],
            columns.clamp(0, width - 1)[:, None, :]]                     # (B, H, W, 3)
        return (picked * inside[..., None]).permute(0, 3, 1, 2).contiguous()


def only_moves_pixels(crop: CropAndFlip, size: tuple[int, int]) -> bool:
    """Whether every view of an image of `size` is a part of it and its border, not resized."""
    return crop.scale == crop.ratio == (1.0, 1.0) and size[0] == size[1]


def resident_source(source: Source, device: torch.device, size: tuple[int, int], budget_gib: float,
                    advance: Callable[[], None] = lambda: None) -> Resident | None:
    """All images on `device`; None if there are too many, or if they are not all of `size`.

    advance: called after every image that is decoded. Raises DataError for one that is broken.
    """
    if len(source) * 3 * size[0] * size[1] > budget_gib * GIB:
        return None
    labels = torch.from_numpy(source.labels).to(device)
    if isinstance(source, ImagesInMemory):
        if tuple(source.images.shape[2:]) != size:
            return None
        return Resident(source.images.to(device).contiguous(), labels)
    images = torch.empty(len(source), 3, *size, dtype=torch.uint8)
    for index in range(len(source)):
        image = source.image(index)
        if tuple(image.shape[1:]) != size:
            return None
        images[index] = image
        advance()
    return Resident(images.to(device), labels)


class ResidentTrainLoader:
    """Micro-batches in the sampler's order, cut on the device; `sampler.start` before each pass."""

    def __init__(self, resident: Resident, windows: Loader) -> None:
        """windows: of `TrainViews` that do not decode."""
        self.resident, self.windows = resident, windows

    def __iter__(self) -> Iterator[TrainBatch]:
        device = self.resident.images.device
        for batch in self.windows:
            windows = batch.images.to(device, non_blocking=True)         # (B, 4)
            yield batch._replace(images=self.resident.cut(windows[:, 0], windows[:, 1:]))
