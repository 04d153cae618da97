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


def dense_written_out(state: dict[str, torch.Tensor], x: torch.Tensor, name: str) -> torch.Tensor:
    """Channel by channel, image by image: M x + b, with the matrices taken in turn."""
    matrices, bias = state[f"{name}.weight"], state[f"{name}.bias"]
    result = torch.empty_like(x)
    for image in range(len(x)):
        for channel in range(x.shape[1]):
            mixed = matrices[channel % len(matrices)] @ x[image, channel].flatten() + bias[channel]
            result[image, channel] = mixed.view(x.shape[2:])
    return result


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
        if state[f"{spatial}.weight"].ndim == 3:
            mixed = dense_written_out(state, x, spatial)
        else:
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


@pytest.mark.parametrize("num_filters", [0, 1, 3, 7])
@pytest.mark.parametrize("softmax", [False, True])
def test_shared_filters_are_those_of_a_plain_model_that_repeats_them(num_filters, softmax):
    model = redraw(vitinit.build_model("convmixer_256_8", num_filters=num_filters,
                                       softmax_filters=softmax, **SMALL)).eval()
    state = dict(model.state_dict())
    for block in range(2):
        filters = state[f"blocks.{block}.0.fn.0.weight"]
        assert filters.shape == (num_filters or 7, 1, 5, 5)
        if softmax:
            filters = filters.exp() / filters.exp().sum(dim=(1, 2, 3), keepdim=True)
        state[f"blocks.{block}.0.fn.0.weight"] = torch.stack(
            [filters[channel % len(filters)] for channel in range(7)])
    images = drawn(3, 3, 14, 33)
    torch.testing.assert_close(model(images), written_out(state, images, 2, F.gelu),
                               rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_filters", [0, 1, 3, 7])
@pytest.mark.parametrize("training", [False, True])
def test_dense_filters_are_matrix_products_with_the_tokens_of_each_channel(num_filters, training):
    model = redraw(vitinit.build_model("convmixer_256_8", dense_filters=True,
                                       num_filters=num_filters, **SMALL)).train(training)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for block in range(2):
        assert state[f"blocks.{block}.0.fn.0.weight"].shape == (num_filters or 7, 77, 77)
        assert state[f"blocks.{block}.0.fn.0.bias"].shape == (7,)
    logits = model(images := drawn(3, 3, 14, 33))
    assert logits.std() > 0.01                       # not a comparison of zeros
    torch.testing.assert_close(logits, written_out(state, images, 2, F.gelu, training),
                               rtol=0, atol=1e-11)


def test_dense_filters_change_no_other_name_or_shape():
    with torch.device("meta"):
        plain, dense = (vitinit.build_model("convmixer_256_8", dense_filters=dense, **SMALL)
                        for dense in (False, True))
    expected = {name: value.shape for name, value in plain.state_dict().items()}
    found = {name: value.shape for name, value in dense.state_dict().items()}
    assert found.keys() == expected.keys()
    assert {name for name in found if found[name] != expected[name]} == {
        f"blocks.{block}.0.fn.0.weight" for block in range(2)}


@pytest.mark.parametrize("dense_filters", [False, True])
def test_frozen_filters_are_the_depthwise_weights_and_biases(dense_filters):
    model = vitinit.build_model("convmixer_256_8", train_filters=False,
                                dense_filters=dense_filters, **SMALL)
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


def test_fewer_classes_take_away_only_rows_of_the_head():
    with torch.device("meta"):
        model = vitinit.build_model("convmixer_768_32", num_classes=37, image_size=224)
    assert sum(p.numel() for p in model.parameters()) == 21_110_248 - (1000 - 37) * (768 + 1)


@pytest.mark.parametrize("options", [dict(), dict(dense_filters=True),
                                     dict(dense_filters=True, num_filters=3)],
                         ids=["kernels", "dense", "shared dense"])
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


@pytest.mark.parametrize("training", [False, True])
def test_bfloat16_is_near_float32(assert_bfloat16_is_near, training):
    model = redraw(vitinit.build_model("convmixer_256_8", **SMALL)).float().train(training)
    images = drawn(7, 3, 14, 33).float()
    assert_bfloat16_is_near(model, images)


@pytest.mark.parametrize("sizes, message", [
    (dict(patch_size=3), "patches of 3×3 pixels do not tile an image of 14×33"),
    (dict(activation="tanh"), "activation is 'tanh', expected one of gelu, relu"),
    (dict(kernel_size=0), "kernel_size is 0, expected more than 0"),
    (dict(num_filters=8), "num_filters is 8, expected 0 ≤ num_filters ≤ embed_dim = 7"),
    (dict(num_filters=-1), "num_filters is -1, expected 0 ≤ num_filters ≤ embed_dim = 7"),
    (dict(softmax_filters=True, dense_filters=True),
     "softmax_filters and dense_filters are both true; expected at most one")])
def test_impossible_sizes_are_errors(sizes, message):
    with pytest.raises(ValueError, match=message):
        vitinit.build_model("convmixer_256_8", **SMALL | sizes)


def test_dense_filters_refuse_images_of_another_size_in_one_line():
    model = vitinit.build_model("convmixer_256_8", num_classes=3, image_size=(6, 10), patch_size=2,
                                embed_dim=5, depth=1, kernel_size=3, dense_filters=True)
    with pytest.raises(ValueError, match="built for images of 6×10 pixels and got 10×14") as caught:
        model(torch.zeros(2, 3, 10, 14))
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------
# Steps towards a ViT
# ---------------------------------------------------------------------------------------------


def steps_written_out(state: dict[str, torch.Tensor], images: torch.Tensor, *, layer_norm: bool,
                      norm_first: bool, hidden: bool, residual: bool, plain_stem: bool
                      ) -> torch.Tensor:
    """The logits in eval mode, from the state dict alone, for blocks with other norms or an MLP."""
    def norm(x, name):
        weight, bias = (state[f"{name}.{part}"][:, None, None] for part in ("weight", "bias"))
        if layer_norm:                               # over channels, at each position
            mean, variance = x.mean(1, keepdim=True), x.var(1, correction=0, keepdim=True)
        else:
            mean, variance = (state[f"{name}.running_{part}"][:, None, None]
                              for part in ("mean", "var"))
        return (x - mean) / (variance + 1e-5).sqrt() * weight + bias

    def pointwise(x, name):
        weight = state[f"{name}.weight"][:, :, 0, 0]
        return torch.einsum("oc, bchw -> bohw", weight, x) + state[f"{name}.bias"][:, None, None]

    x = F.conv2d(images, state["stem.0.weight"], state["stem.0.bias"], stride=(2, 3))
    if not plain_stem:
        x = norm(F.gelu(x), "stem.2")
    for block in ("blocks.0", "blocks.1"):
        read = norm(x, f"{block}.0.norm") if norm_first else x
        mixed = F.gelu(F.conv2d(read, state[f"{block}.0.fn.0.weight"], state[f"{block}.0.fn.0.bias"],
                                padding=2, groups=7))
        x = x + (mixed if norm_first else norm(mixed, f"{block}.0.fn.2"))
        # Without a residual, the layers follow in the block itself, numbered from 1.
        before = f"{block}.1.norm" if residual else f"{block}.1"
        first = 2 if norm_first and not residual else 1
        layers = [f"{block}.1.fn.{number}" if residual else f"{block}.{number + first}"
                  for number in range(4)]
        mixed = F.gelu(pointwise(norm(x, before) if norm_first else x, layers[0]))
        if hidden:
            mixed = pointwise(mixed, layers[2])
        if not norm_first:
            mixed = norm(mixed, layers[3 if hidden else 2])
        x = x + mixed if residual else mixed
    if norm_first:
        x = norm(x, "norm")
    return x.mean(dim=(2, 3)) @ state["head.weight"].T + state["head.bias"]


@pytest.mark.parametrize("plain_stem", [False, True])
@pytest.mark.parametrize("mlp_ratio, channel_residual, residual", [
    (0.0, "mlp", False), (0.0, "never", False), (0.0, "always", True),
    (1.7, "mlp", True), (1.7, "never", False), (1.7, "always", True)])
@pytest.mark.parametrize("norm_place", ["after", "before"])
@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_steps_towards_a_vit_equal_their_transcription(norm, norm_place, mlp_ratio, channel_residual,
                                                       residual, plain_stem):
    model = redraw(vitinit.build_model("convmixer_256_8", **SMALL, norm=norm, norm_place=norm_place,
                                       mlp_ratio=mlp_ratio, channel_residual=channel_residual,
                                       plain_stem=plain_stem)).eval()
    images = drawn(3, 3, 14, 33)
    expected = steps_written_out(model.state_dict(), images, layer_norm=norm == "layer",
                                 norm_first=norm_place == "before", hidden=mlp_ratio > 0,
                                 residual=residual, plain_stem=plain_stem)
    torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-10)
    assert expected.std() > 0.01
    if mlp_ratio:
        hidden = ("blocks.0.1.fn.0.weight" if residual else
                  "blocks.0.2.weight" if norm_place == "before" else "blocks.0.1.weight")
        assert model.state_dict()[hidden].shape == (11, 7, 1, 1)
    assert any("running_mean" in name for name in model.state_dict()) == (norm == "batch")
    vitinit.init_weights(model, "impulse", generator=torch.Generator().manual_seed(0))
    assert model(images).isfinite().all()


@pytest.mark.parametrize("options, message", [
    (dict(norm="group"), "norm is 'group', expected one of batch, layer"),
    (dict(norm_place="middle"), "norm_place is 'middle', expected one of after, before"),
    (dict(channel_residual="no"), "channel_residual is 'no', expected one of mlp, always, never"),
    (dict(mlp_ratio=-1.0), "mlp_ratio is -1.0, expected mlp_ratio ≥ 0"),
    (dict(mlp_ratio=float("nan")), "mlp_ratio is nan"), (dict(mlp_ratio=0.1), "no hidden one")])
def test_steps_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        vitinit.build_model("convmixer_256_8", **SMALL, **options)
