"""What a recipe accepts, what it refuses and in which words, and that it is written and read back."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
import tomllib
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torchvision

from vitinit.data import datasets, draw
from vitinit.init import init_function
from vitinit.models import MODELS, VisionTransformer
from vitinit.recipe import sections
from vitinit.recipe.files import (Override, RecipeError, dump_recipe, find_recipe, from_dict,
                                  load_recipe, parse_override, with_options)
from vitinit.recipe.resolve import resolve_options, resolve_recipe
from vitinit.recipe.sections import SECTIONS, Recipe
from vitinit.recipe.upgrade import VERSION
from vitinit.recipe.values import to_toml
from vitinit.runs.resume import continued

SHIPPED = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.toml"))

RECIPE = """\
[run]
seed = 3

[data]
name = "image_folder"
root = "images"
num_classes = 7
subset = 1.0
images_per_class = 0
subset_seed = 5
held_out_per_class = 2
image_size = [37, 41]
mean = [0.11, 0.13, 0.17]
std = [0.19, 0.23, 0.29]
apply_exif_orientation = true
workers = 2
on_device_gib = 0.5

[augment]
repeats = 3
crop_scale = [0.31, 1.0]
crop_ratio = [0.75, 1.25]
crop_padding = 5
flip = 0.5
interpolation = "bicubic"
erase_probability = 0.37
erase_area = [0.02, 0.41]
erase_ratio = [0.43, 2.5]
erase_fill = "rand"
erase_after_mix = true

[rand_augment]
layers = 2
probability = 0.47
magnitude = 7.0
magnitude_std = 0.53
fill = [101, 103, 107]
interpolation = "random"
operations = ["ShearX", "Invert", "Rotate"]
rotate_degrees = 31.0
shear_factor = 0.59
translate_share = 0.61
enhance_factor = 0.67
posterize_bits = 3
solarize_levels = 251
solarize_add_levels = 109

[mix]
mixup_alpha = 0.71
cutmix_alpha = 0.73
probability = 0.79
switch_probability = 0.83
label_smoothing = 0.1
group = 38

[eval]
crop_pct = 0.875
interpolation = "bilinear"
batch_size = 43
cache_gib = 0.7
every_epochs = 2

[model]
name = "vit_tiny"
options = {patch_size = 1, pool = "mean"}

[init]
name = "impulse"
checkpoint = "runs/a"
checkpoint_weights = "ema"
checkpoint_fit = "select"
options = {rank = 11}

[optim]
name = "muon"
global_batch = 47
max_batch_per_process = 53
base_lr = 1e-3
lr_scaling = "linear"
weight_decay = 0.05
betas = [0.9, 0.999]
eps = 1e-8
layer_decay = 0.7
muon_factor = 2.5
muon_momentum = 0.95
clip_norm = 1.5

[schedule]
shape = "cosine"
epochs = 13
cooldown_epochs = 4
warmup_epochs = 1
warmup_lr = 1e-6
min_lr = 1e-5
step_on = "epoch"

[ema]
decay = 0.99
warmup = false

[engine]
amp = "off"
compile = false
channels_last = true
tf32 = false

[checkpoint]
every_epochs = 3
every_steps = 0
keep_epochs = [2, 5]
best_by = "val_top1"
"""

OPERATIONS = ", ".join(f'"{name}"' for name in draw.ALL_OPERATIONS)

DATA_SETS = ['"shapes"', '"image_folder"', '"imagenet"', '"cifar10"', '"cifar100"', '"stl10"', '"svhn"',
             '"food101"', '"flowers102"', '"pets"', '"tiny_imagenet"']

# key: (what it expects, values that it accepts up to its bounds, values beyond them)
KEYS = {
    "run.seed": ("an integer ≥ 0 and < 2^63", ["0", "9223372036854775807"],
                 ["-1", "9223372036854775808"]),
    "data.name": (f"one of {', '.join(DATA_SETS)}", DATA_SETS, ['"Shapes"', '""']),
    "data.root": ("a string", ['"a = b"'], []),
    "data.num_classes": ("an integer ≥ 0", ["0", "2"], ["-2"]),
    "data.subset": ("a number > 0 and ≤ 1", ["1e-9", "1.0"], ["0.0", "1.1"]),
    "data.images_per_class": ("an integer ≥ 0", ["0", "3"], ["-1"]),
    "data.subset_seed": ("an integer ≥ 0 and < 2^63", ["0", "9223372036854775807"],
                         ["-1", "9223372036854775808"]),
    "data.held_out_per_class": ("an integer ≥ 0", ["0", "3"], ["-1"]),
    "data.image_size": ("a list of 2 integers ≥ 1", ["[1, 61]"],
                        ["[61, 0]", "[0, 61]", "0", "-61"]),
    "data.mean": ("a list of 3 numbers ≥ 0 and ≤ 1", ["[0.0, 0.5, 1.0]"],
                  ["[0.5, 0.5, 1.1]", "[-0.1, 0.5, 0.5]"]),
    "data.std": ("a list of 3 numbers ≥ 1.4013e-45 and < 3.40282e+38", ["[1e-9, 0.5, 9.0]"],
                 ["[0.5, 0.0, 0.5]"]),
    "data.apply_exif_orientation": ("true or false", ["true", "false"], []),
    "data.workers": ("an integer ≥ 0", ["0"], ["-1"]),
    "data.on_device_gib": ("a number ≥ 0", ["0.0", "9.0"], ["-0.1"]),
    "augment.repeats": ("an integer ≥ 1", ["1"], ["0"]),
    "augment.crop_scale": ("a list of 2 numbers > 0 and ≤ 1", ["[1e-9, 1.0]"],
                           ["[0.0, 1.0]", "[0.5, 1.1]"]),
    "augment.crop_ratio": ("a list of 2 numbers > 0", ["[1e-9, 9.0]"], ["[0.0, 1.0]"]),
    "augment.crop_padding": ("an integer ≥ 0 and < 2^31", ["0", "2147483647"], ["-1", "2147483648"]),
    "augment.flip": ("a number ≥ 0 and ≤ 1", ["0.0", "1.0"], ["-0.1", "1.1"]),
    "augment.interpolation": ('one of "bilinear", "bicubic", "random"',
                              ['"bilinear"', '"bicubic"', '"random"'], ['"nearest"']),
    "augment.erase_probability": ("a number ≥ 0 and ≤ 1", ["0.0", "1.0"], ["-0.1", "1.1"]),
    "augment.erase_area": ("a list of 2 numbers > 0 and ≤ 1", ["[1e-9, 1.0]"],
                           ["[0.0, 1.0]", "[0.5, 1.1]"]),
    "augment.erase_ratio": ("a list of 2 numbers > 0", ["[1e-9, 9.0]"], ["[0.0, 1.0]"]),
    "augment.erase_fill": ('one of "pixel", "rand", "const"', ['"pixel"', '"rand"', '"const"'],
                           ['"Pixel"', '""']),
    "augment.erase_after_mix": ("true or false", ["true", "false"], []),
    "rand_augment.layers": ("an integer ≥ 0", ["0", "17"], ["-1"]),
    "rand_augment.probability": ("a number ≥ 0 and ≤ 1", ["0.0", "1.0"], ["-0.1", "1.1"]),
    "rand_augment.magnitude": ("a number ≥ 0 and ≤ 10", ["0.0", "10.0"], ["-0.1", "10.1"]),
    "rand_augment.magnitude_std": ("a number ≥ 0", ["0.0", "1e9"], ["-0.1"]),
    "rand_augment.fill": ("a list of 3 integers ≥ 0 and ≤ 255", ["[0, 127, 255]"],
                          ["[-1, 127, 255]", "[0, 127, 256]"]),
    "rand_augment.interpolation": ('one of "bilinear", "bicubic", "random"',
                                   ['"bilinear"', '"bicubic"', '"random"'], ['"nearest"']),
    "rand_augment.operations": (f"a list of words out of {OPERATIONS}",
                                [f"[{OPERATIONS}]", '["Invert", "Color", "Invert"]'],
                                ['["Invert", "invert"]', '[""]', '["NONE"]']),
    "rand_augment.rotate_degrees": ("a number ≥ 0", ["0.0", "360.0"], ["-0.1"]),
    "rand_augment.shear_factor": ("a number ≥ 0", ["0.0", "9.0"], ["-0.1"]),
    "rand_augment.translate_share": ("a number ≥ 0", ["0.0", "9.0"], ["-0.1"]),
    "rand_augment.enhance_factor": ("a number ≥ 0", ["0.0", "9.0"], ["-0.1"]),
    "rand_augment.posterize_bits": ("an integer ≥ 0 and ≤ 8", ["0", "8"], ["-1", "9"]),
    "rand_augment.solarize_levels": ("an integer ≥ 0 and ≤ 256", ["0", "256"], ["-1", "257"]),
    "rand_augment.solarize_add_levels": ("an integer ≥ 0 and ≤ 255", ["0", "255"], ["-1", "256"]),
    "mix.mixup_alpha": ("a number ≥ 0", ["0.0", "9.0"], ["-0.1"]),
    "mix.cutmix_alpha": ("a number ≥ 0", ["0.0", "9.0"], ["-0.1"]),
    "mix.probability": ("a number ≥ 0 and ≤ 1", ["0.0", "1.0"], ["-0.1", "1.1"]),
    "mix.switch_probability": ("a number ≥ 0 and ≤ 1", ["0.0", "1.0"], ["-0.1", "1.1"]),
    "mix.label_smoothing": ("a number ≥ 0 and < 1", ["0.0", "0.9999999"], ["-0.1", "1.0"]),
    "mix.group": ("an integer ≥ 2", ["2", "1024"], ["1", "0", "-2"]),
    "eval.crop_pct": ("a number > 0 and ≤ 1", ["1e-9", "1.0"], ["0.0", "1.1"]),
    "eval.interpolation": ('one of "bilinear", "bicubic"', ['"bilinear"', '"bicubic"'],
                           ['"nearest"']),
    "eval.batch_size": ("an integer ≥ 1", ["1"], ["0"]),
    "eval.cache_gib": ("a number ≥ 0", ["0.0", "9.0"], ["-0.1"]),
    "eval.every_epochs": ("an integer ≥ 1", ["1"], ["0"]),
    "model.name": ("a string", ['"anything"'], []),
    "model.options": ("a table", ["{}", "{depth = 2}"], []),
    "init.name": ("a string", ['"anything"'], []),
    "init.checkpoint": ("a string", ['""', '"runs/a b"'], []),
    "init.checkpoint_weights": ('one of "model", "ema"', ['"model"', '"ema"'], ['"last"', '""']),
    "init.checkpoint_fit": ('one of "exact", "select"', ['"exact"', '"select"'], ['"fit"', '""']),
    "init.options": ("a table", ["{}", "{rank = 2}"], []),
    "optim.name": ('one of "adamw", "muon"', ['"adamw"', '"muon"'], ['"sgd"', '""']),
    "optim.global_batch": ("an integer ≥ 1 and < 2^31", ["1"], ["0", "2147483648"]),
    "optim.max_batch_per_process": ("an integer ≥ 1 and < 2^31", ["1"], ["0"]),
    "optim.base_lr": ("a number > 0 and < 3.40282e+38", ["1e-9"], ["0.0", "-1e-3", "1e39"]),
    "optim.lr_scaling": ('one of "linear", "none"', ['"linear"', '"none"'], ['"sqrt"']),
    "optim.weight_decay": ("a number ≥ 0 and < 3.40282e+38", ["0.0"], ["-0.1", "1e39"]),
    "optim.betas": ("a list of 2 numbers ≥ 0 and < 1", ["[0.0, 0.9999999]"],
                    ["[0.9, 1.0]", "[-0.1, 0.9]"]),
    "optim.eps": ("a number ≥ 1.4013e-45 and < 3.40282e+38", ["1e-30"], ["0.0", "1e-46", "1e308"]),
    "optim.layer_decay": ("a number > 0 and ≤ 1", ["1.0"], ["0.0", "1.1"]),
    "optim.muon_factor": ("a number > 0 and < 3.40282e+38", ["0.1"], ["0.0"]),
    "optim.muon_momentum": ("a number ≥ 0 and < 1", ["0.0"], ["1.0", "-0.1"]),
    "optim.clip_norm": ("a number ≥ 0", ["0.0"], ["-1.0"]),
    "schedule.shape": ('one of "cosine", "one_cycle"', ['"cosine"'], ['"linear"', '""']),
    "schedule.epochs": ("an integer ≥ 1", ["1"], ["0"]),
    "schedule.cooldown_epochs": ("an integer ≥ 0", ["0"], ["-1"]),
    "schedule.warmup_epochs": ("an integer ≥ 0", ["0"], ["-1"]),
    "schedule.warmup_lr": ("a number ≥ 0", ["0.0"], ["-1e-6"]),
    "schedule.min_lr": ("a number ≥ 0", ["0.0"], ["-1e-6"]),
    "schedule.step_on": ('one of "epoch", "update"', ['"epoch"', '"update"'], ['"step"']),
    "ema.decay": ("a number ≥ 0 and < 1", ["0.0", "0.9999999"], ["-0.1", "1.0"]),
    "ema.warmup": ("true or false", ["true", "false"], []),
    "engine.amp": ('one of "off", "bf16", "fp16"', ['"off"', '"bf16"', '"fp16"'], ['"fp32"']),
    "engine.compile": ("true or false", ["true", "false"], []),
    "engine.channels_last": ("true or false", ["true", "false"], []),
    "engine.tf32": ("true or false", ["true", "false"], []),
    "checkpoint.every_epochs": ("an integer ≥ 1", ["1"], ["0"]),
    "checkpoint.every_steps": ("an integer ≥ 0", ["0"], ["-1"]),
    "checkpoint.keep_epochs": ("a list of integers ≥ 0", ["[]", "[0, 1]"], ["[1, -1]"]),
    "checkpoint.best_by": ('one of "val_top1", "val_loss", "ema_top1"',
                           ['"val_top1"', '"val_loss"', '"ema_top1"'], ['"train_loss"']),
}
TABLES = [key for key, (words, _, _) in KEYS.items() if words == "a table"]

# how an expectation begins: values of another type
WRONG_TYPES = {
    "an integer": ['"3"', "3.0", "true", "[3]", "{}", "1979-05-27"],
    "a number": ['"0.5"', "true", "[0.5]", "{}", "nan", "inf", "-inf"],
    "true or false": ['"true"', "1", "0", "[true]"],
    "a string": ["3", "true", '["a"]', "{}", "1979-05-27"],
    "one of": ["3", "0", "true", "false", '["off"]', "{}"],
    "a list of 2 integers": ["true", "3.0", '"3"', "[]", "[3]", "[3, 5, 7]", "[3, 5.0]",
                             '[3, "5"]', "[3, true]", "{}"],
    "a list of 2 numbers": ["0.5", '"ab"', "[0.5]", "[0.5, 0.6, 0.7]", '[0.5, "0.6"]',
                            "[0.5, true]", "[0.5, nan]", "[0.5, inf]", "[[0.5], 0.6]", "{}"],
    "a list of 3 numbers": ["0.5", '"abc"', "[0.5, 0.6]", "[0.5, 0.6, 0.7, 0.8]",
                            '[0.5, 0.6, "0.7"]', "[0.5, 0.6, true]", "[nan, 0.5, 0.6]", "{}"],
    "a list of 3 integers": ["3", '"abc"', "[3, 5]", "[3, 5, 7, 11]", "[3, 5, 7.0]",
                             '[3, 5, "7"]', "[3, 5, true]", "[3, 5, nan]", "{}"],
    "a list of words": ["3", '"Invert"', "[3]", "[true]", '["Invert", 3]', '[["Invert"]]',
                        '["Invert", {}]', "{}"],
    "a list of integers": ["3", '"3"', "[3.0]", "[true]", '["3"]', "[[3]]", "{}"],
    "a table": ["3", '"a"', "[]", "true"],
}
from vitinit.train.optim import scaled_lr


def resolve(function: Callable, options: dict[str, Any], *, where: str,
            fixed: dict[str, Any] | None = None, given: tuple[str, ...] = ()) -> dict[str, Any]:
    """`resolve_options` for tables that all come from one file."""
    file, _, title = where.rpartition(": ")
    return resolve_options(function, options, title=title, source=lambda name: file,
                           fixed=fixed or {}, given=given)


def edited(key: str, written: str | None, text: str = RECIPE) -> str:
    """The recipe with the line of section.key set to `written`, or removed if that is None."""
    title, _, name = key.partition(".")
    head, header, rest = text.partition(f"[{title}]\n")
    body, gap, tail = rest.partition("\n\n")
    lines = body.splitlines()
    number = next(i for i, line in enumerate(lines) if line.startswith(f"{name} = "))
    lines[number:number + 1] = [] if written is None else [f"{name} = {written}"]
    return head + header + "\n".join(lines) + gap + tail


def without_section(title: str) -> str:
    """The recipe without [title]."""
    head, _, rest = RECIPE.partition(f"[{title}]\n")
    return head + rest.partition("\n\n")[2]


def saved(folder: Path, text: str = RECIPE) -> Path:
    path = folder / "trial.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(action: Callable, *arguments: Any, **options: Any) -> str:
    """The message, of one line, of the RecipeError that `action` raises."""
    with pytest.raises(RecipeError) as caught:
        action(*arguments, **options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def set_refusal(path: Path, text: str) -> str:
    """The message of the error for `--set text` with the recipe at `path`; it quotes the text."""
    message = refusal(lambda: load_recipe(path, [parse_override(text)]))
    assert message.startswith(f"--set {text}: "[:400])      # a long line loses its middle
    return message


def value_of(recipe: Recipe, key: str) -> Any:
    title, _, name = key.partition(".")
    return getattr(getattr(recipe, title), name)


def planting(garden: list, *, generator: int, width: int, height: float = 5.0,
             kind: Literal["oak", "elm"] = "oak", spacing: int | tuple[int, int] = 7,
             watered: bool = True) -> None:
    """A function with options, for resolve_options."""


# ---------------------------------------------------------------------------------------------
# The recipes that come with the project
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_names_a_model_an_init_and_all_their_options(path):
    recipe = resolve_recipe(path, [])
    assert recipe.name == path.stem
    model, _ = MODELS[recipe.model.name]
    init = init_function(recipe.init.name, model)
    for function, options, given in ((model, recipe.model.options, {"num_classes", "image_size"}),
                                     (init, recipe.init.options, {"generator", "images"})):
        parameters = inspect.signature(function).parameters.values()
        keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        assert set(options) == keywords - given


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_writes_back_to_an_equal_one(path, tmp_path):
    for recipe in (load_recipe(path), resolve_recipe(path, [])):
        copied = tmp_path / path.name
        copied.write_text(dump_recipe(recipe), encoding="utf-8")
        assert load_recipe(copied) == recipe
    assert resolve_recipe(copied, []) == recipe


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_survives_its_plain_form(path):
    recipe = resolve_recipe(path, [])
    plain = recipe.as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert from_dict(plain, "a checkpoint") == recipe


def test_all_shipped_recipes_state_the_same_keys_in_the_same_order():
    assert len(SHIPPED) > 1
    for path in SHIPPED:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        stated = [f"{title}.{key}" for title, body in table.items() for key in body]
        assert [key for key in stated if key not in TABLES] == [key for key in KEYS
                                                                if key not in TABLES]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_knows_its_data_set(path):
    """Its class count, and its own statistics, ImageNet's, or pixels on [-1, 1], as papers take them."""
    data = load_recipe(path).data
    assert datasets.DATA_SETS[data.name].num_classes in (None, data.num_classes)
    own = {"shapes": ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
           "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
           "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))}
    imagenet, halves = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.5, 0.5, 0.5),) * 2
    assert (data.mean, data.std) in [own.get(data.name, imagenet), imagenet, halves]


def test_orientation_is_left_as_stored_where_a_paper_s_loader_left_it():
    """That of torchvision and timm, with which DeiT, Swin, Mixer and ConvMixer were trained."""
    stored = {path.stem for path in SHIPPED if not load_recipe(path).data.apply_exif_orientation}
    assert stored == {path.stem for path in SHIPPED if path.stem.startswith(
        ("deit_", "imagenet_", "structured_", "swin_", "mixer_", "convmixer_", "tiny_imagenet_"))}


def argument_of(settings: draw.RandAugment, name: str, magnitude: float) -> float:
    code = np.array(draw.Operation[name])
    return float(settings.arguments(code, np.array(magnitude), np.array(1.0)))


def test_the_plain_vit_baseline_augments_and_decays_as_big_vision_does():
    """randaug(2, 10) and wd of its configs/vit_s16_i1k.py, from the formulas of its level_to_arg."""
    recipe, = (load_recipe(path) for path in SHIPPED if path.stem == "imagenet_vit_small_90")
    ours = recipe.rand_augment
    assert (ours.layers, ours.probability, ours.magnitude, ours.magnitude_std) == (2, 1.0, 10.0, 0.0)
    theirs = {"Rotate": 30.0, "ShearX": 0.3, "ShearY": 0.3, "TranslateX": 100 / 224,
              "TranslateY": 100 / 224, "Color": 1.9, "Contrast": 1.9, "Brightness": 1.9,
              "Sharpness": 1.9, "Solarize": 256, "SolarizeAdd": 110, "AutoContrast": 0.0,
              "Equalize": 0.0, "Invert": 0.0}
    assert {name: pytest.approx(argument_of(ours, name, 10.0), rel=1e-15)
            for name in ours.operations} == theirs
    # Its step is schedule · (lr · Adam's direction + wd · weight); AdamW's is lr · schedule · (… + wd).
    assert recipe.optim.weight_decay == pytest.approx(1e-4 / recipe.optim.base_lr)
    assert recipe.schedule.warmup_epochs == round(10_000 / (1_281_167 // recipe.optim.global_batch))


SIMPLE_VIT = [path for path in SHIPPED if path.stem.endswith("_simple_vit")]


@pytest.mark.parametrize("path", SIMPLE_VIT, ids=lambda path: path.stem)
def test_the_simple_vit_recipes_augment_as_torchvisions_randaugment(path):
    recipe = load_recipe(path)
    ours, size = recipe.rand_augment, recipe.data.image_size
    theirs = torchvision.transforms.RandAugment(num_ops=2, magnitude=14)
    space = theirs._augmentation_space(theirs.num_magnitude_bins, size)
    assert ours.layers == theirs.num_ops and ours.magnitude_std == 0
    assert sorted([*ours.operations, "Identity"]) == sorted(space)
    assert ours.probability == pytest.approx(1 - 1 / len(space), abs=1e-15)
    for name in ours.operations:
        magnitudes, signed = space[name]
        found = argument_of(ours, name, ours.magnitude)
        if not magnitudes.ndim:                      # an operation without an extent
            assert found == 0.0
            continue
        extent = magnitudes[theirs.magnitude].item()
        if name.startswith("Translate"):             # theirs is in pixels
            extent /= size[0]
        if name in ("Color", "Contrast", "Brightness", "Sharpness"):
            extent += 1.0
        # Posterize and Solarize: the nearest values that the keys can express, as the card says.
        assert found == pytest.approx(extent, **({"rel": 1e-6} if signed else {"abs": 1.0}))


# ---------------------------------------------------------------------------------------------
# What a recipe is
# ---------------------------------------------------------------------------------------------


def test_the_data_sets_of_a_recipe_are_those_that_can_be_opened():
    names = typing.get_args(typing.get_type_hints(sections.DataSection)["name"])
    assert names == tuple(datasets.DATA_SETS)


def test_the_sections_hold_exactly_these_keys():
    assert [f"{title}.{item.name}" for title, section in SECTIONS.items()
            for item in dataclasses.fields(section)] == list(KEYS)


def test_a_recipe_reads_every_value_as_it_stands_in_the_file(tmp_path):
    recipe = load_recipe(saved(tmp_path))
    assert recipe.name == "trial"
    expected = tomllib.loads(RECIPE)
    assert recipe.as_dict() == {"name": "trial", "version": VERSION} | expected


def test_a_recipe_and_its_sections_are_frozen(tmp_path):
    recipe = load_recipe(saved(tmp_path))
    for place in (recipe, *(getattr(recipe, title) for title in SECTIONS)):
        for item in dataclasses.fields(place):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(place, item.name, getattr(place, item.name))


@pytest.mark.parametrize("title", ["model", "init"])
def test_the_options_of_a_recipe_are_frozen_too(tmp_path, title):
    recipe = load_recipe(saved(tmp_path))
    with pytest.raises(TypeError):
        getattr(recipe, title).options["rank"] = 5


def test_with_options_writes_both_tables_into_a_new_recipe(tmp_path):
    recipe = load_recipe(saved(tmp_path))
    written = with_options(recipe, model={"depth": 2}, init={"rank": 5, "qk_norm": 7.0})
    assert written.model.options == {"depth": 2} and written.model.name == "vit_tiny"
    assert written.init.options == {"rank": 5, "qk_norm": 7.0} and written.init.name == "impulse"
    assert written.optim == recipe.optim
    assert recipe == load_recipe(tmp_path / "trial.toml")


@pytest.mark.parametrize("title", ["model", "init"])
def test_an_empty_options_table_may_be_left_out(tmp_path, title):
    recipe = load_recipe(saved(tmp_path, edited(f"{title}.options", None)))
    assert getattr(recipe, title).options == {}


@pytest.mark.parametrize("key, written", [(key, written) for key, (_, good, _) in KEYS.items()
                                          for written in good])
def test_a_key_accepts_values_up_to_its_bounds(tmp_path, key, written):
    low = edited("schedule.warmup_lr", "0.0", edited("schedule.min_lr", "0.0"))  # below any peak
    text = edited(key, written, low if key.startswith("optim.") else RECIPE)
    value = value_of(load_recipe(saved(tmp_path, text)), key)
    expected = tomllib.loads(f"v = {written}")["v"]
    if dataclasses.is_dataclass(value):              # what a table of known keys leaves out is there
        value = {name: item for name, item in vars(value).items() if name in expected}
    assert value == (tuple(expected) if isinstance(expected, list) else expected)


def test_one_number_as_image_size_means_a_square(tmp_path):
    assert load_recipe(saved(tmp_path, edited("data.image_size", "37"))).data.image_size == (37, 37)


@pytest.mark.parametrize("key, written, expected", [
    ("optim.weight_decay", "1", 1.0), ("augment.flip", "0", 0.0),
    ("data.mean", "[0, 0.5, 1]", (0.0, 0.5, 1.0)), ("augment.crop_ratio", "[1, 2]", (1.0, 2.0)),
])
def test_a_number_may_be_written_as_an_integer(tmp_path, key, written, expected):
    value = value_of(load_recipe(saved(tmp_path, edited(key, written))), key)
    assert value == expected
    for item in value if isinstance(value, tuple) else (value,):
        assert type(item) is float


@pytest.mark.parametrize("key", ["rand_augment.magnitude_std", "optim.weight_decay", "ema.decay"])
def test_a_negative_zero_is_zero(tmp_path, key):
    """-0.0 is ≥ 0, but a standard deviation or the argument of a logarithm must not get it."""
    value = value_of(load_recipe(saved(tmp_path, edited(key, "-0.0"))), key)
    assert value == 0.0 and math.copysign(1.0, value) == 1.0


# ---------------------------------------------------------------------------------------------
# What a recipe refuses: keys and sections
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [key for key in KEYS if key not in TABLES])
def test_a_missing_key_is_named_with_what_it_expects(tmp_path, key):
    path = saved(tmp_path, edited(key, None))
    message = refusal(load_recipe, path)
    title, _, name = key.partition(".")
    assert message.startswith(f"{path}: [{title}] ") and f"'{name}'" in message
    assert KEYS[key][0] in message


@pytest.mark.parametrize("title", SECTIONS)
def test_a_missing_section_is_named(tmp_path, title):
    path = saved(tmp_path, without_section(title))
    assert refusal(load_recipe, path) == f"{path}: section [{title}] is missing"


def test_an_empty_file_lacks_its_first_section(tmp_path):
    path = saved(tmp_path, "")
    assert refusal(load_recipe, path) == f"{path}: section [run] is missing"


def test_a_missing_section_is_not_blamed_on_the_command_line(tmp_path):
    path = saved(tmp_path, without_section("run"))
    message = refusal(load_recipe, path, [parse_override("run.seed=3")])
    assert message == f"{path}: section [run] is missing"


@pytest.mark.parametrize("line, near", [("epoch = 3", "epochs"), ("warmup_epoch = 3",
                                                                  "warmup_epochs")])
def test_an_unknown_key_with_a_near_one_names_it(tmp_path, line, near):
    path = saved(tmp_path, RECIPE.replace("[schedule]\n", f"[schedule]\n{line}\n"))
    message = refusal(load_recipe, path)
    assert message.startswith(f"{path}: [schedule] ") and f"'{line.split()[0]}'" in message
    assert message.endswith(f"did you mean '{near}'?")


def test_an_unknown_key_with_nothing_near_lists_the_valid_ones(tmp_path):
    path = saved(tmp_path, RECIPE.replace("[ema]\n", "[ema]\nxyz = 3\n"))
    message = refusal(load_recipe, path)
    assert message.startswith(f"{path}: [ema] ") and "'xyz'" in message
    assert message.endswith("valid: decay, warmup")


def test_a_misspelt_key_is_reported_as_unknown_not_as_missing(tmp_path):
    path = saved(tmp_path, RECIPE.replace("\nepochs = 13", "\nepoch = 13"))
    assert refusal(load_recipe, path).endswith("has no key 'epoch'; did you mean 'epochs'?")


def test_a_table_inside_a_section_is_an_unknown_key(tmp_path):
    path = saved(tmp_path, RECIPE + "\n[engine.ampere]\nuse = true\n")
    message = refusal(load_recipe, path)
    assert message.startswith(f"{path}: [engine] ") and message.endswith("did you mean 'amp'?")


@pytest.mark.parametrize("title, hint", [("schedul", "did you mean 'schedule'?"),
                                         ("xyz", f"valid: {', '.join(sorted(SECTIONS))}")])
def test_an_unknown_section_gets_the_nearest_or_the_whole_list(tmp_path, title, hint):
    path = saved(tmp_path, RECIPE + f"\n[{title}]\nepochs = 3\n")
    message = refusal(load_recipe, path)
    assert message.startswith(f"{path}: unknown section '{title}'") and message.endswith(hint)


@pytest.mark.parametrize("key", ["seed", "name", "optm"])
def test_a_key_outside_of_a_section_is_refused(tmp_path, key):
    path = saved(tmp_path, f"{key} = 3\n{RECIPE}")
    message = refusal(load_recipe, path)
    assert message.startswith(f"{path}: ") and f"'{key}'" in message
    assert "outside of a section" in message


@pytest.mark.parametrize("text", ["schedule = 3\n" + without_section("schedule"),
                                  RECIPE.replace("[schedule]", "[[schedule]]")],
                         ids=["a number", "an array of tables"])
def test_a_section_that_is_no_table_is_not_told_to_be_named_as_it_is(tmp_path, text):
    path = saved(tmp_path, text)
    message = refusal(load_recipe, path)
    assert message.startswith(f"{path}: ") and "schedule" in message
    assert "did you mean 'schedule'" not in message


def test_a_newline_in_a_key_stays_within_the_one_line(tmp_path):
    path = saved(tmp_path, RECIPE.replace("[run]\n", '[run]\n"a\\nb" = 3\n'))
    assert refusal(load_recipe, path).startswith(f"{path}: [run] ")


# ---------------------------------------------------------------------------------------------
# What a recipe refuses: values
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key, written", [
    (key, written) for key, (words, _, _) in KEYS.items()
    for written in next(bad for kind, bad in WRONG_TYPES.items() if words.startswith(kind))])
def test_a_wrong_type_is_named_with_what_was_expected(tmp_path, key, written):
    path = saved(tmp_path, edited(key, written))
    message = refusal(load_recipe, path)
    assert message.startswith(f"{path}: {key} is ")
    assert KEYS[key][0] in message


@pytest.mark.parametrize("key, written", [(key, written) for key, (_, _, bad) in KEYS.items()
                                          for written in bad])
def test_a_value_beyond_its_bounds_is_named_with_them(tmp_path, key, written):
    path = saved(tmp_path, edited(key, written))
    message = refusal(load_recipe, path)
    assert message.startswith(f"{path}: {key} is ")
    assert KEYS[key][0] in message
    assert KEYS[key][0] in set_refusal(saved(tmp_path), f"{key}={written}")


@pytest.mark.parametrize("key, written, hint", [
    ("checkpoint.best_by", '"val_top"', "; did you mean 'val_top1'?"),
    ("engine.amp", '"bf6"', "; did you mean 'bf16'?"),
    ("data.name", '"imagefolder"', "; did you mean 'image_folder'?"),
    ("engine.amp", '"quick"', '"fp16"'),
    ("augment.erase_fill", '"pixels"', "; did you mean 'pixel'?"),
    ("rand_augment.operations", '["Invert", "Posterise", "Color"]', "; did you mean 'Posterize'?"),
    ("rand_augment.operations", '["Shear_X", "Posterise"]', "; did you mean 'ShearX'?"),
    ("rand_augment.operations", '["Invert", "Cutout"]', "; 'Cutout' is none of them"),
    ("rand_augment.operations", '[3, "Posterise"]', OPERATIONS),
    ("rand_augment.operations", '"Rotat"', OPERATIONS),
])
def test_a_choice_gets_a_hint_only_where_one_is_near(tmp_path, key, written, hint):
    path = saved(tmp_path, edited(key, written))
    message = refusal(load_recipe, path)
    assert message.startswith(f"{path}: {key} is ") and message.endswith(hint)


@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize("key", ["run.seed", "optim.eps"])
def test_a_number_too_large_for_its_type_is_refused(tmp_path, key, digits):
    path = saved(tmp_path, edited(key, "1" * digits))
    assert refusal(load_recipe, path).startswith(f"{path}: ")
    set_refusal(saved(tmp_path), f"{key}={'1' * digits}")


@pytest.mark.parametrize("changes, key, words", [
    ({"augment.crop_scale": "[0.5, 0.25]"}, "augment.crop_scale", "[0.5, 0.25]"),
    ({"augment.crop_ratio": "[1.5, 0.5]"}, "augment.crop_ratio", "[1.5, 0.5]"),
    ({"augment.erase_area": "[0.3, 0.25]"}, "augment.erase_area", "[0.3, 0.25]"),
    ({"augment.erase_ratio": "[3.5, 0.5]"}, "augment.erase_ratio", "[3.5, 0.5]"),
    ({"rand_augment.operations": "[]"}, "rand_augment.operations", "rand_augment.layers = 2"),
    ({"data.root": '""'}, "data.root", 'data.name = "image_folder"'),
    ({"data.root": '""', "data.name": '"cifar10"'}, "data.root", 'data.name = "cifar10"'),
    ({"data.num_classes": "1"}, "data.num_classes", "two classes at least, or 0 for as many"),
    ({"data.subset": "0.5", "data.images_per_class": "3"}, "data.images_per_class",
     "data.subset = 0.5"),
    ({"schedule.shape": '"one_cycle"', "schedule.warmup_epochs": "1"},
     "schedule.warmup_epochs", 'schedule.shape = "one_cycle"'),
    ({"schedule.warmup_epochs": "14"}, "schedule.warmup_epochs", "schedule.epochs = 13"),
    ({"schedule.min_lr": "1e-4"}, "schedule.min_lr", "optim.base_lr = 0.001 · 47 / 512 = 9.17969e-05"),
    ({"schedule.warmup_lr": "1.1e-3", "optim.lr_scaling": '"none"'}, "schedule.warmup_lr",
     "above the learning rate's peak, optim.base_lr = 0.001"),
    ({"optim.base_lr": "1e38", "optim.global_batch": "2000"}, "optim.base_lr",
     "more than float32 holds"),
    ({"ema.decay": "0.0", "ema.warmup": "true"}, "ema.warmup", "ema.decay = 0"),
    ({"ema.decay": "0.0", "checkpoint.best_by": '"ema_top1"'}, "checkpoint.best_by",
     "ema.decay = 0"),
    ({"checkpoint.keep_epochs": "[5, 18]"}, "checkpoint.keep_epochs", "17 epochs"),
])
def test_values_that_contradict_each_other_are_refused(tmp_path, changes, key, words):
    text = RECIPE
    for name, written in changes.items():
        text = edited(name, written, text)
    path = saved(tmp_path, text)
    message = refusal(load_recipe, path)
    assert message.startswith(f"{path}: {key} ") and words in message

    sets = [parse_override(f"{name}={written}") for name, written in changes.items()]
    message = refusal(load_recipe, saved(tmp_path), sets)
    assert message.startswith(f"--set {key}={changes[key]}: {key} ") and words in message


@pytest.mark.parametrize("file, written, key", [
    ({"rand_augment.operations": "[]", "rand_augment.layers": "0"}, "rand_augment.layers=3",
     "rand_augment.operations"),
    ({"data.root": '""', "data.name": '"shapes"'}, "data.name=cifar10", "data.root"),
    ({"schedule.cooldown_epochs": "7", "checkpoint.keep_epochs": "[19]"},
     "schedule.cooldown_epochs=5", "checkpoint.keep_epochs"),
])
def test_a_contradiction_is_blamed_on_whichever_of_its_keys_was_set(tmp_path, file, written, key):
    text = RECIPE
    for name, value in file.items():
        text = edited(name, value, text)
    assert set_refusal(saved(tmp_path, text), written).startswith(f"--set {written}: {key} ")


@pytest.mark.parametrize("changes", [
    {"augment.crop_scale": "[0.5, 0.5]", "augment.crop_ratio": "[1.5, 1.5]"},
    {"augment.erase_area": "[0.5, 0.5]", "augment.erase_ratio": "[1.5, 1.5]"},
    {"rand_augment.operations": "[]", "rand_augment.layers": "0"},
    {"data.root": '""', "data.name": '"shapes"'},
    {"data.subset": "1.0", "data.images_per_class": "3"},
    {"data.subset": "0.5", "data.images_per_class": "0"},
    {"schedule.warmup_epochs": "13"},
    {"schedule.shape": '"one_cycle"', "schedule.warmup_epochs": "0"},
    {"schedule.min_lr": "0.001", "schedule.warmup_lr": "0.001", "optim.lr_scaling": '"none"'},
    {"schedule.min_lr": repr(scaled_lr(1e-3, "linear", 47))},    # as the engine calculates it
    {"ema.decay": "0.0", "ema.warmup": "false"},
    {"ema.warmup": "true", "checkpoint.best_by": '"ema_top1"'},
    {"checkpoint.keep_epochs": "[0, 17]"},
])
def test_values_at_the_edge_of_a_contradiction_are_accepted(tmp_path, changes):
    sets = [parse_override(f"{name}={written}") for name, written in changes.items()]
    recipe = load_recipe(saved(tmp_path), sets)
    for name, written in changes.items():
        assert to_toml(value_of(recipe, name)) == written


# ---------------------------------------------------------------------------------------------
# What a recipe refuses: files
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [
    b"[run\nseed = 3\n", b"[run]\nseed = \n", b"[run]\nseed = 3\nseed = 3\n",
    b"[run]\n[run]\n", b"seed: 3\n", RECIPE.encode().replace(b"images", b"b\xfccher"),
], ids=["section", "value", "key twice", "section twice", "yaml", "latin-1"])
def test_a_file_that_is_not_toml_in_utf_8_is_refused(tmp_path, content):
    path = tmp_path / "trial.toml"
    path.write_bytes(content)
    assert refusal(load_recipe, path).startswith(f"{path}: not valid TOML: ")


def test_a_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path):
    missing = tmp_path / "missing.toml"
    assert refusal(load_recipe, missing).startswith(f"{missing}: cannot be read: No such file")
    assert refusal(load_recipe, tmp_path) == f"{tmp_path}: cannot be read: Is a directory"


def test_a_recipe_is_found_by_name_and_by_path(tmp_path):
    path = saved(tmp_path)
    assert find_recipe("trial", tmp_path) == path
    assert find_recipe(str(path), tmp_path / "elsewhere") == path


@pytest.mark.parametrize("name, hint", [
    ("trail", "did you mean 'trial'?"), ("xyz", "valid: other, trial"),
    ("", "valid: other, trial")])
def test_an_unknown_recipe_gets_the_nearest_or_the_whole_list(tmp_path, name, hint):
    saved(tmp_path)
    (tmp_path / "other.toml").touch()
    message = refusal(find_recipe, name, tmp_path)
    assert message.startswith(f"recipe {name}: ") and str(tmp_path) in message
    assert message.endswith(hint)


def test_a_path_to_no_recipe_is_refused(tmp_path):
    saved(tmp_path)
    name = str(tmp_path / "trail.toml")
    assert refusal(find_recipe, name, tmp_path) == f"recipe {name}: no such file"
    assert refusal(find_recipe, "trial.toml", tmp_path) == "recipe trial.toml: no such file"


# ---------------------------------------------------------------------------------------------
# --set
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, key, value", [
    ("run.seed=3", "run.seed", 3),
    ("run.seed = 3", "run.seed", 3),
    ("optim.base_lr=1e-3", "optim.base_lr", 1e-3),
    ("engine.compile=true", "engine.compile", True),
    ("data.image_size=[37, 41]", "data.image_size", [37, 41]),
    ("init.options={rank = 3}", "init.options", {"rank": 3}),
    ("model.options.patch_size=4", "model.options.patch_size", 4),
    ('data.root="3"', "data.root", "3"),
    ("data.root='a\\b'", "data.root", "a\\b"),
    ("init.name=impulse", "init.name", "impulse"),
    ("data.root=/data/a folder", "data.root", "/data/a folder"),
    ("data.root=a=b", "data.root", "a=b"),
    ('data.root="a=b"', "data.root", "a=b"),
    ("data.root=[a", "data.root", "[a"),
    ("data.root=", "data.root", ""),
    ('rand_augment.operations=["Invert"]', "rand_augment.operations", ["Invert"]),
])
def test_set_takes_toml_and_bare_words(text, key, value):
    override = parse_override(text)
    assert override == (key, value, f"--set {text}")
    assert type(override.value) is type(value)


@pytest.mark.parametrize("text", ["run.seed", "seed=3", "=3", "", "--seed", "run:seed=3"])
def test_set_without_a_section_or_an_equals_sign_is_refused(text):
    message = refusal(parse_override, text)
    assert message.startswith(f"--set {text}: expected section.key=value")


def test_set_replaces_values_in_the_order_given(tmp_path):
    texts = ["schedule.epochs=5", "optim.betas=[0.8, 0.9]", "schedule.epochs=3"]
    recipe = load_recipe(saved(tmp_path), [parse_override(text) for text in texts])
    assert recipe.schedule.epochs == 3 and recipe.optim.betas == (0.8, 0.9)
    untouched = load_recipe(tmp_path / "trial.toml")
    assert recipe.data == untouched.data and untouched.schedule.epochs == 13


def test_of_several_sets_of_one_key_the_last_is_named(tmp_path):
    sets = [parse_override("schedule.epochs=5"), parse_override("schedule.epochs=0")]
    message = refusal(load_recipe, saved(tmp_path), sets)
    assert message.startswith("--set schedule.epochs=0: schedule.epochs is 0, ")


@pytest.mark.parametrize("texts, model, init", [
    (["model.options.depth=2", "init.options.qk_norm=3.5"],
     {"patch_size": 1, "pool": "mean", "depth": 2}, {"rank": 11, "qk_norm": 3.5}),
    (["init.options.rank=5"], {"patch_size": 1, "pool": "mean"}, {"rank": 5}),
    (["model.options={depth = 2}", "init.options={}", "init.options.base=torch"],
     {"depth": 2}, {"base": "torch"}),
])
def test_set_reaches_single_options_and_whole_tables(tmp_path, texts, model, init):
    recipe = load_recipe(saved(tmp_path), [parse_override(text) for text in texts])
    assert recipe.model.options == model and recipe.init.options == init


def test_set_reaches_an_options_table_that_the_file_leaves_out(tmp_path):
    path = saved(tmp_path, edited("init.options", None))
    assert load_recipe(path, [parse_override("init.options.rank=5")]).init.options == {"rank": 5}


@pytest.mark.parametrize("text, words", [
    ("schedule.epoch=3", "[schedule] has no key 'epoch'; did you mean 'epochs'?"),
    ("ema.xyz=3", "[ema] has no key 'xyz'; valid: decay, warmup"),
    ("run.=3", "[run] has no key ''; valid: seed"),
    ("run.seed=x", "run.seed is 'x', expected an integer ≥ 0 and < 2^63"),
    ("engine.amp=fp6", "did you mean 'fp16'?"),
    ('rand_augment.operations=["Rotat"]', "did you mean 'Rotate'?"),
    ("optim.label_smoothing=0.1", "[optim] has no key 'label_smoothing'; valid: base_lr, betas, "
     "clip_norm, eps, global_batch, layer_decay, lr_scaling, max_batch_per_process, muon_factor, "
     "muon_momentum, name, weight_decay"),
    ("scedule.epochs=3", "'scedule'; did you mean 'schedule'?"),
    ("xyz.epochs=3", f"'xyz'; valid: {', '.join(sorted(SECTIONS))}"),
    ("name.x=3", f"'name'; valid: {', '.join(sorted(SECTIONS))}"),
    ("model.option.depth=3", "'option'; did you mean 'options'?"),
    ("model.options=3", "model.options is 3, expected a table"),
])
def test_what_set_gets_wrong_is_named_with_what_was_written(tmp_path, text, words):
    assert set_refusal(saved(tmp_path), text).endswith(words)


@pytest.mark.parametrize("text", ["run.seed.x=3", "model.options.patch_size.x=3",
                                  "model.options.x.y=3", "data.root.x.y=3"])
def test_set_on_too_deep_a_key_says_so(tmp_path, text):
    message = set_refusal(saved(tmp_path), text)
    assert "nested too deeply" in message and "did you mean" not in message


def test_set_into_a_table_among_the_options_says_that_it_is_too_deep(tmp_path):
    path = saved(tmp_path, edited("model.options", "{x = {y = 2}}"))
    assert "nested too deeply" in set_refusal(path, "model.options.x.y=3")


def test_set_of_several_lines_is_no_single_value(tmp_path):
    message = refusal(lambda: load_recipe(saved(tmp_path), [
        parse_override("run.seed=5\nschedule.epochs=7")]))
    assert message.startswith("--set run.seed=5")


def test_a_newline_after_set_stays_within_the_one_line(tmp_path):
    override = parse_override('data.name="a\nb"')
    assert "data.name" in refusal(load_recipe, saved(tmp_path), [override])


# ---------------------------------------------------------------------------------------------
# Writing and reading back
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [
    'say "cheese"', "back\\slash", "\\n", 'both\\"', "ümläut ☃ 図 😀", "two\nlines", "a\ttab", "'",
    "#", '"""', " padded ", "a\r\nb", "a\rb", "bell\a", "escape\x1b[0m", "nul\0", "delete\x7f",
], ids=ascii)
def test_an_awkward_folder_writes_back_to_an_equal_recipe(tmp_path, text):
    recipe = load_recipe(saved(tmp_path), [Override("data.root", text, "--data-dir")])
    assert recipe.data.root == text
    assert load_recipe(saved(tmp_path, dump_recipe(recipe))) == recipe


def test_a_recipe_writes_back_to_an_equal_one(tmp_path):
    recipe = load_recipe(saved(tmp_path))
    assert load_recipe(saved(tmp_path, dump_recipe(recipe))) == recipe


@pytest.mark.parametrize("value", [
    0, -3, 2**62, 1e-7, 1e22, 0.1, -0.0, True, False, "", 'a"b\\', [], [1, 2.5, "a"], [[1], [True]],
    {}, {"a": 1, "b": {"c": [0.5, "d"]}}], ids=repr)
def test_a_value_in_toml_reads_back_as_itself(value):
    found = tomllib.loads(f"v = {to_toml(value)}")["v"]
    assert found == value and repr(found) == repr(value)


def test_a_plain_recipe_reads_back_as_an_equal_one(tmp_path):
    recipe = load_recipe(saved(tmp_path))
    plain = recipe.as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert from_dict(plain, "a checkpoint") == recipe


def test_reading_a_plain_recipe_leaves_it_as_it_was():
    plain = tomllib.loads(edited("init.options", None))
    before = copy.deepcopy(plain)
    assert from_dict(plain, "a checkpoint").init.options == {}
    assert plain == before


def test_a_plain_recipe_is_checked_under_the_name_of_its_source(tmp_path):
    plain = load_recipe(saved(tmp_path)).as_dict()
    del plain["run"]["seed"]
    message = refusal(from_dict, plain, "runs/a/last.pt")
    assert message.startswith("runs/a/last.pt: [run] ") and "'seed'" in message


# ---------------------------------------------------------------------------------------------
# Options of models and inits
# ---------------------------------------------------------------------------------------------


def test_options_are_defaults_then_fixed_values_then_what_is_written():
    where = dict(where="x.toml: [init.options]", given=("generator",))
    assert resolve(planting, {}, **where) == {
        "height": 5.0, "kind": "oak", "spacing": 7, "watered": True}
    fixed = {"width": 3, "height": 2.5}
    assert resolve(planting, {}, fixed=fixed, **where) == {
        "width": 3, "height": 2.5, "kind": "oak", "spacing": 7, "watered": True}
    assert resolve(planting, {"height": 1.5, "kind": "elm"}, fixed=fixed, **where) == {
        "width": 3, "height": 1.5, "kind": "elm", "spacing": 7, "watered": True}
    assert fixed == {"width": 3, "height": 2.5}


def test_options_of_a_class_are_those_of_its_constructor():
    model, fixed = MODELS["vit_tiny"]
    options = resolve(model, {"drop_path": 1}, where="x", fixed=fixed,
                      given=("num_classes", "image_size"))
    assert options["embed_dim"] == 192 and options["pool"] == "class"
    assert options["drop_path"] == 1.0 and type(options["drop_path"]) is float


@pytest.mark.parametrize("name, value, expected", [
    ("height", 3, 3.0), ("spacing", 3, 3), ("spacing", [3, 5], (3, 5)), ("kind", "elm", "elm"),
    ("watered", False, False), ("width", 11, 11)])
def test_an_option_is_converted_to_its_type(name, value, expected):
    found = resolve(planting, {name: value}, where="x")[name]
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize("name, value, expected", [
    ("width", 3.5, "an integer"), ("width", True, "an integer"), ("width", "3", "an integer"),
    ("height", "3", "a number"), ("height", float("nan"), "a number"),
    ("height", float("inf"), "a number"), ("watered", 1, "true or false"),
    ("kind", "ash", 'one of "oak", "elm"'), ("kind", ["oak"], 'one of "oak", "elm"'),
    ("spacing", [3, 5, 7], "an integer or a list of 2 integers"),
    ("spacing", 3.5, "an integer or a list of 2 integers"),
    ("spacing", True, "an integer or a list of 2 integers")])
def test_an_option_of_the_wrong_type_is_named(name, value, expected):
    message = refusal(resolve, planting, {name: value}, where="x.toml: [init.options]")
    assert message.startswith("x.toml: [init.options] ")
    assert f"{name} is " in message and expected in message


@pytest.mark.parametrize("name, hint", [
    ("heigth", "did you mean 'height'?"),
    ("xyz", "valid: height, kind, spacing, watered, width"),
    ("generator", "valid: height, kind, spacing, watered, width"),
    ("garden", "valid: height, kind, spacing, watered, width")])
def test_an_unknown_option_gets_the_nearest_or_the_whole_list(name, hint):
    message = refusal(resolve, planting, {name: 3}, where="x.toml: [init.options]",
                      given=("generator",))
    assert message.startswith("x.toml: [init.options] ") and f"'{name}'" in message
    assert message.endswith(hint)


def test_an_option_where_there_are_none_is_not_answered_with_an_empty_list():
    default = init_function("default", VisionTransformer)
    message = refusal(resolve, default, {"rank": 3}, where="[init.options]", given=("generator",))
    assert "'rank'" in message and not message.rstrip().endswith("valid:")


# ---------------------------------------------------------------------------------------------
# Comparing the command line with a run's own recipe
# ---------------------------------------------------------------------------------------------


def differences(recipe: Recipe, changes: list[Override]) -> list[str]:
    return continued(recipe, changes, "last.pt")[1]


@pytest.mark.parametrize("text", [
    "schedule.epochs=13", "optim.base_lr=0.001", "ema.decay=0.990", "data.image_size=[37, 41]",
    "optim.betas=[0.9, 0.999]", "data.root=images", "engine.compile=false",
    'rand_augment.operations=["ShearX", "Invert", "Rotate"]', "augment.erase_area=[0.02, 0.41]",
    "init.options.rank=11", "init.options={rank=11}", "model.options.pool=mean"])
def test_an_override_that_changes_nothing_is_no_difference(tmp_path, text):
    assert differences(load_recipe(saved(tmp_path)), [parse_override(text)]) == []


def test_a_square_image_size_equals_its_one_number(tmp_path):
    recipe = load_recipe(saved(tmp_path, edited("data.image_size", "37")))
    same, other = parse_override("data.image_size=37"), parse_override("data.image_size=41")
    assert differences(recipe, [same]) == []
    assert len(differences(recipe, [other])) == 1


def test_every_difference_names_what_was_written_the_key_and_the_runs_value(tmp_path):
    texts = ["schedule.epochs=5", "run.seed=3", "optim.betas=[0.9, 0.99]", "init.options.rank=2",
             "data.name=imagenet"]
    found = differences(load_recipe(saved(tmp_path)), [parse_override(text) for text in texts])
    expected = [("--set schedule.epochs=5", "schedule.epochs = 13"),
                ("--set data.name=imagenet", 'data.name = "image_folder"'),
                ("--set optim.betas=[0.9, 0.99]", "optim.betas = [0.9, 0.999]"),
                ("--set init.options.rank=2", "init.options.rank = 11")]
    assert len(found) == len(expected)
    for phrase, (written, own) in zip(sorted(found), sorted(expected)):
        assert phrase.startswith(written) and phrase.endswith(own)


@pytest.mark.parametrize("text, hint", [
    ("schedule.epoch=5", "'epoch'; did you mean 'epochs'?"),
    ("ema.xyz=5", "'xyz'; valid: decay, warmup"),
    ("scedule.epochs=5", "'scedule'; did you mean 'schedule'?"),
    ("init.options.rnk=5", "'rnk'; did you mean 'rank'?")])
def test_comparing_an_unknown_key_names_the_nearest(tmp_path, text, hint):
    message = refusal(differences, load_recipe(saved(tmp_path)), [parse_override(text)])
    assert message.startswith(f"--set {text}: ") and message.endswith(hint)


@pytest.mark.parametrize("text", ["run.seed.x=5", "data.root.x=5", "optim.betas.x=5"])
def test_comparing_too_deep_a_key_is_refused(tmp_path, text):
    message = refusal(differences, load_recipe(saved(tmp_path)), [parse_override(text)])
    assert message.startswith(f"--set {text}: ") and ".x'" in message


@pytest.mark.parametrize("key", ["min_lr", "warmup_lr"])
def test_a_rate_above_the_peak_is_refused_but_in_a_run_that_has_begun(tmp_path, key):
    """Fine-tuning with DeiT's recipe at 5e-6 leaves min_lr = 1e-5 above the peak; such runs exist."""
    table = load_recipe(saved(tmp_path)).as_dict()
    table["schedule"][key] = 7.0
    assert getattr(from_dict(table, "last.pt").schedule, key) == 7.0
    other = Override("schedule.epochs", 5, "--set schedule.epochs=5")
    assert getattr(from_dict(table, "last.pt", [other]).schedule, key) == 7.0
    again = Override(f"schedule.{key}", 8.0, f"--set schedule.{key}=8.0")
    with pytest.raises(RecipeError, match=f"--set schedule.{key}=8.0: .*above"):
        from_dict(table, "last.pt", [again])
