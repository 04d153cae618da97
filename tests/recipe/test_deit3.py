"""DeiT III's recipes hold the values of its released commands."""

import pytest

from vitinit.recipe.files import load_recipe
from vitinit.runs.model import build
from vitinit.runs.resume import Request, asked_for

# Recipe → image size, images and number of processes, learning rate, drop path.
PRETRAINING = {
    "deit3_small": (224, 256, 8, 4e-3, 0.05),
    "deit3_base": (192, 256, 8, 3e-3, 0.2),
    "deit3_large": (192, 64, 32, 3e-3, 0.45),
}
FINE_TUNING = {
    "deit3_base_224": (224, 64, 8, 1e-5, 0.2),
    "deit3_large_224": (224, 64, 8, 1e-5, 0.45),
    "deit3_small_384": (384, 64, 8, 1e-5, 0.0),
    "deit3_base_384": (384, 32, 16, 1e-5, 0.15),
    "deit3_large_384": (384, 16, 32, 1e-5, 0.4),
}
BEFORE = {
    "deit3_base_224": "deit3_base",
    "deit3_large_224": "deit3_large",
    "deit3_small_384": "deit3_small",
    "deit3_base_384": "deit3_base_224",
    "deit3_large_384": "deit3_large_224",
}
# What all commands have, or leave at the defaults of the code.
COMMON = {
    "model.options.patch_size": 16,
    "model.options.layer_scale": 1e-4,
    "model.options.prefix_positions": False,
    "model.options.constant_drop_path": True,
    "augment.crop_scale": [0.08, 1.0],
    "augment.interpolation": "bicubic",
    "augment.flip": 0.5,
    "augment.erase_probability": 0.0,
    "eval.crop_pct": 1.0,
    "mix.mixup_alpha": 0.8,
    "mix.cutmix_alpha": 1.0,
    "mix.probability": 1.0,
    "mix.switch_probability": 0.5,
    "optim.lr_scaling": "none",
    "optim.betas": [0.9, 0.999],
    "optim.eps": 1e-8,
    "optim.clip_norm": 0.0,
    "schedule.shape": "cosine",
    "schedule.step_on": "epoch",
    "schedule.warmup_epochs": 5,
    "schedule.warmup_lr": 1e-6,
    "schedule.min_lr": 1e-5,
    "schedule.cooldown_epochs": 0,
    "ema.decay": 0.99996,
    "init.name": "default",
}
OF_PRETRAINING = {
    "augment.repeats": 3,
    "rand_augment.layers": 0,
    "three_augment.probability": 1.0,
    "three_augment.color_jitter": 0.3,
    "mix.label_smoothing": 0.0,
    "loss.name": "binary_cross_entropy",
    "loss.targets": "any",
    "loss.class_weights": "none",
    "optim.name": "lamb",
    "optim.weight_decay": 0.05,
    "schedule.epochs": 800,
    "init.checkpoint": "",
}
OF_FINE_TUNING = {
    "augment.repeats": 1,
    "rand_augment.layers": 2,
    "rand_augment.probability": 0.5,
    "rand_augment.magnitude": 9.0,
    "rand_augment.magnitude_std": 0.5,
    "three_augment.probability": 0.0,
    "three_augment.color_jitter": 0.0,
    "mix.label_smoothing": 0.1,
    "loss.name": "cross_entropy",
    "optim.name": "adamw",
    "optim.weight_decay": 0.1,
    "schedule.epochs": 20,
    "init.checkpoint_weights": "model",
    "init.checkpoint_head": "keep",
    "init.checkpoint_positions": "plain",
}


@pytest.mark.parametrize("name", [*PRETRAINING, *FINE_TUNING])
def test_the_recipe_has_the_values_of_the_command(name, held_against):
    size, images, processes, rate, drop_path = (PRETRAINING | FINE_TUNING)[name]
    kind = OF_PRETRAINING if name in PRETRAINING else OF_FINE_TUNING
    expected = (
        COMMON
        | kind
        | {
            "data.image_size": [size, size],
            "mix.group": images,
            "optim.global_batch": images * processes,
            "optim.base_lr": rate,
            "model.options.drop_path": drop_path,
        }
    )
    recipe = load_recipe(name)
    found = {key: recipe.keys[key] for key in expected}
    assert found == expected
    equal = sum(found[key] == expected[key] for key in expected)
    held_against(equal, len(expected), cases=len(expected))
    assert recipe.optim.peak_lr == rate


@pytest.mark.parametrize("name", FINE_TUNING)
def test_fine_tuning_starts_where_the_command_of_the_run_before_it_ends(name):
    _, folder = asked_for(Request(BEFORE[name], [], None, None))
    assert load_recipe(name).init.checkpoint == str(folder.path / "last.pt")


@pytest.mark.parametrize("name, count", [("deit3_small", 22_059_496), ("deit3_base", 86_585_320)])
def test_weights_are_as_many_as_in_the_released_model(name, count, held_against):
    """timm's vit_…_patch16_… with init_values and no_embed_class, as its DeiT III has them; at 192
    px there are fewer positions."""
    recipe = load_recipe(name).with_data(image_size=(224, 224))
    found = sum(parameter.numel() for parameter in build(recipe).parameters())
    assert found == count
    held_against(found, count)
