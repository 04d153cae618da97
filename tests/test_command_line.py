"""command_line.py, and the command line of train.py: its flags, their effects, one line per error."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from vitinit.command_line import Parser, complain
from vitinit.data.images import DataError
from vitinit.init import INITS, init_function
from vitinit.models import MODELS, VisionTransformer
from vitinit.recipe.files import RecipeError, dump_recipe, load_recipe, parse_override
from vitinit.recipe.resolve import fresh_recipe, moved, overrides, resolve_options, resolve_recipe
from vitinit.recipe.sections import InitSection, ModelSection
from vitinit.recipe.values import to_toml
from vitinit.train.checkpoint import CheckpointError
from vitinit.train.distributed import LaunchError, LostProcess

REPOSITORY = Path(__file__).resolve().parent.parent
FLAGS = ["--recipe", "--init", "--data-dir", "--out-dir", "--seed", "--resume", "--dry-run",
         "--profile", "--set"]
MISSPELT = ["--recipe", "quickstart", "--set", "schedule.epoch=3"]
COMPLAINT = ("train.py: --set schedule.epoch=3: [schedule] has no key 'epoch'; "
             "did you mean 'epochs'?")


def saved(folder: Path, *, model: str = "vit_tiny", init: str = "default", root: str = "",
          model_options: dict | None = None, init_options: dict | None = None) -> Path:
    """Write a recipe file like quickstart's with these values; return its path."""
    recipe = load_recipe(REPOSITORY / "recipes" / "quickstart.toml")
    recipe = dataclasses.replace(
        recipe, model=ModelSection(model, model_options or {}),
        init=InitSection(init, "", "model", "exact", init_options or {}),
        data=dataclasses.replace(recipe.data, root=root))
    path = folder / "trial.toml"
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    return path


def refusal(path: Path, sets: list[str], **flags) -> str:
    """The one-line error for this command line with the recipe at `path`."""
    with pytest.raises(RecipeError) as caught:
        resolve_recipe(path, overrides(sets=sets, **flags))
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def resolved(args, printed: list[str]):
    """The recipe of a parsed command line; lines about ignored options are appended to `printed`."""
    return fresh_recipe(args.recipe, recipes=REPOSITORY / "recipes", say=printed.append,
                        init=args.init, seed=args.seed, data_dir=args.data_dir, sets=args.set)


def fresh(train_program, *arguments: object):
    """The recipe that train.py resolves for a new run, and the lines that it prints."""
    printed = []
    args = train_program.parse_arguments([str(argument) for argument in arguments])
    return resolved(args, printed), printed


def environment(**more: str) -> dict[str, str]:
    """Environment for a subprocess: one thread, and no variables of a launcher around these tests."""
    kept = {key: value for key, value in os.environ.items()
            if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    return kept | {"OMP_NUM_THREADS": "1"} | more


# ---------------------------------------------------------------------------------------------
# Flags
# ---------------------------------------------------------------------------------------------


def test_train_py_takes_these_flags_and_no_others(train_program, monkeypatch):
    parsers = []
    monkeypatch.setattr(Parser, "parse_args", lambda self, arguments: parsers.append(self))
    train_program.parse_arguments([])
    actions = parsers[0]._actions
    assert [flag for action in actions for flag in action.option_strings] == [
        "-h", "--help", *FLAGS]
    assert all(action.option_strings for action in actions)      # there are no positional arguments


def test_the_flags_arrive_under_their_names(train_program):
    args = train_program.parse_arguments([
        "--recipe", "a", "--init", "b", "--data-dir", "c", "--out-dir", "d", "--seed", "5",
        "--resume", "auto", "--dry-run", "--set", "run.seed=1", "--set", "run.seed=2"])
    assert vars(args) == dict(recipe="a", init="b", data_dir="c", out_dir=Path("d"), seed=5,
                              resume="auto", dry_run=True, profile=0,
                              set=["run.seed=1", "run.seed=2"])
    assert train_program.parse_arguments(["--profile", "7"]).profile == 7


def test_without_flags_nothing_is_set(train_program):
    assert vars(train_program.parse_arguments([])) == dict(
        recipe=None, init=None, data_dir=None, out_dir=None, seed=None, resume=None, dry_run=False,
        profile=0, set=[])


@pytest.mark.parametrize("flag", FLAGS)
def test_no_flag_may_be_abbreviated(train_program, flag):
    for length in range(len("--x"), len(flag)):
        with pytest.raises(RecipeError, match="unrecognized arguments: " + flag[:length]):
            train_program.parse_arguments([flag[:length], "5"])


@pytest.mark.parametrize("arguments, words", [
    (["--epochs", "5"], "--epochs"), (["quickstart"], "quickstart"), (["--seed", "x"], "--seed"),
    (["--seed", "1.5"], "--seed"), (["--set"], "--set"), (["--recipe"], "--recipe"),
    (["--dry-run=yes"], "--dry-run")])
def test_a_wrong_flag_is_one_line_that_names_it_and_ends_with_2(train_program, monkeypatch, capsys,
                                                               arguments, words):
    monkeypatch.delenv("RANK", raising=False)
    assert train_program.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("train.py: ") and words in printed.err


# ---------------------------------------------------------------------------------------------
# From flags to a recipe
# ---------------------------------------------------------------------------------------------


def test_flags_apply_before_set():
    changes = overrides(init="impulse", seed=5, data_dir="a folder",
                        sets=["run.seed=7", "init.name=mimetic"])
    assert changes == [("data.root", "a folder", "--data-dir a folder"),
                       ("init.name", "impulse", "--init impulse"),
                       ("run.seed", 5, "--seed 5"),
                       ("run.seed", 7, "--set run.seed=7"),
                       ("init.name", "mimetic", "--set init.name=mimetic")]


def test_flags_that_are_not_given_change_nothing():
    assert overrides(sets=[]) == []
    assert overrides(init=None, seed=None, data_dir=None, sets=[]) == []


def test_a_seed_of_0_and_an_empty_folder_are_given():
    assert [change[:2] for change in overrides(seed=0, data_dir="", sets=[])] == [
        ("data.root", ""), ("run.seed", 0)]


def test_set_wins_over_the_short_flags(tmp_path):
    recipe = resolve_recipe(saved(tmp_path), overrides(
        init="impulse", seed=5, data_dir="a",
        sets=["run.seed=7", "init.name=mimetic", "data.root=b"]))
    assert (recipe.run.seed, recipe.init.name, recipe.data.root) == (7, "mimetic", "b")


def test_the_recipe_holds_all_options_those_of_the_file_and_of_set_included(tmp_path):
    path = saved(tmp_path, model_options={"patch_size": 8}, init="impulse",
                 init_options={"rank": 3})
    recipe = resolve_recipe(path, [parse_override("init.options.qk_norm=2"),
                                   parse_override("model.options.pool=mean")])
    model, sizes = MODELS["vit_tiny"]
    assert recipe.model.options == resolve_options(
        model, {"patch_size": 8, "pool": "mean"}, title="x", source=str, fixed=sizes,
        given=("num_classes", "image_size"))
    assert recipe.init.options == resolve_options(
        init_function("impulse", model), {"rank": 3, "qk_norm": 2.0}, title="x", source=str,
        fixed={}, given=("generator", "images"))
    assert type(recipe.init.options["qk_norm"]) is float
    assert {"kernel_size", "noise_std", "base"} < set(recipe.init.options)


@pytest.mark.parametrize("init, sets", [
    ("impulse", []), ("deep_impulse", []), ("deep_impulse", ["init.options.target_mass=[0.3,0.05]"]),
])
def test_resolved_options_resolve_to_themselves(tmp_path, init, sets):
    recipe = resolve_recipe(saved(tmp_path, init=init), [parse_override(text) for text in sets])
    (tmp_path / "trial.toml").write_text(dump_recipe(recipe), encoding="utf-8")
    assert resolve_recipe(tmp_path / "trial.toml", []) == recipe


@pytest.mark.parametrize("file, flags, sets, source, words", [
    (dict(init="impuls"), {}, [], "", "init.name is 'impuls'; did you mean 'impulse'?"),
    (dict(model="vit_tinny"), {}, [], "", "model.name is 'vit_tinny'; did you mean 'vit_tiny'?"),
    (dict(init="xyz"), {}, [], "", f"init.name is 'xyz'; valid: {', '.join(sorted(INITS))}"),
    ({}, dict(init="impuls"), [], "--init impuls: ", "did you mean 'impulse'?"),
    ({}, {}, ["init.name=impuls"], "--set init.name=impuls: ", "did you mean 'impulse'?"),
    ({}, {}, ["model.name=xyz"], "--set model.name=xyz: ", "valid: " + ", ".join(sorted(MODELS))),
    ({}, dict(seed=-1), [], "--seed -1: ", "run.seed is -1, expected an integer ≥ 0 and < 2^63"),
    (dict(init="impulse", init_options={"rnk": 3}), {}, [], "", "'rnk'; did you mean 'rank'?"),
    (dict(model_options={"depht": 3}), {}, [], "", "'depht'; did you mean 'depth'?"),
    (dict(init="impulse"), {}, ["init.options.rnk=3"], "--set init.options.rnk=3: ",
     "'rnk'; did you mean 'rank'?"),
    ({}, {}, ["model.options.depht=3"], "--set model.options.depht=3: ",
     "'depht'; did you mean 'depth'?"),
    (dict(init="impulse"), {}, ["init.options.rank=x"], "--set init.options.rank=x: ",
     "rank is 'x', expected an integer"),
    ({}, {}, ["model.options.depth=2.5"], "--set model.options.depth=2.5: ",
     "depth is 2.5, expected an integer"),
    # If several sources set parts of one table, the one with the wrong value is named.
    ({}, dict(init="impulse"), ["init.name=mimetc"], "--set init.name=mimetc: ",
     "did you mean 'mimetic'?"),
    (dict(init="impulse"), {}, ["init.options.rank=3", "init.options.rnk=3"],
     "--set init.options.rnk=3: ", "'rnk'; did you mean 'rank'?"),
    (dict(init="impulse"), {}, ["init.options.rank=3", "init.options.qk_norm=x"],
     "--set init.options.qk_norm=x: ", "qk_norm is 'x', expected a number"),
    (dict(init="impulse"), {}, ["init.options.rank=x", "init.options.rank=y"],
     "--set init.options.rank=y: ", "rank is 'y', expected an integer"),
    (dict(init="deep_impulse"), {}, ["init.options.target_mass=[0.3]"],
     "--set init.options.target_mass=[0.3]: ",
     "target_mass is [0.3], expected a number or a list of 2 numbers"),
    (dict(init="impulse"), {}, ["init.options={rnk=3}"], "--set init.options={rnk=3}: ",
     "'rnk'; did you mean 'rank'?"),
    (dict(init="impulse", init_options={"rnk": 3}), {}, ["init.options.rank=3"], "",
     "'rnk'; did you mean 'rank'?"),
])
def test_an_error_names_the_source_of_the_wrong_value(tmp_path, file, flags, sets, source, words):
    path = saved(tmp_path, **file)
    message = refusal(path, sets, **flags)
    assert message.startswith(source or f"{path}: ") and message.endswith(words)


# ---------------------------------------------------------------------------------------------
# A new run's recipe
# ---------------------------------------------------------------------------------------------


def test_without_init_the_options_of_the_file_hold(train_program, tmp_path):
    path = saved(tmp_path, init="impulse", init_options={"rank": 3})
    recipe, printed = fresh(train_program, "--recipe", path)
    assert recipe == resolve_recipe(path, [])
    assert recipe.init.name == "impulse" and recipe.init.options["rank"] == 3
    assert printed == []


@pytest.mark.parametrize("name, file, kept, said_of", [
    ("impulse", {"rank": 3, "base": "torch"}, {"rank": 3, "base": "torch"}, None),
    ("mimetic", {"base": "torch", "value_beta": 0.25}, {"base": "torch", "value_beta": 0.25}, None),
    ("mimetic", {"rank": 3, "base": "torch"}, {"base": "torch"}, "{rank = 3}"),
    ("mimetic", {"rank": 3, "qk_norm": 2.5}, {}, "{rank = 3, qk_norm = 2.5}"),
    ("torch", {"rank": 3, "base": "torch"}, {}, '{rank = 3, base = "torch"}'),
    ("torch", {}, {}, None),
])
def test_init_keeps_the_options_that_it_has_and_names_those_that_it_sets_aside(
        train_program, tmp_path, name, file, kept, said_of):
    path = saved(tmp_path, init="impulse", init_options=file)
    recipe, printed = fresh(train_program, "--recipe", path, "--init", name)
    assert recipe.init.name == name
    assert recipe.init.options == resolve_options(
        init_function(name, VisionTransformer), kept, title="x", source=str, fixed={},
        given=("generator", "images"))
    if said_of is None:
        assert printed == []
    else:
        line, = printed
        assert line.startswith(f"--init {name} ") and line.endswith(f": {said_of}")
        assert "\n" not in line


def test_init_changes_no_other_key_of_init(train_program, tmp_path):
    recipe, _ = fresh(train_program, "--recipe", saved(tmp_path, init="impulse"),
                      "--set", "init.checkpoint=runs/a", "--set", "init.checkpoint_weights=ema",
                      "--init", "mimetic")
    assert (recipe.init.checkpoint, recipe.init.checkpoint_weights) == ("runs/a", "ema")


def test_options_set_beside_init_are_those_of_the_new_init(train_program, tmp_path):
    path = saved(tmp_path, init="mimetic", init_options={"qk_beta": 0.5, "base": "torch"})
    recipe, _ = fresh(train_program, "--recipe", path, "--set", "init.options.rank=3",
                      "--init", "impulse", "--set", "init.options.value_beta=0.25")
    assert recipe.init.options["rank"] == 3 and recipe.init.options["base"] == "torch"
    assert recipe.init.options["value_beta"] == 0.25
    assert "qk_beta" not in recipe.init.options


def test_options_set_beside_init_win_over_those_that_it_keeps(train_program, tmp_path):
    path = saved(tmp_path, init="impulse", init_options={"rank": 3, "base": "torch"})
    for written in ("init.options.base=default", 'init.options={base = "default"}'):
        recipe, _ = fresh(train_program, "--recipe", path, "--init", "mimetic", "--set", written)
        assert recipe.init.options["base"] == "default"


def test_an_option_that_was_set_is_refused_not_set_aside(train_program, tmp_path):
    path, printed = saved(tmp_path, init="impulse", init_options={"qk_norm": 2.5}), []
    args = train_program.parse_arguments(["--recipe", str(path), "--init", "mimetic",
                                          "--set", "init.options.rank=5"])
    with pytest.raises(RecipeError) as caught:
        resolved(args, printed)
    assert str(caught.value).startswith("--set init.options.rank=5: ")
    assert "'rank'" in str(caught.value)
    line, = printed
    assert line.endswith(": {qk_norm = 2.5}")


def test_an_unknown_init_is_named_and_sets_nothing_aside(train_program, tmp_path):
    path = saved(tmp_path, init="impulse", init_options={"rank": 3})
    with pytest.raises(RecipeError) as caught:
        fresh(train_program, "--recipe", path, "--init", "mimetc")
    assert str(caught.value) == "--init mimetc: init.name is 'mimetc'; did you mean 'mimetic'?"


@pytest.mark.parametrize("model, family", [("mixer_s16", "MlpMixer"),
                                           ("convmixer_256_8", "ConvMixer")])
def test_an_init_that_the_family_lacks_is_one_line_with_those_that_it_has(train_program, tmp_path,
                                                                          model, family):
    path = saved(tmp_path, model=model, init="impulse", init_options={"gain": 0.5})
    words = f"init 'mimetic' is not defined for a {family}; it has: default, torch, lecun, impulse"
    with pytest.raises(RecipeError) as caught:
        fresh(train_program, "--recipe", path, "--init", "mimetic")
    assert str(caught.value).startswith(f"--init mimetic: {words}")
    assert "\n" not in str(caught.value)
    assert refusal(path, ["init.name=mimetic"]).startswith(f"--set init.name=mimetic: {words}")
    path = saved(tmp_path, model=model, init="mimetic")
    assert refusal(path, []).startswith(f"{path}: {words}")


@pytest.mark.parametrize("model, own", [
    ("swin_tiny", {"target_mass": 0.75}), ("mixer_s16", {"linear_bias": 8.0}),
    ("convmixer_256_8", {"gain": 0.5}), ("vit_tiny", {"qk_norm": 2.0})])
def test_the_options_of_impulse_are_those_of_the_models_family(tmp_path, model, own):
    path = saved(tmp_path, model=model, init="impulse", init_options=own)
    function = init_function("impulse", MODELS[model][0])
    assert resolve_recipe(path, []).init.options == resolve_options(
        function, own, title="x", source=str, fixed={}, given=("generator", "images"))
    name, = own
    for other in {"swin_tiny", "mixer_s16", "vit_tiny"} - {model}:
        path = saved(tmp_path, model=other, init="impulse", init_options=own)
        if name != "gain" or other != "mixer_s16":   # a Mixer's impulse also has a gain
            message = refusal(path, [])
            assert message.startswith(f"{path}: [init.options] of impulse has no key '{name}'; ")


@pytest.mark.parametrize("option, hint", [
    ("target_mas", "did you mean 'target_mass'?"), ("qk_alpha", "did you mean 'value_alpha'?"),
    ("rank", "valid: base, kernel_size, offsets, target_mass, value_alpha, value_beta, value_init"),
])
def test_a_swin_refuses_the_options_of_a_vits_impulse_with_the_nearest_of_its_own(tmp_path, option,
                                                                                  hint):
    path = saved(tmp_path, model="swin_tiny", init="impulse")
    message = refusal(path, [f"init.options.{option}=3"])
    assert message.startswith(f"--set init.options.{option}=3: ") and message.endswith(hint)


def test_init_with_another_model_sets_aside_what_its_family_lacks(train_program, tmp_path):
    path = saved(tmp_path, init="impulse", init_options={"rank": 3, "kernel_size": 5})
    recipe, printed = fresh(train_program, "--recipe", path, "--init", "impulse",
                         "--set", "model.name=swin_tiny")
    assert recipe.init.options["kernel_size"] == 5 and "rank" not in recipe.init.options
    line, = printed
    assert line.startswith("--init impulse ") and line.endswith(": {rank = 3}")


def test_init_and_data_dir_complete_a_recipe_together(train_program, tmp_path):
    path = saved(tmp_path)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('name = "shapes"', 'name = "image_folder"'), encoding="utf-8")
    recipe, _ = fresh(train_program, "--recipe", path, "--init", "mimetic",
                      "--data-dir", "images")
    assert (recipe.data.root, recipe.init.name) == ("images", "mimetic")


def test_every_short_flag_reaches_its_key(train_program):
    recipe, _ = fresh(train_program, "--recipe", "quickstart", "--seed", 5, "--data-dir", "a",
                      "--init", "impulse", "--set", "schedule.epochs=3")
    assert (recipe.name, recipe.run.seed, recipe.data.root) == ("quickstart", 5, "a")
    assert (recipe.init.name, recipe.schedule.epochs) == ("impulse", 3)


@pytest.mark.parametrize("arguments, words", [
    ([], "--recipe is missing; for example --recipe quickstart"),
    (["--recipe", "quikstart"], "did you mean 'quickstart'?")])
def test_a_new_run_needs_a_recipe(train_program, arguments, words):
    with pytest.raises(RecipeError) as caught:
        fresh(train_program, *arguments)
    assert str(caught.value).endswith(words) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("option, value", [
    ("patch_size", "0"), ("patch_size", "-4"), ("embed_dim", "-12"), ("depth", "-1"),
    ("num_heads", "0"), ("num_heads", "-1"), ("mlp_ratio", "-1.0"), ("drop_path", "1.0")])
def test_a_size_that_no_model_can_have_is_one_line_that_names_it(
        train_program, small_run, tmp_path, monkeypatch, capsys, option, value):
    monkeypatch.delenv("RANK", raising=False)
    arguments = small_run(tmp_path / "run", f"--set=model.options.{option}={value}", "--dry-run",
                          init="default")
    assert train_program.main(arguments) == 2
    error = capsys.readouterr().err
    assert option in error and value.removesuffix(".0") in error and error.count("\n") == 1


def test_every_key_of_the_augmentation_reaches_what_draws_or_applies_it(
        train_program, small_run, tmp_path, monkeypatch):
    """The values are all different within each type, and none of them is a default."""
    given = {}
    for name in ("SampleDraws", "TrainSampler", "TrainToDevice"):
        def recorded(*arguments, name=name, real=getattr(train_program, name), **options):
            given.update(options)
            if name == "SampleDraws":
                given["draws"] = [vars(section) for section in arguments[2:]]
            return real(*arguments, **options)
        monkeypatch.setattr(train_program, name, recorded)
    written = {
        "augment": dict(repeats=3, crop_scale=(0.37, 0.97), crop_ratio=(0.71, 1.31), crop_padding=2,
                        flip=0.11, interpolation="bilinear", erase_probability=0.13,
                        erase_area=(0.17, 0.19), erase_ratio=(0.23, 0.29), erase_fill="const",
                        erase_after_mix=True),
        "rand_augment": dict(layers=1, probability=0.41, magnitude=0.43, magnitude_std=0.47,
                             fill=(101, 103, 107), interpolation="random",
                             operations=("Invert", "Rotate"), rotate_degrees=0.53,
                             shear_factor=0.59, translate_share=0.61, enhance_factor=0.67,
                             posterize_bits=5, solarize_levels=109, solarize_add_levels=113),
        "mix": dict(group=6, mixup_alpha=0.73, cutmix_alpha=0.79, probability=0.83,
                    switch_probability=0.89, label_smoothing=0.07)}
    sets = {f"{title}.{key}": to_toml(value) for title, body in written.items()
            for key, value in body.items()}
    assert train_program.main(small_run(tmp_path / "run", "--dry-run", **sets)) == 0

    assert given["repeats"] == 3
    assert given["draws"] == [vars(given["augment"]), vars(given["rand_augment"])]
    assert {title: vars(given[title]) for title in written} == written


@pytest.mark.parametrize("changes, line", [
    (dict(optim__max_batch_per_process="1"),
     "optim.max_batch_per_process = 1, but images are mixed in pairs; expected at least 2, or "
     "mix.probability = 0"),
    (dict(optim__global_batch="13"),
     "optim.global_batch = 13 does not divide into groups of mix.group = 4 images; the nearest "
     "batches that do are 12 and 16"),
    (dict(mix__group="7"),
     "mix.group = 7 is odd, but images are mixed in pairs; the nearest that are even are 6 and 8"),
    (dict(optim__max_batch_per_process="1", mix__mixup_alpha="0.0"), "mixed in pairs"),
    (dict(optim__max_batch_per_process="1", mix__cutmix_alpha="0.0"), "mixed in pairs")])
def test_what_leaves_an_image_without_a_partner_is_refused_in_one_line_where_images_are_mixed(
        train_program, small_run, tmp_path, monkeypatch, capsys, changes, line):
    monkeypatch.delenv("RANK", raising=False)
    arguments = small_run(tmp_path / "run", "--dry-run", **changes)
    assert train_program.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("train.py: ") and line in error and error.count("\n") == 1
    for off in ({"mix__probability": "0"}, {"mix__mixup_alpha": "0", "mix__cutmix_alpha": "0"}):
        arguments = small_run(tmp_path / "run", "--dry-run", **changes | off)
        assert train_program.main(arguments) == 0


@pytest.mark.parametrize("changes, lines", [
    (dict(), []), (dict(augment__repeats="3"), []),
    (dict(augment__repeats="4"), ["1 of the mix.group = 4 images that share a draw of mixing are"]),
    (dict(augment__repeats="4", mix__probability="0"), []),
    (dict(optim__global_batch="13", mix__probability="0"), ["micro-batches have 1 image(s): "])])
def test_batches_that_are_probably_a_mistake_are_a_warning_at_the_start(
        train_program, small_run, tmp_path, monkeypatch, capsys, changes, lines):
    monkeypatch.delenv("RANK", raising=False)
    assert train_program.main(small_run(tmp_path / "run", "--dry-run", **changes)) == 0
    *warnings, updates = [line for line in capsys.readouterr().out.splitlines()
                          if line.startswith("warning")]
    assert len(warnings) == len(lines)
    assert all(line.startswith(f"warning {printed}") for line, printed in zip(warnings, lines))
    assert updates.startswith("warning ") and "update(s) in all" in updates


@pytest.mark.parametrize("repeats, batch, views", [
    ("1", "53", "51 images, fewer"), ("2", "103", "51 images in 2 views each, fewer")])
def test_a_set_that_cannot_fill_a_batch_is_refused_in_one_line(
        train_program, small_run, tmp_path, monkeypatch, capsys, repeats, batch, views):
    monkeypatch.delenv("RANK", raising=False)
    arguments = small_run(tmp_path / "run", "--dry-run", augment__repeats=repeats,
                          optim__global_batch=batch, mix__probability="0")
    assert train_program.main(arguments) == 2
    error = capsys.readouterr().err
    assert f"{views} than optim.global_batch = {batch}" in error and error.count("\n") == 1


def test_a_run_that_moved_has_its_images_elsewhere_and_all_else_as_it_was(tmp_path):
    recipe = load_recipe(saved(tmp_path, root="here"))
    assert moved(recipe, None) == recipe
    there, expected = moved(recipe, "there").as_dict(), recipe.as_dict()
    expected["data"]["root"] = "there"
    assert there == expected


# ---------------------------------------------------------------------------------------------
# One line on standard error
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [None, "0"])
@pytest.mark.parametrize("kind", [RecipeError, DataError, CheckpointError, LaunchError])
def test_the_main_process_complains_in_one_line(monkeypatch, capsys, rank, kind):
    if rank is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", rank)
    complain("eval.py", kind("x.toml: run.seed is 'a', expected an integer"))
    assert capsys.readouterr() == ("", "eval.py: x.toml: run.seed is 'a', expected an integer\n")


@pytest.mark.parametrize("rank", ["1", "7"])
def test_the_other_processes_keep_silent(monkeypatch, capsys, rank):
    monkeypatch.setenv("RANK", rank)
    complain("train.py", RecipeError("anything"))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("error, left", [(RecipeError("no such recipe"), True),
                                         (LostProcess("another one has ended"), False)])
def test_torchrun_is_left_the_cause_and_not_its_consequence(monkeypatch, tmp_path, error, left):
    """ProcessFailure is what torchrun reads the file by, and what its report quotes."""
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    monkeypatch.setenv("RANK", "1")
    complain("train.py", error)
    assert report.exists() == left
    if left:
        failure = ProcessFailure(local_rank=1, pid=3, exitcode=2, error_file=str(report))
        assert failure.message["message"] == "train.py: no such recipe"
        assert 0 <= time.time() - failure.timestamp < 600


# ---------------------------------------------------------------------------------------------
# The program itself
# ---------------------------------------------------------------------------------------------


def test_a_misspelt_key_ends_the_program_with_2_and_one_line(repository, tmp_path):
    result = subprocess.run([sys.executable, str(repository / "train.py"), *MISSPELT], cwd=tmp_path,
                            env=environment(), capture_output=True, text=True, timeout=240)
    assert result.returncode == 2
    assert result.stderr == COMPLAINT + "\n" and result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_under_torchrun_the_line_is_the_last_that_is_said_and_workers_exit_with_2(repository, tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         str(repository / "train.py"), *MISSPELT], cwd=tmp_path, env=environment(),
        capture_output=True, text=True, timeout=240)
    printed = result.stdout + result.stderr
    assert result.returncode != 0
    said = [line for line in printed.splitlines() if line.strip("=")]
    assert said[-1].strip() == f"traceback : {COMPLAINT}"        # in torchrun's report, the last line
    assert said.count(COMPLAINT) <= 1                # none if torchrun ended the main process before
    assert 'train.py", line' not in printed          # torchrun's report has a traceback of its own
    assert re.search(r"Root Cause.*exitcode\s*: 2 \(pid", printed, re.DOTALL)
    assert list(tmp_path.iterdir()) == []


def two_workers(program: Path, folder: Path, *arguments: list[str]) -> list[tuple[int, str]]:
    """Exit status and output of two processes, each with arguments of its own, started as torchrun
    starts them; but none is ended because the other one has failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = [subprocess.Popen(
        [sys.executable, str(program), *of_rank], cwd=folder,
        env=environment(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
                        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True) for rank, of_rank in enumerate(arguments)]
    try:
        printed = [worker.communicate(timeout=240)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(worker.returncode, text) for worker, text in zip(workers, printed)]


def test_every_process_exits_with_2_and_the_first_alone_prints_the_line(repository, tmp_path):
    assert two_workers(repository / "train.py", tmp_path, MISSPELT, MISSPELT) == [
        (2, COMPLAINT + "\n"), (2, "")]


@pytest.mark.parametrize("differs, words", [
    ("seed", "process 1 has run.seed = 1 and process 0 has 0"),
    ("held out", "process 1 has data.held_out_per_class = 2 and process 0 has 0"),
    ("image", "process 1 has training images = 50 and process 0 has 51"),
    ("label", "process 1 has files and labels = ")])
def test_processes_that_were_given_different_work_end_before_the_first_step(
        repository, tmp_path, small_run, image_tree, differs, words):
    """Started on two machines, say, one of which has another recipe or another copy of the data."""
    ours = small_run(tmp_path / "run")
    theirs = ours + {"seed": ["--seed", "1"],
                     "held out": ["--set", "data.held_out_per_class=2"]}.get(differs, [])
    if differs in ("image", "label"):
        other = Path(shutil.copytree(image_tree, tmp_path / "other"))
        wrong = other / "train" / "red" / "03.png"
        wrong.unlink() if differs == "image" else wrong.rename(other / "train" / "green" / "99.png")
        theirs = theirs + ["--set", f"data.root={other}"]
    found = two_workers(repository / "train.py", tmp_path, ours, theirs)
    assert [status for status, _ in found] == [2, 2]
    assert re.fullmatch(rf"train.py: {re.escape(words)}[^\n]*; all processes of a run need the same\n",
                        found[0][1]) and found[1][1] == ""
    assert not (tmp_path / "run").exists()
