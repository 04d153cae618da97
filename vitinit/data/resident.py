"""Small sets live on the training device: decoded once, gathered and cut there, batch by batch.

The same draws and the same bits as the way through worker processes (loader.py). It works where crop
and flip only move pixels: pictures of one size, which is the size that the model sees, shifted over a
padded border. There the workers, if there are any, make draws alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .datasets import PicturesInMemory, Source
from .draw import CropAndFlip, Draws, SampleDraws, SampleKey, stack_draws
from .loader import (Batch, EvalViews, TrainBatch, TrainViews, batch_loader, eval_loader,
                     train_loader)
from .sampler import TrainSampler

GIB = 2**30


class Resident(NamedTuple):
    """A set on the device."""

    pictures: Tensor        # (N, 3, H, W) uint8
    labels: Tensor          # (N,) int64

    def cut(self, indices: Tensor, windows: Tensor) -> Tensor:
        """Views of the pictures `indices`, (B,): (B, 3, H, W), black where a window leaves a picture.

        windows: (B, 3), the top and left of what is cut out, in pixels of the picture, and 1 for a
            view that is mirrored.
        """
        height, width = self.pictures.shape[2:]
        top, left, flip = (column[:, None] for column in windows.unbind(1))
        device = self.pictures.device
        rows = top + torch.arange(height, device=device)                 # (B, H)
        columns = torch.arange(width, device=device)
        columns = left + torch.where(flip == 1, columns.flip(0), columns)    # (B, W)
        inside = ((rows >= 0) & (rows < height))[:, :, None] \
            & ((columns >= 0) & (columns < width))[:, None, :]           # (B, H, W)
        picked = self.pictures.permute(0, 2, 3, 1)[
            indices[:, None, None], rows.clamp(0, height - 1)[:, :, None],
            columns.clamp(0, width - 1)[:, None, :]]                     # (B, H, W, 3)
        return (picked * inside[..., None]).permute(0, 3, 1, 2).contiguous()


def only_moves_pixels(crop: CropAndFlip, size: tuple[int, int]) -> bool:
    """Whether every view of a picture of `size` is a part of it and its border, not resized."""
    return crop.scale == crop.ratio == (1.0, 1.0) and size[0] == size[1]


def resident_source(source: Source, device: torch.device, size: tuple[int, int], budget_gib: float,
                    advance: Callable[[], None] = lambda: None) -> Resident | None:
    """All pictures on `device`; None if there are too many, or if they are not all of `size`.

    advance: called after every picture that is decoded. Raises DataError for one that is broken.
    """
    if len(source) * 3 * size[0] * size[1] > budget_gib * GIB:
        return None
    labels = torch.from_numpy(source.labels).to(device)
    if isinstance(source, PicturesInMemory):
        if tuple(source.pictures.shape[2:]) != size:
            return None
        return Resident(source.pictures.to(device).contiguous(), labels)
    pictures = torch.empty(len(source), 3, *size, dtype=torch.uint8)
    for index in range(len(source)):
        picture = source.picture(index)
        if tuple(picture.shape[1:]) != size:
            return None
        pictures[index] = picture
        advance()
    return Resident(pictures.to(device), labels)


# ---------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------


class DrawnViews(Dataset):
    """What workers make by sample key: which picture, which window of it, and the other draws."""

    def __init__(self, draws: SampleDraws) -> None:
        self.draws = draws

    def __getitem__(self, key: SampleKey) -> tuple[int, tuple[int, int, int], Draws]:
        view = self.draws.view(key, *self.draws.size)
        window = (view.box.top, view.box.left, int(view.flip))
        return key.index, window, self.draws.for_device(key)


class ResidentTrainLoader:
    """Micro-batches in the sampler's order, cut on the device; `sampler.start` before each pass."""

    def __init__(self, resident: Resident, views: DrawnViews, sampler: TrainSampler, *,
                 workers: int) -> None:
        self.resident = resident
        self.draws: DataLoader = batch_loader(views, _stack, workers, pin_memory=False,
                                              batch_sampler=sampler,
                                              persistent_workers=workers > 0)

    def __len__(self) -> int:
        return len(self.draws)

    def __iter__(self) -> Iterator[TrainBatch]:
        device = self.resident.pictures.device
        for indices, windows, draws in self.draws:
            indices = torch.from_numpy(indices).to(device, non_blocking=True)
            windows = torch.from_numpy(windows).to(device, non_blocking=True)
            yield TrainBatch(self.resident.cut(indices, windows), self.resident.labels[indices],
                             draws)


def _stack(samples: list[tuple[int, tuple[int, int, int], Draws]]
           ) -> tuple[np.ndarray, np.ndarray, Draws]:
    indices, windows, draws = zip(*samples)
    return np.array(indices), np.array(windows), stack_draws(draws)


# ---------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------


class ResidentEvalLoader:
    """This process' share, images rank, rank + world_size, …, each once, whole and in order."""

    def __init__(self, resident: Resident, *, rank: int, world_size: int, batch_size: int) -> None:
        self.pictures = resident.pictures[rank::world_size]
        self.labels = resident.labels[rank::world_size]
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.labels) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.labels), self.batch_size):
            part = slice(start, start + self.batch_size)
            yield Batch(self.pictures[part], self.labels[part])


# ---------------------------------------------------------------------------------------------
# Either way
# ---------------------------------------------------------------------------------------------


def training_batches(source: Source, sampler: TrainSampler, draws: SampleDraws, *,
                     device: torch.device, budget_gib: float, workers: int,
                     advance: Callable[[], None]) -> ResidentTrainLoader | DataLoader:
    """From the device if the set fits there and its crops only move pixels, else from workers."""
    if only_moves_pixels(draws.crop, draws.size):
        resident = resident_source(source, device, draws.size, budget_gib, advance)
        if resident is not None:
            return ResidentTrainLoader(resident, DrawnViews(draws), sampler, workers=workers)
    return train_loader(TrainViews(source, draws), sampler, workers=workers,
                        pin_memory=device.type == "cuda")


def evaluation_batches(source: Source, *, rank: int, world_size: int, device: torch.device,
                       budget_gib: float, workers: int, size: tuple[int, int], crop_pct: float,
                       interpolation: str, batch_size: int,
                       advance: Callable[[], None]) -> ResidentEvalLoader | DataLoader:
    """Likewise; whole pictures are taken as they are only at crop_pct = 1."""
    share = dict(rank=rank, world_size=world_size)
    if crop_pct == 1.0:
        resident = resident_source(source, device, size, budget_gib, advance)
        if resident is not None:
            return ResidentEvalLoader(resident, batch_size=batch_size, **share)
    return eval_loader(EvalViews(source, size=size, crop_pct=crop_pct, interpolation=interpolation,
                                 **share),
                       batch_size=batch_size, workers=workers, pin_memory=device.type == "cuda")
