"""What a recipe accepts, what it refuses and in which words, and that it is read back."""

import copy
import dataclasses
import json
import os
import tomllib
import typing
from functools import partial

import numpy as np
import pytest
import torchvision
from bounds import bounds_in
from refused import refused

from vitinit.base.values import flat, plain, to_toml
from vitinit.data import datasets, rand_augment
from vitinit.recipe.absent import KEYS_LEFT_OUT
from vitinit.recipe.files import (
    RECIPES,
    Override,
    RecipeError,
    from_dict,
    load_recipe,
    overrides,
    parse_override,
)
from vitinit.recipe.sections import SECTIONS, VERSION, Recipe
from vitinit.tasks import CROSS_ENTROPY
from vitinit.train.optim import NO_TEACHER

SHIPPED = sorted(RECIPES.glob("*.toml"))
WRITTEN = {path: tomllib.loads(path.read_text(encoding="utf-8")) for path in SHIPPED}
COMPLETE = [path for path in SHIPPED if "base" not in WRITTEN[path]]
WITH_BASE = [path for path in SHIPPED if "base" in WRITTEN[path]]
QUICKSTART = RECIPES / "quickstart.toml"
TEXT = QUICKSTART.read_text(encoding="utf-8")
refusal = partial(refused, RecipeError)


def with_sets(*texts: str) -> Recipe:
    """quickstart with these arguments of --set, for an image folder and the init impulse."""
    base = ["data.name=image_folder", "data.root=images", "init.name=impulse", "init.options={}"]
    return load_recipe(QUICKSTART, [parse_override(text) for text in (*base, *texts)])


def set_refusal(*texts: str) -> str:
    """The message of the error for these arguments of --set; it begins with the last one."""
    message = refusal(with_sets, *texts)
    assert message.startswith(f"--set {texts[-1]}: "[:400])  # a long line loses its middle
    return message.removeprefix(f"--set {texts[-1]}: ")


# The recipes that come with the project -------------------------------------------------------
@pytest.mark.parametrize("path", COMPLETE, ids=lambda path: path.stem)
def test_a_complete_recipe_is_read_as_it_is_written(path):
    """It states all keys in one order; options that it does not state have their defaults."""
    found = load_recipe(path).as_dict()
    written = copy.deepcopy(WRITTEN[path])
    if isinstance(side := written["data"]["image_size"], int):
        written["data"]["image_size"] = [side, side]
    left_out = {
        "three_augment": {"probability": 0.0, "color_jitter": 0.0},
        "loss": plain(CROSS_ENTROPY),
        "distill": NO_TEACHER,
        "task": {"name": "classify", "options": {}},
    }
    for title, meant in left_out.items():
        assert title in written or found.pop(title) == meant
    for title, body in written.items():
        options = body.pop("options", {})
        assert found[title].pop("options", {}).items() >= options.items()
        assert list(found[title].items()) == list(body.items()), title
    assert list(found) == ["version", "name", *written]


@pytest.mark.parametrize("path", WITH_BASE, ids=lambda path: path.stem)
def test_a_recipe_with_a_base_states_what_it_changes_and_why(path):
    """It is its base with these values by --set; each one differs from the base's, but for those of
    another model, init or task, and has a comment beside it or above."""
    written = copy.deepcopy(WRITTEN[path])
    base = load_recipe(written.pop("base"))
    stated, sets = flat(written), {}
    for title, section in written.items():
        if "name" in section and "options" in SECTIONS[title].__annotations__:
            sets |= {f"{title}.name": section["name"], f"{title}.options": {}}
    recipe = load_recipe(path)
    assert recipe.keys == load_recipe(base.name, overrides(sets=sets | stated)).keys
    for key in stated:
        renamed = f"{key.partition('.options.')[0]}.options" in sets
        assert renamed or recipe.keys[key] != base.keys[key], key
    lines = path.read_text(encoding="utf-8").partition("\nbase = ")[2].splitlines()
    for above, line in zip(lines, lines[1:]):
        assert " = " not in line or "#" in line or above.startswith("# "), line


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_is_written_as_it_is_read(path, tmp_path):
    recipe = load_recipe(path)
    found = recipe.as_dict()
    assert found["version"] == VERSION and json.loads(json.dumps(found)) == found
    copied = tmp_path / path.name
    copied.write_text(recipe.as_toml(), encoding="utf-8")
    assert load_recipe(copied) == recipe == from_dict(recipe.as_dict(), "a checkpoint")
    # The data set's class count, and its own statistics, ImageNet's, or pixels on [-1, 1].
    data = recipe.data
    assert datasets.DATA_SETS[data.name].num_classes in (None, data.num_classes)
    own = {
        "shapes": ((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
        "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        "svhn": ((0.4376821, 0.4437697, 0.47280442), (0.19803012, 0.20101562, 0.19703614)),
    }
    imagenet, halves = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.5, 0.5, 0.5),) * 2
    assert (data.mean, data.std) in [own.get(data.name, imagenet), imagenet, halves]


def test_orientation_is_left_as_stored_where_a_paper_s_loader_left_it():
    """That of torchvision and timm, with which DeiT, Swin, Mixer and ConvMixer were trained."""
    stored = {path.stem for path in SHIPPED if not load_recipe(path).data.apply_exif_orientation}
    assert stored == {
        path.stem
        for path in SHIPPED
        if path.stem.startswith(
            (
                "deit_",
                "deit3_",
                "imagenet_",
                "structured_",
                "swin_",
                "mixer_",
                "convmixer_",
                "tiny_imagenet_",
            )
        )
    }


def argument_of(settings: rand_augment.RandAugment, name: str, magnitude: float) -> float:
    code = np.array(rand_augment.Operation[name])
    return float(settings.arguments(code, np.array(magnitude), np.array(1.0)))


def test_the_plain_vit_baseline_augments_and_decays_as_big_vision_does():
    """randaug(2, 10) and wd of its configs/vit_s16_i1k.py, by the formulas of its level_to_arg."""
    (recipe,) = (load_recipe(path) for path in SHIPPED if path.stem == "imagenet_vit_small_90")
    ours = recipe.rand_augment
    assert (ours.layers, ours.probability) == (2, 1.0)
    assert (ours.magnitude, ours.magnitude_std) == (10.0, 0.0)
    theirs = {
        "Rotate": 30.0,
        "ShearX": 0.3,
        "ShearY": 0.3,
        "TranslateX": 100 / 224,
        "TranslateY": 100 / 224,
        "Color": 1.9,
        "Contrast": 1.9,
        "Brightness": 1.9,
        "Sharpness": 1.9,
        "Solarize": 256,
        "SolarizeAdd": 110,
        "AutoContrast": 0.0,
        "Equalize": 0.0,
        "Invert": 0.0,
    }
    assert {
        name: pytest.approx(argument_of(ours, name, 10.0), rel=1e-15) for name in ours.operations
    } == theirs
    # Its step is schedule · (lr · Adam's direction + wd · weight), AdamW's lr · schedule · (… + wd)
    assert recipe.optim.weight_decay == pytest.approx(1e-4 / recipe.optim.base_lr)
    assert recipe.schedule.warmup_epochs == round(10_000 / (1_281_167 // recipe.optim.global_batch))


SIMPLE_VIT = [path for path in SHIPPED if path.stem.endswith("_simple_vit")]


@pytest.mark.parametrize("path", SIMPLE_VIT, ids=lambda path: path.stem)
def test_the_simple_vit_recipes_augment_as_the_papers_code_by_torchvision(path):
    """RandAugment(2, 14) and RandomResizedCrop of mytrain_vit.py; its baselines' logit scale."""
    recipe = load_recipe(path)
    ours, size = recipe.rand_augment, recipe.data.image_size
    crop = torchvision.transforms.RandomResizedCrop(size)
    assert (recipe.augment.crop_scale, recipe.augment.crop_ratio) == (crop.scale, crop.ratio)
    assert (recipe.augment.crop_padding, recipe.augment.interpolation) == (
        0,
        crop.interpolation.value,
    )
    assert recipe.model.options["logit_scale"] == 0  # head_dim^-½
    theirs = torchvision.transforms.RandAugment(num_ops=2, magnitude=14)
    space = theirs._augmentation_space(theirs.num_magnitude_bins, size)
    assert ours.layers == theirs.num_ops and ours.magnitude_std == 0
    assert sorted([*ours.operations, "Identity"]) == sorted(space)
    assert ours.probability == pytest.approx(1 - 1 / len(space), abs=1e-15)
    for name in ours.operations:
        magnitudes, signed = space[name]
        found = argument_of(ours, name, ours.magnitude)
        if not magnitudes.ndim:  # an operation without an extent
            assert found == 0.0
            continue
        extent = magnitudes[theirs.magnitude].item()
        if name.startswith("Translate"):  # theirs is in pixels
            extent /= size[0]
        if name in ("Color", "Contrast", "Brightness", "Sharpness"):
            extent += 1.0
        # Posterize and Solarize: the nearest values that the keys can express, as the card says.
        assert found == pytest.approx(extent, **({"rel": 1e-6} if signed else {"abs": 1.0}))


@pytest.mark.parametrize(
    "name",
    [
        "cifar10_vit_tiny",
        "cifar100_vit_tiny",
        "cifar10_vit_256_8",
        "cifar10_swin_tiny",
        "cifar10_mixer",
        "cifar10_convmixer",
    ],
)
def test_the_families_at_32_pixels_train_by_the_command_of_arxiv_2404_01139s_code(name):
    """Its README's, "small dataset", and the defaults of the timm 0.9.16 that it contains."""
    command = {
        "optim.global_batch": 512,
        "optim.base_lr": 1e-3,
        "optim.lr_scaling": "none",
        "optim.weight_decay": 0.01,
        "optim.eps": 1e-3,
        "optim.clip_norm": 3.0,
        "schedule.epochs": 200,
        "schedule.warmup_epochs": 10,
        "schedule.cooldown_epochs": 0,
        "schedule.warmup_lr": 1e-5,
        "schedule.min_lr": 1e-6,
        "schedule.step_on": "epoch",
        "schedule.cosine_after_warmup": False,
        "augment.crop_scale": [1.0, 1.0],
        "augment.crop_ratio": [1.0, 1.0],
        "augment.crop_padding": 0,
        "augment.flip": 0.5,
        "augment.erase_probability": 0.0,
        "rand_augment.interpolation": "random",
        "mix.mixup_alpha": 0.0,
        "mix.cutmix_alpha": 0.0,
        "mix.label_smoothing": 0.1,
        "eval.crop_pct": 1.0,
    }
    keys = load_recipe(name).keys
    assert {key: keys[key] for key in command} == command


# What a recipe is -----------------------------------------------------------------------------
def test_a_recipe_is_frozen_and_takes_one_number_for_a_square_and_integers_for_numbers():
    recipe = with_sets()
    for place in (recipe, *(getattr(recipe, title) for title in SECTIONS)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(place, dataclasses.fields(place)[0].name, None)
    for options in (recipe.model.options, recipe.init.options):
        with pytest.raises(TypeError):
            options["rank"] = 5
    recipe = with_sets("data.image_size=36", "optim.weight_decay=1", "data.mean=[0, 0.5, 1]")
    assert recipe.data.image_size == (36, 36) and recipe.data.mean == (0.0, 0.5, 1.0)
    assert type(recipe.optim.weight_decay) is float


# What a recipe refuses ------------------------------------------------------------------------
def test_a_wrong_table_is_refused_with_the_nearest_right_one(tmp_path):
    path = tmp_path / "trial.toml"
    for old, new, words in [
        ("\nepochs = ", "\nepoch = ", "[schedule] has no key 'epoch'; did you mean 'epochs'?"),
        ("[ema]\n", "[ema]\nxyz = 3\n", "[ema] has no key 'xyz'; valid: decay, warmup"),
        (
            "[ema]\n",
            "[schedul]\na = 3\n[ema]\n",
            "'schedul' is no section of a recipe; did you mean 'schedule'?",
        ),
        (
            "[run]\n",
            "version = 13\n[run]\n",
            "a recipe of version 13, and this code reads 12, or 13 with a base; "
            "commit bb39c50 reads those of versions 1 to 11",
        ),
        (
            "[ema]\n",
            "[[ema]]\n",
            "ema is [{'decay': 0.99, 'warmup': True}], expected a table, [ema]",
        ),
        (
            "[run]\nseed = 0\n",
            "",
            'there is no section [run]; expected all sections, or base = "NAME" above the first',
        ),
        ("[ema]\n", "[ema\n", "not valid TOML: Expected ']' at the end of a table declaration"),
        ("[ema]\n", "[ema]\ndecay = 0.0\n", "not valid TOML: Cannot overwrite a value"),
    ]:
        assert old in TEXT
        path.write_text(TEXT.replace(old, new))
        assert refusal(load_recipe, path).startswith(f"{path}: {words}")
    path.write_bytes(b"# b\xfccher\n" + TEXT.encode())
    assert refusal(load_recipe, path).startswith(f"{path}: not valid TOML: ")
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())  # as Windows' Notepad saves it
    assert load_recipe(path).as_toml() == load_recipe(QUICKSTART).as_toml()
    assert refusal(load_recipe, "quickstrt").endswith(
        "recipe quickstrt: no such file; did you mean 'quickstart'?"
    )
    assert refusal(load_recipe, tmp_path / "no.toml") == f"recipe {tmp_path}/no.toml: no such file"


def test_what_is_wrong_with_a_base_or_beside_it_is_named_with_its_file(tmp_path, monkeypatch):
    """A base is a recipe's name, or a path from the file that names it."""
    (tmp_path / "bases").mkdir()
    base, path = tmp_path / "bases" / "whole.toml", tmp_path / "trial.toml"
    base.write_text(TEXT.replace("clip_norm = ", "clp_norm = "))
    monkeypatch.chdir(tmp_path / "bases")
    for text, blamed, words in [
        ('base = "quickstrt"', path, "base quickstrt: no such file; did you mean 'quickstart'?"),
        ('base = "whole.toml"', path, "base whole.toml: no such file"),
        (f'base = "{"a" * 300}.toml"', path, f"base {'a' * 300}.toml: no such file"),
        ("base = [3]", path, "base [3]: no such file; valid: "),
        ('base = "trial.toml"', path, "base trial.toml has a base itself, trial.toml; expected a"),
        (f'base = "{WITH_BASE[0].stem}"', path, f"base {WITH_BASE[0].stem} has a base itself, "),
        (
            'version = 12\nbase = "quickstart"',
            path,
            "a recipe of version 12 with a base, and this code reads 12, or 13 with a base; ",
        ),
        ('base = "quickstart"\noptim = 3', path, "optim is 3, expected a table, [optim]"),
        (
            '[optim]\nbase = "quickstart"',
            path,
            "there is no section [augment]; expected all sections",
        ),
        ('base = "quickstart"\n[optm]\neps = 1', path, "'optm' is no section of a recipe; did you"),
        (
            'base = "quickstart"\n[optim]\nepz = 1',
            path,
            "[optim] has no key 'epz'; did you mean 'eps'?",
        ),
        ('base = "quickstart"\n[optim]\neps = 0', path, "optim.eps is 0, expected a number"),
        ('base = "quickstart"\n[ema]\ndecay = 0', path, "ema.warmup = true with ema.decay = 0.0; "),
        (
            'base = "bases/whole.toml"',
            base,
            "[optim] has no key 'clp_norm'; did you mean 'clip_norm'?",
        ),
        (
            'base = "quickstart"\n[model]\nname = "swin_tiny"\noptions.depth = 3',
            path,
            "[model.options] of swin_tiny has no key 'depth'; did you mean",
        ),
    ]:
        path.write_text(text)
        assert refusal(load_recipe, path).startswith(f"{blamed}: {words}")
    base.write_text(TEXT.replace("clip_norm = ", "# "))
    path.write_text('version = 13\nbase = "bases/whole.toml"\n')
    assert refusal(load_recipe, path).startswith(f"{base}: [optim] lacks the key 'clip_norm' (")
    path.write_text(f"{path.read_text()}[optim]\nclip_norm = 0.25\n")
    assert load_recipe(path).optim.clip_norm == 0.25
    message = refusal(load_recipe, path, overrides(sets=["optim.clip_norm=-1"]))
    assert message.startswith("--set optim.clip_norm=-1: optim.clip_norm is -1, expected")


def test_a_missing_key_is_named_with_what_it_takes():
    for title, section in SECTIONS.items():
        table = with_sets().as_dict()
        for field in dataclasses.fields(section):
            value = table[title].pop(field.name)
            if field.name == "options":  # may be left out
                table[title][field.name] = value
                continue
            if f"{title}.{field.name}" in KEYS_LEFT_OUT:  # as in a run of version 12 without it
                recipe = from_dict(table, "last.pt")
                place = f"{title}.{field.name}"
                assert recipe.keys[place] == KEYS_LEFT_OUT[place]
                continue
            message = refusal(from_dict, table, "last.pt")
            assert message.startswith(f"last.pt: [{title}] lacks the key '{field.name}' (")
            table[title][field.name] = value
    assert "version None, and" in refusal(from_dict, table | {"version": None}, "last.pt")
    epochs = table["schedule"].pop("epochs")
    assert refusal(from_dict, table, "last.pt").endswith(
        "'epochs' (an integer ≥ 1 and < 2,147,483,648)"
    )
    table["schedule"]["epochs"] = epochs
    del table["ema"]
    assert refusal(from_dict, table, "last.pt").startswith("last.pt: there is no section [ema]; ")


@pytest.mark.parametrize("option", ["decoder_dim", "decoder_depth", "decoder_heads"])
def test_a_decoder_has_at_least_one_of_each(option):
    change = parse_override(f"task.options.{option}=0")
    line = refusal(load_recipe, RECIPES / "own_images.toml", [change])
    assert f": task.options.{option} is 0, expected an integer ≥ 1" in line


def test_a_key_takes_values_of_its_kind_within_its_bounds():
    """From the sections' own types; every bound in every place of a list, and just beyond it."""
    for key, words, good, bad in [
        (
            "run.seed",
            "an integer ≥ 0 and < 9,223,372,036,854,775,808",
            ["0"],
            ["-1", "1.0", "true"],
        ),
        ("optim.eps", "a number ≥ 1.4013e-45 and", ["1", "1e-8"], ["0", "nan", "inf", "[1]"]),
        ("ema.decay", "a number ≥ 0 and < 1", ["0.25"], ["1.0"]),
        ("engine.compile", "true or false", ["true"], ["1", "'true'"]),
        (
            "data.image_size",
            "an integer or a list of 2, each an integer ≥ 1 and",
            ["[37, 41]"],
            ["0", "[0, 3]", "[3]", "[3, 3, 3]", "'36'"],
        ),
        (
            "optim.betas",
            "a list of 2, each a number ≥ 0 and < 1",
            ["[0.5, 0.75]"],
            ["[0.5, '0.6']", "[0.9, 1.0]"],
        ),
        (
            "checkpoint.keep_epochs",
            "a list, each an integer ≥ 0 and",
            ["[]", "[0, 1]"],
            ["3", "{}"],
        ),
        (
            "rand_augment.operations",
            "a list, each one of ",
            ["['Invert', 'Color', 'Invert']"],
            ["'Invert'", "['Invert', 'Shear_X']"],
        ),
        ("init.options", "a table", ["{}", "{rank = 2}"], ["3", "'a'", "[]"]),
    ]:
        for written in good:
            value = plain(with_sets(f"{key}={written}").keys.get(key))
            assert key == "init.options" or value == tomllib.loads(f"v = {written}")["v"]
        for written in bad:
            message = set_refusal(f"{key}={written}")
            assert message.startswith(f"{key} is ") and f", expected {words}" in message
    for written, words in {
        "bf6": "'bf6'; did you mean 'bf16'?",
        "[1]": "[1]; valid: auto, bf16, fp16, off",
    }.items():
        assert set_refusal(f"engine.amp={written}") == f"engine.amp is {words}"
    table, checked = load_recipe(SHIPPED[0]).as_dict(), 0
    for title, section in SECTIONS.items():
        for key, kind in typing.get_type_hints(section, include_extras=True).items():
            good = table[title][key]
            for name, limit in [
                item
                for bounds in bounds_in(kind)
                for item in vars(bounds).items()
                if item[1] is not None
            ]:
                ways = {"minimum": -1, "above": 0, "maximum": 1, "below": 0}
                beyond = limit + ways[name] * (1 if type(limit) is int else 0.1)
                if beyond == limit and ways[name]:
                    beyond = limit * (1 + ways[name] / 2)
                values = (
                    [beyond]
                    if not isinstance(good, list)
                    else [[*good[:place], beyond, *good[place + 1 :]] for place in range(len(good))]
                )
                for value in values:
                    table[title][key], checked = value, checked + 1
                    message = refusal(from_dict, table, "last.pt")
                    assert message.startswith(f"last.pt: {title}.{key} is "), message
            table[title][key] = good
    assert checked > 80


def test_every_number_has_bounds_and_none_is_beyond_all_floats():
    """A number without bounds would be infinite in float32, or overflow a C integer, say. From
    Python; of a text, the parser of TOML takes no number as long."""
    unbounded = [
        f"{title}.{key}"
        for title, section in SECTIONS.items()
        for key, kind in typing.get_type_hints(section, include_extras=True).items()
        if None in bounds_in(kind)
    ]
    assert unbounded == []
    for changes in (
        [Override("optim.base_lr", 10**399, "here")],
        [Override("optim.base_lr", f"1{'0' * 399}", "here")],
    ):
        message = refusal(load_recipe, QUICKSTART, changes)
        assert message.startswith("here: optim.base_lr is ") and "expected a number > 0" in message


# What goes with the whole image.
WHOLE = (
    "augment.crop_scale=[1.0, 1.0]",
    "augment.crop_ratio=[1.0, 1.0]",
    "augment.crop_padding=0",
    "eval.crop_pct=1.0",
)
PEAK = 1e-3 * 47 / 512  # base_lr · global_batch / 512


@pytest.mark.parametrize(
    "wrong, right, words",
    [
        *(
            (
                [f"augment.{key}=[0.5, 0.25]"],
                f"augment.{key}=[0.5, 0.5]",
                f"augment.{key} = [0.5, 0.25]; expected the smaller value first",
            )
            for key in ("crop_scale", "crop_ratio", "erase_area", "erase_ratio")
        ),
        (
            ["data.subset=0.5", "data.images_per_class=3"],
            "data.images_per_class=0",
            "data.images_per_class = 3 with data.subset = 0.5; expected 0, or a subset of 1.0",
        ),
        (
            ["data.root=''"],
            "data.name=shapes",
            'data.root = "" with data.name = "image_folder"; expected a folder, given by --data-dir',
        ),
        (
            ["schedule.epochs=3", "schedule.warmup_epochs=4"],
            "schedule.warmup_epochs=3",
            "schedule.warmup_epochs = 4 with schedule.epochs = 3; expected no more",
        ),
        (
            ["schedule.epochs=3", "schedule.warmup_epochs=1", "schedule.shift_epochs=3"],
            "schedule.shift_epochs=2",
            "schedule.shift_epochs = 3 with schedule.epochs = 3; expected fewer",
        ),
        (
            ["schedule.shift_epochs=1", "optim.train=head"],
            "optim.train=all",
            'schedule.shift_epochs = 1 with optim.train = "head"; expected 0',
        ),
        (
            ["schedule.warmup_epochs=1", "schedule.shape=one_cycle"],
            "schedule.shape=cosine",
            'schedule.warmup_epochs = 1 with schedule.shape = "one_cycle"; expected 0',
        ),
        (
            [
                "schedule.warmup_epochs=0",
                "schedule.cosine_after_warmup=true",
                "schedule.shape=one_cycle",
            ],
            "schedule.shape=cosine",
            'schedule.cosine_after_warmup = true with schedule.shape = "one_cyc',
        ),
        (
            ["rand_augment.operations=[]", "rand_augment.layers=2"],
            "rand_augment.layers=0",
            "rand_augment.operations = [] with rand_augment.layers = 2; expected some, or 0 layers",
        ),
        (
            [
                "optim.base_lr=1e-3",
                "optim.lr_scaling=linear",
                "optim.global_batch=47",
                "schedule.min_lr=1e-4",
            ],
            f"schedule.min_lr={PEAK!r}",
            'schedule.min_lr = 0.0001 with optim.base_lr = 0.001, optim.lr_scaling = "linear", '
            "optim.global_batch = 47; expected at most the learning rate's peak, 9.17969e-05",
        ),
        (
            ["optim.base_lr=1e-12"],
            "optim.base_lr=1e-3",
            "schedule.warmup_lr = 1e-06 with optim.base_lr = 1e-12",
        ),
        (
            ["distill.weights=ema"],
            "distill.teacher=runs/a",
            'distill.weights = "ema" with distill.teacher = ""; expected none',
        ),
        (
            ["data.held_out=0.25", "data.held_out_per_class=7"],
            "data.held_out=0.0",
            "data.held_out = 0.25 with data.held_out_per_class = 7; expected 0.0, or 0 per class",
        ),
        *(
            (
                [*WHOLE, f"{key}={wrong}", "augment.fit=pad"],
                f"{key}={right}",
                f'{key} = {wrong} with augment.fit = "pad"; expected {right}, as the whole image',
            )
            for key, wrong, right in (
                ("augment.crop_scale", "[0.5, 1.0]", "[1.0, 1.0]"),
                ("augment.crop_ratio", "[1.0, 1.25]", "[1.0, 1.0]"),
                ("augment.crop_padding", "2", "0"),
                ("eval.crop_pct", "0.875", "1.0"),
            )
        ),
        (
            ["data.mean=[0.5]", "data.std=[0.5]", "data.decode=cuda", "augment.crop_padding=0"],
            "data.decode=cpu",
            'data.decode = "cuda" with data.mean = [0.5]; expected cpu, as a GPU decodes to RGB',
        ),
        (
            ["data.decode=cuda", "augment.crop_padding=2"],
            "augment.crop_padding=0",
            'data.decode = "cuda" with augment.crop_padding = 2; expected cpu, as a GPU crops no',
        ),
        (
            [*WHOLE, "augment.fit=pad", "data.decode=cuda"],
            "augment.fit=squash",
            'data.decode = "cuda" with augment.fit = "pad"; expected cpu, as a GPU pads nothing',
        ),
        (
            [
                "engine.recompute=true",
                "model.name=convmixer_256_8",
                "model.options={patch_size = 2}",
            ],
            "engine.recompute=false",
            'engine.recompute = true with model.name = "convmixer_256_8"; expected false, as Batch',
        ),
        (
            ["ema.decay=0.0", "ema.warmup=true"],
            "ema.warmup=false",
            "ema.warmup = true with ema.decay = 0.0",
        ),
        (
            ["ema.decay=0.0", "ema.warmup=false", "checkpoint.best_by=ema_top1"],
            "ema.decay=0.5",
            'checkpoint.best_by = "ema_top1" with ema.decay = 0.0; expected another one',
        ),
        (
            ["schedule.epochs=3", "checkpoint.keep_epochs=[0, 5]"],
            "schedule.cooldown_epochs=2",
            "checkpoint.keep_epochs = [0, 5] with schedule.epochs = 3, schedule.cooldown_epochs = 0",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused_up_to_the_edge(wrong, right, words):
    """The error begins with what was set, even if the key that it names first is the file's."""
    blamed, _, problem = refusal(with_sets, *wrong).partition(": ")
    assert blamed.removeprefix("--set ") in wrong and problem.startswith(words)
    with_sets(*wrong, right)


# --set ----------------------------------------------------------------------------------------
def test_set_takes_toml_and_bare_words_for_values_options_and_tables_in_the_order_given():
    for text, key, value in [
        ("run.seed = 3", "run.seed", 3),
        ("optim.base_lr=1e-3", "optim.base_lr", 1e-3),
        ("engine.compile=true", "engine.compile", True),
        ("data.image_size=[37, 41]", "data.image_size", [37, 41]),
        ("init.options={rank = 3}", "init.options", {"rank": 3}),
        ('data.root="3"', "data.root", "3"),
        ("data.root=/data/a folder", "data.root", "/data/a folder"),
        ("data.root=a=b", "data.root", "a=b"),
        ("data.root=[a", "data.root", "[a"),
        ("data.root=", "data.root", ""),
        ("data.root=2024", "data.root", "2024"),
        ("data.root=2024-01-01", "data.root", "2024-01-01"),
        ("init.checkpoint=1e3", "init.checkpoint", "1e3"),
        ("distill.teacher=true", "distill.teacher", "true"),
        ("data.subset=.5", "data.subset", 0.5),
        ("data.subset=1.", "data.subset", 1.0),
        ("augment.crop_scale=[.25, 1.]", "augment.crop_scale", [0.25, 1.0]),
        ("data.root=.5", "data.root", ".5"),
        ("checkpoint.keep_epochs=[0,\n1]", "checkpoint.keep_epochs", [0, 1]),
    ]:
        override = parse_override(text)
        assert override == (key, value, f"--set {text}") and type(override.value) is type(value)
    problem = refusal(with_sets, "schedule.epochs=3\nrun.seed=1")  # a line more
    assert r": schedule.epochs is '3\nrun.seed=1', expected an integer" in problem
    problem = refusal(load_recipe, QUICKSTART, overrides(sets={"data.root": 2024}))  # of Python
    assert problem == "data.root=2024: data.root is 2024, expected a string"
    recipe = with_sets(
        "schedule.epochs=5",
        "model.options={depth = 2}",
        "init.options={rank = 11}",
        "init.options.qk_norm=3",
        "schedule.epochs=3",
        "model.options.num_heads=2",
    )
    assert recipe.schedule.epochs == 3 and recipe.data == with_sets().data
    options = recipe.model.options
    assert (options["depth"], options["num_heads"], options["pool"]) == (2, 2, "class")
    assert (recipe.init.options["rank"], recipe.init.options["qk_norm"]) == (11, 3.0)
    assert type(recipe.init.options["qk_norm"]) is float
    assert load_recipe("quickstart", overrides(sets="run.seed=3")).run.seed == 3  # one is enough


def test_an_init_that_is_named_keeps_the_options_of_the_file_that_it_has(tmp_path):
    path = tmp_path / "trial.toml"
    path.write_text(with_sets("init.options={rank = 3, base = 'torch'}").as_toml())
    defaults = dict(with_sets("init.name=mimetic").init.options)
    for changes in (
        [Override("init.name", "mimetic", "--init mimetic")],
        [parse_override("init.name=mimetic")],
    ):
        assert dict(load_recipe(path, changes).init.options) == defaults | {"base": "torch"}
        more = [*changes, parse_override("init.options.base=default")]
        assert load_recipe(path, more).init.options["base"] == "default"
        message = refusal(load_recipe, path, [*changes, parse_override("init.options.rank=5")])
        assert message.startswith("--set init.options.rank=5: [init.options] of mimetic has no key")
    over = tmp_path / "over.toml"  # of a base it has, and drops, the options as of its own
    for written in ("[optim]\neps = 1", "[init.options]\nrank = 5\nvalue_init = 'mimetic'"):
        over.write_text(f"base = 'trial.toml'\n{written}")
        options = load_recipe(over).init.options
        assert (options["rank"], options["base"]) == (5 if "rank" in written else 3, "torch")
        options = load_recipe(
            over, [Override("init.name", "mimetic", "--init mimetic")]
        ).init.options
        kept = {"base": "torch"} | ({"value_init": "mimetic"} if "rank" in written else {})
        assert dict(options) == defaults | kept
    path.write_text(path.read_text().replace("rank =", "rnk ="))  # its own one must have all
    message = refusal(load_recipe, path, [Override("init.name", "impulse", "--init impulse")])
    assert message.startswith(f"{path}: [init.options] of impulse has no key 'rnk'")
    message = refusal(load_recipe, path, [parse_override("model.name=mixer_s16")])
    assert message.startswith(f"{path}: [model.options] of mixer_s16 has no key")


def test_what_set_gets_wrong_is_named_with_what_was_written():
    assert refusal(load_recipe, QUICKSTART, [Override("crop_pct", 1.0, "crop_pct")]) == (
        "crop_pct: 'crop_pct' is no section.key, such as eval.crop_pct"
    )
    for text, words in {
        "seed=3": "expected section.key=value, for example --set schedule.epochs=10",
        "run.=3": "[run] has no key ''; valid: seed",
        "scedule.epochs=3": "there is no table 'scedule'; did you mean 'schedule'?",
        "run.seed.x=3": "there is no table 'seed'",
        "model.option.depth=3": "there is no table 'option'; did you mean 'options'?",
        "model.name=vit_tinny": "there is no model 'vit_tinny'; did you mean 'vit_tiny'?",
        "init.name=impuls": "there is no init 'impuls'; did you mean 'impulse'?",
        "model.options.depth=2.5": "model.options.depth is 2.5, expected an integer",
        "init.options={rnk = 3}": "[init.options] of impulse has no key 'rnk'; did you mean 'rank'?",
        "init.options.generator=3": "has no key 'generator'",
    }.items():
        assert words in set_refusal("init.options.rank=3", text)


# Writing and reading back ---------------------------------------------------------------------
def test_awkward_folders_and_values_write_back_to_equal_ones(tmp_path):
    path = tmp_path / "quickstart.toml"
    for text in (
        'say "cheese"',
        "back\\slash",
        "\\n",
        "ümläut ☃ 図 😀",
        "two\nlines",
        "a\ttab",
        "'",
        "#",
        '"""',
        " padded ",
        "a\r\nb",
        "escape\x1b[0m",
        "nul\0",
        "delete\x7f",
        os.fsdecode(b"not UTF-8: \xe9\xff"),
        "neither: \ud800\U0010dce9",
    ):
        recipe = load_recipe(QUICKSTART, [Override("data.root", text, "--data-dir")])
        path.write_text(recipe.as_toml(), encoding="utf-8")
        assert recipe.data.root == text and load_recipe(path) == recipe
        assert tomllib.loads(path.read_text(encoding="utf-8")), "others read it, too"
    for value in (
        0,
        -3,
        2**62,
        1e-7,
        1e22,
        0.1,
        -0.0,
        True,
        "",
        [],
        [1, 2.5, "a"],
        [[1], [True]],
        {},
        {"a": 1, "b": {"c": [0.5, "d"]}},
    ):
        found = tomllib.loads(f"v = {to_toml(value)}")["v"]
        assert found == value and repr(found) == repr(value)


def test_the_init_of_a_run_that_exists_is_a_record():
    table = with_sets().as_dict()
    table["init"] |= {"name": "an_earlier_one", "options": {"content_scale": 0.5}}
    assert dict(from_dict(table, "last.pt").init.options) == {"content_scale": 0.5}
