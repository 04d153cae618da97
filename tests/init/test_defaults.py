"""The defaults of every init: a published number is a claim, and stands here with its source."""

import inspect

from vitinit.base.table import find
from vitinit.init import GIVEN, INITS

OURS = "ours: no paper or code has the option, or this value of it"
CODE = "released code of arXiv 2505.19985"
OF_VIT = f"{CODE}, where it is of a ViT"
EARLIER = "released code of arXiv 2401.12511"
MIMETIC = "arXiv 2305.09828, §3: the constants of ViT"
DEFAULTS = {  # function → option → its default, and where that is from
    "default": {},
    "mixer_default": {},
    "torch_default": {},
    "lecun": {},
    "whitened": {"base": ("default", OURS)},
    "mimetic": {
        "base": ("default", OURS),
        "qk_init": ("mimetic", MIMETIC),
        "qk_alpha": (0.7, MIMETIC),
        "qk_beta": (0.7, MIMETIC),
        "value_init": ("mimetic", MIMETIC),
        "value_alpha": (0.4, MIMETIC),
        "value_beta": (0.4, MIMETIC),
    },
    "mimetic_simple_vit": {
        "base": ("default", OURS),
        "qk_alpha": (0.7 / 3**0.5, f"{EARLIER}: .7, of a Z with a third of our variance"),
        "qk_beta": (0.7, EARLIER),
    },
    "impulse": {
        "base": ("default", OURS),
        "kernel_size": (3, CODE),
        "offsets": ("ordered", CODE),
        "pos_embed_scale": (18.0, CODE),
        "qk_norm": (7.0, f"{CODE}; the paper has 2"),
        "rank": (0, f"{OURS}, `default_rank`; {CODE} has head_dim"),
        "impulse_scale": (1000.0, f"{CODE}; the paper has 40"),
        "noise_scale": (3.0, f"{CODE}; the paper has 1"),
        "noise_std": (0.6, f"{CODE}; the paper has 1"),
        "value_init": ("mimetic", f"{CODE}; the paper leaves the base"),
        "value_alpha": (0.4, CODE),
        "value_beta": (0.4, CODE),
    },
    "norm_matched": {"base": ("default", OURS)},
    "impulse_swin": {
        "base": ("default", OURS),
        "kernel_size": (3, "arXiv 2505.19985"),
        "offsets": ("ordered", OF_VIT),
        "target_mass": (0.9, OURS),
    },
    "impulse_simple_vit": {
        "base": ("default", OURS),
        "kernel_size": (3, "arXiv 2404.01139, which has 3 and 5"),
        "offsets": ("ordered", OF_VIT),
        "target_mass": (0.9, OURS),
    },
    "impulse_mixer": {
        "base": ("default", OURS),
        "kernel_size": (3, "arXiv 2505.19985"),
        "offsets": ("ordered", OF_VIT),
        "gain": (1.0, OURS),
        "linear_bias": (4.0, OURS),
    },
    "impulse_conv_mixer": {
        "base": ("default", OURS),
        "kernel_size": (0, f"{EARLIER}: that of the model"),
        "offsets": ("ordered", OURS),
        "gain": (1.0, f"{OURS}, {EARLIER} has √⅓"),
    },
    "filters_conv_mixer": {
        "base": ("default", OURS),
        "kind": ("random", EARLIER),
        "cells": (2, OURS),
        "sigma": (1.0, OURS),
    },
    "impulse_gd": {
        "base": ("default", OURS),
        "kernel_size": (3, "arXiv 2404.01139, which has 3 and 5"),
        "offsets": ("random", EARLIER),
        "pseudo_input": ("pos_embed", EARLIER),
        "share_blocks": (True, "arXiv 2404.01139"),
        "steps": (1000, f"{OURS}, {EARLIER} has 10,000"),
        "step_size": (1e-4, EARLIER),
        "renorm_every": (100, f"{EARLIER}, which has 1 and 100"),
    },
    "impulse_rotary": {
        "base": ("torch", OURS),
        "kernel_size": (3, "arXiv 2505.19985"),
        "target_mass": (0.9, OURS),
        "value_init": ("base", OURS),
        "value_alpha": (0.4, MIMETIC),
        "value_beta": (0.4, MIMETIC),
        "patch_init": ("base", OURS),
    },
    "deep_impulse": {
        "base": ("lecun", OURS),
        "kernel_size": (3, "arXiv 2505.19985"),
        "target_mass": ((0.66, 0.025), OURS),
        "value_init": ("mimetic", CODE),
        "value_alpha": (0.4, MIMETIC),
        "value_beta": (0.4, MIMETIC),
        "constant_variance": (0.95, OURS),
        "patch_init": ("base", OURS),
    },
    "deep_impulse_rotary": {
        "base": ("torch", OURS),
        "kernel_size": (3, "arXiv 2505.19985"),
        "value_init": ("base", OURS),
        "value_alpha": (0.4, MIMETIC),
        "value_beta": (0.4, MIMETIC),
        "patch_init": ("base", OURS),
        "target_mass": ((0.9, 0.3), OURS),
    },
}


def test_the_defaults_of_every_init_are_those_that_their_sources_have():
    functions = {find(place) for families in INITS.values() for place in families.values()}
    found = {}
    for function in functions:
        _, *options = inspect.signature(function).parameters.values()  # less the model
        found[function.__name__] = {
            option.name: (type(option.default), option.default)
            for option in options
            if option.name not in GIVEN
        }
        for option in options:
            assert option.kind is option.KEYWORD_ONLY, f"{function.__name__}: {option.name}"
    assert found == {
        name: {key: (type(value), value) for key, (value, _) in options.items()}
        for name, options in DEFAULTS.items()
    }
