"""ConvMixer against a transcription from its state dict, in eval and in training mode."""

import pytest
import torch
import torch.nn.functional as F
from small_models import assert_same_function, drawn, redraw
from torch import Tensor

import vitinit

SMALL = dict(
    num_classes=11, image_size=(14, 33), patch_size=(2, 3), embed_dim=7, depth=2, kernel_size=5
)


def built(**sizes):
    return redraw(vitinit.build_model("convmixer_256_8", **SMALL | sizes))


def written_out(
    state: dict[str, Tensor], images: Tensor, activation=F.gelu, training: bool = False
) -> Tensor:
    """The logits from the state dict alone, whose running statistics stay unchanged."""

    def norm(x, name):
        mean, variance, weight, bias = (
            state[f"{name}.{part}"][:, None, None]
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        if training:
            variance, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0, keepdim=True)
        return (x - mean) / (variance + 1e-5).sqrt() * weight + bias

    def conv(x, name, **options):
        return F.conv2d(x, state[f"{name}.weight"], state[f"{name}.bias"], **options)

    x = conv(images, "stem.0", stride=state["stem.0.weight"].shape[2:])
    x = norm(activation(x), "stem.2")
    for block in ("blocks.0", "blocks.1"):
        spatial = f"{block}.0.fn.0"
        dim, _, size, _ = state[f"{spatial}.weight"].shape
        before, after = (size - 1) // 2, size // 2  # an even one has one more pixel after it
        mixed = conv(F.pad(x, (before, after, before, after)), spatial, groups=dim)
        x = x + norm(activation(mixed), f"{block}.0.fn.2")
        x = norm(activation(conv(x, f"{block}.1")), f"{block}.3")
    return F.linear(x.mean(dim=(2, 3)), state["head.weight"], state["head.bias"])


@pytest.mark.parametrize("kernel_size", [1, 5, 8])  # 8: also wider than the grid of 7×11
@pytest.mark.parametrize("activation, function", [("gelu", F.gelu), ("relu", F.relu)])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
def test_outputs_equal_the_layers_written_out(kernel_size, activation, function, held_against):
    model = built(activation=activation, kernel_size=kernel_size).eval()
    assert model.grid == (7, 11)
    for height, width in ((14, 33), (10, 39)):  # its weights know no size
        images = drawn(3, 3, height, width)
        logits = model(images)
        assert logits.std() > 0.01  # not a comparison of zeros
        expected = written_out(model.state_dict(), images, function)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
        held_against(logits, expected, cases=3)


def test_training_norms_by_the_batch_and_remembers_its_statistics(held_against):
    model = built().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = before | {name: before[name].requires_grad_() for name, _ in model.named_parameters()}
    images = drawn(3, 3, 14, 33)
    assert_same_function(
        model, model(images), written_out(state, images, training=True), state, held_against
    )
    x = F.gelu(model.stem[0](images))  # what the stem's norm has seen
    statistics = {"running_mean": x.mean(dim=(0, 2, 3)), "running_var": x.var(dim=(0, 2, 3))}
    after = model.state_dict()
    for name, seen in statistics.items():
        torch.testing.assert_close(
            after[f"stem.2.{name}"], 0.9 * before[f"stem.2.{name}"] + 0.1 * seen
        )
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {name for name, _ in model.named_buffers()}


@pytest.mark.parametrize("num_filters", [1, 3, 7])
def test_shared_filters_are_those_of_a_plain_model_that_repeats_them(num_filters):
    model = built(num_filters=num_filters).eval()
    state = dict(model.state_dict())
    for name in ("blocks.0.0.fn.0.weight", "blocks.1.0.fn.0.weight"):
        assert state[name].shape == (num_filters, 1, 5, 5)
        state[name] = torch.stack([state[name][channel % num_filters] for channel in range(7)])
    images = drawn(3, 3, 14, 33)
    torch.testing.assert_close(model(images), written_out(state, images), rtol=0, atol=1e-12)


def test_frozen_filters_are_the_depthwise_weights_and_biases():
    model = built(train_filters=False)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {
        f"blocks.{block}.0.fn.0.{part}" for block in range(2) for part in ("weight", "bias")
    }
