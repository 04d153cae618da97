"""Mixing matrices read off a forward pass, family by family, and the target mass."""

import copy

import pytest
import torch
import torch.nn.functional as F
from small_models import seeded, written
from torch import nn

import vitinit
from vitinit import mixing
from vitinit.mixing import block_grids, mean_kernel, mixing_matrices, target_mass
from vitinit.mixing.filters import convolution_matrix, impulse_kernel

GRID = (3, 5)
FAMILIES = {  # name in the table, sizes for images of 12×20 pixels
    "vit": ("vit_tiny", dict(patch_size=4, embed_dim=22, depth=3, num_heads=2)),
    "simple_vit": ("simple_vit", dict(patch_size=4, embed_dim=28, depth=3, num_heads=2)),
    "swin": (
        "swin_tiny",
        dict(patch_size=1, embed_dim=22, depths=(2, 3), num_heads=(2, 11), window_size=(3, 5)),
    ),
    "mixer": ("mixer_s16", dict(patch_size=4, embed_dim=23, depth=3)),
    "conv_mixer": ("convmixer_256_8", dict(patch_size=4, embed_dim=11, depth=3, kernel_size=4)),
}
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


def built(family: str, **sizes) -> nn.Module:
    """In float64, for evaluation, and with relative position biases that matter: of std 1."""
    name, own = FAMILIES[family]
    model = written(
        "torch", vitinit.build_model(name, num_classes=7, image_size=(12, 20), **own | sizes)
    )
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias_table"):
                parameter.mul_(50.0)
    return model.double().eval()


def drawn_images(height: int = 12, width: int = 20) -> torch.Tensor:
    return torch.randn(5, 3, height, width, generator=seeded(1), dtype=torch.float64)


def test_they_are_the_matrices_that_the_blocks_apply():
    model = built("vit")
    found = mixing_matrices(model, drawn_images())
    assert list(found) == [0, 1, 2] and found[1].shape == (5, 2, 16, 16)
    x = model.embed(drawn_images())
    for index, block in enumerate(model.blocks):
        normalised = block.norm1(x)
        values = block.attn.queries_keys_values(normalised)[2]
        mixed = (found[index] @ values).transpose(1, 2).flatten(2)  # (B, N, C)
        torch.testing.assert_close(block.attn.proj(mixed), block.attn(normalised))
        x = block(x)


@torch.no_grad()
def test_a_swins_matrices_are_what_its_blocks_apply_to_the_values_of_the_whole_map():
    """Windows, shifts and masks included: proj(M v) is the attention branch."""
    model = built("swin")
    found = mixing_matrices(model, drawn_images())
    x = model.patch_embed(drawn_images()).unflatten(1, model.grid)
    shapes, index = [], 0
    for stage in model.layers:
        x = stage.downsample(x)
        for block in stage.blocks:
            normalised = block.norm1(x)  # (B, H, W, C)
            tokens, dim = normalised.flatten(1, 2), normalised.shape[-1]
            values = tokens @ block.attn.qkv.weight[2 * dim :].T + block.attn.qkv.bias[2 * dim :]
            values = values.unflatten(-1, (block.attn.num_heads, -1)).transpose(1, 2)
            mixed = (found[index] @ values).transpose(1, 2).flatten(2)  # (B, N, C)
            torch.testing.assert_close(
                block.attn.proj(mixed), block.mix_windows(normalised).flatten(1, 2)
            )
            shapes.append(tuple(found[index].shape[1:]))
            x, index = block(x), index + 1
    assert shapes == [(2, 240, 240)] * 2 + [(11, 60, 60)] * 3


def test_a_mixers_matrices_are_the_jacobian_of_its_token_mixing():
    """∂ output (token n, channel c) / ∂ input (token m, channel c); other channels do nothing."""
    model = built("mixer")
    found, x = mixing_matrices(model, drawn_images()), model.stem(drawn_images())[:1]  # (1, N, C)
    for index, block in enumerate(model.blocks):
        jacobian = torch.autograd.functional.jacobian(block.token_mixing, block.norm1(x).detach())[
            0, :, :, 0
        ]
        x = block(x)
        for channel in range(23):
            torch.testing.assert_close(found[index][0, channel], jacobian[:, channel, :, channel])
            jacobian[:, channel, :, channel] = 0.0
        assert (jacobian == 0).all()
    assert found[2].shape == (5, 23, 15, 15)
    assert not torch.equal(found[2][0], found[2][1])  # it depends on the image


def test_a_conv_mixers_matrices_are_its_depthwise_layer_on_one_hot_images_without_its_bias():
    model = built("conv_mixer")
    one_hot = torch.eye(15, dtype=torch.float64).view(15, 1, *GRID).expand(-1, 11, -1, -1)
    for index, matrices in mixing_matrices(model, drawn_images()).items():
        weight = model.depthwise(model.blocks[index]).weight.detach()  # (C, 1, 4, 4)
        columns = F.conv2d(F.pad(one_hot, (1, 2, 1, 2)), weight, groups=11).flatten(2)
        expected = columns.permute(1, 2, 0)  # (C, token out, token in)
        torch.testing.assert_close(matrices, expected.expand(5, -1, -1, -1))


@pytest.mark.parametrize("family", FAMILIES)
def test_chosen_blocks_and_heads_are_parts_of_all(family):
    model = built(family)
    everything = mixing_matrices(model, drawn_images())
    grids = [(12, 20)] * 2 + [(6, 10)] * 3 if family == "swin" else [GRID] * 3
    assert block_grids(model) == grids and list(everything) == list(range(len(grids)))
    for (height, width), matrices in zip(grids, everything.values()):
        assert matrices.shape[-1] == height * width + model.num_prefix_tokens
    some = mixing_matrices(model, drawn_images(), blocks=[2, 0], heads=[1, 0, 1])
    assert sorted(some) == [0, 2]
    for block, matrices in some.items():
        torch.testing.assert_close(matrices, everything[block][:, [1, 0, 1]])
    assert not torch.equal(some[2][:, 0], some[2][:, 1])


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_reading_leaves_the_model_as_it_was(family):
    """Mode, statistics, gradients and hooks; also where an image of another size makes it fail.
    What is read is the model in evaluation mode."""
    model = built(family).train()
    next(model.children()).eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.enable_grad():
        found = mixing_matrices(model, drawn_images())
    if family != "conv_mixer":  # which takes any
        with pytest.raises(ValueError, match="built for images of 12×20 pixels"):
            mixing_matrices(model, drawn_images(20, 12))
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(matrices.requires_grad for matrices in found.values())
    for parameter in model.parameters():  # what was read stays when the model trains on
        parameter.mul_(-0.7)
    model.load_state_dict(before)
    again = mixing_matrices(model.eval(), drawn_images())
    assert all(torch.equal(found[block], again[block]) for block in found)


def test_a_pass_is_that_of_the_model_in_evaluation_mode_and_draws_nothing():
    """BatchNorm's statistics are those that training left, and dropout leaves all as it is. A
    masked autoencoder draws also then."""

    class Draws(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 0.0 * torch.rand_like(x)

    model = nn.Sequential(built("conv_mixer"), nn.Dropout(0.5), Draws()).train()
    model(drawn_images())  # training moves the statistics
    expected, found = copy.deepcopy(model).eval()(drawn_images()), []
    state = torch.get_rng_state()
    mixing.run(
        model,
        drawn_images(),
        before={model[1]: found.append},
        after={model: lambda inputs, output: found.extend([*inputs, output])},
    )
    assert model.training and torch.equal(torch.get_rng_state(), state)
    for seen, value in zip(found, (expected, drawn_images(), expected), strict=True):
        assert torch.equal(seen, value) and not seen.requires_grad


@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_model_is_read_as_itself_and_one_in_inference_mode_too(family):
    model = built(family)
    expected = mixing_matrices(model, drawn_images())
    assert block_grids(torch.compile(model, backend="eager")) == block_grids(model)
    with torch.inference_mode():
        found = mixing_matrices(model, drawn_images())
    assert all(torch.equal(found[block], expected[block]) for block in expected)


def test_a_block_that_is_not_there_or_a_model_of_another_kind_is_an_error():
    for block in (-4, 3):
        with pytest.raises(ValueError, match=f"block {block} is asked for, but .* has blocks 0…2"):
            mixing_matrices(built("vit"), drawn_images(), blocks=[block])
    with pytest.raises(ValueError, match="spatial mixing of a Linear is not defined here"):
        mixing_matrices(nn.Linear(3, 5), drawn_images())


def test_the_mass_of_a_perfect_shift_is_one_and_of_uniform_attention_one_over_n():
    offsets = [(0, 1), (-1, 0)]
    shifts = torch.stack([convolution_matrix(impulse_kernel(o, 3), GRID) for o in offsets])
    rowless = shifts.sum(-1) == 0  # rows off the grid: anything may stand there
    shifts[rowless] = 1.0 / 15
    assert target_mass(shifts, offsets, GRID).tolist() == [1.0, 1.0]
    uniform = torch.full((2, 15, 15), 1.0 / 15)
    assert target_mass(uniform, offsets, GRID).tolist() == pytest.approx([1 / 15, 1 / 15])
    with pytest.raises(ValueError, match="zip"):  # an offset for each head
        target_mass(uniform, offsets[:1], GRID)


def test_the_mass_is_counted_over_patch_tokens_alone():
    weights = torch.rand(4, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    weights = weights / weights.sum(-1, keepdim=True)
    expected = []
    for image in weights[:, 0]:
        for row in range(15):
            if row % 5 < 4:  # the last column has no right neighbour
                expected.append(image[1 + row, 2 + row] / image[1 + row, 1:].sum())
    mass = target_mass(weights, [(0, 1)], GRID)
    assert mass.item() == pytest.approx(torch.stack(expected).mean().item(), rel=1e-5)


def attention_like(*batch: int) -> torch.Tensor:
    """(*batch, 2 heads, 16, 16): softmaxes whose rows are sharp, with a prefix token."""
    logits = torch.randn(*batch, 2, 16, 16, dtype=torch.float64, generator=seeded(3))
    return (5.0 * logits).softmax(-1)


READINGS = {
    "target_mass": lambda weights: target_mass(weights, [(0, 1), (-1, 0)], GRID),
    "mean_kernel": lambda weights: mean_kernel(weights, GRID, radius=2),
}


@pytest.mark.parametrize("read", READINGS.values(), ids=READINGS)
def test_any_dimensions_before_the_heads_half_precision_and_rows_without_mass_are_read(read):
    """mean_kernel keeps those dimensions, target_mass is their mean. Entries are normal in fp16."""
    weights = attention_like(3, 5)
    each = torch.stack([read(matrices) for matrices in weights.flatten(0, 1)])
    expected = each.view(3, 5, 2, 5, 5) if read is READINGS["mean_kernel"] else each.mean(0)
    torch.testing.assert_close(read(weights), expected)
    weights = (0.01 + attention_like(3)) / 1.16
    found = read(weights.half())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), read(weights), rtol=2e-3, atol=2e-3)
    on_prefix = torch.zeros(2, 16, 16, dtype=torch.float16)
    on_prefix[..., 0] = 1.0
    assert (read(on_prefix) == 0).all()


def test_the_mean_kernel_of_a_convolution_matrix_is_its_kernel():
    kernel = torch.rand(3, 3, generator=torch.Generator().manual_seed(0)) + 0.1
    kernel = kernel / kernel.sum()
    matrix = convolution_matrix(kernel, (7, 5), circular=True)  # rows sum to one
    with_class_token = torch.nn.functional.pad(matrix, (1, 0, 1, 0), value=0.3)
    found = mean_kernel(with_class_token[None], (7, 5), radius=1)
    assert found.shape == (1, 3, 3)
    torch.testing.assert_close(found[0], kernel)
