"""Images for the inits that read some."""

import numpy as np
import pytest
import torch
from torch import Tensor

from vitinit.data.augment import normalise
from vitinit.data.shapes import draw_image


@pytest.fixture(scope="module")
def images() -> Tensor:
    """Of the embedded set, (61, 3, 32, 32), with as much noise as a photograph has."""
    rng = np.random.default_rng(0)
    pixels = torch.from_numpy(np.stack([draw_image(rng)[0] for _ in range(61)]))
    noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(2))
    return normalise(pixels, (0.5,) * 3, (0.25,) * 3) + 0.1 * noise
