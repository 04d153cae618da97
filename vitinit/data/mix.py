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
from torch import Tensor

from .images import Box
from .passes import Passes, passes_on, put


class MixDraw(NamedTuple):
    """How an image and its partner are mixed."""

    share: float                # λ: how much of the target is the image's own label
    box: Box | None             # cutmix: the box that comes from the partner; None: mixup


UNMIXED = MixDraw(1.0, None)
EMPTY = Box(0, 0, 0, 0)


@dataclass(frozen=True)
class MixSettings:
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

    def draw(self, rng: np.random.Generator, height: int, width: int) -> MixDraw:
        """For a group of images of height × width pixels."""
        if not self.mixes or rng.random() >= self.probability:
            return UNMIXED
        switch = rng.random() < self.switch_probability
        if self.cutmix_alpha and (switch or not self.mixup_alpha):
            box = draw_box(rng, rng.beta(self.cutmix_alpha, self.cutmix_alpha), height, width)
            # The box was cut off at the border: its true area counts.
            return MixDraw(1.0 - box.height * box.width / (height * width), box)
        return MixDraw(rng.beta(self.mixup_alpha, self.mixup_alpha), None)


def draw_box(rng: np.random.Generator, share: float, height: int, width: int) -> Box:
    """Cutmix' box of (1 − share) of the area, its centre uniform, cut off at the border."""
    side = math.sqrt(1.0 - share)
    half_height, half_width = int(height * side) // 2, int(width * side) // 2
    y, x = int(rng.integers(height)), int(rng.integers(width))
    top, left = max(y - half_height, 0), max(x - half_width, 0)
    return Box(top, left, min(y + half_height, height) - top, min(x + half_width, width) - left)


def smooth_one_hot(labels: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """(B,) → (B, K) float32: s/K everywhere, 1 − s more at the label (arXiv 1512.00567, §7)."""
    off = np.float32(smoothing / num_classes)
    on = np.float32(1.0 - smoothing) + off
    targets = torch.full((len(labels), num_classes), float(off), device=labels.device)
    return targets.scatter_(1, labels[:, None], float(on))


class MixPlan(NamedTuple):
    """The mixes of a batch as arrays; tensors, once they are on its device."""

    image_weights: np.ndarray | None    # (B, 2) float32: λ and 1 − λ, each rounded to float32 once
    boxes: np.ndarray | tuple[tuple[int, Box], ...] | None      # (B, 4) int64, or (row, box) of each


def plan_mixing(mixes: Sequence[MixDraw], passes: Passes) -> MixPlan:
    """Of images; None where no image is mixed that way."""
    boxed = tuple((row, mix.box) for row, mix in enumerate(mixes) if mix.box is not None)
    shared = any(mix.box is None and mix.share != 1.0 for mix in mixes)
    boxes = np.array([mix.box or EMPTY for mix in mixes]) if passes.at_once else boxed
    return MixPlan(
        # Images with a box keep all of themselves here, to the bit.
        weights([mix.share if mix.box is None else 1.0 for mix in mixes]) if shared else None,
        boxes if boxed else None)


def weights(shares: Sequence[float]) -> np.ndarray:
    """(B, 2)"""
    return np.array([[share, 1.0 - share] for share in shares], dtype=np.float32)


def mix_images(images: Tensor, mixes: Sequence[MixDraw], passes: Passes | None = None) -> Tensor:
    """(B, 3, H, W) with their partners, B mixes. uint8 stays uint8, rounded to the nearest level."""
    plan = plan_mixing(mixes, passes or passes_on(images.device))
    return mixed_images(images, put(plan, images.device))


def mixed_images(images: Tensor, plan: MixPlan) -> Tensor:
    """The same by a plan that is on the images' device."""
    mixed = images
    if plan.image_weights is not None:
        mixed = blended(images, plan.image_weights)
        if not images.is_floating_point():
            mixed = mixed.round_().to(images.dtype)
    if isinstance(plan.boxes, tuple):
        mixed = images.clone() if mixed is images else mixed
        for row, (top, left, height, width) in plan.boxes:
            part = (slice(None), slice(top, top + height), slice(left, left + width))
            mixed[row][part] = images[-1 - row][part]
    elif plan.boxes is not None:
        mixed = torch.where(_inside(plan.boxes, images), images.flip(0), mixed)
    return mixed


def mix_targets(targets: Tensor, mixes: Sequence[MixDraw]) -> Tensor:
    """(B, K) with their partners', B mixes."""
    return blended(targets, put(weights([mix.share for mix in mixes]), targets.device))


def blended(batch: Tensor, sides: Tensor) -> Tensor:
    """λ of each (B, …) and 1 − λ of its partner, float32. sides: both weights, (B, 2)."""
    own, partners = (side.view(-1, *[1] * (batch.ndim - 1)) for side in sides.unbind(1))
    return (batch * own).add_(batch.flip(0) * partners)


def _inside(boxes: Tensor, images: Tensor) -> Tensor:
    """Which pixels lie in their image's box, (B, 4): (B, 1, H, W) bool."""
    top, left, height, width = boxes[:, :, None].unbind(1)               # (B, 1)
    rows = torch.arange(images.shape[2], device=images.device) - top     # (B, H)
    columns = torch.arange(images.shape[3], device=images.device) - left     # (B, W)
    return (((rows >= 0) & (rows < height))[:, None, :, None]
            & ((columns >= 0) & (columns < width))[:, None, None, :])
