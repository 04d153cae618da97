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


def initialised(case: Case, **options: Any) -> torch.nn.Module:
    model = vitinit.build_model(case.model, num_classes=7, image_size=case.image_size,
                                **case.sizes).double().eval()
    vitinit.init_weights(model, case.init, generator=torch.Generator().manual_seed(0),
                         **case.options | options)
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


# ---------------------------------------------------------------------------------------------
# Whole layers
# ---------------------------------------------------------------------------------------------


@torch.no_grad()
def pass_values_through(attention: torch.nn.Module) -> None:
    """Set V = proj = I and all biases to 0, so that the layer only mixes."""
    dim = attention.proj.in_features
    attention.qkv.weight[2 * dim:] = torch.eye(dim)
    attention.proj.weight.copy_(torch.eye(dim))
    attention.qkv.bias.zero_()
    attention.proj.bias.zero_()


def head_kernels(case: Case, block: int, dim: int) -> Tensor:
    """(C, 3, 3): the channels of a head share its kernel."""
    kernels = torch.stack([impulse(offset) for offset in case.offsets[block]])
    return kernels.repeat_interleave(dim // len(kernels), dim=0)


def as_map(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    return tokens.mT.unflatten(-1, grid)             # (B, N, C) → (B, C, H, W)


@torch.no_grad()
@pytest.mark.parametrize("name, block", [("vit", 1), ("vit, deep", 4)])
def test_a_vits_attention_with_v_and_proj_the_identity_is_a_depthwise_conv2d(name, block):
    """A row that is `distance` from an impulse errs by at most that times the channel's range."""
    case = CASES[name]
    model = initialised(case)
    x = model.embed(images_for(case))
    for earlier in model.blocks[:block]:
        x = earlier(x)
    z, attention = model.blocks[block].norm1(x), model.blocks[block].attn
    pass_values_through(attention)
    kernels = head_kernels(case, block, case.sizes["embed_dim"])
    expected = convolved(as_map(z, model.grid), kernels)
    on_grid = convolved(torch.ones_like(expected), kernels) == 1
    error = (as_map(attention(z), model.grid) - expected).abs()
    span = (z.amax(1) - z.amin(1))[:, :, None, None]                     # (B, C, 1, 1)
    assert (error <= case.distance * span)[on_grid].all()                # channels may be constant
    # And the input is not small: a LayerNorm makes it 1, but that of deep_impulse keeps faint images so.
    assert z.std() > (0.9 if case.init == "impulse" else 0.25)


@torch.no_grad()
@pytest.mark.parametrize("name, values", [("simple vit, position", True), ("simple vit, free", False)])
def test_a_simple_vits_attention_with_v_and_proj_the_identity_is_a_depthwise_conv2d(name, values):
    """For any z, as the queries hardly depend on it."""
    case = CASES[name]
    model = initialised(case._replace(sizes=case.sizes | dict(values=values)))
    kernels = head_kernels(case, 0, 132)
    z = torch.randn(2, 35, 132, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = convolved(as_map(z, model.grid), kernels)
    on_grid = convolved(torch.ones_like(expected), kernels) == 1
    span = (z.amax(1) - z.amin(1))[:, :, None, None]                     # (B, C, 1, 1)
    for attention in (block.attn for block in model.blocks):
        attention.proj.weight.copy_(torch.eye(132))
        if values:
            attention.value.weight.copy_(torch.eye(132))
        error = (as_map(attention(z, model.pos_embed), model.grid) - expected).abs()
        assert (error / span)[on_grid].max() <= case.distance


@torch.no_grad()
@pytest.mark.parametrize("block", [0, 3])
def test_a_swins_attention_with_v_and_proj_the_identity_is_a_depthwise_conv2d(block):
    case = CASES["swin"]
    model = initialised(case)
    layer = [layer for stage in model.layers for layer in stage.blocks][block]
    dim, grid = layer.norm1.normalized_shape[0], layer.grid
    pass_values_through(layer.attn)
    z = torch.randn(2, *grid, dim, generator=torch.Generator().manual_seed(2),
                    dtype=torch.float64)
    kernels, maps = head_kernels(case, block, dim), z.permute(0, 3, 1, 2)
    expected = convolved(maps, kernels)
    error = (layer.mix_windows(z).permute(0, 3, 1, 2) - expected).abs()
    seen = torch.stack([(dense(offset, grid) * visible_pairs(model, block)).sum(-1) == 1
                        for offset in case.offsets[block]])              # (h, N)
    seen = seen.repeat_interleave(dim // len(seen), dim=0).view(1, dim, *grid).expand_as(error)
    span = (maps.amax((2, 3)) - maps.amin((2, 3)))[:, :, None, None]
    assert (error / span)[seen].max() <= case.distance
    assert (error / span)[~seen].max() > 0.3         # across windows it is no convolution


@torch.no_grad()
@pytest.mark.parametrize("name, bias, tolerance", [
    ("mixer, wide", 4.0, 1e-10), ("mixer, narrow", 8.0, 4e-4)])
def test_a_mixers_token_mlp_is_one_conv2d_for_all_channels(name, bias, tolerance):
    """The worst of |GELU(x + b) − b − x| for |x| ≤ 4.25 is .170 at b = 4 and 3.3e-4 at b = 8."""
    case = CASES[name]
    model = initialised(case, linear_bias=bias)
    z = torch.randn(3, 35, case.sizes["embed_dim"], generator=torch.Generator().manual_seed(2),
                    dtype=torch.float64)
    for block, (offset, *_) in zip(model.blocks, case.offsets):
        expected = convolved(as_map(z, model.grid), impulse(offset).expand(z.shape[-1], -1, -1))
        found = as_map(block.token_mixing(z), model.grid)
        assert (found - expected).abs().max() <= tolerance


@torch.no_grad()
@pytest.mark.parametrize("name", ["convmixer", "convmixer, inside a larger kernel"])
def test_a_convmixers_depthwise_layer_is_that_conv2d_exactly(name):
    case = CASES[name]
    model = initialised(case)
    z = torch.randn(3, 23, *model.grid, generator=torch.Generator().manual_seed(2),
                    dtype=torch.float64)
    for block, offsets in zip(model.blocks, case.offsets):
        kernels = torch.stack([impulse(offset) for offset in offsets])
        torch.testing.assert_close(model.depthwise(block)(z), convolved(z, kernels),
                                   rtol=0, atol=1e-12)
