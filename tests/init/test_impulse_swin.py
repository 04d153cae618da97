"""Impulse initialisation of Swin: a β in the relative position bias, through the real attention."""

from functools import partial

import pytest
import torch
from small_models import drawn, written
from torch import Tensor, nn

import vitinit
from vitinit.mixing import mixing_matrices
from vitinit.mixing.filters import ordered_offsets

initialised = partial(written, "impulse")
# Stages of 12×20 and 6×10 tokens in windows of 3×5; the second block of each is shifted by (1, 2).
SIZES = dict(
    image_size=(24, 40),
    patch_size=2,
    embed_dim=22,
    depths=(2, 2),
    num_heads=(2, 11),
    window_size=(3, 5),
)


def built(**sizes) -> nn.Module:
    return vitinit.build_model("swin_tiny", num_classes=7, **SIZES | sizes).double()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [block for stage in model.layers for block in stage.blocks]


@torch.no_grad()
def without_content(model: nn.Module) -> nn.Module:
    """Set Q and K to zero, so that the logits are the bias and the shift's mask."""
    for block in blocks_of(model):
        dim = block.attn.proj.in_features
        block.attn.qkv.weight[: 2 * dim] = 0.0
        block.attn.qkv.bias[: 2 * dim] = 0.0
    return model


def slow_map(block: nn.Module, offset: tuple[int, int], mass: float) -> Tensor:
    """(N, N): the softmax over what each token sees on the unshifted map, token by token. Row r
    sees row s if ⌊(r − shift) / w⌋ is the same for both; it is −1 for the rows that wrap around."""
    (height, width), tokens = block.grid, block.window[0] * block.window[1]
    strength = mass * (tokens - 1) / (1.0 - mass)  # e^β

    def window_of(token: int) -> tuple[int, int]:
        cell = token // width, token % width
        return tuple((x - s) // w for x, s, w in zip(cell, block.shift, block.window))

    matrix = torch.zeros(height * width, height * width, dtype=torch.float64)
    for query in range(height * width):
        for key in range(height * width):
            if window_of(key) == window_of(query):
                away = key // width - query // width, key % width - query % width
                matrix[query, key] = strength if away == offset else 1.0
    return matrix / matrix.sum(1, keepdim=True)


def test_shifted_and_masked_windows_attend_to_the_neighbour_on_the_unshifted_map(held_against):
    """Exactly the β-softmax over the visible tokens; if they are fewer, the mass is larger."""
    model = without_content(initialised(built(), target_mass=0.8))
    found = mixing_matrices(model, drawn(1, 3, 24, 40))
    for index, block in enumerate(blocks_of(model)):
        assert block.shift == ((1, 2) if index % 2 else (0, 0))
        for head in range(block.attn.num_heads):
            offset = ordered_offsets(3)[head % 9]
            expected = slow_map(block, offset, 0.8)
            torch.testing.assert_close(found[index][0, head], expected, rtol=0, atol=1e-7)
            held_against(found[index][0, head], expected)
            mass = expected.max(1).values
            mass = mass[mass > 0.75]  # of the rows that have a target in sight
            assert mass.min().item() == pytest.approx(0.8)
            assert (mass.max() > 0.9) == (index % 2 == 1)


def test_the_smallest_window_of_all_stages_counts_and_may_be_one_token():
    model = built(image_size=16, depths=(1, 1, 1), num_heads=(2, 2, 2), window_size=4)
    initialised(model, kernel_size=3)
    with pytest.raises(ValueError, match="on the 2×2 grid"):
        initialised(model, kernel_size=5)
    model = built(image_size=4, depths=(1, 1), num_heads=(2, 2), window_size=2)
    last = initialised(model, kernel_size=1).layers[-1].blocks[0].attn
    assert last.window == (1, 1) and not last.relative_position_bias_table.any()
