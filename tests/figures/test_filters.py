"""Filters are shown as the model applies them, by the offset from the query to the key."""

from __future__ import annotations

import pytest
import torch

import vitinit
from vitinit.figures import kernels
from vitinit.filters import convolution_matrix
from vitinit.mixing import mixing_matrices


def built(name: str, init: str, **sizes):
    model = vitinit.build_model(name, num_classes=3, image_size=(12, 20), **sizes)
    vitinit.init_weights(model, init, generator=torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize("sizes", [{}, dict(num_filters=3)])
def test_a_conv_mixers_filters_are_those_that_it_mixes_with(sizes):
    model = built("convmixer_256_8", "default", embed_dim=7, depth=2, kernel_size=3, **sizes)
    columns = [5, 0, 4]
    matrices = mixing_matrices(model, torch.zeros(1, 3, 12, 20), blocks=[1], heads=columns)[1][0]
    for kernel, matrix in zip(kernels.held_kernels(model, 1, columns), matrices, strict=True):
        torch.testing.assert_close(convolution_matrix(kernel, (6, 10)), matrix)


def test_a_swins_bias_by_offset_is_that_of_every_pair_of_tokens():
    model = built("swin_tiny", "default", patch_size=2, embed_dim=9, depths=(1,), num_heads=(3,),
                  window_size=(3, 5))
    attention = model.layers[0].blocks[0].attn
    kernel, bias = kernels.held_kernels(model, 0, [1])[0], attention.relative_bias()[1]
    for query in range(15):
        for key in range(15):
            down, right = key // 5 - query // 5, key % 5 - query % 5
            assert kernel[2 + down, 4 + right] == bias[query, key]


@pytest.mark.parametrize("recipe, columns", [("cifar10_convmixer", [0, 9]),
                                             ("cifar10_swin_tiny", [2])])
def test_filters_are_drawn(draw, recipe, columns):
    draw("filters", "--recipe", recipe, "--init", "default", "impulse", "--blocks", 1, "--columns",
         *columns)
