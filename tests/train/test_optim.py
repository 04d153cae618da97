"""Parameter groups, compared with published counts; the learning rate, with known values."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from optimisers import OPTIM

import vitinit
from vitinit.recipe.files import load_recipe
from vitinit.train.optim import Schedule, learning_rate, parameter_groups

DEIT = Schedule("cosine", epochs=300, cooldown_epochs=10, warmup_epochs=5, warmup_lr=1e-6,
                min_lr=1e-5, step_on="epoch")


@pytest.mark.parametrize("name, decayed, exempt", [
    ("vit_tiny", 5_647_872, 69_544), ("vit_base", 86_292_480, 275_176)])
def test_decayed_and_exempt_counts_are_deits(name, decayed, exempt):
    with torch.device("meta"):
        model = vitinit.build_model(name, num_classes=1000, image_size=224)
    groups = parameter_groups(model, weight_decay=0.05)
    assert [sum(p.numel() for p in group["params"]) for group in groups] == [decayed, exempt]
    assert [len(group["params"]) for group in groups] == [50, 102]
    assert [group["weight_decay"] for group in groups] == [0.05, 0.0]
    exempt_ids = {id(p) for p in groups[1]["params"]}
    assert {id(model.pos_embed), id(model.cls_token), id(model.head.bias)} <= exempt_ids


def test_the_trace_of_deit_base_is_the_published_schedule(repository):
    """By the recipe's own values, for each of the 300 epochs, compared with DeiT's formulas."""
    recipe = load_recipe(repository / "recipes" / "deit_base.toml")
    schedule, steps = recipe.schedule, 1_281_167 // recipe.optim.global_batch
    assert (schedule.epochs, schedule.cooldown_epochs, steps) == (300, 0, 1251)
    for epoch in range(300):
        expected = (1e-6 + epoch * (1e-3 - 1e-6) / 5 if epoch < 5 else
                    1e-5 + 0.5 * (1e-3 - 1e-5) * (1 + math.cos(math.pi * epoch / 300)))
        for step in (epoch * steps, (epoch + 1) * steps - 1):
            assert learning_rate(step, schedule, steps_per_epoch=steps, peak=recipe.optim.peak_lr
                                 ) == pytest.approx(expected, rel=1e-12)


def test_update_stepping_agrees_at_epoch_boundaries_and_moves_between():
    updates, how = replace(DEIT, step_on="update"), dict(steps_per_epoch=10, peak=1e-3)
    for epoch in (0, 3, 5, 77, 300, 305):
        assert learning_rate(epoch * 10, updates, **how) == pytest.approx(
            learning_rate(epoch * 10, DEIT, **how))
    rates = [learning_rate(step, updates, **how) for step in range(3000)]
    assert all(a < b for a, b in zip(rates[:49], rates[1:50]))           # warm-up
    assert all(a > b for a, b in zip(rates[50:-1], rates[51:]))          # cosine
    assert rates[25] == pytest.approx(1e-6 + 2.5 / 5 * 9.99e-4)
    assert learning_rate(0, replace(updates, warmup_epochs=0), **how) == pytest.approx(1e-3)


@pytest.mark.parametrize("step_on", ["epoch", "update"])
def test_one_cycle_is_conv_mixers_interpolation(step_on):
    """arXiv 2201.09792's code: numpy.interp over 0, ⅖, ⅘ and all of the epochs."""
    epochs, steps, peak = 35, 11, 0.013
    schedule = Schedule("one_cycle", epochs=epochs, cooldown_epochs=1, warmup_epochs=0,
                        warmup_lr=1e-3, min_lr=1e-4, step_on=step_on)
    for step in range((epochs + 1) * steps):
        time = step // steps if step_on == "epoch" else step / steps
        expected = np.interp(time, [0, epochs * 2 / 5, epochs * 4 / 5, epochs],
                             [1e-3, peak, peak / 20, 1e-4])
        assert learning_rate(step, schedule, steps_per_epoch=steps, peak=peak
                             ) == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_linear_scaling_is_by_512():
    optim = replace(OPTIM, base_lr=5e-4, lr_scaling="linear", global_batch=1024)
    assert optim.peak_lr == pytest.approx(1e-3)
    assert replace(optim, global_batch=128).peak_lr == pytest.approx(1.25e-4)
    assert replace(optim, lr_scaling="none").peak_lr == 5e-4
