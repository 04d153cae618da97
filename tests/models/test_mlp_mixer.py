"""MLP-Mixer against a transcription of its equations, and against the published counts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import vitinit
from vitinit.models.mlp_mixer import MixerBlock

# A grid of 3×5 = 15 tokens; hidden widths 7 · .5 → 3 and 7 · 3 = 21.
SMALL = dict(num_classes=11, image_size=(6, 20), patch_size=(2, 4), embed_dim=7, depth=2,
             channels_ratio=3.0)


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def redraw(model: torch.nn.Module) -> torch.nn.Module:
    """New values for every parameter: a head that starts at zero would hide any error before it."""
    generator = torch.Generator().manual_seed(0)
    model.double()
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(values * 0.3 + (parameter.ndim == 1) * 0.5)
    return model


def written_out(state: dict[str, torch.Tensor], images: torch.Tensor, depth: int) -> torch.Tensor:
    """The logits by the paper's equation 1, from the state dict alone, tokens as (n, c)."""
    def norm(x, name):
        x = x - x.mean(dim=-1, keepdim=True)
        x = x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt()
        return x * state[f"{name}.weight"] + state[f"{name}.bias"]

    def mlp(x, name):
        x = F.linear(x, state[f"{name}.fc1.weight"], state[f"{name}.fc1.bias"])
        return F.linear(F.gelu(x), state[f"{name}.fc2.weight"], state[f"{name}.fc2.bias"])

    kernel = state["stem.proj.weight"]
    x = F.conv2d(images, kernel, state["stem.proj.bias"], stride=kernel.shape[2:])
    x = torch.einsum("bchw->bhwc", x).flatten(1, 2)
    for block in (f"blocks.{index}" for index in range(depth)):
        channels = torch.einsum("bnc->bcn", norm(x, f"{block}.norm1"))
        x = x + torch.einsum("bcn->bnc", mlp(channels, f"{block}.mlp_tokens"))
        x = x + mlp(norm(x, f"{block}.norm2"), f"{block}.mlp_channels")
    return F.linear(norm(x, "norm").mean(dim=1), state["head.weight"], state["head.bias"])


def test_outputs_and_gradients_equal_the_equations_written_out():
    model = redraw(vitinit.build_model("mixer_s16", **SMALL))
    assert model.grid == (3, 5)
    images = drawn(3, 3, 6, 20)
    logits = model(images)
    assert logits.std() > 0.1                        # not a comparison of zeros
    state = {name: value.clone().requires_grad_() for name, value in model.state_dict().items()}
    expected = written_out(state, images, depth=2)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    logits.square().sum().backward()
    expected.square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, state[name].grad, rtol=1e-9, atol=1e-9)


def test_tokens_are_mixed_the_same_way_in_every_channel_and_by_no_other():
    block = redraw(MixerBlock(13, 5, tokens_hidden=3, channels_hidden=7))
    x = drawn(2, 13, 5)
    mixed = block.token_mixing(x)
    for channel in range(5):
        alone = block.mlp_tokens(x[..., channel])
        torch.testing.assert_close(mixed[..., channel], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name, parameters, keys, patch, width", [
    ("mixer_s32", 19_104_624, 102, 32, 512), ("mixer_s16", 18_528_264, 102, 16, 512),
    ("mixer_b32", 60_293_428, 150, 32, 768), ("mixer_b16", 59_880_472, 150, 16, 768),
    ("mixer_l16", 208_196_168, 294, 16, 1024)])
def test_sizes_and_names_are_the_published_ones(name, parameters, keys, patch, width):
    with torch.device("meta"):
        model = vitinit.build_model(name, num_classes=1000, image_size=224)
    state = model.state_dict()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(state) == keys
    layers = ["stem.proj", "norm", "head"] + [
        f"blocks.{index}.{layer}" for index in range(len(model.blocks)) for layer in
        ("norm1", "norm2", "mlp_tokens.fc1", "mlp_tokens.fc2", "mlp_channels.fc1",
         "mlp_channels.fc2")]
    assert state.keys() == {f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}
    tokens = (224 // patch) ** 2
    assert state["stem.proj.weight"].shape == (width, 3, patch, patch)
    assert state["blocks.0.mlp_tokens.fc1.weight"].shape == (width // 2, tokens)
    assert state["blocks.7.mlp_tokens.fc2.weight"].shape == (tokens, width // 2)
    assert state["blocks.0.mlp_channels.fc1.weight"].shape == (4 * width, width)


def test_the_rate_of_stochastic_depth_is_the_same_in_every_block():
    model = vitinit.build_model("mixer_s16", drop_path=0.3, **SMALL)
    assert model.drop_path_rates == (0.3,) * 4


def test_drop_path_drops_branches_per_image_and_block():
    model = redraw(vitinit.build_model("mixer_s16", **SMALL))
    images, ones = drawn(3, 3, 6, 20), torch.ones(4, 3)
    logits = model(images)
    torch.testing.assert_close(model(images, ones), logits)
    drop_path = ones.clone()
    drop_path[:, 1] = 0                              # image 1 passes no branch at all
    bare = model.head(model.norm(model.stem(images)).mean(dim=1))
    expected = torch.stack([logits[0], bare[1], logits[2]])
    torch.testing.assert_close(model(images, drop_path), expected)
    drop_path = ones.clone()
    drop_path[2, 2] = 0                              # the token mixing of the second block, image 2
    x, second = model.blocks[0](model.stem(images)), model.blocks[1]
    x = x + second.mlp_channels(second.norm2(x))
    expected = torch.stack([*logits[:2], model.head(model.norm(x).mean(dim=1))[2]])
    torch.testing.assert_close(model(images, drop_path), expected)
