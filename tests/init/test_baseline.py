"""The baselines' distributions, their independence of what constructors drew, and init_weights."""

import re

import pytest
import torch
from small_models import SIZES, after, built
from torch import nn

import vitinit
from vitinit.init import INITS
from vitinit.init.baseline import CUT_NORMAL_STD

MODELS_TRIED = [*((family, {}) for family in SIZES), ("vit", dict(distilled=True))]
VIT_INITS = [name for name, families in INITS.items() if "vit" in families]
EMBEDDINGS = ("pos_embed", "cls_token", "dist_token", "reg_token", "relative_position_bias_table")


def drawn_by(name: str, family: str = "vit", **sizes) -> dict[str, torch.Tensor]:
    return after(name, built(family, **sizes))


def fan_in(state: dict[str, torch.Tensor], name: str) -> int:
    """Inputs of one output of the layer that owns this weight or bias; tokens for a free Q or K."""
    if name.endswith((".query", ".key")):
        return state[name].shape[1]
    weight = state[name.rpartition(".")[0] + ".weight"]
    return weight[0].numel()


def errors_off(value: torch.Tensor, std: float) -> float:
    """By how many standard errors a spread about zero differs from `std`."""
    return abs(value.square().mean().item() ** 0.5 / std - 1) * (2 * value.numel()) ** 0.5


def has_std(value: torch.Tensor, std: float) -> bool:
    return errors_off(value, std) < 4


def is_normal(value: torch.Tensor, std: float) -> bool:
    """That spread, and tails beyond √3 std, where a uniform distribution ends."""
    return has_std(value, std) and (value.numel() < 60 or value.abs().max().item() > 1.8 * std)


def is_uniform(value: torch.Tensor, bound: float) -> bool:
    return has_std(value, bound / 3**0.5) and value.abs().max().item() <= bound


def of_a_norm(name: str) -> bool:
    """Weights, biases and statistics of LayerNorms and BatchNorms, by the names of models/."""
    return re.search(r"((^|\.)norm[12]?|^stem\.2|\.fn\.2|^blocks\.\d+\.3)\.\w+$", name) is not None


def leaves_normed_values_alone(name: str, value: torch.Tensor) -> bool:
    return bool((value == (1.0 if name.endswith(("weight", "running_var")) else 0.0)).all())


@pytest.mark.parametrize(
    "family, sizes", [("vit", {}), ("vit", dict(distilled=True, num_registers=3)), ("swin", {})]
)
def test_default_is_normal_with_zero_biases(family, sizes, held_against):
    state = drawn_by("default", family, **sizes)
    for name, value in state.items():
        if of_a_norm(name):
            assert leaves_normed_values_alone(name, value), name
        elif name.startswith("patch_embed"):
            assert is_uniform(value, fan_in(state, name) ** -0.5), name
        elif name.endswith("bias"):
            assert (value == 0).all(), name
        else:
            assert name.endswith(("weight", *EMBEDDINGS))
            assert is_normal(value, 0.02), name
            held_against(errors_off(value, 0.02), 0.0, within=4)


def test_default_of_a_mixer_is_its_authors():
    state = drawn_by("default", "mixer")
    for name, value in state.items():
        if of_a_norm(name):
            assert leaves_normed_values_alone(name, value), name
        elif name.startswith("head") or name == "stem.proj.bias":
            assert (value == 0).all(), name
        elif name == "stem.proj.weight":
            std = (3 * 4 * 4) ** -0.5  # after the cut, at 2 of the normal's own std
            assert has_std(value, std), name
            assert 1.99 * std < value.abs().max() * CUT_NORMAL_STD <= 2 * std, name
        elif name.endswith("weight"):  # Glorot and Bengio 2010, equation 16
            assert is_uniform(value, (6 / sum(value.shape)) ** 0.5), name
        else:
            assert is_normal(value, 1e-6), name


@pytest.mark.parametrize("family, sizes", MODELS_TRIED)
def test_torch_is_uniform_by_fan_in(family, sizes):
    state = drawn_by("torch", family, **sizes)
    for name, value in state.items():
        if of_a_norm(name):
            assert leaves_normed_values_alone(name, value), name
        elif name in ("cls_token", "dist_token"):
            assert (value == 0).all(), name
        elif name.endswith(EMBEDDINGS):
            assert family.startswith("simple") or is_normal(value, 0.02), name
        else:
            assert is_uniform(value, fan_in(state, name) ** -0.5), name


@pytest.mark.parametrize("family, sizes", MODELS_TRIED)
def test_lecun_is_normal_by_fan_in_without_biases(family, sizes):
    state, pytorchs = (drawn_by(name, family, **sizes) for name in ("lecun", "torch"))
    layers = 0
    for name, value in state.items():
        if of_a_norm(name) or name.endswith((*EMBEDDINGS, ".query", ".key")):
            assert torch.equal(value, pytorchs[name]), name
        elif name.endswith("bias"):
            assert (value == 0).all(), name
        else:
            assert is_normal(value, fan_in(state, name) ** -0.5), name
            layers += 1
    assert layers > 4


@pytest.mark.parametrize("name", VIT_INITS)
def test_the_generator_alone_decides(name):
    """Neither what constructors drew nor the global generator, which is left alone."""
    first, model = drawn_by(name), built("vit")
    torch.manual_seed(1)
    state = torch.get_rng_state()
    again = after(name, model, fill=2.0)
    assert all(torch.equal(value, first[key]) for key, value in again.items())
    assert torch.equal(torch.get_rng_state(), state)
    second = after(name, model, seed=1)
    for key in ("pos_embed", "head.weight", "blocks.1.attn.qkv.weight"):
        assert not torch.equal(first[key], second[key]), key


@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_a_parameter_that_no_rule_covers_is_an_error(positions):
    model = built("vit", pos_embed=positions, embed_dim=24)
    model.scale_token = nn.Parameter(torch.zeros(1, 1, 54))
    with pytest.raises(ValueError, match="no rule for scale_token"):
        vitinit.init_weights(model, "default", generator=torch.Generator())
