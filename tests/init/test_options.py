"""Options of inits and models of any value: finite weights, or an error of one line."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import vitinit
from vitinit.init import INITS, init_function, init_weights
from vitinit.models import MODELS, VisionTransformer

VIT = ("vit_tiny", dict(patch_size=4, embed_dim=36, depth=2, num_heads=2))
MODELS_TRIED = {        # names and sizes for images of 12×20 pixels
    "vit": VIT,
    "swin": ("swin_tiny", dict(patch_size=4, embed_dim=8, depths=(2,), num_heads=(2,),
                               window_size=(3, 5))),
    "mixer, wide": ("mixer_s16", dict(patch_size=4, embed_dim=62, depth=1)),
    "mixer, narrow": ("mixer_s16", dict(patch_size=4, embed_dim=34, depth=1)),
    "conv_mixer": ("convmixer_256_8", dict(patch_size=4, embed_dim=7, depth=1, kernel_size=3)),
    "simple_vit": ("simple_vit", dict(patch_size=4, embed_dim=36, depth=1, num_heads=2,
                                      reads="position", input_pos_embed=False)),
    "simple_vit, free": ("simple_vit", dict(patch_size=4, embed_dim=36, depth=1, num_heads=2,
                                            reads="free", input_pos_embed=False)),
}
BESIDE = {              # options beside the one that is tried, which it has an effect with
    ("impulse", "value_alpha"): [{}, dict(value_init="mimetic")],
    ("impulse", "value_beta"): [{}, dict(value_init="mimetic")],
    ("filters", "sigma"): [dict(kind="gaussian")], ("filters", "cells"): [dict(kind="box")],
}
NUMBERS = [0.0, -1.0, -0.4, 1e-300, 1e-30, 1e30, 1e308, -1e308, math.nan, math.inf, -math.inf]
INTEGERS = [0, -1, 2**31, 2**63, -(2**63)]
QUICK = {"impulse_gd": dict(steps=2)}


def built(family: str) -> nn.Module:
    name, sizes = MODELS_TRIED[family]
    return vitinit.build_model(name, num_classes=3, image_size=(12, 20), **sizes)


def tries() -> Iterator[tuple[str, str, str, Any, dict]]:
    """(family, init, option, value, other options): every numeric option, at extreme values."""
    for family, (name, _) in MODELS_TRIED.items():
        for init in INITS:
            if MODELS[name][0] not in INITS[init]:
                continue
            function = init_function(init, MODELS[name][0])
            for option, parameter in inspect.signature(function).parameters.items():
                values = {float: NUMBERS, int: INTEGERS,
                          tuple: [(number, 0.02) for number in NUMBERS]}.get(type(parameter.default), [])
                for value in values if option != "steps" else (0, -1):
                    for others in BESIDE.get((init, option), [{}]):
                        if others.keys() <= inspect.signature(function).parameters.keys():
                            yield family, init, option, value, others


def outcome(family: str, init: str, option: str, value: Any, others: dict) -> str | None:
    """The message of its ValueError, or None where all weights are finite."""
    model = built(family)
    try:
        init_weights(model, init, generator=torch.Generator().manual_seed(0),
                     **QUICK.get(init, {}) | others | {option: value})
    except ValueError as error:
        return str(error)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    return None


SOME = random.Random(0).sample(list(tries()), 110)


def test_extreme_numbers_give_finite_weights_or_a_line_that_names_the_option():
    for family, init, option, value, others in SOME:
        case = f"{family}: {init} {option}={value!r:.40} {others}"
        try:
            message = outcome(family, init, option, value, others)
        except Exception as error:
            pytest.fail(f"{case}: {type(error).__name__}: {error}")
        if message is not None:
            assert "\n" not in message and len(message) < 300 + len(repr(value)), case
            assert (option in message or "nearly uniform" in message
                    or option.endswith("alpha") and "factor of the noise" in message), f"{case}: {message}"


# ---------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------


class Child(VisionTransformer):
    """A user's subclass that changes nothing that inits depend on."""


@pytest.mark.parametrize("init", ["impulse", "default"])
def test_subclasses_and_compiled_models_get_the_weights_of_the_model_itself(init):
    name, sizes = VIT
    sizes = MODELS[name][1] | sizes | dict(num_classes=3, image_size=(12, 20))
    plain, child, wrapped = VisionTransformer(**sizes), Child(**sizes), VisionTransformer(**sizes)
    compiled = torch.compile(wrapped) if init == "impulse" else wrapped  # whose import takes seconds
    for model in (plain, child, compiled):
        init_weights(model, init, generator=torch.Generator().manual_seed(0))
    for other in (child, wrapped):
        assert all(torch.equal(value, other.state_dict()[key])
                   for key, value in plain.state_dict().items())
    assert init_function(init, child.family) is init_function(init, "vit")


@pytest.mark.parametrize("change, message", [
    (lambda model: model.half(), "^cls_token is float16 on cpu; .* call init_weights before .half"),
    (lambda model: model.to("meta"), r"^cls_token is float32 on meta; .* or \.to\(device\)")])
def test_models_on_a_device_or_in_half_precision_are_one_line(change, message, init="impulse"):
    model = change(built("vit"))
    generator = torch.Generator()
    state = generator.get_state()
    with pytest.raises(ValueError, match=message) as error:
        init_weights(model, init, generator=generator)
    assert "\n" not in str(error.value) and torch.equal(generator.get_state(), state)
