"""Mixup and cutmix: each image of a micro-batch is mixed with its partner, and so are their targets.

The partner of image i is image B − 1 − i (the batch flipped), as in timm and DeiT. One random draw
serves a whole group of images of the global batch (sampler.py), and a micro-batch may hold pairs of
several groups. So the functions here take one `MixDraw` per image; two partners have the same one.
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

    share: float                # λ: the weight of the image's own label in its target
    box: Box | None             # cutmix: the box that comes from the partner; None: mixup


UNMIXED = MixDraw(1.0, None)
EMPTY = Box(0, 0, 0, 0)


@dataclass(frozen=True)
class MixSettings:
    """Mixup (Zhang et al., arXiv 1710.09412) and cutmix (Yun et al., arXiv 1905.04899).

    A group of images is mixed with `probability`. Where both kinds are on, it is mixed by cutmix
    with `switch_probability`, else by mixup. λ ~ Beta(α, α); α = 0 switches that kind off.
    label_smoothing: applied to all targets, mixed or not. group: how many images share a draw, an
    even number. The defaults are those of DeiT-B.
    """

    mixup_alpha: float = 0.8
    cutmix_alpha: float = 1.0
    probability: float = 1.0
    switch_probability: float = 0.5
    label_smoothing: float = 0.1
    group: int = 64

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
            box = draw_box(rng, rng.beta(self.cutmix_alpha, self.cutmix_alpha), height, width)
            # λ follows the area of the box after it was clipped at the border.
            return MixDraw(1.0 - box.height * box.width / (height * width), box)
        return MixDraw(rng.beta(self.mixup_alpha, self.mixup_alpha), None)


def draw_box(rng: np.random.Generator, share: float, height: int, width: int) -> Box:
    """Draw cutmix's box: (1 − share) of the area, centre uniform, then clipped at the border."""
    side = math.sqrt(1.0 - share)
    half_height, half_width = int(height * side) // 2, int(width * side) // 2
    y, x = int(rng.integers(height)), int(rng.integers(width))
    top, left = max(y - half_height, 0), max(x - half_width, 0)
    return Box(top, left, min(y + half_height, height) - top, min(x + half_width, width) - left)


def smooth_one_hot(labels: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Turn labels (B,) into smoothed targets (B, K) float32 (arXiv 1512.00567, section 7).

    With s = smoothing, every class gets s/K and the label 1 − s in addition.
    """
    off = np.float32(smoothing / num_classes)
    on = np.float32(1.0 - smoothing) + off
    targets = torch.full((len(labels), num_classes), float(off), device=labels.device)
    return targets.scatter_(1, labels[:, None], float(on))


class MixPlan(NamedTuple):
    """How the images of a batch are mixed, as arrays, which `put` makes tensors on the device.

    Each field is None where no image of the batch is mixed that way.
    """

    image_weights: np.ndarray | None    # (B, 2) float32: mixup's λ and 1 − λ for each image
    boxes: np.ndarray | tuple[tuple[int, Box], ...] | None  # cutmix: (B, 4) int64, or (row, box) pairs


def plan_mixing(mixes: Sequence[MixDraw], passes: Passes) -> MixPlan:
    """Plan how images are mixed whose draws are `mixes`, one per image.

    The boxes are one array with `passes.at_once`, else a list of those images that have a box.
    """
    boxed = tuple((row, mix.box) for row, mix in enumerate(mixes) if mix.box is not None)
    shared = any(mix.box is None and mix.share != 1.0 for mix in mixes)
    boxes = np.array([mix.box or EMPTY for mix in mixes]) if passes.at_once else boxed
    return MixPlan(
        # With weights 1 and 0, an image that has a box stays as it is, bit for bit.
        weights([mix.share if mix.box is None else 1.0 for mix in mixes]) if shared else None,
        boxes if boxed else None)


def weights(shares: Sequence[float]) -> np.ndarray:
    """(B, 2) float32: each λ and 1 − λ, both computed in float64 and rounded once."""
    return np.array([[share, 1.0 - share] for share in shares], dtype=np.float32)


def mix_images(images: Tensor, mixes: Sequence[MixDraw], passes: Passes | None = None) -> Tensor:
    """Mix images (B, 3, H, W) with their partners; `mixes` holds one draw per image.

    uint8 images stay uint8; mixup rounds them to the nearest level.
    """
    plan = plan_mixing(mixes, passes or passes_on(images.device))
    return mixed_images(images, put(plan, images.device))


def mixed_images(images: Tensor, plan: MixPlan) -> Tensor:
    """Carry out a plan of `plan_mixing` whose arrays are on the images' device."""
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
    """Mix targets (B, K) with those of the partners; `mixes` holds one draw per image."""
    return blended(targets, put(weights([mix.share for mix in mixes]), targets.device))


def blended(batch: Tensor, lambdas: Tensor) -> Tensor:
    """λ · batch + (1 − λ) · flipped batch, (B, …) float32.

    lambdas: (B, 2), λ and 1 − λ for each item.
    """
    own, partners = (part.view(-1, *[1] * (batch.ndim - 1)) for part in lambdas.unbind(1))
    return (batch * own).add_(batch.flip(0) * partners)


def _inside(boxes: Tensor, images: Tensor) -> Tensor:
    """Whether each pixel lies in the box of its image: (B, 1, H, W) bool. boxes: (B, 4)."""
    top, left, height, width = boxes[:, :, None].unbind(1)               # (B, 1)
    rows = torch.arange(images.shape[2], device=images.device) - top     # (B, H)
    columns = torch.arange(images.shape[3], device=images.device) - left     # (B, W)
    return (((rows >= 0) & (rows < height))[:, None, :, None]
            & ((columns >= 0) & (columns < width))[:, None, None, :])
