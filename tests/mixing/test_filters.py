"""Kernels and their matrices, against torch's own conv2d in float64."""

import pytest
import torch
import torch.nn.functional as F

from vitinit.mixing.filters import (
    convolution_matrix,
    impulse_kernel,
    kernel_offsets,
    neighbours,
    ordered_offsets,
    shift_matrix,
)

GRID = (5, 7)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_a_convolution_matrix_is_conv2d():
    generator = torch.Generator().manual_seed(1)
    for shape in ((1, 1), (3, 5), (5, 3), (1, 7), (2, 3), (4, 1), (2, 2), (5, 5)):
        kernel = torch.randn(*shape, generator=generator, dtype=torch.float64)
        image = torch.randn(*GRID, generator=generator, dtype=torch.float64)
        before, after = zip(*(((size - 1) // 2, size // 2) for size in shape))
        wrapped = F.pad(image[None, None], (before[1], after[1], before[0], after[0]), "circular")
        for circular, expected in (
            (False, F.conv2d(image[None, None], kernel[None, None], padding="same")),
            (True, F.conv2d(wrapped, kernel[None, None])),
        ):
            matrix = convolution_matrix(kernel, GRID, circular=circular)
            torch.testing.assert_close(
                (matrix @ image.flatten()).view(GRID), expected[0, 0], rtol=0, atol=1e-12
            )


def test_an_impulse_reads_the_neighbour_at_its_offset():
    image = torch.arange(35.0).view(GRID)
    for offset in ((0, 0), (-1, 0), (0, 1), (1, -1), (2, -2)):
        matrix = convolution_matrix(impulse_kernel(offset, 5), GRID)
        assert torch.equal(shift_matrix(offset, GRID), matrix)
        assert torch.equal(matrix.sum(1).nonzero()[:, 0], neighbours(offset, GRID)[0])
        shifted = (matrix @ image.flatten()).view(GRID)
        row, column = 2, 3  # every offset stays on the grid from here
        assert shifted[row, column] == image[row + offset[0], column + offset[1]]


def test_the_released_order_is_centre_up_right_left_down_corners_and_others_go_by_distance():
    assert ordered_offsets(3) == [
        (0, 0),
        (-1, 0),
        (0, 1),
        (0, -1),
        (1, 0),
        (-1, -1),
        (-1, 1),
        (1, -1),
        (1, 1),
    ]
    for kernel_size in (1, 2, 4, 5):
        offsets = ordered_offsets(kernel_size)
        keys = [(row**2 + column**2, row, column) for row, column in offsets]
        assert keys == sorted(keys)
        assert sorted(offsets) == sorted(kernel_offsets(kernel_size))
