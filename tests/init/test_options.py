"""Every init of every family: it can be trained, and options of any value are finite weights or a
line."""

import inspect
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from refused import refused
from same_run import assert_identical
from small_models import QUICK, SIZES, built, inits_of, seeded

from vitinit.init import INITS, init_, init_function, init_weights, stated_family
from vitinit.models import MODELS, VisionTransformer, build_model

BESIDE = {"sigma": dict(kind="gaussian"), "cells": dict(kind="box")}  # with which they matter
EXTREMES = {
    float: [0.0, -1.0, -0.4, 1e-300, 1e-30, 1e30, 1e308, -1e308, math.nan, math.inf, -math.inf],
    int: [0, -1, 2**31, 2**63, -(2**63)],
}
EXTREMES[tuple] = [(number, 0.02) for number in EXTREMES[float]]


def tries() -> Iterator[tuple[str, str, str, Any]]:
    """(family, init, option, value): every numeric option, at extreme values."""
    for family in SIZES:
        for init in inits_of(family):
            function = init_function(init, stated_family(*SIZES[family]))
            for option, parameter in inspect.signature(function).parameters.items():
                values = EXTREMES.get(type(parameter.default), [])
                yield from (
                    (family, init, option, value)
                    for value in (values if option != "steps" else (0, -1))
                )


def test_extreme_numbers_give_finite_weights_or_a_line_that_names_the_option():
    for family, init, option, value in random.Random(0).sample(list(tries()), 110):
        model, case = built(family), f"{family}: {init} {option}={value!r:.40}"
        try:
            init_weights(
                model,
                init,
                generator=seeded(),
                **QUICK.get(init, {}) | BESIDE.get(option, {}) | {option: value},
            )
        except ValueError as error:
            message = str(error)
            assert "\n" not in message and len(message) < 300 + len(repr(value)), case
            assert option in message or "nearly uniform" in message or "something did" in message, (
                message
            )
        except Exception as error:
            pytest.fail(f"{case}: {type(error).__name__}: {error}")
        else:
            assert all(parameter.isfinite().all() for parameter in model.parameters()), case


@pytest.mark.parametrize("family", SIZES)
def test_a_step_lowers_the_loss_and_every_gradient_is_finite(images, family):
    views, labels = images[:23, :, 3:23, 2:30], torch.arange(23) % 10
    for number, name in enumerate(inits_of(family)):
        model, losses = built(family), []
        init_weights(model, name, generator=seeded(), **QUICK.get(name, {}))
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=number % 2 == 1):
                loss = torch.nn.functional.cross_entropy(model(views), labels)
            losses.append(loss.item())
            model.zero_grad()
            loss.backward()
            square = sum(p.grad.square().sum() for p in model.parameters())
            assert square.isfinite(), name
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad / square.sqrt()
        assert losses[1] < losses[0], name


@pytest.mark.parametrize("family", SIZES)
def test_an_init_within_autocast_is_that_without(family):
    for name in inits_of(family):
        model, plain = built(family), built(family)
        init_weights(plain, name, generator=seeded(), **QUICK.get(name, {}))
        with torch.autocast("cpu", torch.bfloat16):
            init_weights(model, name, generator=seeded(), **QUICK.get(name, {}))
        assert_identical(model.state_dict(), plain.state_dict())


def test_no_family_is_left_out():
    classes = {stated_family(*sizes) for sizes in SIZES.values()}
    assert classes == {family for functions in INITS.values() for family in functions}
    assert classes > {family for family, _ in MODELS.values()}


class Child(VisionTransformer):
    """A user's subclass that changes nothing that inits depend on."""


def test_subclasses_and_compiled_models_get_the_weights_of_the_model_itself():
    sizes = MODELS["vit_tiny"][1] | SIZES["vit"][1] | dict(num_classes=3, image_size=(20, 28))
    plain, child, wrapped = VisionTransformer(**sizes), Child(**sizes), VisionTransformer(**sizes)
    for model in (plain, child, torch.compile(wrapped)):
        init_weights(model, "impulse", generator=seeded())
    for other in (child, wrapped):
        assert all(
            torch.equal(value, other.state_dict()[key]) for key, value in plain.state_dict().items()
        )


@pytest.mark.parametrize(
    "name, option, value, words",
    [
        ("impulse_gd", "share_blocks", "no", "is 'no', expected true or false"),
        ("impulse", "pos_embed_scale", "a", "is 'a', expected a number"),
        ("impulse", "impulse_scale", 0, "is 0, expected a number > 0 and < "),
        ("impulse", "impulse_scale", -40.0, "is -40.0, expected a number > 0 and < "),
        ("impulse", "qk_norm", -7, "is -7, expected a number > 0 and < "),
        ("impulse", "kernel_size", 3.0, "is 3.0, expected an integer ≥ 1"),
        ("mimetic", "value_beta", True, "is true, expected a number"),
    ],
)
def test_a_value_of_another_type_is_a_line_and_no_weight_changes(name, option, value, words):
    model = built("vit")
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for call in (init_weights, init_):
        line = refused(ValueError, call, model, name, generator=seeded(), **{option: value})
        assert line.startswith(f"{option} {words}")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_an_option_that_no_recipe_can_state_is_taken_as_it_is(monkeypatch):
    """An init of one's own, with a tensor, a list, and an argument without a type."""
    seen: list = []

    def mine(model, *, generator, scale: int, filters: torch.Tensor, sizes: list[int], other=None):
        seen.extend((scale, filters, sizes, other))

    monkeypatch.setitem(INITS, "mine", {"vit": mine})
    given = (np.int64(3), torch.ones(2), [5, 7], object())
    options = dict(zip(("scale", "filters", "sizes", "other"), given))
    init_weights(built("vit"), "mine", generator=seeded(), **options)
    assert type(seen[0]) is int and seen[0] == 3
    assert all(one is other for one, other in zip(seen[1:], given[1:]))


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda model: model.half(),
            "^cls_token is float16 on cpu; .* call init_weights before .half",
        ),
        (lambda model: model.to("meta"), r"^cls_token is float32 on meta; .* or \.to\(device\)"),
    ],
)
def test_models_on_a_device_or_in_half_precision_are_one_line(change, message):
    model, generator = change(built("vit")), torch.Generator()
    state = generator.get_state()
    with pytest.raises(ValueError, match=message) as error:
        init_weights(model, "impulse", generator=generator)
    assert "\n" not in str(error.value) and torch.equal(generator.get_state(), state)


@pytest.mark.parametrize(
    "init, shifts, expected",
    [
        ("impulse", 2, "no block has queries and keys"),
        ("norm_matched", 2, "no block has queries and keys"),
        ("impulse_gd", 2, "no block has queries and keys"),
        ("deep_impulse", 1, "the first 1 mix by shifts; expected shift_blocks = 0"),
    ],
)
def test_an_init_of_attention_says_that_shifts_have_none(init, shifts, expected):
    sizes = dict(num_classes=3, image_size=(15, 25), patch_size=5, embed_dim=24, num_heads=2)
    model = build_model("vit_tiny", **sizes, depth=2, pool="mean", shift_blocks=shifts)
    with pytest.raises(ValueError, match=expected):
        init_weights(model, init, generator=torch.Generator().manual_seed(0))
