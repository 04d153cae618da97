"""Mixing matrices read off a forward pass, and the target mass."""

from __future__ import annotations

import pytest
import torch

import vitinit
from vitinit.filters import convolution_matrix, impulse_kernel
from vitinit.mixing import mean_kernel, mixing_matrices, target_mass

GRID = (3, 5)


@pytest.fixture
def model() -> torch.nn.Module:
    model = vitinit.build_model("vit_tiny", num_classes=7, image_size=(12, 20), patch_size=4,
                                embed_dim=22, depth=3, num_heads=2).double()
    vitinit.init_weights(model, "torch", generator=torch.Generator().manual_seed(0))
    return model


def drawn_images() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 3, 12, 20, generator=generator, dtype=torch.float64)


def test_they_are_the_matrices_that_the_blocks_apply(model):
    found = mixing_matrices(model, drawn_images())
    assert list(found) == [0, 1, 2] and found[1].shape == (5, 2, 16, 16)
    x = model.embed(drawn_images())
    for index, block in enumerate(model.blocks):
        normalised = block.norm1(x)
        values = block.attn.queries_keys_values(normalised)[2]
        mixed = (found[index] @ values).transpose(1, 2).flatten(2)       # (B, N, C)
        torch.testing.assert_close(block.attn.proj(mixed), block.attn(normalised))
        x = block(x)


def test_chosen_blocks_and_heads_are_parts_of_all(model):
    everything = mixing_matrices(model, drawn_images())
    some = mixing_matrices(model, drawn_images(), blocks=[2], heads=[1])
    assert list(some) == [2]
    assert torch.equal(some[2], everything[2][:, [1]])


def test_reading_leaves_the_model_as_it_was(model):
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    mixing_matrices(model, drawn_images())
    assert model.training and not model.blocks[0].attn._forward_pre_hooks
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_block_that_is_not_there_is_an_error(model):
    with pytest.raises(ValueError, match="block 3 is asked for, but the model has blocks 0…2"):
        mixing_matrices(model, drawn_images(), blocks=[3])


def test_the_mass_of_a_perfect_shift_is_one_and_of_uniform_attention_one_over_n():
    offsets = [(0, 1), (-1, 0)]
    shifts = torch.stack([convolution_matrix(impulse_kernel(o, 3), GRID) for o in offsets])
    rowless = shifts.sum(-1) == 0                    # rows off the grid: anything may stand there
    shifts[rowless] = 1.0 / 15
    assert target_mass(shifts, offsets, GRID).tolist() == [1.0, 1.0]
    uniform = torch.full((2, 15, 15), 1.0 / 15)
    assert target_mass(uniform, offsets, GRID).tolist() == pytest.approx([1 / 15, 1 / 15])


def test_the_mass_is_counted_over_patch_tokens_alone():
    weights = torch.rand(4, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    weights = weights / weights.sum(-1, keepdim=True)
    expected = []
    for image in weights[:, 0]:
        for row in range(15):
            if row % 5 < 4:                          # the last column has no right neighbour
                expected.append(image[1 + row, 2 + row] / image[1 + row, 1:].sum())
    mass = target_mass(weights, [(0, 1)], GRID)
    assert mass.item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-5)


def test_one_offset_a_head_is_needed():
    with pytest.raises(ValueError, match="2 heads but 1 offsets"):
        target_mass(torch.ones(2, 15, 15), [(0, 0)], GRID)


def test_the_mean_kernel_of_a_convolution_matrix_is_its_kernel():
    kernel = torch.rand(3, 3, generator=torch.Generator().manual_seed(0)) + 0.1
    kernel = kernel / kernel.sum()
    matrix = convolution_matrix(kernel, (7, 5), circular=True)            # rows sum to one
    with_class_token = torch.nn.functional.pad(matrix, (1, 0, 1, 0), value=0.3)
    found = mean_kernel(with_class_token[None], (7, 5), radius=1)
    assert found.shape == (1, 3, 3)
    torch.testing.assert_close(found[0], kernel)
