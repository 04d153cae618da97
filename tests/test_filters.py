"""Kernels and their matrices, against torch's own conv2d in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vitinit.filters import (convolution_matrix, impulse_kernel, kernel_offsets, ordered_offsets,
                             shift_matrix, shift_targets)

GRID = (5, 7)


def conv2d_same(image: torch.Tensor, kernel: torch.Tensor, circular: bool) -> torch.Tensor:
    """torch's conv2d with padding "same": left pad (f - 1) // 2, right pad the rest."""
    size = len(kernel)
    left, right = (size - 1) // 2, size // 2
    padded = F.pad(image[None, None], (left, right, left, right),
                   mode="circular" if circular else "constant")
    return F.conv2d(padded, kernel[None, None])[0, 0]


@pytest.mark.parametrize("kernel_size, circular", [(1, True), (2, False), (3, True), (4, True),
                                                   (5, False)])
def test_convolution_matrix_is_conv2d(kernel_size, circular):
    generator = torch.Generator().manual_seed(kernel_size)
    kernel = torch.randn(kernel_size, kernel_size, generator=generator, dtype=torch.float64)
    image = torch.randn(*GRID, generator=generator, dtype=torch.float64)
    matrix = convolution_matrix(kernel, GRID, circular=circular)
    expected = conv2d_same(image, kernel, circular)
    torch.testing.assert_close((matrix @ image.flatten()).view(GRID), expected,
                               rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_a_kernel_need_not_be_square_and_is_padded_as_torch_pads_same():
    generator = torch.Generator().manual_seed(1)
    for shape in ((3, 5), (5, 3), (1, 7), (2, 3), (4, 1), (2, 2), (5, 5)):
        kernel = torch.randn(*shape, generator=generator, dtype=torch.float64)
        image = torch.randn(*GRID, generator=generator, dtype=torch.float64)
        expected = F.conv2d(image[None, None], kernel[None, None], padding="same")[0, 0]
        matrix = convolution_matrix(kernel, GRID)
        torch.testing.assert_close((matrix @ image.flatten()).view(GRID), expected, rtol=0, atol=1e-12)
    for shape in ((9,), (1, 3, 3)):
        with pytest.raises(ValueError, match=r"kernel has the shape \(.*\), expected \(down, right\)"):
            convolution_matrix(torch.ones(shape), GRID)


def test_an_impulse_reads_the_neighbour_at_its_offset():
    image = torch.arange(35.0).view(GRID)
    for offset in ((0, 0), (-1, 0), (0, 1), (1, -1), (2, -2)):
        matrix = convolution_matrix(impulse_kernel(offset, 5), GRID)
        assert torch.equal(shift_matrix(offset, GRID), matrix)
        assert ((matrix.sum(1) == 0) == (shift_targets(offset, GRID) < 0)).all()
        shifted = (matrix @ image.flatten()).view(GRID)
        row, column = 2, 3                           # every offset stays on the grid from here
        assert shifted[row, column] == image[row + offset[0], column + offset[1]]


def test_the_released_order_is_centre_up_right_left_down_corners():
    assert ordered_offsets(3) == [(0, 0), (-1, 0), (0, 1), (0, -1), (1, 0),
                                  (-1, -1), (-1, 1), (1, -1), (1, 1)]


def test_other_orders_go_by_distance_then_row_major():
    for kernel_size in (1, 2, 4, 5):
        offsets = ordered_offsets(kernel_size)
        keys = [(row**2 + column**2, row, column) for row, column in offsets]
        assert keys == sorted(keys)
        assert sorted(offsets) == sorted(kernel_offsets(kernel_size))


def test_an_offset_that_the_kernel_lacks_is_an_error():
    with pytest.raises(ValueError, match=r"3×3 kernel has no offset \(0, 2\).*-1…1"):
        impulse_kernel((0, 2), 3)
