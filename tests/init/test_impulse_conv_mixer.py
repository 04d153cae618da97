"""Impulse initialisation of ConvMixer: depthwise kernels with a single entry."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vitinit
from vitinit.filters import ordered_offsets

CHANNELS = 31
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def initialised(name: str = "impulse", size: int = 3, seed: int = 0, *, num_filters: int = 0,
                **options) -> nn.Module:
    model = vitinit.build_model("convmixer_256_8", num_classes=7, image_size=(20, 28), patch_size=4,
                                embed_dim=CHANNELS, depth=2, kernel_size=size,
                                num_filters=num_filters).double()
    vitinit.init_weights(model, name, generator=torch.Generator().manual_seed(seed), **options)
    return model


def kernels(model: nn.Module) -> list[Tensor]:
    return [model.depthwise(block).weight.detach()[:, 0] for block in model.blocks]


def moved(image: Tensor, offset: tuple[int, int]) -> Tensor:
    """y[p] = image[p + offset], zero off the grid, pixel by pixel. image: (H, W)."""
    height, width = image.shape
    result = torch.zeros_like(image)
    for row in range(height):
        for column in range(width):
            y, x = row + offset[0], column + offset[1]
            if 0 <= y < height and 0 <= x < width:
                result[row, column] = image[y, x]
    return result


@pytest.mark.parametrize("size, kernel_size", [(3, 0), (4, 0), (5, 3), (7, 2)])
def test_each_channel_reads_one_neighbour_in_the_order_of_the_offsets(size, kernel_size):
    """Even kernels, too: a smaller kernel's offsets are the same cells in the larger one."""
    model = initialised(size=size, kernel_size=kernel_size)
    offsets = ordered_offsets(kernel_size or size)
    image = torch.randn(5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for block in model.blocks:                       # alike in every block
        found = model.depthwise(block)(image.expand(1, CHANNELS, -1, -1))[0].detach()
        for channel in range(CHANNELS):
            expected = moved(image, offsets[channel % len(offsets)])
            torch.testing.assert_close(found[channel], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("gain", [3**-0.5, -2.0])
def test_the_gain_is_the_one_entry_of_each_kernel(gain):
    for kernel in kernels(initialised(size=5, gain=gain)):
        assert ((kernel != 0).sum((1, 2)) == 1).all()
        torch.testing.assert_close(kernel.sum((1, 2)), torch.full((CHANNELS,), gain).double(),
                                   rtol=1e-6, atol=0)


def test_shared_filters_are_as_many_offsets_in_order():
    for kernel, offset in zip(kernels(initialised(num_filters=5))[1], ordered_offsets(3),
                              strict=False):
        assert kernel[1 + offset[0], 1 + offset[1]] == 1.0
