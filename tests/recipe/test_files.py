"""What a recipe accepts, what it refuses and in which words, and that it is written and read back."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchvision

from vitinit.data import datasets, draw
from vitinit.init import init_function
from vitinit.models import MODELS
from vitinit.recipe import sections
from vitinit.recipe.files import (GIVEN, SIZES, Override, RecipeError, dump_recipe, find_recipe, from_dict,
                                  load_recipe, parse_override)
from vitinit.recipe.sections import SECTIONS, VERSION, Recipe
from vitinit.recipe.values import to_toml
from vitinit.train.distill import NO_TEACHER
from vitinit.runs.resume import continued

SHIPPED = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.toml"))
TABLES = ("model.options", "init.options")

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
image_size = [36, 40]
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
options = {patch_size = 4, pool = "mean"}

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


def edited(key: str, written: str | None, text: str = RECIPE) -> str:
    """The recipe with the line of section.key set to `written`, or removed if that is None."""
    title, _, name = key.partition(".")
    head, header, rest = text.partition(f"[{title}]\n")
    body, gap, tail = rest.partition("\n\n")
    lines = body.splitlines()
    number = next(i for i, line in enumerate(lines) if line.startswith(f"{name} = "))
    lines[number:number + 1] = [] if written is None else [f"{name} = {written}"]
    return head + header + "\n".join(lines) + gap + tail


def saved(folder: Path, text: str = RECIPE) -> Path:
    path = folder / "trial.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(action: Callable, *arguments: Any) -> str:
    """The message, of one line, of the RecipeError that `action` raises."""
    with pytest.raises(RecipeError) as caught:
        action(*arguments)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def set_refusal(path: Path, *texts: str) -> str:
    """The message of the error for `--set text` with the recipe at `path`; it quotes the last text."""
    message = refusal(lambda: load_recipe(path, [parse_override(text) for text in texts]))
    assert message.startswith(f"--set {texts[-1]}: "[:400])      # a long line loses its middle
    return message


def value_of(recipe: Recipe, key: str) -> Any:
    title, _, name = key.partition(".")
    return getattr(getattr(recipe, title), name)


# ---------------------------------------------------------------------------------------------
# The recipes that come with the project
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_is_complete_and_reads_back_equal_from_both_of_its_forms(path, tmp_path):
    recipe = load_recipe(path)
    model, _ = MODELS[recipe.model.name]
    init = init_function(recipe.init.name, model)
    for function, options, given in ((model, recipe.model.options, SIZES),
                                     (init, recipe.init.options, GIVEN)):
        keywords = typing.get_type_hints(getattr(function, "__init__") if function is model else function)
        assert set(options) <= set(keywords) - set(given)
    copied = tmp_path / path.name
    copied.write_text(dump_recipe(recipe), encoding="utf-8")
    plain = recipe.as_dict()
    assert plain["version"] == VERSION and json.loads(json.dumps(plain)) == plain
    assert load_recipe(copied) == recipe == from_dict(plain, "a checkpoint")
    # The data set's class count, and its own statistics, ImageNet's, or pixels on [-1, 1].
    data = recipe.data
    assert datasets.DATA_SETS[data.name].num_classes in (None, data.num_classes)
    own = {"shapes": ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
           "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
           "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))}
    imagenet, halves = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.5, 0.5, 0.5),) * 2
    assert (data.mean, data.std) in [own.get(data.name, imagenet), imagenet, halves]


def test_all_shipped_recipes_state_the_same_keys_in_the_same_order():
    expected = [f"{title}.{item.name}" for title, section in SECTIONS.items()
                for item in dataclasses.fields(section)]
    for path in SHIPPED:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        stated = [f"{title}.{key}" for title, body in table.items() for key in body]
        left_out = () if "distill" in table else "distill."      # without it there is no teacher
        assert [key for key in stated if key not in TABLES] == [
            key for key in expected if key not in TABLES and not key.startswith(left_out)], path


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


def test_a_recipe_reads_every_value_as_it_stands_in_the_file_and_is_frozen(tmp_path):
    recipe = load_recipe(saved(tmp_path))
    found, expected = recipe.as_dict(), tomllib.loads(RECIPE)
    for title, stated in (("model", {"patch_size": 4, "pool": "mean"}), ("init", {"rank": 11})):
        assert found[title]["options"].items() >= stated.items() == expected[title].pop("options").items()
        del found[title]["options"]
        with pytest.raises(TypeError):
            getattr(recipe, title).options["rank"] = 5
    assert found == {"name": "trial", "version": VERSION, "distill": NO_TEACHER} | expected
    for place in (recipe, *(getattr(recipe, title) for title in SECTIONS)):
        name = dataclasses.fields(place)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(place, name, None)


def test_other_ways_to_write_a_value(tmp_path):
    """One number for a square, integers for numbers, no empty table, and -0.0, which is 0."""
    text = edited("data.image_size", "36", edited("optim.weight_decay", "1", edited(
        "init.options", None, edited("ema.decay", "-0.0", edited("data.mean", "[0, 0.5, 1]")))))
    recipe = load_recipe(saved(tmp_path, text))
    assert recipe.data.image_size == (36, 36) and recipe.init.options["rank"] == 0
    assert type(recipe.optim.weight_decay) is float and recipe.data.mean == (0.0, 0.5, 1.0)
    assert recipe.ema.decay == 0.0 and math.copysign(1.0, recipe.ema.decay) == 1.0


# ---------------------------------------------------------------------------------------------
# What a recipe refuses: keys and sections
# ---------------------------------------------------------------------------------------------


SCHEDULE = RECIPE[RECIPE.index("[schedule]"):RECIPE.index("[ema]")]


@pytest.mark.parametrize("old, new, words", [
    ("epochs = 13\n", "", "[schedule] lacks the key 'epochs' (an integer ≥ 1 and < 2^31)"),
    (SCHEDULE, "", "section [schedule] is missing"), (RECIPE, "", "section [run] is missing"),
    ("\nepochs = 13", "\nepoch = 13", "[schedule] has no key 'epoch'; did you mean 'epochs'?"),
    ("[ema]\n", "[ema]\nxyz = 3\n", "[ema] has no key 'xyz'; valid: decay, warmup"),
    ("[ema]\n", "[engine.ampere]\nuse = true\n[ema]\n",
     "[engine] has no key 'ampere'; did you mean 'amp'?"),
    ("[ema]\n", "[schedul]\na = 3\n[ema]\n", "unknown section 'schedul'; did you mean 'schedule'?"),
    ("[ema]\n", "[xyz]\n[ema]\n", f"unknown section 'xyz'; valid: {', '.join(sorted(SECTIONS))}"),
    ("[run]\n", "name = 3\n[run]\n", "unknown key outside of a section: 'name'; valid: "
     + ", ".join(sorted(SECTIONS))),
    (SCHEDULE, SCHEDULE.replace("[schedule]", "[[schedule]]"), ", expected a section [schedule]"),
    ("[run]\n", '[run]\n"a\\nb" = 3\n', "[run] has no key 'a\\nb'; valid: seed"),
    ("[run]\n", "version = 13\n[run]\n", "a recipe of version 13, and this code reads 12; commit "
     "bb39c50 reads those of versions 1 to 11"),
    ("[ema]\n", f"[{'.'.join('a' * 900)}]\n[ema]\n", "its tables are nested too deeply"),
    ('{rank = 11}', "[" * 900 + "]" * 900, "maximum recursion depth exceeded"),
    ("[run]\nseed = 3", "[run\nseed = 3", "Expected ']' at the end of a table declaration"),
    ("seed = 3", "seed = 3\nseed = 3", "Cannot overwrite a value"),
    ("seed = 3", "seed: 3", "Expected '=' after a key"),
])
def test_a_wrong_table_is_refused_with_the_nearest_right_one(tmp_path, old, new, words):
    assert old in RECIPE
    path = saved(tmp_path, RECIPE.replace(old, new))
    message = refusal(load_recipe, path)
    assert message.startswith(f"{path}: ") and words in message
    if words[-1] in "?'":                            # the hint ends it
        assert message.endswith(words)


def test_a_file_that_is_no_text_or_is_not_there_is_refused(tmp_path):
    path = tmp_path / "trial.toml"
    path.write_bytes(RECIPE.encode().replace(b"images", b"b\xfccher"))
    assert refusal(load_recipe, path).startswith(f"{path}: not valid TOML: ")
    assert refusal(load_recipe, tmp_path) == f"{tmp_path}: cannot be read: Is a directory"
    assert "No such file" in refusal(load_recipe, tmp_path / "missing.toml")


def test_a_recipe_is_found_by_name_and_by_path_or_refused_with_the_nearest(tmp_path):
    path = saved(tmp_path)
    assert find_recipe("trial", tmp_path) == path == find_recipe(str(path), tmp_path / "elsewhere")
    (tmp_path / "other.toml").touch()
    for name, hint in (("trail", "did you mean 'trial'?"), ("xyz", "valid: other, trial")):
        message = refusal(find_recipe, name, tmp_path)
        assert message.startswith(f"recipe {name}: no such recipe in {tmp_path}; ")
        assert message.endswith(hint)
    assert refusal(find_recipe, "trial.toml", tmp_path) == "recipe trial.toml: no such file"


# ---------------------------------------------------------------------------------------------
# What a recipe refuses: values
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key, words, good, bad", [
    ("run.seed", "an integer ≥ 0 and < 2^63", ["0", "9223372036854775807"],
     ["-1", "9223372036854775808", '"3"', "3.0", "true", "[3]", "1979-05-27", "1" * 400]),
    ("optim.eps", "a number ≥ 1.4013e-45 and < 3.40282e+38", ["1", "1e-30"],
     ["0.0", "1e-46", "1e39", '"0.5"', "true", "[0.5]", "nan", "inf", "-inf", "1" * 400]),
    ("eval.crop_pct", "a number > 0 and ≤ 1", ["1e-9", "1.0"], ["0.0", "1.1"]),
    ("engine.compile", "true or false", ["true"], ['"true"', "1", "0", "[true]"]),
    ("data.root", "a string", ['"a = b"'], ["3", "true", '["a"]', "{}"]),
    ("engine.amp", 'one of "off", "bf16", "fp16"', ['"fp16"'], ["3", "0", "true", '["off"]', '""']),
    ("data.image_size", "an integer or a list of 2 integers ≥ 1 and < 2^31", ["[4, 60]"],
     ["true", "3.0", '"3"', "[]", "[3]", "[3, 5, 7]", "[3, 5.0]", "[3, true]", "[61, 0]", "0"]),
    ("optim.betas", "a list of 2 numbers ≥ 0 and < 1", ["[0.0, 0.9999999]", "[0, 0.5]"],
     ["0.5", '"ab"', "[0.5]", "[0.5, 0.6, 0.7]", '[0.5, "0.6"]', "[0.5, nan]", "[0.9, 1.0]"]),
    ("rand_augment.fill", "a list of 3 integers ≥ 0 and ≤ 255", ["[0, 127, 255]"],
     ["3", "[3, 5]", "[3, 5, 7.0]", "[-1, 127, 255]", "[0, 127, 256]"]),
    ("checkpoint.keep_epochs", "a list of integers ≥ 0 and < 2^31", ["[]", "[0, 1]"],
     ["3", "[3.0]", "[true]", "[[3]]", "[1, -1]"]),
    ("rand_augment.operations", "a list of words out of ", ['["Invert", "Color", "Invert"]'],
     ["3", '"Invert"', "[3]", '["Invert", 3]', '["NONE"]', '[["Invert"]]', '["Invert", {}]']),
    ("init.options", "a table", ["{}", "{rank = 2}"], ["3", '"a"', "[]", "true"]),
], ids=lambda value: value if isinstance(value, str) and "." in value else "")
def test_a_key_takes_values_of_its_kind_within_its_bounds(tmp_path, key, words, good, bad):
    for written in good:
        value = value_of(load_recipe(saved(tmp_path, edited(key, written))), key)
        expected = tomllib.loads(f"v = {written}")["v"]
        if isinstance(expected, dict):               # the value also has the defaults
            assert value.items() >= expected.items()
        else:
            assert value == (tuple(expected) if isinstance(expected, list) else expected)
    for written in bad:
        path = saved(tmp_path, edited(key, written))
        for message in (refusal(load_recipe, path),
                        set_refusal(saved(tmp_path), f"{key}={written}")):
            assert f": {key} is " in message and f", expected {words}" in message


def test_every_bound_is_checked_in_every_place_of_a_list():
    """At a bound and just beyond it, from the sections' own metadata."""
    table, checked = load_recipe(SHIPPED[0]).as_dict(), 0
    for title, section in SECTIONS.items():
        for item in dataclasses.fields(section):
            own = table[title][item.name]
            for name, limit in item.metadata.items():
                if limit is None:
                    continue
                ways = {"minimum": -1, "above": 0, "maximum": 1, "below": 0}
                beyond = limit + ways[name] * (1 if type(limit) is int else 0.1)
                beyond = beyond if beyond != limit or not ways[name] else limit * (1 + ways[name] / 2)
                values = [beyond] if not isinstance(own, list) else [
                    [*own[:place], beyond, *own[place + 1:]] for place in range(len(own))]
                for value in values:
                    table[title][item.name], checked = value, checked + 1
                    message = refusal(from_dict, table, "last.pt")
                    assert message.startswith(f"last.pt: {title}.{item.name} is "), message
            table[title][item.name] = own
    assert checked > 80


@pytest.mark.parametrize("key, written, hint", [
    ("engine.amp", '"bf6"', "; did you mean 'bf16'?"), ("engine.amp", '"quick"', '"fp16"'),
    ("rand_augment.operations", '["Shear_X", "Posterise"]', "; did you mean 'ShearX'?"),
    ("rand_augment.operations", '["Invert", "Cutout"]', "; 'Cutout' is none of them"),
])
def test_a_choice_gets_a_hint_only_where_one_is_near(tmp_path, key, written, hint):
    assert refusal(load_recipe, saved(tmp_path, edited(key, written))).endswith(hint)


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
    ({"schedule.cooldown_epochs": "7", "checkpoint.keep_epochs": "[19]"},
     "schedule.cooldown_epochs=5", "checkpoint.keep_epochs"),
])
def test_a_contradiction_is_blamed_on_whichever_of_its_keys_was_set(tmp_path, file, written, key):
    text = RECIPE
    for name, value in file.items():
        text = edited(name, value, text)
    assert set_refusal(saved(tmp_path, text), written).startswith(f"--set {written}: {key} ")


def test_values_at_the_edge_of_a_contradiction_are_accepted(tmp_path):
    for changes in (
            {"augment.crop_scale": "[0.5, 0.5]", "augment.erase_ratio": "[1.5, 1.5]"},
            {"rand_augment.operations": "[]", "rand_augment.layers": "0"},
            {"data.root": '""', "data.name": '"shapes"'},
            {"data.subset": "0.5", "data.images_per_class": "0"}, {"schedule.warmup_epochs": "13"},
            {"schedule.shape": '"one_cycle"', "schedule.warmup_epochs": "0"},
            {"schedule.min_lr": repr(1e-3 * 47 / 512)},          # as the schedule calculates it
            {"ema.decay": "0.0", "ema.warmup": "false"},
            {"ema.warmup": "true", "checkpoint.best_by": '"ema_top1"'},
            {"checkpoint.keep_epochs": "[0, 17]"}):
        sets = [parse_override(f"{name}={written}") for name, written in changes.items()]
        recipe = load_recipe(saved(tmp_path), sets)
        for name, written in changes.items():
            assert to_toml(value_of(recipe, name)) == written


# ---------------------------------------------------------------------------------------------
# --set
# ---------------------------------------------------------------------------------------------


def test_set_takes_toml_and_bare_words():
    for text, key, value in [
            ("run.seed = 3", "run.seed", 3), ("optim.base_lr=1e-3", "optim.base_lr", 1e-3),
            ("engine.compile=true", "engine.compile", True),
            ("data.image_size=[37, 41]", "data.image_size", [37, 41]),
            ("init.options={rank = 3}", "init.options", {"rank": 3}), ('data.root="3"', "data.root", "3"),
            ("data.root=/data/a folder", "data.root", "/data/a folder"),
            ("data.root=a=b", "data.root", "a=b"), ("data.root=[a", "data.root", "[a"),
            ("data.root=", "data.root", "")]:
        override = parse_override(text)
        assert override == (key, value, f"--set {text}") and type(override.value) is type(value)


def test_set_replaces_values_options_and_whole_tables_in_the_order_given(tmp_path):
    texts = ["schedule.epochs=5", "model.options={depth = 2}", "init.options.qk_norm=3",
             "schedule.epochs=3", "model.options.num_heads=2"]
    recipe = load_recipe(saved(tmp_path), [parse_override(text) for text in texts])
    assert recipe.schedule.epochs == 3 and recipe.data == load_recipe(saved(tmp_path)).data
    options = recipe.model.options
    assert (options["depth"], options["num_heads"], options["pool"]) == (2, 2, "class")
    assert (recipe.init.options["rank"], recipe.init.options["qk_norm"]) == (11, 3.0)
    assert type(recipe.init.options["qk_norm"]) is float


@pytest.mark.parametrize("text, words", [
    ("run.seed", "expected section.key=value, for example --set schedule.epochs=10"),
    ("seed=3", "expected section.key=value, for example --set schedule.epochs=10"),
    ("schedule.epoch=3", "[schedule] has no key 'epoch'; did you mean 'epochs'?"),
    ("run.=3", "[run] has no key ''; valid: seed"),
    ("engine.amp=fp6", "did you mean 'fp16'?"),
    ("scedule.epochs=3", "there is no section 'scedule'; did you mean 'schedule'?"),
    ("model.option.depth=3", "[model] has no table 'option'; did you mean 'options'?"),
    ("run.seed.x=3", "'run.seed.x' is nested too deeply; expected section.key=value"),
    ("model.options.x.y=3", "'model.options.x.y' is nested too deeply; expected section.key=value"),
    ("model.options=3", "model.options is 3, expected a table"),
    ("model.options={" + ".".join("a" * 900) + "=1}", "pos_embed, qkv_bias"),
    ("model.name=vit_tinny", "model.name is 'vit_tinny'; did you mean 'vit_tiny'?"),
    ("init.name=impuls", "init.name is 'impuls'; did you mean 'impulse'?"),
    ("model.options.depht=3", "[model.options] of vit_tiny has no key 'depht'; did you mean 'depth'?"),
    ("model.options.depth=2.5", "model.options.depth is 2.5, expected an integer"),
    ("init.options.rank=x", "init.options.rank is 'x', expected an integer"),
    ("init.options={rnk = 3}", "[init.options] of impulse has no key 'rnk'; did you mean 'rank'?"),
    ("init.options.generator=3", ""), ("model.options.num_classes=3", ""),
])
def test_what_set_gets_wrong_is_named_with_what_was_written(tmp_path, text, words):
    assert words in set_refusal(saved(tmp_path), "init.options.rank=3", text)


def test_set_of_several_lines_is_no_single_value(tmp_path):
    assert refusal(parse_override, "run.seed=5\nschedule.epochs=7").startswith("--set run.seed=5")
    override = parse_override('data.name="a\nb"')
    assert "data.name" in refusal(load_recipe, saved(tmp_path), [override])


# ---------------------------------------------------------------------------------------------
# Writing and reading back
# ---------------------------------------------------------------------------------------------


def test_awkward_folders_and_values_write_back_to_equal_ones(tmp_path):
    for text in ('say "cheese"', "back\\slash", "\\n", 'both\\"', "ümläut ☃ 図 😀", "two\nlines", "a\ttab",
                 "'", "#", '"""', " padded ", "a\r\nb", "bell\a", "escape\x1b[0m", "nul\0", "del\x7f"):
        recipe = load_recipe(saved(tmp_path), [Override("data.root", text, "--data-dir")])
        assert recipe.data.root == text
        assert load_recipe(saved(tmp_path, dump_recipe(recipe))) == recipe
    for value in (0, -3, 2**62, 1e-7, 1e22, 0.1, -0.0, True, "", [], [1, 2.5, "a"], [[1], [True]],
                  {}, {"a": 1, "b": {"c": [0.5, "d"]}}):
        found = tomllib.loads(f"v = {to_toml(value)}")["v"]
        assert found == value and repr(found) == repr(value)


@pytest.mark.parametrize("change, words", [
    (lambda table: table["run"].clear(), "[run] lacks the key 'seed' (an integer"),
    (lambda table: table.update(version=7), "a recipe of version 7, and this code reads 12; commit bb39c50"),
    (lambda table: table.pop("version"), "a recipe of version None, and"),
    (lambda table: table["model"]["options"].update(past=3), "[model.options] of vit_tiny has no key 'past'"),
])
def test_a_checkpoints_recipe_is_checked_under_the_name_of_its_file(tmp_path, change, words):
    plain = load_recipe(saved(tmp_path)).as_dict()
    change(plain)
    assert refusal(from_dict, plain, "last.pt").startswith(f"last.pt: {words}")
    assert "its recipe is [1], expected a table" in refusal(from_dict, [1], "last.pt")


def test_the_init_of_a_run_that_exists_is_a_record(tmp_path):
    """It may be of an init that is no longer here; only a change of it is checked."""
    plain = load_recipe(saved(tmp_path)).as_dict()
    plain["init"] |= {"name": "an_earlier_one", "options": {"content_scale": 0.5}}
    assert dict(from_dict(plain, "last.pt").init.options) == {"content_scale": 0.5}
    assert from_dict(plain, "last.pt", [parse_override("data.root=x")]).init.name == "an_earlier_one"
    assert "'an_earlier_one'" in refusal(from_dict, plain, "last.pt", [parse_override("init.options.a=1")])


# ---------------------------------------------------------------------------------------------
# Comparing the command line with a run's own recipe
# ---------------------------------------------------------------------------------------------


def test_what_changes_nothing_is_no_difference_and_what_does_is_named(tmp_path):
    recipe = load_recipe(saved(tmp_path))
    same = ["schedule.epochs=13", "ema.decay=0.990", "data.image_size=[36, 40]", "init.name=impulse",
            "optim.betas=[0.9, 0.999]", "data.root=elsewhere", "engine.compile=true",
            "init.options={rank=11}", "model.options.pool=mean"]
    assert continued(recipe, [parse_override(text) for text in same], "last.pt")[1] == []
    others = {"schedule.epochs=5": "schedule.epochs = 13", "data.name=imagenet": 'data.name = "image_folder"',
              "optim.betas=[0.9, 0.99]": "optim.betas = [0.9, 0.999]",
              "init.options.rank=2": "init.options.rank = 11"}
    found = continued(recipe, [parse_override(text) for text in others], "last.pt")[1]
    assert sorted(found) == sorted(f"--set {text} differs from the run's {own}"
                                   for text, own in others.items())
    assert continued(recipe, [parse_override("init.name=mimetic")], "last.pt")[1] == [
        '--set init.name=mimetic differs from the run\'s init.name = "impulse"']
    unknown = [parse_override("init.options.rnk=5")]
    assert refusal(continued, recipe, unknown, "last.pt").endswith("'rnk'; did you mean 'rank'?")
