"""Images for the inits that read some."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vitinit.data.augment import normalise
from vitinit.data.datasets import open_split


@pytest.fixture(scope="module")
def images() -> Tensor:
    """Of the embedded set, (61, 3, 32, 32), with as much noise as a photograph has."""
    source = open_split("shapes", "", "train", 10)
    pixels = torch.stack([source.image(index) for index in range(61)])
    noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(2))
    return normalise(pixels, (0.5,) * 3, (0.25,) * 3) + 0.1 * noise
