"""ConvMixer against a transcription from its state dict, in eval and in training mode."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import vitinit

SMALL = dict(num_classes=11, image_size=(14, 33), patch_size=(2, 3), embed_dim=7, depth=2,
             kernel_size=5)


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def redraw(model: torch.nn.Module) -> torch.nn.Module:
    """New values for every parameter and running statistic, which would hide errors at 0 and 1."""
    generator = torch.Generator().manual_seed(0)
    model.double()
    for name, value in model.state_dict().items():
        values = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        if name.endswith("running_var"):
            value.copy_(values.square() + 0.5)
        elif name.endswith("num_batches_tracked"):
            value.fill_(3)
        else:
            value.copy_(values * 0.3 + (value.ndim == 1) * 0.5)
    return model


def written_out(state: dict[str, torch.Tensor], images: torch.Tensor, depth: int, activation,
                training: bool = False) -> torch.Tensor:
    """The logits from the state dict alone, whose running statistics stay unchanged."""
    def norm(x, name):
        mean, variance = state[f"{name}.running_mean"], state[f"{name}.running_var"]
        if training:
            mean, variance = x.mean(dim=(0, 2, 3)), x.var(dim=(0, 2, 3), correction=0)
        return F.batch_norm(x, mean, variance, state[f"{name}.weight"], state[f"{name}.bias"],
                            eps=1e-5)

    def conv(x, name, **options):
        return F.conv2d(x, state[f"{name}.weight"], state[f"{name}.bias"], **options)

    x = conv(images, "stem.0", stride=state["stem.0.weight"].shape[2:])
    x = norm(activation(x), "stem.2")
    for block in (f"blocks.{index}" for index in range(depth)):
        spatial = f"{block}.0.fn.0"
        dim, _, size, _ = state[f"{spatial}.weight"].shape
        before, after = (size - 1) // 2, size // 2   # an even one has one more pixel after it
        mixed = conv(F.pad(x, (before, after, before, after)), spatial, groups=dim)
        x = x + norm(activation(mixed), f"{block}.0.fn.2")
        x = norm(activation(conv(x, f"{block}.1")), f"{block}.3")
    return F.linear(x.mean(dim=(2, 3)), state["head.weight"], state["head.bias"])


@pytest.mark.parametrize("kernel_size", [1, 5, 8])   # 8: also wider than the grid of 7×11
@pytest.mark.parametrize("activation, function", [("gelu", F.gelu), ("relu", F.relu)])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
def test_outputs_equal_the_layers_written_out(kernel_size, activation, function):
    model = redraw(vitinit.build_model("convmixer_256_8", activation=activation,
                                       **SMALL | dict(kernel_size=kernel_size))).eval()
    assert model.grid == (7, 11)
    images = drawn(3, 3, 14, 33)
    logits = model(images)
    assert logits.std() > 0.01                       # not a comparison of zeros
    expected = written_out(model.state_dict(), images, 2, function)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


def test_training_norms_by_the_batch_and_remembers_its_statistics():
    model = redraw(vitinit.build_model("convmixer_256_8", **SMALL)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images = drawn(3, 3, 14, 33)
    logits = model(images)
    torch.testing.assert_close(logits, written_out(before, images, 2, F.gelu, training=True),
                               rtol=0, atol=1e-12)
    assert not torch.allclose(logits, written_out(before, images, 2, F.gelu), atol=1e-3)
    x = F.gelu(model.stem[0](images))                # what the stem's norm has seen
    statistics = {"running_mean": x.mean(dim=(0, 2, 3)), "running_var": x.var(dim=(0, 2, 3))}
    after = model.state_dict()
    for name, seen in statistics.items():
        expected = 0.9 * before[f"stem.2.{name}"] + 0.1 * seen
        torch.testing.assert_close(after[f"stem.2.{name}"], expected)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {name for name, _ in model.named_buffers()}
    assert all(after[name] == 4 for name in after if name.endswith("num_batches_tracked"))


def test_images_of_another_size_work():
    model = redraw(vitinit.build_model("convmixer_256_8", **SMALL)).eval()
    images = drawn(2, 3, 10, 39)
    torch.testing.assert_close(model(images), written_out(model.state_dict(), images, 2, F.gelu),
                               rtol=0, atol=1e-12)


def test_space_is_mixed_within_channels_and_channels_within_a_pixel():
    model = redraw(vitinit.build_model("convmixer_256_8", **SMALL | dict(kernel_size=3))).eval()
    (spatial, pointwise), cell = model.blocks[0][:2], (3, 4)
    zeros = torch.zeros(1, 7, 7, 11, dtype=torch.float64)
    spike = zeros.clone()
    spike[0, 2, *cell] = 1.0
    changed = (spatial(spike) != spatial(zeros))[0]
    expected = torch.zeros_like(changed)
    expected[2, 2:5, 3:6] = True                     # one channel, 3×3 pixels
    assert torch.equal(changed, expected)
    changed = (pointwise(spike) != pointwise(zeros))[0]
    expected = torch.zeros_like(changed)
    expected[:, *cell] = True                        # all channels, one pixel
    assert torch.equal(changed, expected)


@pytest.mark.parametrize("num_filters", [1, 3, 7])
def test_shared_filters_are_those_of_a_plain_model_that_repeats_them(num_filters):
    model = redraw(vitinit.build_model("convmixer_256_8", num_filters=num_filters, **SMALL)).eval()
    state = dict(model.state_dict())
    for block in range(2):
        filters = state[f"blocks.{block}.0.fn.0.weight"]
        assert filters.shape == (num_filters, 1, 5, 5)
        state[f"blocks.{block}.0.fn.0.weight"] = torch.stack(
            [filters[channel % num_filters] for channel in range(7)])
    images = drawn(3, 3, 14, 33)
    torch.testing.assert_close(model(images), written_out(state, images, 2, F.gelu),
                               rtol=0, atol=1e-12)


def test_frozen_filters_are_the_depthwise_weights_and_biases():
    model = vitinit.build_model("convmixer_256_8", train_filters=False, **SMALL)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {f"blocks.{block}.0.fn.0.{part}" for block in range(2)
                      for part in ("weight", "bias")}


@pytest.mark.parametrize("name, parameters, keys, buffers, width, patch, kernel", [
    ("convmixer_1536_20", 51_625_960, 289, 123, 1536, 7, 9),
    ("convmixer_768_32", 21_110_248, 457, 195, 768, 7, 7),
    ("convmixer_1024_20", 24_383_464, 289, 123, 1024, 14, 9)])
def test_sizes_and_names_are_the_published_ones(name, parameters, keys, buffers, width, patch,
                                                kernel):
    with torch.device("meta"):
        model = vitinit.build_model(name, num_classes=1000, image_size=224)
    state = model.state_dict()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(state) == keys and len(list(model.buffers())) == buffers
    blocks = [f"blocks.{index}" for index in range(len(model.blocks))]
    layers = ["stem.0", "stem.2", "head"] + [
        f"{block}.{layer}" for block in blocks for layer in ("0.fn.0", "0.fn.2", "1", "3")]
    norms = ["stem.2"] + [f"{block}.{layer}" for block in blocks for layer in ("0.fn.2", "3")]
    assert state.keys() == (
        {f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}
        | {f"{norm}.{part}" for norm in norms
           for part in ("running_mean", "running_var", "num_batches_tracked")})
    assert state["stem.0.weight"].shape == (width, 3, patch, patch)
    assert state["blocks.0.0.fn.0.weight"].shape == (width, 1, kernel, kernel)
    assert state["blocks.19.1.weight"].shape == (width, width, 1, 1)
    relu = any(isinstance(module, torch.nn.ReLU) for module in model.modules())
    assert relu == (name == "convmixer_768_32")


@pytest.mark.parametrize("options", [dict(), dict(num_filters=3)])
def test_gradients_reach_every_parameter(options):
    model = redraw(vitinit.build_model("convmixer_256_8", **SMALL | options)).train()
    model(drawn(3, 3, 14, 33)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 1e-6, name


def test_there_is_no_stochastic_depth_and_no_position_embedding():
    model = vitinit.build_model("convmixer_256_8", **SMALL)
    assert model.drop_path_rates == () and not model.learns_positions
    with pytest.raises(TypeError, match="drop_path"):
        vitinit.build_model("convmixer_256_8", drop_path=0.1, **SMALL)


@pytest.mark.parametrize("sizes, message", [
    (dict(patch_size=3), "patches of 3×3 pixels do not tile an image of 14×33"),
    (dict(activation="tanh"), "activation is 'tanh', expected one of gelu, relu"),
    (dict(kernel_size=0), "kernel_size is 0, expected more than 0"),
    (dict(num_filters=8), "num_filters is 8, expected 0 ≤ num_filters ≤ embed_dim = 7"),
    (dict(num_filters=-1), "num_filters is -1, expected 0 ≤ num_filters ≤ embed_dim = 7")])
def test_impossible_sizes_are_errors(sizes, message):
    with pytest.raises(ValueError, match=message):
        vitinit.build_model("convmixer_256_8", **SMALL | sizes)
