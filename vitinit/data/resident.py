"""Small training sets on the device: decoded once, then cropped and flipped there, batch by batch.

This needs no decoding during training, and gives the same batches, bit for bit, as the loader with
worker processes (loader.py), from the same draws. It is possible if crop and flip only move pixels:
all images have the size that the model takes, and are shifted over a padded border. Worker
processes, if there are any, then only make random draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .datasets import ImagesInMemory, Source
from .draw import CropAndFlip

GIB = 2**30


class Resident(NamedTuple):
    """A training set that is stored on the device."""

    images: Tensor          # (N, 3, H, W) uint8
    labels: Tensor          # (N,) int64

    def cut(self, indices: Tensor, windows: Tensor) -> Tensor:
        """Crop and flip the images at `indices`, (B,): views (B, 3, H, W), black outside the images.

        windows: (B, 3), for each view the top and left of its crop in the image, in pixels, and 1
            if it is mirrored, else 0.
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
    """Whether no view of an image of `size` = (height, width) is resized, only shifted and flipped."""
    return crop.scale == crop.ratio == (1.0, 1.0) and size[0] == size[1]


def resident_source(source: Source, device: torch.device, size: tuple[int, int], budget_gib: float,
                    advance: Callable[[], None] = lambda: None) -> Resident | None:
    """Store all images of `source` on `device`.

    Returns None if they take more than `budget_gib` GiB or do not all have the same `size`.
    advance: called after each image that is decoded. Raises DataError for an image that cannot be
    decoded.
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
