"""Swin against torchvision's, and its windows against attention written out token by token."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from redrawn import assert_same_gradients, drawn, redraw
from torchvision.models import SwinTransformer as TorchvisionSwin

import vitinit
from vitinit.models.convert import native_tensors
from vitinit.models.swin import PatchMerging, SwinBlock, WindowAttention


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
    assert_same_gradients(ours, gradients)


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
