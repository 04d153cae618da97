"""The model in the box: a run folder that is small, loads by its name, and is good enough."""

import torch

import vitinit
from vitinit.programs.shared.records import RunRecord, read_archive, read_run
from vitinit.recipe.absent import MEANT
from vitinit.recipe.files import load_recipe, overrides
from vitinit.runs.load import BOXED
from vitinit.runs.model import build, task_of
from vitinit.runs.start import fine_tune

BOX = BOXED / "cifar10_small"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def test_the_box_is_a_run_folder_of_less_than_two_megabytes():
    files = {path.name: path.stat().st_size for path in BOX.iterdir()}
    assert set(files) == {"recipe.toml", "run.json", "metrics.jsonl", "last.pt"}
    assert sum(files.values()) <= 2_000_000
    weights = torch.load(BOX / "last.pt")["model"]
    assert {value.dtype for value in weights.values()} == {torch.float16}
    assert sum(value.numel() for value in weights.values()) <= 700_000


def changed(run: RunRecord, other: RunRecord) -> set[str]:
    """The keys that differ, but for where the images are, and a key of runs with a checkpoint."""
    ours, theirs = MEANT | run.keys, MEANT | other.keys
    return {key for key in ours | theirs if ours.get(key) != theirs.get(key)} - {
        "data.name",
        "data.root",
        "init.checkpoint_head",
    }


def test_it_was_trained_as_its_recipe_says_and_each_twin_differs_in_one_thing(tmp_path):
    box = read_run(BOX)
    assert box.finished
    (tmp_path / "recipe.toml").write_text(load_recipe("cifar10_small").as_toml())
    assert changed(box, read_run(tmp_path)) == {"engine.amp", "optim.muon_dtype"}
    twins = {run.path.name: run for run in read_archive(BOXED.parent / "cifar10_small.tar.xz")}
    short = twins["deep_impulse-muon"]
    assert len(twins) == 3 and all(run.finished for run in twins.values())
    assert changed(box, short) == {"schedule.epochs"} and 3 * short.epochs == box.epochs
    assert changed(twins["deep_impulse-adamw"], short) == {"optim.name"}
    other = changed(twins["default-muon"], short)
    assert "init.name" in other and all(key.startswith("init.") for key in other)
    tops = {name: run.rows[-1]["val_top1"] for name, run in twins.items()}
    assert box.rows[-1]["val_top1"] > 90.0 > max(tops.values()) == tops["deep_impulse-muon"]


def test_it_is_called_by_name_and_recipes_start_there(eval_program, tmp_path, monkeypatch, capsys):
    """Wherever one is, and not by the absolute path of the folder that it is in. What it predicts
    is on the README, whose test runs it."""
    monkeypatch.chdir(tmp_path)
    trained = vitinit.load("cifar10_small")
    assert trained.path == BOX / "last.pt" and trained.image_size == (32, 32)
    assert trained.classes == CLASSES
    assert next(trained.model.parameters()).dtype == torch.float32
    assert eval_program.main(["cifar10_small", "--data", "shapes"]) == 2
    assert capsys.readouterr().err.endswith("; the model is cifar10_small/last.pt\n")
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe(
        "cifar10_small", overrides(data_dir="data", sets=["init.checkpoint=cifar10_small"])
    )
    start, head = fine_tune(build(recipe), recipe, task_of(recipe, CLASSES))
    assert start.startswith("start   cifar10_small: ")
    assert head == "head    10 of 10 rows by class name, 0 as drawn"
