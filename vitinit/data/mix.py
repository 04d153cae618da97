"""Mixup and cutmix: every image of a micro-batch with its partner, and the targets likewise.

The partner of image i is image B − 1 − i (the batch flipped), as in timm and DeiT. One draw serves a
group of images of the global batch (sampler.py), of which a micro-batch may have pairs of several: so
each image comes with its own mix, which is also its partner's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .augment import put
from .images import Box


class Mix(NamedTuple):
    """How an image and its partner are mixed."""

    share: float                # λ: how much of the target is the image's own label
    box: Box | None             # cutmix: the box that comes from the partner; None: mixup


UNMIXED = Mix(1.0, None)
EMPTY = Box(0, 0, 0, 0)


@dataclass(frozen=True)
class Mixing:
    """Mixup (Zhang et al., arXiv 1710.09412) and cutmix (Yun et al., arXiv 1905.04899).

    A group is mixed with `probability`, by cutmix with `switch_probability` where both are
    on. λ ~ Beta(α, α); α = 0 switches that kind off. label_smoothing: of the targets, mixed or not.
    group: images that share a draw, an even number. The defaults are DeiT-B's.
    """

    mixup_alpha: float = 0.8
    cutmix_alpha: float = 1.0
    probability: float = 1.0
    switch_probability: float = 0.5
    label_smoothing: float = 0.1
    group: int = 64

    @property
    def mixes(self) -> bool:
        return self.probability > 0.0 and (self.mixup_alpha > 0.0 or self.cutmix_alpha > 0.0)

    def draw(self, rng: np.random.Generator, height: int, width: int) -> Mix:
        """For a group of images of height × width pixels."""
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


def mix_images(images: Tensor, mixes: Sequence[Mix]) -> Tensor:
    """(B, 3, H, W) with their partners, B mixes. uint8 stays uint8, rounded to the nearest level."""
    partners, mixed = images.flip(0), images
    if any(mix.box is None and mix.share != 1.0 for mix in mixes):
        # Images with a box keep all of themselves here, to the bit.
        own, theirs = _weights([mix.share if mix.box is None else 1.0 for mix in mixes], images)
        mixed = (images * own).add_(partners * theirs)
        if not images.is_floating_point():
            mixed = mixed.round().to(images.dtype)
    if any(mix.box is not None for mix in mixes):
        mixed = torch.where(_inside([mix.box or EMPTY for mix in mixes], images), partners, mixed)
    return mixed


def mix_targets(targets: Tensor, mixes: Sequence[Mix]) -> Tensor:
    """(B, K) with their partners', B mixes."""
    own, partners = _weights([mix.share for mix in mixes], targets)
    return targets * own + targets.flip(0) * partners


def _weights(shares: Sequence[float], factors_of: Tensor) -> list[Tensor]:
    """λ and 1 − λ, each rounded to float32 once, as factors of a batch: (B, 1, …) each."""
    weights = put(np.array([[share, 1.0 - share] for share in shares], dtype=np.float32),
                  factors_of.device)                                     # (B, 2)
    return [side.view(-1, *[1] * (factors_of.ndim - 1)) for side in weights.unbind(1)]


def _inside(boxes: Sequence[Box], images: Tensor) -> Tensor:
    """Which pixels lie in their image's box: (B, 1, H, W) bool."""
    top, left, height, width = put(np.array(boxes), images.device)[:, :, None].unbind(1)   # (B, 1)
    rows = torch.arange(images.shape[2], device=images.device) - top     # (B, H)
    columns = torch.arange(images.shape[3], device=images.device) - left     # (B, W)
    return (((rows >= 0) & (rows < height))[:, None, :, None]
            & ((columns >= 0) & (columns < width))[:, None, None, :])
