"""DeiT's recipes hold what its main.py has by default, and its README's commands change."""

import pytest

from vitinit.recipe.files import load_recipe

# Recipe → images of each process, of 1,024.
IMAGES_OF_EACH = {"deit_tiny": 256, "deit_small": 256, "deit_base": 64}
VALUES = {
    "data.image_size": [224, 224],
    "data.mean": [0.485, 0.456, 0.406],
    "data.std": [0.229, 0.224, 0.225],
    "augment.repeats": 3,
    "augment.crop_scale": [0.08, 1.0],
    "augment.crop_ratio": [3 / 4, 4 / 3],
    "augment.flip": 0.5,
    "augment.interpolation": "bicubic",
    "augment.erase_probability": 0.25,
    "augment.erase_area": [0.02, 1 / 3],
    "augment.erase_ratio": [0.3, 1 / 0.3],
    "augment.erase_fill": "pixel",
    "augment.erase_after_mix": False,
    "rand_augment.layers": 2,
    "rand_augment.probability": 0.5,
    "rand_augment.magnitude": 9.0,
    "rand_augment.magnitude_std": 0.5,
    "rand_augment.fill": [124, 116, 104],
    "rand_augment.interpolation": "bicubic",
    "mix.mixup_alpha": 0.8,
    "mix.cutmix_alpha": 1.0,
    "mix.probability": 1.0,
    "mix.switch_probability": 0.5,
    "mix.label_smoothing": 0.1,
    "loss.name": "cross_entropy",
    "eval.crop_pct": 0.875,
    "eval.interpolation": "bicubic",
    "model.options.patch_size": 16,
    "model.options.pool": "class",
    "model.options.drop_path": 0.1,
    "init.name": "default",
    "optim.name": "adamw",
    "optim.global_batch": 1024,
    "optim.base_lr": 5e-4,
    "optim.lr_scaling": "linear",
    "optim.weight_decay": 0.05,
    "optim.betas": [0.9, 0.999],
    "optim.eps": 1e-8,
    "optim.clip_norm": 0.0,
    "schedule.shape": "cosine",
    "schedule.epochs": 300,
    "schedule.warmup_epochs": 5,
    "schedule.warmup_lr": 1e-6,
    "schedule.min_lr": 1e-5,
    "schedule.step_on": "epoch",
    "ema.decay": 0.99996,
    "ema.warmup": False,
}


@pytest.mark.parametrize("name", IMAGES_OF_EACH)
def test_the_recipe_has_the_values_of_deits_code(name, held_against):
    expected = VALUES | {"mix.group": IMAGES_OF_EACH[name]}
    keys = load_recipe(name).keys
    found = {key: keys[key] for key in expected}
    assert found == expected
    equal = sum(found[key] == expected[key] for key in expected)
    held_against(equal, len(expected), cases=len(expected))
