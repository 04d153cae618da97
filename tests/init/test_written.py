"""Every init writes what its docstring lists and nothing else, and refuses options before it draws."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

import vitinit
from vitinit.init import INITS, init_weights
from vitinit.models import MODELS

SIZES = {           # name in the table of models, sizes for images of 20×28 pixels
    "vit": ("vit_tiny", dict(patch_size=4, embed_dim=54, depth=2, num_heads=3)),
    "vit, fixed": ("vit_tiny", dict(patch_size=4, embed_dim=48, depth=2, num_heads=3,
                                    pos_embed="sincos")),
    "vit, narrow heads": ("vit_tiny", dict(patch_size=4, embed_dim=51, depth=1, num_heads=17)),
    "swin": ("swin_tiny", dict(patch_size=2, embed_dim=22, depths=(1, 1), num_heads=(2, 11),
                               window_size=(5, 7))),
    "mixer": ("mixer_s16", dict(patch_size=4, embed_dim=142, depth=2)),
    "mixer, narrow": ("mixer_s16", dict(patch_size=4, embed_dim=74, depth=1)),
    "mixer, too narrow": ("mixer_s16", dict(patch_size=4, embed_dim=68, depth=1)),
    "conv_mixer": ("convmixer_256_8", dict(patch_size=4, embed_dim=23, depth=2, kernel_size=3)),
    **{f"simple_vit, {reads}": ("simple_vit", dict(
        patch_size=4, embed_dim=68, depth=2, num_heads=4, reads=reads,
        input_pos_embed=reads == "content")) for reads in ("content", "position", "free")},
    "simple_vit, blind": ("simple_vit", dict(patch_size=4, embed_dim=68, depth=1, num_heads=4,
                                             reads="content", input_pos_embed=False)),
    "simple_vit, narrow heads": ("simple_vit", dict(patch_size=4, embed_dim=68, depth=1, num_heads=4,
                                                    head_dim=3, reads="position",
                                                    input_pos_embed=False)),
}
QK, VALUES = r"attn\.qkv\.weight\[QK\]", r"attn\.(qkv\.weight\[V\]|proj\.weight)"
QK_OF_SIMPLE = r"attn\.(qk\.weight|query|key)"

# family, init, options → the tensors that differ from the base; those of Q and K, and of V, apart.
WRITTEN: list[tuple[str, str, dict, str]] = [
    ("vit", "mimetic", {}, f"{QK}|{VALUES}"),
    ("vit", "mimetic", dict(qk_init="base"), VALUES),
    ("vit", "mimetic", dict(value_init="base"), QK),
    ("vit", "impulse", {}, f"pos_embed|{QK}|{VALUES}"),
    ("vit", "impulse", dict(value_init="base"), f"pos_embed|{QK}"),
    ("vit", "impulse_gd", dict(steps=2), QK),
    ("swin", "mimetic", {}, f"{QK}|{VALUES}"),
    ("swin", "impulse", {}, "relative_position_bias_table"),
    ("mixer", "impulse", {}, r"mlp_tokens\.fc[12]\.\w+"),
    ("mixer, narrow", "impulse", {}, r"mlp_tokens\.fc[12]\.\w+"),
    ("conv_mixer", "impulse", {}, r"0\.fn\.0\.(weight|bias)"),
    ("conv_mixer", "filters", dict(kind="box"), r"0\.fn\.0\.weight"),
    ("simple_vit, content", "impulse", {}, QK_OF_SIMPLE),
    ("simple_vit, free", "impulse", {}, QK_OF_SIMPLE),
    ("simple_vit, position", "mimetic", {}, QK_OF_SIMPLE),
    ("simple_vit, free", "impulse_gd", dict(steps=2), QK_OF_SIMPLE),
]

# What each kind of mistake is told: family, init, options, message.
MISTAKES: list[tuple[str, str, dict, str]] = [
    ("vit", "impulse", dict(base="zeros"), "base is 'zeros', expected one of default, torch, lecun"),
    ("vit", "impulse", dict(kernel_size=0), "kernel_size is 0, expected at least 1"),
    ("vit", "impulse", dict(kernel_size=10), "kernel_size is 10, but beyond 9 its outer offsets have no"),
    ("vit", "impulse", dict(offsets="spiral"), "offsets is 'spiral'"),
    ("vit", "impulse", dict(value_init="x"), "value_init is 'x'"),
    ("vit", "impulse", dict(rank=-1), "rank is -1"),
    ("vit", "impulse", dict(noise_std=-1.0), "noise_std -1.0"),
    ("vit", "impulse", dict(value_alpha=math.nan), "value_alpha nan"),
    ("vit, fixed", "impulse", {}, r"numerical rank is \d+ for 35 tokens.*uniform.*learned"),
    ("vit", "mimetic", dict(qk_init="torch"), "qk_init is 'torch', expected one of mimetic, base"),
    ("vit, fixed", "deep_impulse", {}, "a fixed position embedding"),
    ("vit, narrow heads", "deep_impulse", {}, "head_dim 3, embed_dim 51"),
    ("vit", "deep_impulse", dict(target_mass=(0.5, 1.0)), "expected 0 < mass < 1"),
    ("vit", "impulse_gd", dict(steps=0), "steps is 0"),
    ("vit", "impulse_gd", dict(pseudo_input="noise"), "pseudo_input is 'noise', expected one of pos_embed"),
    ("vit, fixed", "impulse_gd", {}, 'set pool = "mean"'),           # its class token has no position
    ("swin", "impulse", dict(target_mass=0.0), "target_mass is 0.0, expected 0 < target_mass < 1"),
    ("swin", "impulse", dict(kernel_size=11), "kernel_size is 11, .* a window 5 tokens wide"),
    ("mixer", "mimetic", {}, "not defined for a MlpMixer"),
    ("mixer", "impulse", dict(gain=0), "gain is 0 and linear_bias 4.0; expected a gain other than 0"),
    ("mixer, too narrow", "impulse", {}, "as tokens, 35, and it has 34; raise tokens_ratio or"),
    ("conv_mixer", "impulse", dict(kernel_size=4), "kernel_size is 4, expected at most the model's 3"),
    ("conv_mixer", "impulse", dict(gain=-0.0), "gain is 0, so that no filter picks a neighbour"),
    ("conv_mixer", "filters", dict(kind="boxes"), "kind is 'boxes'"),
    ("conv_mixer", "filters", dict(cells=10), "expected 1 ≤ cells ≤ 9"),
    ("simple_vit, blind", "impulse", {}, "queries do not see; set input_pos_embed = true, alpha < 1, or"),
    ("simple_vit, narrow heads", "impulse", {}, "head_dim is 3, and init 'impulse' needs 4 or more"),
    ("simple_vit, position", "impulse", dict(target_mass=math.nan), "target_mass is nan"),
]
AFTER_THE_DRAW: list[tuple[str, str, dict, str]] = [         # seen in the weights alone
    ("vit", "impulse", dict(pos_embed_scale=0.0), "numerical rank is 0 for 35 tokens"),
    ("vit", "impulse", dict(value_beta=1e308), r"init 'impulse' with value_beta=1e\+308 "),
    ("vit", "impulse", dict(qk_norm=1e-300), "nearly uniform attention in all heads"),
    ("vit", "deep_impulse", dict(value_alpha=-0.4), "the factor of the noise Z is -0.4, expected"),
]


def built(family: str) -> nn.Module:
    name, sizes = SIZES[family]
    return vitinit.build_model(name, num_classes=3, image_size=(20, 28), **sizes)


def drawn(family: str, init: str, **options: Any) -> dict[str, torch.Tensor]:
    """The state after an init; what constructors drew, and buffers, must not survive: NaN."""
    model = built(family)
    for key, value in model.state_dict().items():
        if value.is_floating_point() and "pos_embed" not in key:     # which may be fixed
            value.fill_(math.nan)
    init_weights(model, init, generator=torch.Generator().manual_seed(3), **options)
    state = {}
    for key, value in model.state_dict().items():
        if key.endswith("qkv.weight"):
            state[f"{key}[QK]"], state[f"{key}[V]"] = value.tensor_split([2 * len(value) // 3])
        else:
            state[key] = value
    return state


@pytest.mark.parametrize("family, init, options, written", WRITTEN)
@pytest.mark.parametrize("base", ["torch"])
def test_all_other_tensors_are_as_the_base_drew_them(family, init, options, written, base):
    state, reference = drawn(family, init, base=base, **options), drawn(family, base)
    for key, value in state.items():
        assert value.isfinite().all(), key
        listed = re.search(rf"(^|\.)({written})$", key) is not None
        assert torch.equal(value, reference[key]) != listed, key


@pytest.mark.parametrize("family, init, options, message", MISTAKES + AFTER_THE_DRAW)
def test_a_mistake_is_one_line_and_draws_nothing(family, init, options, message):
    model, generator = built(family), torch.Generator().manual_seed(0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = generator.get_state()
    with pytest.raises(ValueError, match=message) as error:
        init_weights(model, init, generator=generator, **options)
    assert "\n" not in str(error.value)
    if (family, init, options, message) in MISTAKES:
        assert torch.equal(generator.get_state(), state)
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_every_init_but_the_bases_is_tried():
    pairs = {(MODELS[SIZES[family][0]][0], init) for family, init, *_ in WRITTEN}
    own = {("vit", "deep_impulse"), ("vit", "norm_matched")}         # whose tests do so in detail
    assert pairs | own == {
        (family, init) for init, families in INITS.items() for family in families
        if init not in ("default", "torch", "lecun")}
