"""Parameter groups, compared with published counts; the learning rate, with known values."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from refused import refused
from torch import nn

import vitinit
from vitinit.base.messages import OneLineError
from vitinit.recipe.files import RECIPES, load_recipe
from vitinit.train.optim import LearningRate, Schedule, parameter_groups


@pytest.mark.parametrize(
    "name, decayed, exempt", [("vit_tiny", 5_647_872, 69_544), ("vit_base", 86_292_480, 275_176)]
)
def test_decayed_and_exempt_counts_are_deits(name, decayed, exempt, held_against):
    with torch.device("meta"):
        model = vitinit.build_model(name, num_classes=1000, image_size=224)
    groups = parameter_groups(model, weight_decay=0.05)
    counts = [sum(p.numel() for p in group["params"]) for group in groups]
    assert counts == [decayed, exempt]
    held_against(counts, [decayed, exempt])
    assert [len(group["params"]) for group in groups] == [50, 102]
    assert [group["weight_decay"] for group in groups] == [0.05, 0.0]
    exempt_ids = {id(p) for p in groups[1]["params"]}
    assert {id(model.pos_embed), id(model.cls_token), id(model.head.bias)} <= exempt_ids


@pytest.mark.parametrize("step_on", ["epoch", "update"])
def test_the_trace_of_deit_base_is_the_published_schedule(step_on, held_against):
    """By the recipe's own values and DeiT's formulas; and of a cool-down, which DeiT's has not."""
    recipe = load_recipe(RECIPES / "deit_base.toml")
    schedule, steps = recipe.schedule, 1_281_167 // recipe.optim.global_batch
    assert (schedule.epochs, schedule.cooldown_epochs, schedule.step_on) == (300, 0, "epoch")
    assert replace(recipe.optim, lr_scaling="none").peak_lr == 5e-4  # and linear: 1e-3
    schedule = replace(schedule, cooldown_epochs=7, step_on=step_on)
    for step in {*range(0, 307 * 1251, 389), *range(0, 307 * 1251, 1251), 1250, 5 * 1251 - 1}:
        time = step // 1251 if step_on == "epoch" else step / 1251
        expected = (
            1e-6 + time * (1e-3 - 1e-6) / 5
            if time < 5
            else 1e-5 + 0.5 * (1e-3 - 1e-5) * (1 + math.cos(math.pi * min(time, 300) / 300))
        )
        found = LearningRate(schedule, recipe.optim.peak_lr, steps)(step)
        assert found == pytest.approx(expected, rel=1e-12)
        held_against(found, expected)


@pytest.mark.parametrize("prefix", [True, False])
def test_the_trace_of_swin_tiny_is_that_of_timms_scheduler_as_swins_code_sets_it(
    prefix, held_against
):
    """With its WARMUP_PREFIX, which the recipe has, and without; all rates for 8 · 128 images."""
    recipe, per_epoch = load_recipe(RECIPES / "swin_tiny.toml"), 1_281_167 // (8 * 128)
    assert recipe.schedule.cosine_after_warmup and recipe.optim.global_batch == 8 * 128
    peak, start, end = (rate * 8 * 128 / 512 for rate in (5e-4, 5e-7, 5e-6))
    warmup, cycle = 20 * per_epoch, 300 * per_epoch - 20 * per_epoch * prefix
    for step in {*range(0, 300 * per_epoch, 389), warmup - 1, warmup, 300 * per_epoch - 1}:
        along = step - warmup * prefix
        expected = (
            start + step * (peak - start) / warmup
            if step < warmup
            else end + 0.5 * (peak - end) * (1 + math.cos(math.pi * along / cycle))
        )
        schedule = replace(recipe.schedule, cosine_after_warmup=prefix)
        found = LearningRate(schedule, recipe.optim.peak_lr, per_epoch)(step)
        assert found == pytest.approx(expected, rel=1e-12)
        held_against(found, expected)


@pytest.mark.parametrize("step_on", ["epoch", "update"])
def test_one_cycle_is_conv_mixers_interpolation(step_on, held_against):
    """arXiv 2201.09792's code: numpy.interp over 0, ⅖, ⅘ and all of the epochs."""
    epochs, steps, peak = 35, 11, 0.013
    schedule = Schedule(
        "one_cycle",
        epochs=epochs,
        cooldown_epochs=1,
        warmup_epochs=0,
        warmup_lr=1e-3,
        cosine_after_warmup=False,
        min_lr=1e-4,
        step_on=step_on,
        shift_epochs=0,
    )
    for step in range((epochs + 1) * steps):
        time = step // steps if step_on == "epoch" else step / steps
        expected = np.interp(
            time, [0, epochs * 2 / 5, epochs * 4 / 5, epochs], [1e-3, peak, peak / 20, 1e-4]
        )
        found = LearningRate(schedule, peak, steps)(step)
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-18)
        held_against(found, expected)


def test_a_model_without_weights_to_train_is_refused_with_the_way():
    model = nn.Linear(3, 5).requires_grad_(False)
    assert refused(OneLineError, parameter_groups, model, 0.05) == (
        "no weight of this model requires a gradient, as vitinit.load and ema leave them; "
        "model.requires_grad_(True) makes them trainable"
    )
