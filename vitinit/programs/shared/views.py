"""Several views of an image at evaluation: shifted and mirrored, whose logits are averaged.

AIRBENCH is the set of six views of airbench (Keller Jordan, arXiv 2404.00498), on which published
results of CIFAR-10 rest: an image as it is and shifted by a pixel along the diagonal, both ways.
"""

from argparse import ArgumentTypeError
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Shift(NamedTuple):
    """A view: how many pixels lower and further right it begins, and the weight of its logits."""

    down: int
    right: int
    weight: float

    def __str__(self) -> str:
        return f"{self.down},{self.right}:{self.weight:g}"


AS_IT_IS = (Shift(0, 0, 1.0),)
AIRBENCH = (Shift(0, 0, 0.5), Shift(-1, -1, 0.25), Shift(1, 1, 0.25))


def parse_shifts(text: str) -> list[Shift]:
    """Parse an argument of --shifts: DOWN,RIGHT:WEIGHT for each view, with spaces between."""
    shifts = []
    for part in text.split():
        place, _, weight = part.partition(":")
        try:
            down, right = map(int, place.split(","))
            shifts.append(Shift(down, right, float(weight)))
        except ValueError:
            raise ArgumentTypeError(f"{part}: expected DOWN,RIGHT:WEIGHT, as -1,-1:0.25") from None
    total = sum(one.weight for one in shifts)
    if abs(total - 1.0) > 1e-6 or min(one.weight for one in shifts) <= 0.0:
        raise ArgumentTypeError(f"{text}: expected weights above 0 that add up to 1, not {total:g}")
    return shifts


def in_words(shifts: Sequence[Shift], mirrored: bool) -> str:
    """How an image is viewed, to stand beside each number; "" for once, as it is."""
    parts = []
    if tuple(shifts) != AS_IT_IS:
        parts.append(f"shifts {' '.join(map(str, shifts))}")
    if mirrored:
        parts.append("also mirrored")
    count = len(shifts) * (1 + mirrored)
    return f"{count} views each: {', '.join(parts)}" if parts else ""


def reach_of(shifts: Sequence[Shift]) -> int:
    """How many pixels beyond its edges an image needs for these shifts."""
    return max(max(abs(one.down), abs(one.right)) for one in shifts)


class Views(nn.Module):
    """A model whose logits are the weighted mean of those of several views of each image.

    Beyond its edges an image goes on as in a mirror. mirrored: each view counts half, and half
    mirrored from left to right. The weights of `shifts` are to add up to 1.
    """

    def __init__(self, model: nn.Module, shifts: Sequence[Shift], mirrored: bool) -> None:
        super().__init__()
        self.model, self.shifts, self.mirrored = model, shifts, mirrored

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W), normalised → logits (B, K)."""
        height, width = images.shape[2:]
        border = reach_of(self.shifts)
        padded = F.pad(images, (border,) * 4, mode="reflect")
        weighted = []
        for down, right, weight in self.shifts:
            top, left = border + down, border + right
            view = padded[..., top : top + height, left : left + width]
            logits = self.model(view)
            if self.mirrored:
                logits = 0.5 * (logits + self.model(view.flip(3)))
            weighted.append(weight * logits)
        return torch.stack(weighted).sum(0)
