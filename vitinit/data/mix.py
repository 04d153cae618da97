"""Mixup and cutmix: each image of a micro-batch and its target are mixed with its partner's.

The partner of image i is image B − 1 − i (the batch flipped), as in timm and DeiT. One draw serves
a group of images of the global batch (sampler.py); here each image has its group's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..bounds import BelowOne, Bounds, NonNegative, Proportion
from .images import NOWHERE, Box


class MixDraw(NamedTuple):
    """How an image and its partner are mixed."""

    share: float                # λ: the weight of the image's own label in its target
    box: Box                    # cutmix: the box that comes from the partner; else NOWHERE


UNMIXED = MixDraw(1.0, NOWHERE)


@dataclass(frozen=True)
class Mix:
    """Mixup (Zhang et al., arXiv 1710.09412), cutmix (Yun et al., arXiv 1905.04899), smoothing.

    A group of images is mixed with `probability`, where both kinds are on by cutmix with
    `switch_probability`, else by mixup. All targets are smoothed, mixed or not.
    """

    mixup_alpha: NonNegative                        # λ ~ Beta(α, α); 0: no mixup
    cutmix_alpha: NonNegative                       # likewise
    probability: Proportion                         # that a group is mixed
    switch_probability: Proportion                  # of cutmix, where both are on
    label_smoothing: BelowOne
    # Images per draw: even, divides global_batch.
    group: Annotated[int, Bounds(minimum=2, below=2**31)]

    @property
    def mixes(self) -> bool:
        """Whether any image is ever mixed with these settings."""
        return self.probability > 0.0 and (self.mixup_alpha > 0.0 or self.cutmix_alpha > 0.0)

    def draw(self, rng: np.random.Generator, height: int, width: int) -> MixDraw:
        """Draw how a group of images of height × width pixels is mixed."""
        if not self.mixes or rng.random() >= self.probability:
            return UNMIXED
        switch = rng.random() < self.switch_probability
        if self.cutmix_alpha and (switch or not self.mixup_alpha):
            # A box of (1 − λ) of the area, centre uniform, clipped at the border, which λ follows.
            side = math.sqrt(1.0 - rng.beta(self.cutmix_alpha, self.cutmix_alpha))
            half_height, half_width = int(height * side) // 2, int(width * side) // 2
            y, x = int(rng.integers(height)), int(rng.integers(width))
            top, left = max(y - half_height, 0), max(x - half_width, 0)
            box = Box(top, left, min(y + half_height, height) - top,
                      min(x + half_width, width) - left)
            return MixDraw(1.0 - box.height * box.width / (height * width), box)
        return MixDraw(rng.beta(self.mixup_alpha, self.mixup_alpha), NOWHERE)


def smooth_one_hot(labels: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Labels (B,) → (B, K) float32: s/K, and 1 − s more for the label (arXiv 1512.00567, §7)."""
    off = np.float32(smoothing / num_classes)
    on = np.float32(1.0 - smoothing) + off
    targets = torch.full((len(labels), num_classes), float(off), device=labels.device)
    return targets.scatter_(1, labels[:, None], float(on))


def mix_images(images: Tensor, mixed: Tensor) -> Tensor:
    """Mix (B, 3, H, W) with partners, uint8 rounded; mixed: (B, 5), see `draw.Draws`."""
    share, top, left, height, width = mixed.view(-1, 5, 1, 1, 1).unbind(1)   # (B, 1, 1, 1) each
    rows = torch.arange(images.shape[2], device=images.device)[:, None]
    columns = torch.arange(images.shape[3], device=images.device)
    inside = (((rows >= top) & (rows < top + height))
              & ((columns >= left) & (columns < left + width))).float()  # (B, 1, H, W)
    # An image that has a box stays as it is around it: weights of 1 and 0 change no bit.
    share = share.masked_fill(height * width > 0, 1.0)
    blended = blend(images, share.float() - inside, (1.0 - share).float() + inside)
    return blended if images.is_floating_point() else blended.round_().to(images.dtype)


def mix_targets(targets: Tensor, mixed: Tensor) -> Tensor:
    """Mix targets (B, K) float32 with their partners'; mixed: as for `mix_images`."""
    share = mixed[:, :1]
    return blend(targets, share.float(), (1.0 - share).float())


def blend(batch: Tensor, weight: Tensor, partners: Tensor) -> Tensor:
    """weight · batch + partners · flipped batch, in float32."""
    return batch.flip(0).float().mul_(partners).add_(batch * weight)
