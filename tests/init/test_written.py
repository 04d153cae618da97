"""Every init writes what its docstring lists alone, and refuses options before it draws."""

import re
from typing import Any

import pytest
import torch
from small_models import SIZES, after, built, inits_of, seeded, state_of

from vitinit.init import INITS, init_weights, stated_family

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
    *(
        (
            "rotary",
            init,
            {},
            rf"reg_token|patch_embed\.proj\.\w+|mlp\.fc2\.\w+|attn\.qkv\.bias|"
            rf"attn\.proj\.bias|{QK}|{VALUES}",
        )
        for init in ("impulse", "deep_impulse")
    ),
    ("swin", "mimetic", {}, f"{QK}|{VALUES}"),
    ("swin", "impulse", {}, "relative_position_bias_table"),
    ("mixer", "impulse", {}, r"mlp_tokens\.fc[12]\.\w+"),
    ("mixer, narrow", "impulse", {}, r"mlp_tokens\.fc[12]\.\w+"),
    ("conv_mixer", "impulse", {}, r"0\.fn\.0\.(weight|bias)"),
    ("conv_mixer", "filters", dict(kind="box"), r"0\.fn\.0\.weight"),
    *(
        (family, "whitened", {}, r"(stem\.0|(stem|patch_embed)\.proj)\.weight")
        for family in ("vit", "rotary", "swin", "mixer", "conv_mixer")
    ),
    ("simple_vit, content", "impulse", {}, QK_OF_SIMPLE),
    ("simple_vit, free", "impulse", {}, QK_OF_SIMPLE),
    ("simple_vit, position", "mimetic", {}, QK_OF_SIMPLE),
    ("simple_vit, free", "impulse_gd", dict(steps=2), QK_OF_SIMPLE),
]

FIXED = dict(pos_embed="sincos", embed_dim=48)  # positions that do not train
# What each kind of mistake is told: family, other sizes, init, options, message.
MISTAKES: list[tuple[str, dict, str, dict, str]] = [
    ("vit", {}, "impulse", dict(base="zeros"), "base is 'zeros'; valid: default, lecun, torch"),
    ("vit", {}, "impulse", dict(kernel_size=0), "kernel_size is 0, expected an integer ≥ 1"),
    ("vit", {}, "impulse", dict(kernel_size=10), "is 10, but beyond 9 its outer offsets have no"),
    ("vit", {}, "impulse", dict(rank=-1), "rank is -1"),
    ("vit", FIXED, "impulse", {}, r"numerical rank is \d+ for 35 tokens.*uniform.*learned"),
    ("vit", FIXED, "deep_impulse", {}, "a fixed position embedding"),
    ("vit", dict(num_heads=18), "deep_impulse", {}, "head_dim 3, embed_dim 54"),
    ("vit", {}, "deep_impulse", dict(target_mass=(0.5, 1.0)), "a list of 2, each a number > 0"),
    ("vit", dict(image_size=256), "deep_impulse", dict(target_mass=(0.99, 0.1)), "of 4096 tokens"),
    ("vit", {}, "deep_impulse", dict(constant_variance=1.0), "is 1.0, expected a number ≥ 0"),
    ("vit", FIXED, "impulse_gd", {}, 'set pool = "mean"'),  # its class token has no position
    ("vit", {}, "deep_impulse", dict(value_alpha=-0.4), "alpha is -0.4, expected a number ≥ 0"),
    ("rotary", {}, "impulse", dict(kernel_size=10), "is 10, but beyond 9 its .* on the 5×7 grid"),
    (
        "rotary",
        {},
        "mimetic",
        {},
        "for the family rotary_vit; it has: default, torch, lecun, impulse, deep",
    ),
    ("swin", {}, "impulse", dict(target_mass=0.0), "is 0.0, expected a number > 0 and < 1"),
    ("swin", {}, "impulse", dict(kernel_size=11), "is 11, but beyond 9 its .* on the 5×7 grid"),
    ("mixer", {}, "mimetic", {}, "the family mlp_mixer; it has: default, torch, lecun, impulse"),
    ("mixer", {}, "impulse", dict(linear_bias=0), "linear_bias is 0, expected a number > 0"),
    ("mixer", dict(embed_dim=68), "impulse", {}, "as tokens, 35, and it has 34; raise token"),
    ("conv_mixer", {}, "impulse", dict(kernel_size=4), "is 4, expected at most the model's 3"),
    ("conv_mixer", {}, "filters", dict(cells=10), "expected at most the 9 of the model's kernel"),
    (
        "simple_vit, content",
        dict(input_pos_embed=False),
        "impulse",
        {},
        "queries do not see; set input_pos_embed = true, alpha < 1, or",
    ),
    (
        "simple_vit, position",
        dict(head_dim=3),
        "impulse",
        {},
        r"with 0 pair\(s\) of sine and cosine; raise head_dim",
    ),
    (
        "simple_vit, position",
        {},
        "filters",
        {},
        "the family simple_vit; it has: .*mimetic, impulse, imp",
    ),
    ("vit", {}, "xyz", {}, f"there is no init 'xyz'; valid: {', '.join(sorted(INITS))} "),
]
AFTER_THE_DRAW: list[tuple[str, dict, str, dict, str]] = [  # seen in the weights alone
    (
        "rotary",
        dict(num_heads=15),
        "impulse",
        dict(base="lecun", target_mass=0.99),
        "target_mass is 0.99, which these queries and keys do not reach: too much",
    ),
    ("vit", {}, "impulse", dict(pos_embed_scale=0.0), "numerical rank is 0 for 35 tokens"),
    ("vit", {}, "impulse", dict(value_beta=1e308), r"init 'impulse' with value_beta=1e\+308 "),
    ("vit", {}, "impulse", dict(qk_norm=1e-300), "nearly uniform attention in all heads"),
    ("vit", {}, "deep_impulse", dict(value_beta=1e308), "value_beta=1e.308 .*block 1 reads"),
]


def drawn(family: str, init: str, **options: Any) -> dict[str, torch.Tensor]:
    """The state after an init, by part."""
    state = after(init, built(family), 3, **options)
    for key in [key for key in state if key.endswith("qkv.weight")]:
        value = state.pop(key)
        state[f"{key}[QK]"], state[f"{key}[V]"] = value.tensor_split([2 * len(value) // 3])
    return state


@pytest.mark.parametrize("family, init, options, written", WRITTEN)
def test_all_other_tensors_are_as_the_base_drew_them(family, init, options, written):
    reference = drawn(family, "torch")
    for key, value in drawn(family, init, base="torch", **options).items():
        assert value.isfinite().all(), key
        listed = re.search(rf"(^|\.)({written})$", key) is not None
        assert torch.equal(value, reference[key]) != listed, key


def test_a_mistake_is_one_line_and_draws_nothing():
    for number, (family, sizes, init, options, message) in enumerate(MISTAKES + AFTER_THE_DRAW):
        model, generator = built(family, **sizes), seeded()
        before, drawn_from = state_of(model), generator.get_state()
        with pytest.raises(ValueError, match=message) as error:
            init_weights(model, init, generator=generator, **options)
        assert "\n" not in str(error.value)
        if number < len(MISTAKES):
            assert torch.equal(generator.get_state(), drawn_from), message
            assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_every_init_but_the_bases_is_tried():
    pairs = {(family, init) for family, init, *_ in WRITTEN}
    own = {("vit", "deep_impulse"), ("vit", "norm_matched")}  # whose tests do so in detail
    kinds = {(stated_family(*SIZES[family]), init) for family, init in pairs | own}
    assert kinds == {
        (stated_family(*SIZES[family]), init)
        for family in SIZES
        for init in inits_of(family)
        if init not in ("default", "torch", "lecun")
    }
