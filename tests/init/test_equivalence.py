"""One statement for all families: an impulse-initialised model mixes tokens as a convolution does.

The reference is torch's conv2d with an impulse kernel; nothing of `filters` is used here. Attention
can only come near a convolution, because its rows sum to one. How near is its *distance*: half the
sum of absolute differences along a row, which is 1 − mass on the target token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import vitinit
from vitinit.mixing import block_grids, mixing_matrices
from vitinit.models import SwinTransformer

# (down, right) in the released order, in which heads, blocks and channels take them.
OFFSETS = [(0, 0), (-1, 0), (0, 1), (0, -1), (1, 0), (-1, -1), (-1, 1), (1, -1), (1, 1)]


# ---------------------------------------------------------------------------------------------
# The reference
# ---------------------------------------------------------------------------------------------


def impulse(offset: tuple[int, int], size: int = 3) -> Tensor:
    kernel = torch.zeros(size, size, dtype=torch.float64)
    kernel[(size - 1) // 2 + offset[0], (size - 1) // 2 + offset[1]] = 1.0
    return kernel


def convolved(maps: Tensor, kernels: Tensor) -> Tensor:
    """Bias-free depthwise conv2d, padding "same". maps: (B, C, H, W); kernels: (C, f, f)."""
    size = kernels.shape[-1]
    before, after = (size - 1) // 2, size // 2
    padded = F.pad(maps, (before, after, before, after))
    return F.conv2d(padded, kernels[:, None].to(maps), groups=len(kernels))


def dense(offset: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """(N, N), the matrix of that impulse's conv2d: column j is its output for a one at token j."""
    cells = grid[0] * grid[1]
    one_hot = torch.eye(cells, dtype=torch.float64).view(cells, 1, *grid)
    return convolved(one_hot, impulse(offset)[None]).flatten(1).T


def visible_pairs(model: torch.nn.Module, block: int) -> Tensor:
    """(N, N), true where block `block` lets one token attend to another.

    In a Swin these tokens share a window and are on the same side of the map's edge: row r of a map
    that is rolled by s is in the window ⌊(r − s) / w⌋, which is −1 for the rows that wrap around.
    """
    height, width = block_grids(model)[block]
    rows, columns = torch.arange(height * width) // width, torch.arange(height * width) % width
    if not isinstance(model, SwinTransformer):
        return torch.ones(height * width, height * width, dtype=torch.bool)
    block = [block for stage in model.layers for block in stage.blocks][block]
    rows = (rows - block.shift[0]).div(block.window[0], rounding_mode="floor")
    columns = (columns - block.shift[1]).div(block.window[1], rounding_mode="floor")
    return (rows[:, None] == rows) & (columns[:, None] == columns)


# ---------------------------------------------------------------------------------------------
# The families
# ---------------------------------------------------------------------------------------------


class Case(NamedTuple):
    model: str
    image_size: tuple[int, int]
    sizes: dict[str, Any]
    options: dict[str, Any]
    offsets: list[list[tuple[int, int]]]             # by block and head or channel
    distance: float                                  # the largest of any row with a target
    pads_with_zeros: bool                            # rows without a target are zero
    init: str = "impulse"


CASES = {
    # The token MLP has one offset per block, the same for all channels.
    "mixer, wide": Case(
        "mixer_s16", (20, 28), dict(patch_size=4, embed_dim=142, depth=11), {},
        [[OFFSETS[block % 9]] * 3 for block in range(11)], 1e-10, True),
    # GELU′(x + 8) − 1 for the x that LayerNorm makes, of which some reach −4: at most 5e-4.
    "mixer, narrow": Case(
        "mixer_s16", (20, 28), dict(patch_size=4, embed_dim=74, depth=3), dict(linear_bias=8.0),
        [[OFFSETS[block]] * 3 for block in range(3)], 5e-4, True),
    "convmixer": Case(
        "convmixer_256_8", (20, 28), dict(patch_size=4, embed_dim=23, depth=2, kernel_size=3), {},
        [[OFFSETS[channel % 9] for channel in range(23)]] * 2, 1e-10, True),
    "convmixer, inside a larger kernel": Case(
        "convmixer_256_8", (20, 28), dict(patch_size=4, embed_dim=23, depth=2, kernel_size=5),
        dict(kernel_size=3), [[OFFSETS[channel % 9] for channel in range(23)]] * 2, 1e-10, True),
    # target_mass .9, give or take the logits Q Kᵀ of the base. Windows 3×5, every second shifted.
    "swin": Case(
        "swin_tiny", (24, 40), dict(patch_size=2, embed_dim=22, depths=(2, 2), num_heads=(2, 11),
                                    window_size=(3, 5)), {},
        [[OFFSETS[head % 9] for head in range(heads)] for heads in (2, 2, 11, 11)], 0.11, False),
    # 31 of 35 directions of the position embedding fit into a head. Deep in a real model, or with 64
    # channels per head on 196 tokens, the mass is far lower; see test_impulse.py.
    "vit": Case(
        "vit_tiny", (20, 28), dict(patch_size=4, embed_dim=341, depth=2, num_heads=11,
                                   pool="mean"), {},
        [[OFFSETS[head % 9] for head in range(11)]] * 2, 0.02, False),
    # Offsets that go on from block to block. A ViT's heads read 4 waves, not 31 directions, of the
    # position embedding, and have their mass in the last block as in the first.
    "vit, deep": Case(
        "vit_tiny", (20, 28), dict(patch_size=4, embed_dim=121, depth=5, num_heads=11,
                                   pool="mean"), dict(target_mass=(0.97, 0.97)),
        [[OFFSETS[(11 * block + head) % 9] for head in range(11)] for block in range(5)], 0.1,
        False, "deep_impulse"),
    # target_mass .9, whatever the patches are, where nothing but positions is looked at.
    **{f"simple vit, {reads}": Case(
        "simple_vit", (20, 28), dict(patch_size=4, embed_dim=132, depth=2, num_heads=11,
                                     reads=reads, input_pos_embed=False), {},
        [[OFFSETS[head % 9] for head in range(11)]] * 2, 0.1, False)
       for reads in ("position", "free")},
    # A patch in fifty parts: with one in ten the worst row has no more than .11 on its target.
    "simple vit, mixed": Case(
        "simple_vit", (20, 28), dict(patch_size=4, embed_dim=132, depth=2, num_heads=11,
                                     reads="mixed", alpha=0.02, input_pos_embed=False), {},
        [[OFFSETS[head % 9] for head in range(11)]] * 2, 0.2, False),
}


def initialised(case: Case) -> torch.nn.Module:
    model = vitinit.build_model(case.model, num_classes=7, image_size=case.image_size,
                                **case.sizes).double().eval()
    vitinit.init_weights(model, case.init, generator=torch.Generator().manual_seed(0),
                         **case.options)
    return model


def images_for(case: Case) -> Tensor:
    """Faint for the ViT, whose attention depends on the patches' content, too."""
    drawn = torch.randn(2, 3, *case.image_size, generator=torch.Generator().manual_seed(1),
                        dtype=torch.float64)
    return 0.1 * drawn if case.model == "vit_tiny" else drawn


def distances(found: Tensor, expected: Tensor) -> Tensor:
    return (found - expected).abs().sum(-1) / 2


# ---------------------------------------------------------------------------------------------
# The matrices
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_impulse_model_mixes_real_input_as_conv2d_with_these_kernels_does(case):
    model, heads = initialised(case), len(case.offsets[0])
    channels = list(range(heads)) if case.model == "mixer_s16" else None
    found = mixing_matrices(model, images_for(case), heads=channels)
    assert list(found) == list(range(len(case.offsets)))
    for block, matrices in found.items():
        expected = torch.stack([dense(offset, block_grids(model)[block])
                                for offset in case.offsets[block]])      # (h, N, N)
        assert matrices.shape[1:] == expected.shape
        off_grid = expected.sum(-1) == 0                                 # (h, N)
        # A row counts if all that the kernel reads is what the token may see.
        within = ~off_grid & (expected * ~visible_pairs(model, block) == 0).all(-1)
        assert within.any(-1).all()
        assert distances(matrices, expected)[:, within].max() <= case.distance
        if case.pads_with_zeros:
            assert (matrices[:, off_grid].abs() <= 1e-10).all()
