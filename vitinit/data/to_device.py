"""The last step before the model: a batch is copied to the device, augmented, normalised and mixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .augment import ErasedBoxes, Normalise, erase, erased_boxes, normal_quantiles
from .draw import Augment, RandAugment
from .loader import Batch, TrainBatch
from .mix import Mix, Mixing, blend, draw_mixes, mix_images, mixing_of, smooth_one_hot
from .operations import CHUNK, operation_tables, rand_augment


class ToDevice:
    """Prepare evaluation batches: normalised images (B, 3, H, W) float32 and labels (B,).

    mean, std: per channel, of values in [0, 1]. channels_last: the memory format of the images.
    """

    def __init__(self, device: torch.device, *, mean: Sequence[float], std: Sequence[float],
                 channels_last: bool) -> None:
        self.device = device
        self.normalise = Normalise(mean, std, device)
        self.format = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        images = self.normalise(batch.images.to(self.device, non_blocking=True))
        return (images.contiguous(memory_format=self.format),
                batch.labels.to(self.device, non_blocking=True))


class TrainToDevice(ToDevice):
    """Prepare training batches: augmented images (B, 3, H, W) float32, and targets (B, K) float32.

    The draws for RandAugment and erasing come with the batch (draw.py). Mixing is drawn here, keyed
    by (seed, step, group). Three copies go to a GPU: the images, the labels, and one tensor with
    all that the host has computed for the operations.

    at_once: augment a micro-batch as a whole, which takes fewest launches, as a GPU needs; else in
        chunks that fit into a CPU's cache. By default what suits the device; the bits are the same.
    """

    def __init__(self, device: torch.device, *, mean: Sequence[float], std: Sequence[float],
                 channels_last: bool, augment: Augment, rand_augment: RandAugment, mix: Mix,
                 num_classes: int, seed: int, at_once: bool | None = None) -> None:
        super().__init__(device, mean=mean, std=std, channels_last=channels_last)
        self.settings, self.fill, self.mix = augment, rand_augment.fill, mix
        self.num_classes, self.seed = num_classes, seed
        self.at_once = device.type != "cpu" if at_once is None else at_once
        self.quantiles = normal_quantiles().to(device)

    def __call__(self, batch: TrainBatch, step: int, groups: np.ndarray) -> tuple[Tensor, Tensor]:
        """Prepare one micro-batch of step `step`.

        groups: (B,), the mixing group of each image (sampler.py); two partners have the same one.
        """
        images = batch.images.to(self.device, non_blocking=True)
        labels = batch.labels.to(self.device, non_blocking=True)
        count, _, *size = images.shape
        operations, erased = (part.numpy() for part in batch.draws)
        mixes = draw_mixes(self.mix, self.seed, step, groups, *size)
        chunks = pairs_in_chunks(count, count if self.at_once else CHUNK // (size[0] * size[1]))
        tables = [operation_tables(operations, size, self.fill, at_once=self.at_once)]
        for rows in map(np.concatenate, chunks):
            tables += erased_boxes(erased[rows], size), mixing_of([mixes[row] for row in rows])
        operations, *tables = upload(self.device, tables)

        images = rand_augment(images, operations)
        targets = smooth_one_hot(labels, self.num_classes, self.mix.label_smoothing)
        if len(chunks) == 1:
            return self.finish(images, targets, *tables)
        done = (torch.empty(images.shape, memory_format=self.format), torch.empty_like(targets))
        for halves, boxes, mixing in zip(chunks, tables[::2], tables[1::2]):
            halves = [slice(half[0], half[-1] + 1) for half in halves if len(half)]
            parts = (torch.cat([whole[half] for half in halves]) for whole in (images, targets))
            for whole, part in zip(done, self.finish(*parts, boxes, mixing)):
                for half, some in zip(halves, part.split([half.stop - half.start for half in halves])):
                    whole[half] = some
        return done

    def finish(self, images: Tensor, targets: Tensor, boxes: ErasedBoxes, mixing: Mixing
               ) -> tuple[Tensor, Tensor]:
        """Turn uint8 images (n, 3, H, W) into what the model takes, and mix their targets (n, K).

            normalise → erase → mix     the order of DeiT
            mix → normalise → erase     with erase_after_mix: the order of timm with its prefetcher,
                                        which mixes uint8 images in workers
        """
        if self.settings.erase_after_mix:
            images = mix_images(images, mixing, at_once=self.at_once)
        images = self.normalise(images)
        images = erase(images, boxes, self.settings.erase_fill, self.quantiles, at_once=self.at_once)
        if not self.settings.erase_after_mix:
            images = mix_images(images, mixing, at_once=self.at_once)
        return (images.contiguous(memory_format=self.format),
                blend(targets, mixing.weights) if self.mix.mixes else targets)


def pairs_in_chunks(count: int, most: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Split the images of a batch into chunks that hold each image with its mixing partner.

    Partners stand opposite each other, so a chunk is rows from the front of the batch and rows from
    its end; an odd batch has one image in the middle. most: how many images a chunk may have, which
    has at least one pair.
    """
    rows, middle, pairs = np.arange(count), (count + 1) // 2, max(1, most // 2)
    return [(rows[first:min(first + pairs, middle)],
             rows[max(middle, count - first - pairs):count - first])
            for first in range(0, middle, pairs)]


def upload(device: torch.device, tables: Sequence[Any]) -> list[Any]:
    """Return the named tuples `tables` with all their arrays as tensors on the device, in one copy.

    The host does not wait for work that is queued on the device.
    """
    arrays = [field for table in tables for field in table if isinstance(field, np.ndarray)]
    ends = np.cumsum([-(-array.nbytes // 8) * 8 for array in arrays]).tolist()  # aligned to 8 bytes
    packed = np.zeros(max(8, ends[-1]), np.uint8)
    for array, start in zip(arrays, [0, *ends]):
        packed[start:start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    host = torch.from_numpy(packed)
    if device.type == "cuda" and torch.cuda.is_available():
        # From pinned memory, so that the host need not wait for the copy. (Tensor.pin_memory would
        # do the same, but it is not implemented for fake tensors.)
        host = torch.empty(len(packed), dtype=torch.uint8, pin_memory=True).copy_(host)
    there = host.to(device, non_blocking=True)
    tensors = (there[start:start + array.nbytes].view(torch.from_numpy(array[:0]).dtype)
               .view(array.shape) for array, start in zip(arrays, [0, *ends]))
    return [table._make(next(tensors) if isinstance(field, np.ndarray) else field for field in table)
            for table in tables]
