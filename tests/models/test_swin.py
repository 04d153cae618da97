"""Swin against torchvision's, and its windows against attention written out token by token."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torchvision.models import SwinTransformer as TorchvisionSwin

import vitinit
from vitinit.models.convert import native_tensors
from vitinit.models.swin import PatchMerging, SwinBlock, WindowAttention

SMALL = dict(num_classes=5, image_size=(12, 24), patch_size=(2, 3), embed_dim=6, depths=(2, 3),
             num_heads=(3, 2), window_size=(3, 2))    # grids 6×8 and 3×4: shifts (1, 1) and (0, 1)


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def redraw(model: torch.nn.Module) -> torch.nn.Module:
    """New values for every parameter: a table that starts at zero would hide any error in it."""
    generator = torch.Generator().manual_seed(0)
    model.double()
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(values * 0.3 + (parameter.ndim == 1) * 0.5)
    return model


# The whole model --------------------------------------------------------------------------------


@pytest.mark.parametrize("image_size, patch, window, depths", [
    ((24, 60), (2, 3), (3, 5), (2, 3, 2)),   # grids 12×20, 6×10 and 3×5: shifts, and then none
    ((12, 48), (2, 2), (3, 3), (2, 2)),      # grids 6×24 and 3×12: at last one side alone shifts
    ((24, 24), (3, 1), (4, 2), (3, 2)),      # grids 8×24 and 4×12: windows of even sides
    ((20, 20), (4, 4), (5, 5), (2,)),        # one window, and no merge
])
def test_outputs_and_gradients_equal_torchvisions(image_size, patch, window, depths):
    heads = (3, 2, 4)[:len(depths)]
    theirs = redraw(TorchvisionSwin(
        patch_size=list(patch), embed_dim=6, depths=list(depths), num_heads=list(heads),
        window_size=list(window), stochastic_depth_prob=0.0, num_classes=11))
    ours = vitinit.build_model("swin_tiny", num_classes=11, image_size=image_size, embed_dim=6,
                               patch_size=patch, depths=depths, num_heads=heads,
                               window_size=window).double()
    ours.load_state_dict(native_tensors(theirs.state_dict()))
    images = drawn(2, 3, *image_size)
    logits, expected = ours(images), theirs(images)
    assert logits.std() > 0.1                        # not a comparison of zeros
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
    logits.square().sum().backward()
    expected.square().sum().backward()
    gradients = native_tensors({name: p.grad for name, p in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-9)


def swin_keys(depths: tuple[int, ...]) -> set[str]:
    keys = {f"{layer}.{part}" for part in ("weight", "bias") for layer in
            ("patch_embed.proj", "patch_embed.norm", "norm", "head.fc")}
    for stage, depth in enumerate(depths):
        if stage > 0:
            keys |= {f"layers.{stage}.downsample.{name}"
                     for name in ("norm.weight", "norm.bias", "reduction.weight")}
        for block in range(depth):
            prefix = f"layers.{stage}.blocks.{block}"
            keys |= {f"{prefix}.{layer}.{part}" for part in ("weight", "bias") for layer in
                     ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
            keys.add(f"{prefix}.attn.relative_position_bias_table")
    return keys


@pytest.mark.parametrize("name, parameters, keys, depths, width, heads", [
    ("swin_tiny", 28_288_354, 173, (2, 2, 6, 2), 96, (3, 6, 12, 24)),
    ("swin_small", 49_606_258, 329, (2, 2, 18, 2), 96, (3, 6, 12, 24)),
    ("swin_base", 87_768_224, 329, (2, 2, 18, 2), 128, (4, 8, 16, 32))])
def test_sizes_and_names_are_the_published_ones(name, parameters, keys, depths, width, heads):
    with torch.device("meta"):
        model = vitinit.build_model(name, num_classes=1000, image_size=224)
    state = model.state_dict()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(state) == keys and state.keys() == swin_keys(depths)
    assert state["patch_embed.proj.weight"].shape == (width, 3, 4, 4)
    assert state["head.fc.weight"].shape == (1000, 8 * width)
    for stage, count in enumerate(heads):
        prefix, dim = f"layers.{stage}", width * 2**stage
        table = state[f"{prefix}.blocks.1.attn.relative_position_bias_table"]
        assert table.shape == (169, count)
        assert state[f"{prefix}.blocks.0.attn.qkv.weight"].shape == (3 * dim, dim)
        if stage > 0:
            assert state[f"{prefix}.downsample.reduction.weight"].shape == (dim, 2 * dim)
        shifts = [block.shift for block in model.layers[stage].blocks]
        assert shifts == [(0, 0), (3, 3) if stage < 3 else (0, 0)] * (depths[stage] // 2)


def test_masks_and_indices_are_in_the_model_but_not_in_its_state():
    model = vitinit.build_model("swin_tiny", **SMALL)
    buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    assert buffers == {"mask", "relative_position_index"}
    assert model.state_dict().keys() == {name for name, _ in model.named_parameters()}


# Windows ----------------------------------------------------------------------------------------


def token_by_token(attn: WindowAttention, x: torch.Tensor, window: tuple[int, int],
                   shift: tuple[int, int]) -> torch.Tensor:
    """The output of a block's attention on one map (H, W, C), without ever cutting out windows.

    Windows begin at `shift` and follow one another both ways, cut off at the edges of the map; a
    token attends to the tokens of its own window. Nothing here is cyclic.
    """
    height, width = window
    cells = list(product(range(x.shape[0]), range(x.shape[1])))
    qkv = F.linear(x.flatten(0, 1), attn.qkv.weight, attn.qkv.bias)
    q, k, v = qkv.unflatten(1, (3, attn.num_heads, -1)).unbind(1)        # each (N, h, d)
    tokens = []
    for query, (row, column) in enumerate(cells):
        seen = [key for key, (r, c) in enumerate(cells)
                if (r - shift[0]) // height == (row - shift[0]) // height
                and (c - shift[1]) // width == (column - shift[1]) // width]
        entries = [(row - cells[key][0] + height - 1) * (2 * width - 1)
                   + column - cells[key][1] + width - 1 for key in seen]
        logits = torch.einsum("hd,khd->hk", q[query], k[seen]) / q.shape[-1] ** 0.5
        weights = (logits + attn.relative_position_bias_table[entries].T).softmax(dim=-1)
        tokens.append(torch.einsum("hk,khd->hd", weights, v[seen]).flatten())
    output = F.linear(torch.stack(tokens), attn.proj.weight, attn.proj.bias)
    return output.unflatten(0, x.shape[:2])


@pytest.mark.parametrize("grid, window, shifted, shift", [
    ((6, 10), (3, 5), False, (0, 0)),
    ((6, 10), (3, 5), True, (1, 2)),
    ((9, 4), (3, 2), True, (1, 1)),
    ((8, 4), (4, 2), True, (2, 1)),
    ((3, 10), (3, 5), True, (0, 2)),         # the window is the grid on one side
    ((9, 5), (3, 5), True, (1, 0)),
    ((3, 5), (3, 5), True, (0, 0)),
    ((5, 7), (1, 7), True, (0, 0)),
])
def test_windows_are_masked_attention_on_the_map(grid, window, shifted, shift):
    block = redraw(SwinBlock(6, grid=grid, num_heads=2, window=window, shifted=shifted,
                             mlp_ratio=2.0, qkv_bias=True))
    assert block.shift == shift
    x = drawn(3, *grid, 6)
    expected = torch.stack([token_by_token(block.attn, image, window, shift) for image in x])
    torch.testing.assert_close(block.mix_windows(x), expected, rtol=0, atol=1e-12)


def test_the_window_is_at_most_the_grid_and_does_not_shift_along_a_side_that_it_fills():
    model = vitinit.build_model("swin_tiny", num_classes=5, image_size=(28, 8), patch_size=2,
                                embed_dim=6, depths=(2, 2), num_heads=(3, 3), window_size=7)
    assert model.grid == (14, 4)
    seen = [(block.grid, block.window, block.shift, block.mask is None)
            for stage in model.layers for block in stage.blocks]
    assert seen == [((14, 4), (7, 4), (0, 0), True), ((14, 4), (7, 4), (3, 0), False),
                    ((7, 2), (7, 2), (0, 0), True), ((7, 2), (7, 2), (0, 0), True)]
    assert model.layers[0].blocks[1].attn.relative_position_bias_table.shape == (13 * 7, 3)


def test_a_map_is_merged_upper_left_lower_left_upper_right_lower_right():
    merge = redraw(PatchMerging(3))
    x = drawn(2, 4, 10, 3)
    y = merge(x)
    assert y.shape == (2, 2, 5, 6)
    for row, column in product(range(2), range(5)):
        r, c = 2 * row, 2 * column
        four = torch.cat([x[:, r, c], x[:, r + 1, c], x[:, r, c + 1], x[:, r + 1, c + 1]], dim=1)
        normed = F.layer_norm(four, (12,), merge.norm.weight, merge.norm.bias, eps=1e-5)
        torch.testing.assert_close(y[:, row, column], normed @ merge.reduction.weight.T)
    assert merge.reduction.bias is None


# Gradients, stochastic depth, precision ---------------------------------------------------------


def test_drop_path_drops_branches_per_image_and_block():
    model = redraw(vitinit.build_model("swin_tiny", drop_path=0.4, **SMALL))
    assert model.drop_path_rates == pytest.approx([0, 0, .1, .1, .2, .2, .3, .3, .4, .4])
    images, ones = drawn(3, 3, 12, 24), torch.ones(10, 3)
    logits = model(images)
    torch.testing.assert_close(model(images, ones), logits)
    drop_path = ones.clone()
    drop_path[:, 1] = 0                              # image 1 passes the merge and nothing else
    x = model.layers[1].downsample(model.patch_embed(images))
    bare = model.head(model.norm(x).mean(dim=(1, 2)))
    expected = torch.stack([logits[0], bare[1], logits[2]])
    torch.testing.assert_close(model(images, drop_path), expected)
    drop_path = ones.clone()
    drop_path[7, 2] = 0                              # the MLP of block 3, of image 2
    x = model.patch_embed(images)
    for block in model.layers[0].blocks:
        x = block(x)
    first, second, third = model.layers[1].blocks
    x = first(model.layers[1].downsample(x))
    x = third(x + second.mix_windows(second.norm1(x)))
    expected = torch.stack([*logits[:2], model.head(model.norm(x).mean(dim=(1, 2)))[2]])
    torch.testing.assert_close(model(images, drop_path), expected)


# What does not fit ------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes, message", [
    (dict(image_size=(20, 24)),
     "stage 1 has a grid of 10×8 tokens, which windows of 3×2 do not tile; choose window_size or "
     "image_size so that they do"),
    (dict(image_size=(24, 36), window_size=(4, 3)),
     "stage 2 has a grid of 6×6 tokens, which windows of 4×3 do not tile; choose window_size or "
     "image_size so that they do"),
    (dict(image_size=(12, 27), window_size=3),
     "stage 1 has a grid of 6×9 tokens, which does not merge into 2×2; image_size must be a "
     "multiple of patch_size · 2"),
    (dict(depths=(2, 1, 1), num_heads=(3, 2, 2)),
     "stage 2 has a grid of 3×4 tokens, which does not merge into 2×2; image_size must be a "
     "multiple of patch_size · 4"),
    (dict(image_size=(13, 24)),
     "patches of 2×3 pixels do not tile an image of 13×24; image_size must be a multiple of "
     "patch_size on both sides"),
    (dict(depths=(2, 1, 1)), "depths has 3 stages and num_heads 2; expected as many"),
    (dict(num_heads=(3, 5)), "embed_dim 12 does not divide into num_heads 5"),
    (dict(depths=(2, 0)), "depths is (2, 0), expected more than 0"),
])
def test_sizes_that_do_not_fit_are_errors_of_one_line(sizes, message):
    with pytest.raises(ValueError) as error:
        vitinit.build_model("swin_tiny", **SMALL | sizes)
    assert str(error.value) == message
