"""Mixup and cutmix: each image of a micro-batch is mixed with its partner, and so are their targets.

The partner of image i is image B − 1 − i (the batch flipped), as in timm and DeiT. One random draw
serves a whole group of images of the global batch (sampler.py), and a micro-batch may hold pairs of
several groups. So there is one draw per image here; two partners have the same one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..bounds import COUNT, number
from ..keys import Stream, keyed_generator
from .images import Box


class MixDraw(NamedTuple):
    """How an image and its partner are mixed."""

    share: float                # λ: the weight of the image's own label in its target
    box: Box                    # cutmix: the box that comes from the partner; else UNMIXED.box


UNMIXED = MixDraw(1.0, Box(0, 0, 0, 0))


@dataclass(frozen=True)
class Mix:
    """Mixup (Zhang et al., arXiv 1710.09412), cutmix (Yun et al., arXiv 1905.04899), label smoothing.

    A group of images is mixed with `probability`. Where both kinds are on, it is mixed by cutmix
    with `switch_probability`, else by mixup. All targets are smoothed, mixed or not.
    """

    mixup_alpha: float = number(minimum=0.0)        # λ ~ Beta(α, α); 0: no mixup
    cutmix_alpha: float = number(minimum=0.0)       # likewise
    probability: float = number(minimum=0.0, maximum=1.0)         # that a group is mixed
    switch_probability: float = number(minimum=0.0, maximum=1.0)  # of cutmix, where both are on
    label_smoothing: float = number(minimum=0.0, below=1.0)
    group: int = number(minimum=2, below=COUNT)     # images per draw: even, divides global_batch

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
        return MixDraw(rng.beta(self.mixup_alpha, self.mixup_alpha), UNMIXED.box)


def draw_box(rng: np.random.Generator, share: float, height: int, width: int) -> Box:
    """Draw cutmix's box: (1 − share) of the area, centre uniform, then clipped at the border."""
    side = math.sqrt(1.0 - share)
    half_height, half_width = int(height * side) // 2, int(width * side) // 2
    y, x = int(rng.integers(height)), int(rng.integers(width))
    top, left = max(y - half_height, 0), max(x - half_width, 0)
    return Box(top, left, min(y + half_height, height) - top, min(x + half_width, width) - left)


def draw_mixes(mix: Mix, seed: int, step: int, groups: np.ndarray, height: int, width: int
               ) -> list[MixDraw]:
    """Draw how each of B images of height × width pixels is mixed: one draw for each group.

    groups: (B,), the group of each image in step number `step`.
    """
    drawn = {group: mix.draw(keyed_generator(seed, Stream.MIX, step, group), height, width)
             for group in set(groups.tolist())}
    return [drawn[group] for group in groups.tolist()]


class Mixing(NamedTuple):
    """How the B images of a batch are mixed: arrays, which `upload` makes tensors on the device."""

    weights: np.ndarray         # (B, 2) float32: λ and 1 − λ, for targets
    image_weights: np.ndarray   # (B, 2) float32: the same for images, but 1 and 0 where a box is cut
    boxes: np.ndarray           # (B, 4) int64: top, left, height, width; 0 where no box is cut
    blended: bool               # whether any image is mixed by its weights
    boxed: bool                 # whether any image has a box


def mixing_of(draws: Sequence[MixDraw]) -> Mixing:
    """How images are mixed whose draws are `draws`, one per image."""
    shares, boxes = np.array([draw.share for draw in draws]), np.array([draw.box for draw in draws])
    boxed = boxes[:, 2:].all(1)
    # With weights 1 and 0, an image that has a box stays as it is, bit for bit.
    own = np.where(boxed, 1.0, shares)
    weights, image_weights = (np.stack([share, 1.0 - share], 1).astype(np.float32)
                              for share in (shares, own))
    return Mixing(weights, image_weights, boxes, bool((own != 1.0).any()), bool(boxed.any()))


def smooth_one_hot(labels: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Turn labels (B,) into smoothed targets (B, K) float32 (arXiv 1512.00567, section 7).

    With s = smoothing, every class gets s/K and the label 1 − s in addition.
    """
    off = np.float32(smoothing / num_classes)
    on = np.float32(1.0 - smoothing) + off
    targets = torch.full((len(labels), num_classes), float(off), device=labels.device)
    return targets.scatter_(1, labels[:, None], float(on))


def mix_images(images: Tensor, mixing: Mixing, *, at_once: bool) -> Tensor:
    """Mix images (B, 3, H, W) with their partners; uint8 images are rounded to the nearest level.

    mixing: its arrays are tensors on the images' device. at_once: cut all boxes at once, which takes
    fewest launches; else one after the other, for which they must be on the host.
    """
    mixed = blend(images, mixing.image_weights) if mixing.blended else images
    if mixed.dtype != images.dtype:
        mixed = mixed.round_().to(images.dtype)
    if mixing.boxed and at_once:
        return torch.where(_inside(mixing.boxes, images), images.flip(0), mixed)
    if mixing.boxed:
        mixed = images.clone() if mixed is images else mixed
        for row, (top, left, height, width) in enumerate(mixing.boxes.tolist()):
            inside = (slice(None), slice(top, top + height), slice(left, left + width))
            mixed[row][inside] = images[-1 - row][inside]
    return mixed


def blend(batch: Tensor, weights: Tensor) -> Tensor:
    """λ · batch + (1 − λ) · flipped batch, (B, …) float32; weights: (B, 2), λ and 1 − λ."""
    own, partners = (part.view(-1, *[1] * (batch.ndim - 1)) for part in weights.unbind(1))
    return (batch * own).add_(batch.flip(0) * partners)


def _inside(boxes: Tensor, images: Tensor) -> Tensor:
    """Whether each pixel lies in the box of its image: (B, 1, H, W) bool. boxes: (B, 4)."""
    top, left, height, width = boxes[:, :, None].unbind(1)               # (B, 1)
    rows = torch.arange(images.shape[2], device=images.device) - top     # (B, H)
    columns = torch.arange(images.shape[3], device=images.device) - left     # (B, W)
    return (((rows >= 0) & (rows < height))[:, None, :, None]
            & ((columns >= 0) & (columns < width))[:, None, None, :])
