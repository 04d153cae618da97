"""What eval.py prints and writes, for made-up findings."""

import dataclasses
import json
import math
import os

import torch
from pytest import approx

from vitinit.base.files import write_text_atomically
from vitinit.programs.shared.evaluated import EvaluatedSet
from vitinit.programs.shared.outputs import STDOUT
from vitinit.programs.shared.results import Finding, class_scores, print_results
from vitinit.train.metrics import Evaluation, balanced_accuracy

MODEL = Evaluation(
    loss=1.25,
    top1=50.0,
    top5=75.0,
    images=1004,
    class_hits=[2, 0, 500],
    class_images=[4, 1, 999],
    class_guesses=[2, 501, 501],
    confusion=torch.tensor([[2, 2, 0], [0, 0, 1], [0, 499, 500]]),
)
EMA = Evaluation(
    loss=1.5,
    top1=25.0,
    top5=100.0,
    images=1004,
    class_hits=[4, 1, 246],
    class_images=[4, 1, 999],
    class_guesses=[757, 1, 246],
    confusion=None,
)


def finding(
    data_set: EvaluatedSet = EvaluatedSet("pets", "/data/pets"),
    model_classes: int = 3,
    **results: Evaluation,
) -> Finding:
    return Finding(
        "runs/a/last.pt",
        "deit_tiny",
        data_set,
        (192, 256),
        model_classes,
        ["ant", "bee", "cat"],
        results or {"model": MODEL, "ema": EMA},
    )


def test_one_finding_is_a_line_for_each_weights_and_json_and_classes_are_sorted(capsys):
    print_results([finding()], per_class=False, json_file=STDOUT)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "model  top-1 50.000 %  top-5 75.000 %  loss 1.2500  over 1,004 images",
        "ema    top-1 25.000 %  top-5 100.000 %  loss 1.5000  over 1,004 images",
    ]
    row = json.loads(lines[2])
    assert list(row) == [
        "checkpoint",
        "recipe",
        "data",
        "data_dir",
        "image_size",
        "classes",
        "model_classes",
        "model",
        "ema",
    ]
    assert (row["data"], row["data_dir"], row["image_size"]) == ("pets", "/data/pets", [192, 256])
    assert row["model"]["confusion"] == [[2, 2, 0], [0, 0, 1], [0, 499, 500]]
    assert row["ema"] == {
        "loss": 1.5,
        "top1": 25.0,
        "top5": 100.0,
        "balanced_accuracy": approx(100 * 2244 / 2997),
        "images": 1004,
        "confusion": None,
        "per_class": [
            {
                "class": "ant",
                "correct": 4,
                "total": 4,
                "precision": approx(400 / 757),
                "recall": 100.0,
                "f1": approx(800 / 761),
            },
            {
                "class": "bee",
                "correct": 1,
                "total": 1,
                "precision": 100.0,
                "recall": 100.0,
                "f1": 100.0,
            },
            {
                "class": "cat",
                "correct": 246,
                "total": 999,
                "precision": 100.0,
                "recall": approx(24600 / 999),
                "f1": approx(49200 / 1245),
            },
        ],
    }
    print_results(
        [finding(model=dataclasses.replace(MODEL, top5=None))], per_class=False, json_file=STDOUT
    )
    line, row = capsys.readouterr().out.splitlines()  # a set of few classes
    assert line == "model  top-1 50.000 %  loss 1.2500  over 1,004 images"
    assert json.loads(row)["model"]["top5"] is None
    print_results([finding()], per_class=True, json_file=None)
    printed = capsys.readouterr().out
    assert "runs/a/last.pt on pets=/data/pets, top-1 of every class in %:" in printed
    assert (
        "\n".join(
            [
                "| class | images | model top-1 | ema top-1 |",
                "| --- | ---: | ---: | ---: |",
                "| bee | 1 | 0.00 | 100.00 |",
                "| ant | 4 | 50.00 | 100.00 |",
                "| cat | 999 | 50.05 | 24.62 |",
            ]
        )
        in printed
    )


def test_numbers_that_are_not_finite_are_null_as_json_has_none(capsys):
    def unknown(name):
        raise AssertionError(f"{name} is no JSON")

    results = {
        "model": dataclasses.replace(MODEL, loss=math.nan),
        "ema": dataclasses.replace(EMA, loss=math.inf),
    }
    print_results([finding(**results)], per_class=False, json_file=STDOUT)
    row = json.loads(capsys.readouterr().out.splitlines()[2], parse_constant=unknown)
    assert row["model"]["loss"] is row["ema"]["loss"] is None and row["model"]["top1"] == 50.0


def test_what_no_image_counts_for_has_no_score():
    """Classes without images and guesses, without images, and without guesses."""
    scores = class_scores([0, 0, 0, 3], [0, 0, 5, 3], [0, 2, 0, 6])
    assert scores == [
        (None, None, None),
        (0.0, None, 0.0),
        (None, 0.0, 0.0),
        (50.0, 100.0, approx(200 / 3)),
    ]
    assert balanced_accuracy([0, 0, 0, 3], [0, 0, 5, 3]) == 50.0  # of the two with images


def test_several_findings_are_a_table_and_a_line_of_json_each(tmp_path, capsys):
    file = tmp_path / "out.json"
    few = dataclasses.replace(MODEL, top5=None)
    print_results(
        [finding(model=few), finding(EvaluatedSet("shapes", ""), model_classes=5)],
        per_class=False,
        json_file=file,
    )
    assert capsys.readouterr().out.splitlines() == [
        f"wrote {file}",  # before a closed terminal can end it
        "shapes: 3 of the 5 classes of runs/a/last.pt; the others are left out of ranking and loss",
        "| checkpoint | weights | data | top-1 % | top-5 % | loss | images |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| runs/a/last.pt | model | pets=/data/pets | 50.000 | – | 1.2500 | 1,004 |",
        "| runs/a/last.pt | model | shapes | 50.000 | 75.000 | 1.2500 | 1,004 |",
        "| runs/a/last.pt | ema | shapes | 25.000 | 100.000 | 1.5000 | 1,004 |",
    ]
    first, second = map(json.loads, file.read_text().splitlines())
    assert "ema" not in first and second["model_classes"] == 5


def test_a_regular_file_is_replaced_and_a_link_leads_to_one(tmp_path):
    target, link = tmp_path / "there" / "out.json", tmp_path / "link.json"
    target.parent.mkdir()
    link.symlink_to(target)
    for text in ("new\n", "other\n"):
        write_text_atomically(text, link)  # at first the link's target does not exist
        assert target.read_text() == text and link.is_symlink()
    node = target.stat().st_ino
    write_text_atomically("third\n", target)
    assert target.stat().st_ino != node  # written atomically: a new file replaces it
    assert os.listdir(target.parent) == ["out.json"]
    (target.parent / "out.json.partial").symlink_to(tmp_path / "mine")
    write_text_atomically("fourth\n", target)  # such a link is not ours, and leads anywhere
    assert not (tmp_path / "mine").exists()
    assert sorted(os.listdir(target.parent)) == ["out.json", "out.json.partial"]
