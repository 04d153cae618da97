"""Mixup and cutmix: every image of a micro-batch with its partner, and the targets likewise.

The partner of image i is image B − 1 − i (the batch flipped), as in timm and DeiT; of an odd batch
the middle one is its own partner, which changes nothing. One draw serves a micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from .images import Box


class Mix(NamedTuple):
    """How images and partners are mixed."""

    share: float                # λ: how much of the target is the image's own label
    box: Box | None             # cutmix: the box that comes from the partner; None: mixup


UNMIXED = Mix(1.0, None)


@dataclass(frozen=True)
class Mixing:
    """Mixup (Zhang et al., arXiv 1710.09412) and cutmix (Yun et al., arXiv 1905.04899).

    A micro-batch is mixed with `probability`, by cutmix with `switch_probability` where both are
    on. λ ~ Beta(α, α); α = 0 switches that kind off. label_smoothing: of the targets, mixed or not.
    The defaults are DeiT's.
    """

    mixup_alpha: float = 0.8
    cutmix_alpha: float = 1.0
    probability: float = 1.0
    switch_probability: float = 0.5
    label_smoothing: float = 0.1

    @property
    def mixes(self) -> bool:
        return self.probability > 0.0 and (self.mixup_alpha > 0.0 or self.cutmix_alpha > 0.0)

    def draw(self, rng: np.random.Generator, height: int, width: int) -> Mix:
        """For a micro-batch of images of height × width pixels."""
        if not self.mixes or rng.random() >= self.probability:
            return UNMIXED
        switch = rng.random() < self.switch_probability
        if self.cutmix_alpha and (switch or not self.mixup_alpha):
            box = draw_box(rng, rng.beta(self.cutmix_alpha, self.cutmix_alpha), height, width)
            # The box was cut off at the border: its true area counts.
            return Mix(1.0 - box.height * box.width / (height * width), box)
        return Mix(rng.beta(self.mixup_alpha, self.mixup_alpha), None)


def draw_box(rng: np.random.Generator, share: float, height: int, width: int) -> Box:
    """Cutmix' box of (1 − share) of the area, its centre uniform, cut off at the border."""
    side = math.sqrt(1.0 - share)
    half_height, half_width = int(height * side) // 2, int(width * side) // 2
    y, x = int(rng.integers(height)), int(rng.integers(width))
    top, left = max(y - half_height, 0), max(x - half_width, 0)
    return Box(top, left, min(y + half_height, height) - top, min(x + half_width, width) - left)


def smooth_one_hot(labels: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """(B,) → (B, K) float32: s/K everywhere, 1 − s more at the label (arXiv 1512.00567, §7)."""
    return F.one_hot(labels, num_classes) * (1.0 - smoothing) + smoothing / num_classes


def mix_images(images: Tensor, mix: Mix) -> Tensor:
    """(B, 3, H, W) with their partners. uint8 stays uint8, rounded to the nearest level."""
    if mix.box is not None:
        top, left, height, width = mix.box
        window = (..., slice(top, top + height), slice(left, left + width))
        mixed = images.clone()
        mixed[window] = images.flip(0)[window]
        return mixed
    if mix.share == 1.0:
        return images
    mixed = (images * mix.share).add_(images.flip(0) * (1.0 - mix.share))
    return mixed if images.is_floating_point() else mixed.round().to(images.dtype)


def mix_targets(targets: Tensor, mix: Mix) -> Tensor:
    """(B, K) with their partners'."""
    return targets * mix.share + targets.flip(0) * (1.0 - mix.share)
