"""Impulse initialisation of ConvMixer: depthwise kernels with a single entry."""

from __future__ import annotations

import pytest
import torch

import vitinit
from vitinit.filters import convolution_matrix, ordered_offsets, shift_matrix


@pytest.mark.parametrize("size, kernel_size, num_filters, gain", [
    (3, 0, 0, 3**-0.5), (4, 0, 0, 1.0), (5, 3, 7, -2.0), (7, 2, 0, 1.0)])
def test_each_filter_reads_one_neighbour_in_the_order_of_the_offsets(size, kernel_size, num_filters,
                                                                     gain):
    """Even kernels, too: a smaller kernel's offsets are the same cells in the larger one."""
    model = vitinit.build_model("convmixer_256_8", num_classes=7, image_size=(20, 28), patch_size=4,
                                embed_dim=31, depth=2, kernel_size=size, num_filters=num_filters)
    vitinit.init_weights(model, "impulse", generator=torch.Generator().manual_seed(0), gain=gain,
                         kernel_size=kernel_size)
    offsets = ordered_offsets(kernel_size or size)
    for block in model.blocks:                       # alike in every block
        kernels = model.depthwise(block).weight.detach()[:, 0]
        assert len(kernels) == (num_filters or 31)
        for number, kernel in enumerate(kernels):
            wanted = gain * shift_matrix(offsets[number % len(offsets)], (5, 7))
            torch.testing.assert_close(convolution_matrix(kernel, (5, 7)), wanted)
