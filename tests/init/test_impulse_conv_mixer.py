"""Impulse initialisation of ConvMixer: depthwise kernels with a single entry."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
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


def test_random_offsets_are_drawn_for_each_channel_and_block():
    first, again, other = (kernels(initialised(seed=seed, offsets="random")) for seed in (0, 0, 1))
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0]) and not torch.equal(first[0], first[1])
    for kernel in first:
        assert ((kernel == 1).sum((1, 2)) == 1).all() and kernel.sum() == CHANNELS
        assert (kernel.sum(0) > 0).sum() > 5         # of the nine cells
        assert not torch.equal(kernel, kernels(initialised())[0])


@pytest.mark.parametrize("size, kernel_size, num_filters", [(3, 0, 0), (5, 2, 5)])
def test_rotating_offsets_go_on_in_the_next_block(size, kernel_size, num_filters):
    model = initialised(size=size, kernel_size=kernel_size, offsets="rotating",
                        num_filters=num_filters)
    offsets, filters = ordered_offsets(kernel_size or size), num_filters or CHANNELS
    image = torch.randn(5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for number, block in enumerate(model.blocks):
        found = model.depthwise(block)(image.expand(1, CHANNELS, -1, -1))[0].detach()
        for channel in range(CHANNELS):
            expected = moved(image, offsets[(number * filters + channel % filters) % len(offsets)])
            torch.testing.assert_close(found[channel], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("base", ["torch"])
def test_the_depthwise_layers_are_all_that_is_written(base):
    reference = initialised(base).state_dict()
    for key, value in initialised(base=base).state_dict().items():
        written = key.endswith(("0.fn.0.weight", "0.fn.0.bias"))
        assert torch.equal(value, reference[key]) != written, key
        if key.endswith("0.fn.0.bias"):
            assert (value == 0).all(), key


def test_a_block_is_the_shifts_activation_and_norm_beside_the_skip_connection():
    """x + BN(GELU(shifted x)): what the paper's block is with these kernels."""
    model = initialised().eval()
    x = torch.randn(3, CHANNELS, 5, 7, generator=torch.Generator().manual_seed(1),
                    dtype=torch.float64)
    shifted = torch.stack([torch.stack([moved(x[image, channel], ordered_offsets(3)[channel % 9])
                                        for channel in range(CHANNELS)]) for image in range(3)])
    expected = x + F.gelu(shifted) / (1.0 + 1e-5)**0.5                   # BatchNorm when untrained
    torch.testing.assert_close(model.blocks[1][0](x).detach(), expected)


@pytest.mark.parametrize("options, message", [
    (dict(kernel_size=-1), "kernel_size is -1, expected at most the model's 3"),
    (dict(kernel_size=4), "kernel_size is 4, expected at most the model's 3"),
    (dict(offsets="spiral"), "offsets is 'spiral'"), (dict(base="zeros"), "base is 'zeros'")])
def test_impossible_options_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        initialised(**options)
