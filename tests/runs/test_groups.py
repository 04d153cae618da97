"""Runs are read back as they were written, and grouped by everything but the seed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from vitinit.recipe.resolve import overrides, resolve_recipe
from vitinit.recipe.upgrade import VERSION
from vitinit.runs.groups import FREE_KEYS, finished_groups, group_runs, read_run
from vitinit.runs.records import LATER, METRICS
from vitinit.runs.trained import RECIPES
from vitinit.train.checkpoint import CheckpointError


def test_a_run_is_read_as_it_was_written(written_run):
    run = read_run(written_run("a", [10.0, None, 20.0], seed=7, init="impulse", recipe="trial"))
    assert (run.seed, run.recipe, run.finished) == (7, "trial", True)
    assert (run.epochs, run.epochs_done) == (3, 3)
    assert run.keys["init.options.qk_norm"] == 7.0 and run.keys["model.options.depth"] == 4
    assert [row["val_top1"] for row in run.rows] == [10.0, None, 20.0]
    assert run.starts[0]["git_commit"] == "c0ffee"


def test_a_real_run_is_read_without_its_checkpoints(train_program, small_run, tmp_path,
                                                    monkeypatch):
    arguments = small_run(tmp_path / "run", schedule__epochs="2")
    monkeypatch.setattr("sys.argv", ["train.py", *arguments])
    assert train_program.main(arguments) == 0
    for name in ("last.pt", "best.pt"):
        (tmp_path / "run" / name).unlink()
    run = read_run(tmp_path / "run")
    assert run.finished and run.recipe == "quickstart" and run.keys["model.options.depth"] == 2
    assert [list(row) for row in run.rows] == [list(METRICS)] * 2


@pytest.mark.parametrize("words, name", [
    (["--recipe", "deit_base"], "deit_base"), (["--recipe=runs/a.b/trial.toml"], "trial"),
    (["--seed", "3", "--recipe", "x.toml", "--set", "a.b=c"], "x"), ([], "recipe")])
def test_a_recipe_goes_by_the_name_on_the_command_line(written_run, words, name):
    folder = written_run("a", [1.0], start={"command": ["train.py", *words]})
    assert read_run(folder).recipe == name


def test_cooldown_epochs_belong_to_a_run(written_run):
    sets = ("schedule.cooldown_epochs=2",)
    assert not read_run(written_run("a", [1.0, 2.0, 3.0], sets=sets)).finished
    assert read_run(written_run("b", [1.0, 2.0, 3.0], epochs=1, sets=sets)).finished


def test_a_line_that_a_crash_cut_short_is_no_epoch(written_run):
    folder = written_run("a", [1.0, 2.0])
    lines = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(lines[:-9])
    assert read_run(folder).epochs_done == 1 and not read_run(folder).finished
    (folder / "metrics.jsonl").write_text(lines[:-1])    # it lacks only the line break
    assert read_run(folder).finished


def test_a_run_of_an_earlier_version_lacks_what_was_not_measured_then(written_run):
    folder = written_run("a", [10.0, 20.0])
    rows = list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))
    (folder / "metrics.jsonl").write_text("".join(
        json.dumps({key: row[key] for key in row if key not in LATER}) + "\n" for row in rows))
    found = read_run(folder)
    assert found.finished and [row["val_top1"] for row in found.rows] == [10.0, 20.0]
    assert [row[key] for row in found.rows for key in LATER] == [None] * 8


def test_a_run_without_metrics_or_starts_is_unfinished(written_run):
    folder = written_run("a", [1.0])
    (folder / "metrics.jsonl").unlink()
    (folder / "run.json").unlink()
    run = read_run(folder)
    assert (run.epochs_done, run.finished, run.recipe) == (0, False, "recipe")


@pytest.mark.parametrize("name, content, message", [
    ("recipe.toml", None, "a: not a run's folder, there is no recipe.toml in it"),
    ("recipe.toml", "seed = ", "recipe.toml: not what a run writes: Invalid value"),
    ("recipe.toml", f"version = {VERSION}\n[run]\nseed = 1\n",
     "recipe.toml: lacks the key 'model.name', so"),
    ("recipe.toml", "[run]\nseed = 1\n", "recipe.toml: not what a run writes: is no recipe of ver"),
    ("recipe.toml", "version = 99\n", "is a recipe of version 99, and this code knows 1 to"),
    ("recipe.toml", f"version = {VERSION}\n[run]\nseed = true\n[model]\nname = 3\n[init]\nname = ''\n"
     "[schedule]\nepochs = 1\ncooldown_epochs = 0\n", "run.seed is true, expected an integer"),
    ("metrics.jsonl", "{}\n", "metrics.jsonl: line 1 names no epoch"),
    ("metrics.jsonl", '{"epoch": 1}\n', "metrics.jsonl: line 1 lacks 'lr', so it is no run's"),
    ("metrics.jsonl", "{'epoch': 1}\n", "metrics.jsonl: line 1 is no JSON object (Expecting prop"),
    ("run.json", "[", "run.json: not what a run writes (Expecting value"),
    ("run.json", "[{}]", "run.json: start 1 lacks 'command', so it is no run's"),
    ("run.json", "null", "run.json: not what a run writes, expected a list of objects"),
    ("run.json", '[{"command": ["train.py"], "git_commit": "", "torch": "", "python": "", '
     '"processes": 1}]', "run.json: start 1 lacks 'device', so it is no run's"),
])
def test_a_broken_folder_is_one_line_that_names_the_file(written_run, name, content, message):
    folder = written_run("a", [1.0])
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(CheckpointError) as caught:
        read_run(folder)
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name, value, words", [
    ("val_top1", math.nan, "has nan for 'val_top1'"), ("seconds", None, "has no 'seconds'"),
    ("val_top1", "50", "has '50' for 'val_top1'"), ("ema_top1", True, "has true for 'ema_top1'")])
def test_a_metric_that_is_no_number_is_one_line(written_run, name, value, words):
    folder = written_run("a", [1.0, 2.0])
    first, second = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in
                                                  (first, second | {name: value})))
    with pytest.raises(CheckpointError) as caught:
        read_run(folder)
    assert str(caught.value) == f"{folder / 'metrics.jsonl'}: line 2 {words}, so it is no run's"


def test_a_validation_loss_that_is_none_is_a_metric_all_the_same(written_run):
    folder = written_run("a", [1.0])
    row = json.loads((folder / "metrics.jsonl").read_text())
    (folder / "metrics.jsonl").write_text(json.dumps(row | {"val_loss": math.nan}) + "\n")
    assert math.isnan(read_run(folder).rows[0]["val_loss"])


def test_a_folder_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: not a run's folder"):
        read_run(tmp_path / "nowhere")


# ---------------------------------------------------------------------------------------------
# Grouping
# ---------------------------------------------------------------------------------------------


def grouped(*folders: Path) -> dict[str, list[int]]:
    """Label → seeds."""
    return {group.label: list(group.runs) for group in group_runs([read_run(f) for f in folders])}


def test_a_group_is_one_experiment_with_all_its_seeds(written_run):
    assert grouped(written_run("a", [1.0], seed=5, init="impulse"), written_run("b", [1.0], seed=2),
                   written_run("c", [1.0], seed=0, init="impulse"), written_run("d", [1.0], seed=9),
                   written_run("e", [1.0], seed=2, init="impulse")
                   ) == {"impulse": [0, 2, 5], "default": [2, 9]}


def test_where_and_how_images_are_read_and_the_recipes_name_do_not_set_runs_apart(written_run):
    assert FREE_KEYS == ("run.seed", "data.root", "data.workers", "data.on_device_gib",
                         "eval.batch_size", "eval.cache_gib", "optim.max_batch_per_process",
                         "engine.compile", "checkpoint.every_steps")
    assert grouped(written_run("a", [1.0]), written_run("b", [1.0], seed=1, sets=("data.root=x",)),
                   written_run("c", [1.0], seed=2, sets=("data.workers=3",)),
                   written_run("d", [1.0], seed=3, recipe="runs/a/recipe.toml"),
                   written_run("e", [1.0], seed=4, sets=("data.on_device_gib=0.5",)),
                   written_run("f", [1.0], seed=5, sets=("optim.max_batch_per_process=10",
                                                         "engine.compile=true")),
                   ) == {"default": [0, 1, 2, 3, 4, 5]}


def test_a_model_with_batch_norm_is_told_apart_by_its_micro_batch(written_run):
    model = ("model.name=convmixer_256_8", "model.options={}")
    assert grouped(written_run("a", [1.0], sets=model),
                   written_run("b", [1.0], seed=1, sets=(*model, "optim.max_batch_per_process=10"))
                   ) == {"default, optim.max_batch_per_process = 50": [0],
                         "default, optim.max_batch_per_process = 10": [1]}


def test_an_option_that_came_after_a_run_counts_as_left_alone(written_run):
    old, new = (written_run(name, [1.0], seed=seed, init="mimetic")
                for seed, name in enumerate(("old", "new")))
    text = (old / "recipe.toml").read_text()
    assert 'value_init = "mimetic"\n' in text and "mlp_ratio = 4.0\n" in text
    (old / "recipe.toml").write_text(text.replace('value_init = "mimetic"\n', "")
                                     .replace("mlp_ratio = 4.0\n", ""))
    assert grouped(old, new) == {"mimetic": [0, 1]}


def test_a_label_names_only_the_keys_that_differ(written_run):
    """Groups of one init are not compared in options that only another init has."""
    base = 'init.options.value_init="base"'
    assert list(grouped(written_run("a", [1.0]), written_run("b", [1.0], init="impulse"),
                        written_run("c", [1.0], init="impulse", sets=(base,)))) == [
        "default", 'impulse, init.options.value_init = "mimetic"',
        'impulse, init.options.value_init = "base"']
    assert list(grouped(written_run("d", [1.0], sets=("optim.eps=1e-6", "mix.cutmix_alpha=1")),
                        written_run("e", [1.0], sets=("optim.eps=1e-6",)),
                        written_run("f", [1.0], init="mimetic"))) == [
        "default, mix.cutmix_alpha = 1.0, optim.eps = 1e-06",
        "default, mix.cutmix_alpha = 0.0, optim.eps = 1e-06",
        "mimetic, mix.cutmix_alpha = 0.0, optim.eps = 1e-08"]


def test_recipes_are_named_where_there_are_several_and_not_compared_key_by_key(written_run):
    assert list(grouped(written_run("a", [1.0], recipe="one"),
                        written_run("b", [1.0, 2.0], recipe="two"))) == ["one, default",
                                                                         "two, default"]


def test_a_key_that_only_newer_runs_have_is_said_to_be_missing(written_run):
    old, new = written_run("a", [1.0]), written_run("b", [1.0], seed=1)
    text = (old / "recipe.toml").read_text()
    assert "tf32 = true\n" in text
    (old / "recipe.toml").write_text(text.replace("tf32 = true\n", ""))
    assert list(grouped(old, new)) == ["default, without engine.tf32",
                                       "default, engine.tf32 = true"]


def test_two_runs_of_one_seed_in_a_group_are_an_error(written_run):
    first, second = written_run("a", [1.0], seed=3), written_run("b", [1.0], seed=3)
    with pytest.raises(CheckpointError) as caught:
        grouped(first, second)
    assert str(caught.value) == (f"{second}: the same experiment and seed 3 as {first}; expected "
                                 "one run per seed and commit")
    with pytest.raises(CheckpointError, match="the same experiment and seed 3"):
        grouped(first, first)


def test_one_seed_by_two_commits_is_two_experiments(written_run):
    """Other code may do something else by the same recipe, as two of the study's trials did."""
    later = dict(start={"git_commit": "beef" * 10})
    assert grouped(
        written_run("a", [1.0], seed=3), written_run("b", [2.0], seed=3, **later),
        written_run("c", [3.0], seed=4, **later)
    ) == {"default, commit c0ffee": [3], "default, commit beefbee": [3, 4]}
    assert grouped(written_run("d", [1.0], seed=5), written_run("e", [2.0], seed=6, **later)
                   ) == {"default": [5, 6]}


def test_muons_keys_matter_to_muon_alone(written_run):
    factor = ("optim.muon_factor=2.5",)
    assert grouped(written_run("a", [1.0]), written_run("b", [2.0], seed=1, sets=factor)) == {
        "default": [0, 1]}
    muon = ("optim.name=muon",)
    assert len(grouped(written_run("c", [1.0], sets=muon),
                       written_run("d", [2.0], seed=1, sets=muon + factor))) == 2


def test_orientation_sets_runs_apart_only_where_images_are_files(written_run):
    sets = [[f"data.name={name}", "data.root=x", f"data.apply_exif_orientation={turned}"]
            for name in ("cifar10", "image_folder") for turned in ("true", "false")]
    runs = [read_run(written_run(f"r{number}", [50.0], seed=number, sets=tuple(chosen)))
            for number, chosen in enumerate(sets)]
    assert [list(group.runs) for group in group_runs(runs)] == [[0, 1], [2], [3]]


def test_a_number_of_classes_from_the_data_is_that_of_the_run(written_run):
    sets = ["data.name=image_folder", "data.root=x"]
    run = read_run(written_run("r", [50.0], sets=(*sets, "data.num_classes=7")))
    for count, differs in ((0, False), (7, False), (8, True)):
        recipe = resolve_recipe(RECIPES / "quickstart.toml", overrides(
            init="default", seed=0, sets=[*sets, "schedule.epochs=1", f"data.num_classes={count}"]))
        assert bool(run.departure(recipe)) == differs


def test_unfinished_runs_are_named_and_left_out(written_run):
    done, cut = written_run("a", [1.0, 2.0]), written_run("b", [1.0], epochs=2, seed=1)
    groups, unfinished = finished_groups([done, cut])
    assert [list(group.runs) for group in groups] == [[0]]
    assert unfinished == [f"left out, not finished: {cut}, 1 of 2 epochs"]
    with pytest.raises(CheckpointError, match="none of the runs is finished; left out, .* 1 of 2"):
        finished_groups([cut])
    lines = (done / "metrics.jsonl").read_text().splitlines(keepends=True)
    (done / "metrics.jsonl").write_text(lines[1])
    with pytest.raises(CheckpointError, match="of its metrics.jsonl are lost: .*/a, 1 of 2 epochs"):
        finished_groups([done])


def test_a_label_of_groups_is_made_of_finished_runs_alone(written_run):
    groups, _ = finished_groups([written_run("a", [1.0, 2.0]), written_run("b", [1.0], epochs=3)])
    assert [group.label for group in groups] == ["default"]


def test_all_starts_of_a_run_are_kept(written_run):
    folder = written_run("a", [1.0])
    starts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps([*starts, starts[0] | {"git_commit": "beef"}]))
    assert [start["git_commit"] for start in read_run(folder).starts] == ["c0ffee", "beef"]
