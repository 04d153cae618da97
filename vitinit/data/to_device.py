"""The last door before the model: batches go to the device and become what the model takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..keys import Stream, keyed_generator
from .augment import erase, normal_quantiles, normalise, rand_augment
from .loader import Batch, TrainBatch
from .mix import Mix, Mixing, mix_images, mix_targets, smooth_one_hot


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
    group).
    """

    def __init__(self, device: torch.device, *, mean: Sequence[float], std: Sequence[float],
                 channels_last: bool, fill: Sequence[int],
                 erase_fill: Literal["pixel", "rand", "const"], erase_after_mix: bool,
                 mixing: Mixing, num_classes: int, seed: int) -> None:
        super().__init__(device, mean=mean, std=std, channels_last=channels_last)
        self.fill, self.erase_fill, self.erase_after_mix = fill, erase_fill, erase_after_mix
        self.mixing, self.num_classes, self.seed = mixing, num_classes, seed
        self.quantiles = normal_quantiles().to(device)

    def __call__(self, batch: TrainBatch, step: int, groups: np.ndarray) -> tuple[Tensor, Tensor]:
        """groups: of the global batch, in which each image is mixed, (B,); partners have the same."""
        images, labels = (part.to(self.device, non_blocking=True)
                          for part in (batch.images, batch.labels))
        images = rand_augment(images, batch.draws, self.fill)
        targets = smooth_one_hot(labels, self.num_classes, self.mixing.label_smoothing)
        if not self.mixing.mixes:
            return self.laid_out(self.erased(self.normalised(images), batch)), targets

        mixes = self.mixes(step, groups.tolist(), *images.shape[2:])
        if self.erase_after_mix:
            images = self.erased(self.normalised(mix_images(images, mixes)), batch)
        else:
            images = mix_images(self.erased(self.normalised(images), batch), mixes)
        return self.laid_out(images), mix_targets(targets, mixes)

    def mixes(self, step: int, groups: Sequence[int], height: int, width: int) -> list[Mix]:
        """Of each image, (B,): one draw per group."""
        drawn = {group: self.mixing.draw(keyed_generator(self.seed, Stream.MIX, step, group),
                                         height, width) for group in set(groups)}
        return [drawn[group] for group in groups]

    def erased(self, images: Tensor, batch: TrainBatch) -> Tensor:
        return erase(images, batch.draws, self.erase_fill, self.quantiles)
