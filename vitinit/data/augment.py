"""Pure batched operations on (B, 3, H, W), on whatever device the batch is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def normalise(images: Tensor, mean: Sequence[float] | Tensor,
              std: Sequence[float] | Tensor) -> Tensor:
    """(B, 3, H, W) uint8 → float32: (value / 255 - mean) / std by channel.

    mean, std: three numbers, or tensors that are on the images' device already.
    """
    mean, std = (torch.as_tensor(values, device=images.device).view(3, 1, 1)
                 for values in (mean, std))
    return (images.float() / 255.0 - mean) / std
