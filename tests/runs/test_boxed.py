"""The model in the box: a run folder that is small, loads by its name, and is good enough."""

from __future__ import annotations

import torch

import vitinit
from vitinit.recipe.files import fresh_recipe
from vitinit.runs.saved import fine_tune
from vitinit.runs.folder import BOXED, RunFolder
from vitinit.runs.records import read_run
from vitinit.runs.start import build

BOX = BOXED / "cifar10_small"
TWIN = BOXED / "cifar10_small-default"              # the same from the init default; no weights
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def test_the_box_is_a_run_folder_of_less_than_two_megabytes():
    files = {path.name: path.stat().st_size for path in BOX.iterdir()}
    assert set(files) == {"recipe.toml", "run.json", "metrics.jsonl", "steps.jsonl", "last.pt"}
    assert sum(files.values()) <= 2_000_000
    weights = torch.load(BOX / "last.pt")["model"]
    assert {value.dtype for value in weights.values()} == {torch.float16}
    assert sum(value.numel() for value in weights.values()) <= 700_000


def test_it_was_trained_as_its_recipe_says_and_its_twin_from_the_default_is_worse():
    box, twin = read_run(BOX), read_run(TWIN)
    assert box.finished and twin.finished and box.epochs == 30
    assert box.keys["init.name"] == "deep_impulse" and box.keys["init.options.base"] == "torch"
    assert (box.keys["data.images_per_class"], box.keys["data.subset"]) == (0, 1.0)
    assert len(RunFolder(BOX).steps.rows()) == 30 * 390 // 10
    assert {key for key in box.keys | twin.keys if box.keys.get(key) != twin.keys.get(key)
            and not key.startswith("init.")} == set()
    tops = [run.rows[-1]["val_top1"] for run in (box, twin)]
    assert tops[0] >= 75.0 and tops[0] > tops[1] + 1.0


def test_a_recipe_starts_from_it_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = fresh_recipe("cifar10_small", data_dir="data",
                          sets=["init.checkpoint=cifar10_small"])
    line, = fine_tune(build(recipe), recipe)
    assert line.startswith("start   cifar10_small: ")


def test_it_is_called_by_its_name(eval_program, tmp_path, monkeypatch, capsys):
    """Wherever one is, and not by the absolute path of the folder that it is in. What it predicts
    is on the README, whose test runs it."""
    monkeypatch.chdir(tmp_path)
    trained = vitinit.load("cifar10_small")
    assert trained.path == BOX / "last.pt" and trained.image_size == (32, 32)
    assert trained.classes == CLASSES
    assert next(trained.model.parameters()).dtype == torch.float32
    assert eval_program.main(["cifar10_small", "--data", "shapes"]) == 2
    assert capsys.readouterr().err.endswith("; the model is cifar10_small/last.pt\n")
