"""Several labels per image: measures as scikit-learn has them, and a run from a list to a page."""

import csv
import json

import numpy as np
import pytest
import torch
from forks import in_two_processes
from refused import refused
from same_run import assert_same_run, checkpoint, rows_of
from sklearn.metrics import average_precision_score, f1_score
from torch import nn

import vitinit
from vitinit.data.datasets import open_split
from vitinit.programs import compare, export, predict
from vitinit.programs.figures import program as figures
from vitinit.recipe.files import RecipeError, load_recipe, overrides
from vitinit.tasks import multi_label
from vitinit.tasks.multi_label import average_precision, evaluate, evaluation_of
from vitinit.train import distributed
from vitinit.train.distributed import Processes
from vitinit.train.interruption import StopRequest

CLASSES = ["blue", "green", "noisy", "red"]
SETS = {
    "data.name": "image_list",
    "task.name": "multi_label",
    "task.options.threshold": 0.5,
    "loss.name": "binary_cross_entropy",
    "mix.label_smoothing": 0.0,
    "checkpoint.best_by": "val_map",
}
CHANGES = {key.replace(".", "__"): str(value) for key, value in SETS.items()}
CHANGES["data__num_classes"] = "0"


def scored(images: int = 53, classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, many of which are equal, and labels (N, K); the last class has no image."""
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(rng.normal(size=(images, classes)).round(1)).float()
    labels = torch.from_numpy(rng.uniform(size=(images, classes)) < 0.3)
    labels[:, -1] = False
    return logits, labels


def test_the_measures_are_scikit_learns():
    logits, labels = scored()
    found = evaluation_of(logits, labels, 0.55)
    shares, truths = logits.double().sigmoid().numpy()[:, :-1], labels.numpy()[:, :-1]
    expected = average_precision_score(truths, shares, average=None)
    assert found.precisions == [*(pytest.approx(share, abs=1e-12) for share in expected), None]
    assert average_precision(logits[:, 0], torch.zeros(len(logits), dtype=torch.bool)) is None
    assert np.isnan(evaluation_of(logits * np.nan, labels, 0.55).measures["map"])
    chosen = logits.sigmoid().numpy() >= 0.55
    assert chosen[:, -1].any() and not truths.all()
    assert found.measures == {
        "map": pytest.approx(100 * expected.mean(), abs=1e-10),
        "f1": pytest.approx(100 * f1_score(labels.numpy(), chosen, average="micro"), abs=1e-10),
        "macro_f1": pytest.approx(
            100 * f1_score(truths, chosen[:, :-1], average="macro"), abs=1e-10
        ),
    }
    logs = np.where(labels, 1, -1) * logits.double().numpy()
    assert found.loss == pytest.approx(np.log1p(np.exp(-logs)).mean(), rel=1e-12)


def measured(processes: Processes) -> tuple:
    """The evaluation of a model that returns its images, of this process's part of them."""
    logits, labels = scored()
    part = slice(processes.rank, None, processes.world_size)
    batches = zip(logits[part].split(5), labels[part].byte().split(5))
    (found,) = evaluate(
        [nn.Identity()],
        batches,
        num_classes=7,
        threshold=0.55,
        amp="off",
        processes=processes,
        stop=StopRequest(),
    )
    return found.loss, found.precisions, found.class_hits, found.class_guesses, found.images


def measured_here() -> tuple:
    with distributed.joined() as processes:
        return measured(processes)


def test_labels_take_a_byte_each_until_they_are_put_together(monkeypatch):
    sizes, gather = [], multi_label.of_all_processes

    def of_all(rows: torch.Tensor, processes: Processes) -> torch.Tensor:
        sizes.append(rows.element_size())
        return gather(rows, processes)

    monkeypatch.setattr(multi_label, "of_all_processes", of_all)
    assert measured_here()[-1] == 53 and sizes == [1, 4]


def test_two_processes_measure_what_one_does_to_the_bit(tmp_path):
    alone = measured_here()
    both = [ended.result for ended in in_two_processes(measured_here, tmp_path)]
    assert both == [alone, alone] and alone[-1] == 53


@pytest.fixture
def listed(image_tree):
    """The images of `image_tree` with their colour as a label, and "noisy" for every third; the
    first has no label."""
    for split in ("train", "val"):
        with open(image_tree / f"{split}.csv", "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["path", *CLASSES])
            for number, path in enumerate(sorted((image_tree / split).glob("*/*.png"))):
                names = {path.parent.name} | ({"noisy"} if number % 3 == 0 else set())
                marks = [int(name in names and number > 0) for name in CLASSES]
                rows.writerow([path.relative_to(image_tree), *marks])
    return image_tree


def test_a_run_learns_them_and_every_program_says_what_it_gives(
    train_program, eval_program, small_run, listed, tmp_path, monkeypatch, stop_before, capsys
):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train_program.main(small_run(whole, **CHANGES)) == 0
    monkeypatch.setattr("vitinit.run.StopRequest", stop_before(6))
    assert train_program.main(small_run(cut, **CHANGES)) == 143
    monkeypatch.setattr("vitinit.run.StopRequest", stop_before(10**6))
    assert train_program.main(["--resume", str(cut)]) == 0
    assert_same_run(whole, cut)
    assert checkpoint(whole)["classes"] == CLASSES
    last = rows_of(whole)[-1]
    assert last["val_top1"] is None and 0 < last["val_map"] < 100
    assert max(row["val_map"] for row in rows_of(whole)) == checkpoint(whole)["progress"]["best"]
    capsys.readouterr()

    # What it measured is measured again; with another threshold F1 differs, and precision not.
    for threshold in ("0.5", "0.51"):
        out = tmp_path / f"{threshold}.json"
        how = ["--set", f"task.options.threshold={threshold}", "--per-class", "--json", str(out)]
        assert eval_program.main([str(whole), *how]) == 0
        found = json.loads(out.read_text())
        assert found["model"]["map"] == last["val_map"] and found["ema"]["map"] == last["ema_map"]
        assert (found["model"]["f1"] == last["val_f1"]) == (threshold == "0.5")
        assert found["ema"]["threshold"] == float(threshold)
    printed = capsys.readouterr().out
    assert f"mAP {last['val_map']:.3f} %  F1 " in printed
    assert "average precision of every class in %" in printed

    # A threshold takes the place of a temperature, and of a least probability.
    assert eval_program.main([str(whole), "--fit-temperature"]) == 2
    of_last = [str(whole), "--weights", "model"]
    assert predict.main([*of_last, str(listed / "val/red/03.png"), "--least", "0.7"]) == 2
    complaints = capsys.readouterr().err.splitlines()
    assert all("s threshold; expected --set task.options.threshold=" in line for line in complaints)
    assert len(complaints) == 2

    # Every label from the threshold on, as a list that is read as one again.
    files = sorted((listed / "val").glob("*/*.png"))
    guesses = listed / "images.csv"
    for name in ("train.csv", "val.csv"):
        (listed / name).rename(tmp_path / name)
    for _ in range(2):  # the second time in place of the first
        assert predict.main([*of_last, *map(str, files), "--csv", str(guesses)]) == 0
    trained = vitinit.load(whole)
    shares = trained.probabilities(trained.preprocess(files))
    assert 0 < (shares >= 0.5).sum() < shares.numel()
    source = open_split("image_list", str(listed), "train", 0)
    columns = [CLASSES.index(name) for name in source.classes]
    assert source.labels.tolist() == (shares >= 0.5)[:, columns].int().tolist()
    above_all = ["--set", "task.options.threshold=1.0", "--json", "-"]
    capsys.readouterr()
    assert predict.main([*of_last, str(files[0]), *above_all]) == 0
    line = json.dumps({"image": str(files[0]), "classes": []})
    assert capsys.readouterr().out == f"{files[0]}  no label\n{line}\n"
    assert predict.main([str(whole), str(files[0]), "--top", "3"]) == 2
    assert "gives all labels that reach its threshold" in capsys.readouterr().err

    # The other programs.
    guesses.unlink()
    for name in ("train.csv", "val.csv"):
        (tmp_path / name).rename(listed / name)
    assert (
        export.main(
            [
                str(whole),
                "--to",
                "safetensors",
                "--names",
                "transformers",
                "--out",
                str(tmp_path / "model"),
            ]
        )
        == 0
    )
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    assert compare.main([str(whole)]) == 0
    printed = capsys.readouterr().out
    assert "\nValidation mAP in %" in printed and f"| {last['val_map']:.2f} |" in printed
    assert figures.main(["report", str(whole), "--out", str(tmp_path / "report.html")]) == 0
    assert figures.main(["curves", str(whole), "--out", str(tmp_path / "curves.png")]) == 0
    assert "mAP, judged here" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    "sets, words",
    [
        ({"data.name": "image_folder"}, "image_list, which may state several labels"),
        ({"loss.name": "cross_entropy"}, "binary_cross_entropy"),
        ({"mix.label_smoothing": 0.1}, "0.0"),
        ({"data.sampling": "balanced"}, "shuffled, as an image is of several classes"),
        ({"distill.teacher": "a"}, "none: a teacher goes with plain cross-entropy"),
        ({"checkpoint.best_by": "ema_top1"}, "val_loss or val_map or ema_map"),
    ],
)
def test_what_does_not_go_with_several_labels_is_refused(sets, words):
    changes = overrides(sets={"data.root": "a"} | SETS | sets)
    assert refused(RecipeError, load_recipe, "quickstart", changes).endswith(f"expected {words}")


def test_a_list_and_a_task_that_do_not_agree_are_refused(train_program, small_run, listed, capsys):
    single = dict(data__name="image_list", data__num_classes="0")
    assert train_program.main(small_run(listed / "run", **single)) == 2
    assert "several labels each, and task.name = classify takes one" in capsys.readouterr().err
    pixels = single | {"task__name": "reconstruct", "checkpoint__best_by": "val_loss"}
    pixels |= {"mix__probability": "0.0", "data__sampling": "balanced"}
    assert train_program.main(small_run(listed / "run", **pixels)) == 2
    assert "several labels each, and data.sampling = balanced takes" in capsys.readouterr().err
    for name in ("train.csv", "val.csv"):
        rows = [line.split(",")[0] for line in (listed / name).read_text().splitlines()[1:]]
        (listed / name).write_text("\n".join(["path,label", *(f"{row},{row[-6]}" for row in rows)]))
    assert train_program.main(small_run(listed / "run", **CHANGES)) == 2
    assert "one label each, in a column label" in capsys.readouterr().err
