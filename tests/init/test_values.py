"""Values that pass channels on: V·proj is a multiple of the identity, head by head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import vitinit
from vitinit.filters import ordered_offsets
from vitinit.init.code_plan import code_size, slowest_waves

SIZES = dict(num_classes=5, image_size=(20, 28), patch_size=4, embed_dim=111, depth=2, num_heads=3,
             pool="mean")                            # 5×7 tokens, heads of 37 channels
FIRST = {"impulse": 0, "deep_impulse": 19}           # channels that are reserved: eight waves and three
OPTIONS = {"impulse": dict(rank=11),
           "deep_impulse": dict(base="default", code_channels=0.18, target_mass=0.8, bias_channels=True)}
each_init = pytest.mark.parametrize("init", FIRST)


def initialised(init: str, **options) -> nn.Module:
    model = vitinit.build_model("vit_tiny", **SIZES)
    vitinit.init_weights(model, init, generator=torch.Generator().manual_seed(0),
                         **OPTIONS[init] | options)
    return model.double()


def products(attention: nn.Module) -> Tensor:
    """V·proj of each head, (h, C, C): what it makes of the stream where attention is the identity."""
    return torch.einsum("hdc, ohd -> hco", attention.v_weight, attention.proj_weight)


@each_init
@pytest.mark.parametrize("scale", [1.0, -0.3])
def test_each_head_has_its_own_share_of_the_identity(init, scale):
    first = FIRST[init]
    model = initialised(init, value_init="identity", value_scale=scale)
    if first:
        assert code_size(slowest_waves(model, 0.18, 1.0, True), True) == first
    expected = scale * torch.eye(111, dtype=torch.float64)
    expected[:first] = 0
    for block in model.blocks:
        found = products(block.attn)
        torch.testing.assert_close(found.sum(0), expected, rtol=0, atol=1e-6)
        shares = [(head.diagonal() != 0).sum().item() for head in found]
        assert max(shares) - min(shares) <= 1 and sum(shares) == 111 - first


@each_init
def test_nothing_else_changes_but_the_sharpness_of_deep_impulse(init):
    before = initialised(init, value_init="base").state_dict()
    after = initialised(init, value_init="identity").state_dict()
    for name, value in after.items():
        if name.endswith("qkv.weight"):
            queries_keys = slice(0, 222)
            if init == "impulse":
                assert torch.equal(value[queries_keys], before[name][queries_keys])
        elif not name.endswith("attn.proj.weight"):
            assert torch.equal(value, before[name]), name


def test_the_layer_is_a_depthwise_shift_of_each_heads_channels():
    """On the code alone, for a token whose targets are all on the grid, at a high mass."""
    model = initialised("deep_impulse", value_init="identity", target_mass=0.999, offsets="ordered")
    attention, norm = model.blocks[0].attn, model.blocks[0].norm1
    generator = torch.Generator().manual_seed(1)
    x = model.pos_embed + 1e-3 * torch.randn(1, 35, 111, generator=generator, dtype=torch.float64)
    normed = norm(x)[0].view(5, 7, 111)
    mixed = attention(norm(x))[0].view(5, 7, 111) - attention.proj.bias
    for head, (down, right) in enumerate(ordered_offsets(3)[:3]):
        channels = torch.arange(19 + head, 111, 3)
        torch.testing.assert_close(mixed[2, 3, channels], normed[2 + down, 3 + right, channels],
                                   rtol=0, atol=0.02 * normed.abs().max().item())


@each_init
def test_gradients_reach_every_value_and_projection(init):
    model = initialised(init, value_init="identity")
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(7, 3, 20, 28, generator=generator, dtype=torch.float64)
    model(images).square().sum().backward()
    for block in model.blocks:
        value = block.attn.qkv.weight.grad[222:]
        assert (value.abs().sum(1) > 0).all()
        assert (block.attn.proj.weight.grad.abs().sum(0) > 0).sum() >= 111 - FIRST[init]


@each_init
def test_a_scale_of_zero_is_refused(init):
    with pytest.raises(ValueError, match="value_scale is 0"):
        initialised(init, value_init="identity", value_scale=0.0)
