"""The baselines' distributions, their independence of what constructors drew, and init_weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vitinit
from vitinit.init import INITS

SIZES = dict(num_classes=101, image_size=(28, 44), patch_size=4, embed_dim=66, depth=2, num_heads=3)


def drawn_by(name: str, seed: int = 0, **options) -> dict[str, torch.Tensor]:
    model = vitinit.build_model("vit_tiny", **SIZES)
    vitinit.init_weights(model, name, generator=torch.Generator().manual_seed(seed), **options)
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def test_default_is_normal_with_zero_biases():
    for name, value in drawn_by("default").items():
        if "norm" in name:
            assert (value == (1.0 if name.endswith("weight") else 0.0)).all(), name
        elif name.startswith("patch_embed"):
            bound = (3 * 4 * 4) ** -0.5
            assert value.abs().max() <= bound, name
            assert value.std().item() == pytest.approx(bound / 3**0.5, rel=0.2), name
        elif name.endswith("bias"):
            assert (value == 0).all(), name
        else:
            assert value.std().item() == pytest.approx(0.02, rel=0.25), name
            assert value.abs().max() > 0.04 or value.numel() < 100, name    # tails: not uniform


def test_torch_is_what_pytorchs_layers_draw():
    """The same bounds and spreads as layers made by PyTorch itself, of the same shapes."""
    state = drawn_by("torch")
    torch.manual_seed(0)
    model = vitinit.build_model("vit_tiny", **SIZES)
    for name, layer in model.named_modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            layer.reset_parameters()
            bound = layer.weight[0].numel() ** -0.5
            for part in ("weight", "bias"):
                ours, theirs = state[f"{name}.{part}"], getattr(layer, part)
                assert ours.abs().max() <= bound and theirs.abs().max() <= bound
                spread = 3 * bound / ours.numel() ** 0.5
                assert ours.std().item() == pytest.approx(theirs.std().item(), abs=spread), name
    assert state["pos_embed"].std().item() == pytest.approx(0.02, rel=0.05)
    assert (state["cls_token"] == 0).all()
    assert (state["norm.weight"] == 1).all() and (state["norm.bias"] == 0).all()


@pytest.mark.parametrize("name", INITS)
def test_what_constructors_and_the_global_generator_drew_never_matters(name):
    states = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        states.append(drawn_by(name))
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("name", INITS)
def test_the_global_generator_is_left_alone(name):
    model = vitinit.build_model("vit_tiny", **SIZES)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    vitinit.init_weights(model, name, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", INITS)
def test_another_seed_gives_other_weights(name):
    first, second = drawn_by(name), drawn_by(name, seed=1)
    for key in ("pos_embed", "head.weight", "blocks.1.attn.qkv.weight"):
        assert not torch.equal(first[key], second[key]), key


@pytest.mark.parametrize("base", ["default", "torch"])
@pytest.mark.parametrize("name, options, touched", [
    ("mimetic", {}, {"attn.qkv.weight", "attn.proj.weight"}),
    ("impulse", {}, {"attn.qkv.weight", "attn.proj.weight", "pos_embed"}),
    ("impulse", {"value_init": "base"}, {"attn.qkv.weight", "pos_embed"}),
])
def test_inits_touch_what_their_tables_list_and_nothing_else(name, options, touched, base):
    reference, state = drawn_by(base), drawn_by(name, base=base, **options)
    for key, value in state.items():
        listed = any(key.endswith(part) for part in touched)
        assert torch.equal(value, reference[key]) != listed, key
    if options:                                      # V keeps the base's draw, to the bit
        rows = slice(2 * 66, None)
        key = "blocks.1.attn.qkv.weight"
        assert torch.equal(state[key][rows], reference[key][rows])


def test_an_unknown_init_lists_the_near_ones():
    model = vitinit.build_model("vit_tiny", **SIZES)
    with pytest.raises(ValueError, match="no init 'mimetik'; near: mimetic"):
        vitinit.init_weights(model, "mimetik", generator=torch.Generator())


@pytest.mark.parametrize("name", ["mimetic", "impulse"])
def test_models_without_attention_are_refused_before_anything_is_drawn(name):
    layer = nn.Linear(3, 5)
    before = layer.weight.detach().clone()
    with pytest.raises(ValueError, match=f"init '{name}' is defined for a VisionTransformer"):
        vitinit.init_weights(layer, name, generator=torch.Generator())
    assert torch.equal(layer.weight, before)


def test_a_parameter_that_no_rule_covers_is_an_error():
    model = vitinit.build_model("vit_tiny", **SIZES)
    model.reg_token = nn.Parameter(torch.zeros(1, 1, 66))
    with pytest.raises(ValueError, match="no rule for reg_token"):
        vitinit.init_weights(model, "default", generator=torch.Generator())
