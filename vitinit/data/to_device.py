"""The last step before the model: a batch is copied to the device, augmented, normalised and mixed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..keys import Stream, keyed_generator
from .augment import (Fill, Normalise, augmented, normal_quantiles, plan_erasing,
                      plan_rand_augment)
from .draw import Draws
from .loader import Batch, TrainBatch
from .mix import (MixDraw, MixPlan, MixSettings, blended, mixed_images, plan_mixing, smooth_one_hot,
                  weights)
from .passes import Call, Pass, Passes, passes_on, put


class ToDevice:
    """Prepare evaluation batches: normalised images (B, 3, H, W) float32 and labels (B,).

    mean, std: per channel, of values in [0, 1]. channels_last: the memory format of the images.
    """

    def __init__(self, device: torch.device, *, mean: Sequence[float], std: Sequence[float],
                 channels_last: bool) -> None:
        self.device = device
        self.normalised = Normalise(mean, std, device)
        self.format = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        images = self.normalised(batch.images.to(self.device, non_blocking=True))
        return self.laid_out(images), batch.labels.to(self.device, non_blocking=True)

    def laid_out(self, images: Tensor) -> Tensor:
        """The images in the memory format that the model takes."""
        return images.contiguous(memory_format=self.format)


class Piece(NamedTuple):
    """What happens, after RandAugment, to some pairs of a micro-batch that are finished together."""

    slices: tuple[tuple[int, int], ...]     # (from, to) in the micro-batch; joined in this order,
                                            # partners are opposite each other again
    erasing: Call
    mixing: MixPlan | None                  # None: nothing is mixed


class Plan(NamedTuple):
    """All that happens to a micro-batch, as arrays, which `put` makes tensors on the device."""

    rand_augment: tuple[Pass, ...]
    pieces: tuple[Piece, ...]
    target_weights: np.ndarray | None   # (B, 2) float32: λ and 1 − λ; None: no target is mixed


class TrainToDevice(ToDevice):
    """Prepare training batches: augmented images (B, 3, H, W) float32, and targets (B, K) float32.

        RandAugment → normalise → erase → mix      the order of DeiT
        RandAugment → mix → normalise → erase      with erase_after_mix: the order of timm with its
                                                   prefetcher, which mixes uint8 images in workers

    The draws for RandAugment and erasing come with the batch (draw.py). Mixing is drawn here, keyed
    by (seed, step, group). Three copies go to the device: the images, the labels, and one tensor
    with the arguments of all operations.

    fill: the colour of RandAugment's geometric operations. erase_fill: see `draw.Erasing`.
    passes: how many images go through an operation at once; by default what suits the device.
    """

    def __init__(self, device: torch.device, *, mean: Sequence[float], std: Sequence[float],
                 channels_last: bool, fill: Sequence[int], erase_fill: Fill, erase_after_mix: bool,
                 mixing: MixSettings, num_classes: int, seed: int, passes: Passes | None = None) -> None:
        super().__init__(device, mean=mean, std=std, channels_last=channels_last)
        self.fill, self.erase_fill, self.erase_after_mix = fill, erase_fill, erase_after_mix
        self.mixing, self.num_classes, self.seed = mixing, num_classes, seed
        self.passes = passes or passes_on(device)
        self.quantiles = normal_quantiles().to(device)

    def __call__(self, batch: TrainBatch, step: int, groups: np.ndarray) -> tuple[Tensor, Tensor]:
        """Prepare one micro-batch of step `step`.

        groups: (B,), the mixing group of each image (sampler.py); two partners have the same one.
        """
        size = tuple(batch.images.shape[2:])
        mixes = self.mixes(step, groups.tolist(), *size) if self.mixing.mixes else None
        plan = put(self.plan(batch.draws, mixes, size), self.device)
        images, labels = (part.to(self.device, non_blocking=True)
                          for part in (batch.images, batch.labels))
        targets = smooth_one_hot(labels, self.num_classes, self.mixing.label_smoothing)
        if plan.target_weights is not None:
            targets = blended(targets, plan.target_weights)
        return self.finished(augmented(images, plan.rand_augment), plan.pieces), targets

    def mixes(self, step: int, groups: Sequence[int], height: int, width: int) -> list[MixDraw]:
        """How each of B images of height × width pixels is mixed: one draw for each group."""
        drawn = {group: self.mixing.draw(keyed_generator(self.seed, Stream.MIX, step, group),
                                         height, width) for group in set(groups)}
        return [drawn[group] for group in groups]

    def plan(self, draws: Draws, mixes: list[MixDraw] | None, size: tuple[int, int]) -> Plan:
        """Plan everything that happens to a micro-batch; `put` moves the plan to the device."""
        return Plan(tuple(plan_rand_augment(draws, size, self.fill, self.passes)),
                    tuple(self.pieces(draws, mixes, size)),
                    mixes and weights([mix.share for mix in mixes]))

    def pieces(self, draws: Draws, mixes: list[MixDraw] | None, size: tuple[int, int]
               ) -> Iterator[Piece]:
        """Yield the pairs of a micro-batch in pieces that are finished together.

        Since partners are opposite each other, a piece has a slice from the front of the batch and
        the matching slice from its end; the last piece is the middle.
        """
        count = len(draws.noise_keys)
        pairs = max(1, self.passes.finished_pixels // (2 * size[0] * size[1]))
        for first in range(0, (count + 1) // 2, pairs):
            last = first + pairs
            slices = ((first, last), (count - last, count - first))
            if 2 * last >= count:                    # the two slices meet in the middle
                slices = ((first, count - first),)
            rows = np.concatenate([np.arange(*each) for each in slices])
            yield Piece(slices, plan_erasing(draws.erase_boxes[rows], draws.noise_keys[rows], size,
                                             self.passes),
                        mixes and plan_mixing([mixes[row] for row in rows], self.passes))

    def finished(self, images: Tensor, pieces: Sequence[Piece]) -> Tensor:
        """Normalise, erase and mix uint8 images, piece by piece; the result is what the model takes."""
        if len(pieces) == 1:
            return self.laid_out(self.finished_piece(images, pieces[0]))
        done = torch.empty(images.shape, device=self.device, memory_format=self.format)
        for piece in pieces:
            part = torch.cat([images[first:last] for first, last in piece.slices])
            sizes = [last - first for first, last in piece.slices]
            for (first, last), some in zip(piece.slices,
                                           self.finished_piece(part, piece).split(sizes)):
                done[first:last] = some
        return done

    def finished_piece(self, images: Tensor, piece: Piece) -> Tensor:
        """Normalise, erase and mix the images of one piece, in the order that was chosen."""
        def mixed(images: Tensor) -> Tensor:
            return images if piece.mixing is None else mixed_images(images, piece.mixing)

        def erased(images: Tensor) -> Tensor:
            return piece.erasing(images, self.erase_fill, self.quantiles)
        if self.erase_after_mix:
            return erased(self.normalised(mixed(images)))
        return mixed(erased(self.normalised(images)))
