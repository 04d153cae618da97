"""The last door before the model: batches go to the device and become what the model takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ..keys import Stream, keyed_generator
from .augment import erase, normal_quantiles, normalise, rand_augment
from .loader import Batch, TrainBatch
from .mix import Mixing, mix_images, mix_targets, smooth_one_hot


class ToDevice:
    """For evaluation: images (B, 3, H, W) float32, normalised, and labels (B,)."""

    def __init__(self, device: torch.device, *, mean: Sequence[float], std: Sequence[float],
                 channels_last: bool) -> None:
        self.device = device
        self.mean, self.std = (torch.tensor(values, dtype=torch.float64, device=device)
                               for values in (mean, std))
        self.format = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        images = self.normalised(batch.images.to(self.device, non_blocking=True))
        return self.laid_out(images), batch.labels.to(self.device, non_blocking=True)

    def normalised(self, images: Tensor) -> Tensor:
        return normalise(images, self.mean, self.std)

    def laid_out(self, images: Tensor) -> Tensor:
        return images.contiguous(memory_format=self.format)


class TrainToDevice(ToDevice):
    """For training: images (B, 3, H, W) float32, augmented, and targets (B, K) float32.

        RandAugment → normalise → erase → mix          DeiT's order
        RandAugment → mix → normalise → erase          erase_after_mix: timm's with its prefetcher,
                                                       which mixes uint8 images in its workers

    Everything before mixing is drawn already (draw.py). Mixing is drawn here, keyed by (seed, step,
    rank, micro-step): partners stay within a micro-batch.
    """

    def __init__(self, device: torch.device, *, mean: Sequence[float], std: Sequence[float],
                 channels_last: bool, fill: Sequence[int],
                 erase_fill: Literal["pixel", "rand", "const"], erase_after_mix: bool,
                 mixing: Mixing, num_classes: int, seed: int, rank: int) -> None:
        super().__init__(device, mean=mean, std=std, channels_last=channels_last)
        self.fill, self.erase_fill, self.erase_after_mix = fill, erase_fill, erase_after_mix
        self.mixing, self.num_classes, self.seed, self.rank = mixing, num_classes, seed, rank
        self.quantiles = normal_quantiles().to(device)

    def __call__(self, batch: TrainBatch, step: int, micro_step: int) -> tuple[Tensor, Tensor]:
        images, labels = (part.to(self.device, non_blocking=True)
                          for part in (batch.images, batch.labels))
        rng = keyed_generator(self.seed, Stream.MIX, step, self.rank, micro_step)
        mix = self.mixing.draw(rng, *images.shape[2:])

        images = rand_augment(images, batch.draws, self.fill)
        if self.erase_after_mix:
            images = self.erased(self.normalised(mix_images(images, mix)), batch)
        else:
            images = mix_images(self.erased(self.normalised(images), batch), mix)
        targets = smooth_one_hot(labels, self.num_classes, self.mixing.label_smoothing)
        return self.laid_out(images), mix_targets(targets, mix)

    def erased(self, images: Tensor, batch: TrainBatch) -> Tensor:
        return erase(images, batch.draws, self.erase_fill, self.quantiles)
