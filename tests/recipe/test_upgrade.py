"""Recipes of earlier versions: what runs wrote at past commits of this repository can still be read.

tests/runs/data/<commit>/ is the folder of a run with that commit's train.py: `quickstart` on three
classes of small images, a ViT of one block, stopped by a signal in its second or third epoch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vitinit.recipe.files import RecipeError, dump_recipe, from_dict, load_recipe
from vitinit.recipe.resolve import with_defaults
from vitinit.recipe.upgrade import GONE, STEPS, VERSION, notes, processes_of, upgraded, version_of

PAST = Path(__file__).resolve().parents[1] / "runs" / "data"
VERSIONS = {"0c0940f": 1, "6bde95e": 2, "e89ec2a": 3, "004f0a5": 4, "75c8dd7": 4, "55cb85f": 5,
            "644a0fb": 6, "1579675": 7, "54ef552": 8, "c96dca1": 9, "09cb91f": 10,
            "bb39c50": 11}


def stored(commit: str) -> dict:
    return torch.load(PAST / commit / "last.pt")["recipe"]


@pytest.mark.parametrize("commit, version", VERSIONS.items())
def test_a_recipe_of_a_past_commit_is_upgraded_to_the_present_keys(commit, version):
    table = stored(commit)
    assert version_of(table) == version and ("version" in table) == (version > 4)
    recipe = from_dict(table, "last.pt")
    assert load_recipe(PAST / commit / "recipe.toml").as_dict() == recipe.as_dict() | {
        "name": "recipe"}
    # Old values are unchanged, and new keys have the values that do what was done without them.
    ours = recipe.as_dict()
    for title in table.keys() - {"name", "version"}:
        for key in table[title].keys() - {"label_smoothing", "lr_scales", "hold_epochs"}:
            stated = table[title][key]
            if (title, key) == ("init", "options"):  # without options that did nothing and are gone
                stated = {option: value for option, value in stated.items()
                          if option not in GONE["init"]}
            assert ours[title][key] == stated
    assert ours["mix"]["label_smoothing"] == 0.1 and ours["mix"]["group"] == 4
    assert ours["mix"]["mixup_alpha"] == (0.0 if version == 1 else 0.8)
    assert (ours["init"]["checkpoint_fit"], ours["schedule"]["shape"]) == ("exact", "cosine")
    assert ours["data"]["subset"] == 1.0 and recipe.rand_augment.layers == (version > 1)
    assert not ours["data"]["apply_exif_orientation"]
    assert ours["eval"]["cache_gib"] == (2.0 if version > 5 else 0.0)
    assert with_defaults(ours)["init"]["options"]["value_init"] == "mimetic"


def test_every_version_has_a_step_and_a_stored_run():
    assert list(STEPS) == list(range(2, VERSION + 1))
    assert set(VERSIONS) == {path.name for path in PAST.iterdir()}
    assert set(VERSIONS.values()) == set(range(1, VERSION))


def test_what_a_run_writes_has_the_present_version(tmp_path):
    recipe = from_dict(stored("0c0940f"), "last.pt")
    assert recipe.as_dict()["version"] == VERSION
    (tmp_path / "recipe.toml").write_text(dump_recipe(recipe))
    assert (tmp_path / "recipe.toml").read_text().startswith(f"version = {VERSION}\n\n[run]\n")
    assert load_recipe(tmp_path / "recipe.toml").as_dict() == recipe.as_dict() | {"name": "recipe"}
    assert {"version": VERSION} | upgraded(recipe.as_dict()) == recipe.as_dict()


def test_a_recipe_that_a_person_writes_must_have_all_keys(tmp_path):
    """A forgotten key is an error; the recipe is not taken for one of a version without the key."""
    text = dump_recipe(from_dict(stored("75c8dd7"), "last.pt"))
    file = tmp_path / "recipe.toml"
    file.write_text(text.replace(f"version = {VERSION}\n", "").replace("group = 4\n", ""))
    with pytest.raises(RecipeError, match=r"\[mix\] lacks the key 'group'"):
        load_recipe(file)
    (tmp_path / "run.json").write_text("[]")         # now it is a run's recipe, of an earlier version
    assert load_recipe(file).mix.group == 4


@pytest.mark.parametrize("global_batch, most, processes, group", [
    (1024, 64, 1, 64), (1024, 64, 8, 64), (1024, 256, 8, 128), (60, 16, 1, 12), (60, 16, 3, 10),
    (50, 50, 1, 50), (50, 25, 1, 10), (12, 1, 1, 2), (15, 15, 1, 2)])
def test_the_group_is_the_micro_batch_of_earlier_versions(global_batch, most, processes, group):
    """The largest even divisor of a process's images that fitted; 2 where nothing could be mixed."""
    table = stored("75c8dd7")
    table["optim"] |= {"global_batch": global_batch, "max_batch_per_process": most}
    assert upgraded(table, processes=processes)["mix"]["group"] == group
    table["mix"]["group"] = 34
    assert upgraded(table, processes=processes)["mix"]["group"] == 34


def test_a_deep_impulse_from_before_the_bias_channels_has_none():
    table = stored("75c8dd7")
    table["init"] = table["init"] | {"name": "deep_impulse", "options": {"base": "torch"}}
    assert upgraded(table)["init"]["options"] == {"bias_channels": False, "base": "torch",
                                                  "target_mass": 0.9, "code_channels": 1 / 3}
    table["init"]["options"]["marks"] = True
    assert upgraded(table)["init"]["options"]["bias_channels"] is True


def earlier_defaults(version: int) -> dict[str, Any]:
    """Those of deep_impulse for a ViT that have changed since, as they were at this version."""
    return ({"base": "default", "target_mass": 0.9} if version < 9 else
            {"base": "lecun", "target_mass": [0.3, 0.02]}) | {
        "code_channels": 1 / 3 if version < 10 else 1 / 12, "bias_channels": 4 < version < 10}


@pytest.mark.parametrize("commit, version", VERSIONS.items())
@pytest.mark.parametrize("model, stated", [
    ("vit_tiny", {}), ("vit_base", {"period": 2.0}), ("vit_tiny_distilled", {"base": "torch"}),
    ("vit_small", {"target_mass": [0.5, 0.1]}), ("vit_base", {"code_channels": 0.2})])
def test_a_deep_impulse_of_a_vit_keeps_the_defaults_that_it_was_trained_with(commit, version, model,
                                                                             stated):
    table = stored(commit)
    table["model"] = {"name": model, "options": {}}
    table["init"] |= {"name": "deep_impulse", "options": stated}
    meant = earlier_defaults(version) | stated
    of_the_run = with_defaults(from_dict(table, "last.pt").as_dict())["init"]["options"]
    assert {key: of_the_run[key] for key in meant} == meant
    table["init"]["name"] = "impulse"
    assert upgraded(table)["init"]["options"] == stated


@pytest.mark.parametrize("commit", VERSIONS)
@pytest.mark.parametrize("model, stated", [("swin_tiny", {}), ("mixer_s16", {"base": "torch"}),
                                           ("convmixer_256_8", {})])
def test_of_other_families_its_defaults_never_changed(commit, model, stated):
    table = stored(commit)
    table["model"] = {"name": model, "options": {}}
    table["init"] |= {"name": "deep_impulse", "options": stated}
    assert upgraded(table)["init"]["options"] == stated


def test_a_deep_impulse_of_the_present_version_has_the_present_defaults():
    table = {"version": VERSION} | upgraded(stored("09cb91f"))
    table["init"] |= {"name": "deep_impulse", "options": {}}
    assert upgraded(table)["init"]["options"] == {}
    options = with_defaults(from_dict(table, "last.pt").as_dict())["init"]["options"]
    assert (options["base"], options["target_mass"]) == ("lecun", [0.3, 0.02])
    assert (options["code_channels"], options["bias_channels"]) == (1 / 12, False)


@pytest.mark.parametrize("title, before, after", [
    ("init", {"marks": False, "period": 2.0}, {"bias_channels": False, "period": 2.0}),
    ("init", {"pseudo_input": "code+normal"}, {"pseudo_input": "pos_embed+normal"}),
    ("init", {"pseudo_input": "uniform"}, {"pseudo_input": "uniform"}),
    ("model", {"alpha": 0.3, "input_code": False}, {"alpha": 0.3, "input_pos_embed": False})])
def test_options_have_their_present_names_in_the_same_order(title, before, after):
    table = stored("644a0fb")
    table[title]["options"] = before
    assert list(upgraded(table)[title]["options"].items()) == list(after.items())


def test_a_run_that_mixed_by_micro_batches_is_told_so_once():
    assert notes(stored("0c0940f")) == []            # this run mixed nothing
    for commit in ("6bde95e", "75c8dd7"):
        assert len(notes(stored(commit))) == 1
        assert notes(from_dict(stored(commit), "last.pt").as_dict()) == []
    still = stored("75c8dd7")
    still["mix"]["probability"] = 0.0
    assert notes(still) == []


@pytest.mark.parametrize("table, words", [
    ({"version": VERSION + 1}, f"recipe of version {VERSION + 1}, and this code knows 1 to"),
    ({"version": "5"}, "is a recipe of version '5'"), ({"version": True}, "version True"),
    ({"version": 0}, "version 0"), ({"version": 2}, "is no recipe of version 2: 'init'"),
    ({}, "is no recipe of version 1"), ({"version": 4, "mix": 3, "optim": {}}, "of version 4"),
    ({"mix": 1, "schedule": 2, "data": 3}, "is no recipe of version"),
    ([1], "its recipe is [1], expected a table"), (None, "its recipe is None")])
def test_what_no_run_wrote_is_one_line(table, words):
    with pytest.raises(RecipeError) as caught:
        from_dict(table, "last.pt")
    assert str(caught.value).startswith("last.pt: ") and words in str(caught.value)


@pytest.mark.parametrize("content, processes", [
    ('[{"processes": 2}, {"processes": 8}]', 8), ("[]", 1), ("null", 1), ("[{}]", 1), ("{", 1),
    ('[{"processes": "8"}]', 1), ('[{"processes": 0}]', 1), (None, 1)])
def test_a_runs_processes_are_those_of_its_last_start(tmp_path, content, processes):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    assert processes_of(tmp_path) == processes


def test_past_runs_say_how_they_were_started():
    for commit in VERSIONS:
        start, = json.loads((PAST / commit / "run.json").read_text())
        assert start["git_commit"].startswith(commit)


@pytest.mark.parametrize("key, part, value", [("lr_scales", "qk", 0.3), ("hold_epochs", "head", 2)])
def test_rates_of_parts_are_refused_in_training_and_read_in_records(key, part, value):
    table = stored("09cb91f")
    table["optim"]["lr_scales"]["layer_decay"] = 0.7
    assert from_dict(table, "last.pt").optim.layer_decay == 0.7
    table["optim"][key][part] = value
    with pytest.raises(RecipeError, match=rf"^last.pt: trains with optim.{key}.{part}, which commit"):
        from_dict(table, "last.pt")
    assert upgraded(table)["optim"][key] == {part: value}
