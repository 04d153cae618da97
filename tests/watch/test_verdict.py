"""How good a run is, in words, and which of its files and weights are the best."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from vitinit.programs import export, predict
from vitinit.runs import keeper as train_keeper
from vitinit.runs.data import guessing
from vitinit.tasks.labels import Labels
from vitinit.tasks.multi_label import MultiLabel
from vitinit.watch.verdict import best_of, how_good, margin

FACTS = {"validation images": 100, "score by guessing": 20.0}


def row(epoch, loss, top1=None, ema=None, train=1.0, **others):
    known = {"epoch": epoch, "val_loss": loss, "val_top1": top1, "ema_top1": ema}
    return known | {"train_loss": train} | others


@pytest.mark.parametrize("hits, images", [(52, 100), (0, 23), (23, 23), (1, 7), (990, 1009)])
def test_the_margin_reaches_the_farther_end_of_wilsons_interval(hits, images):
    """Whose ends are the shares e of which what was seen is z standard deviations of e away."""
    seen, reach = hits / images, margin(100 * hits / images, images) / 100
    inward = 1 if seen < 0.5 else -1
    end = seen + inward * reach
    z = NormalDist().inv_cdf(0.975)
    assert reach == pytest.approx(z * math.sqrt(end * (1 - end) / images), rel=1e-6)
    assert 0 < end < 1


def test_it_is_said_beside_guessing_with_the_best_epoch_and_weights():
    rows = [
        row(1, 1.5, 40.0, 39.0, train=1.4),
        row(2, None),  # not evaluated
        row(3, 1.02, 58.0, 60.0, train=0.9),
        row(4, 1.61, 52.0, 59.0, train=0.2),
    ]
    assert how_good(rows, "val_top1", FACTS) == [
        "4 epochs: 52.0 ± 9.7 % of 100 validation images (guessing 20 %)",
        "best 60.0 % after epoch 3, by averaged weights, which best.pt keeps",
        "validation loss rose from 1.02 to 1.61 since: later epochs fitted the training images "
        "alone, so take best.pt, chosen by checkpoint.best_by",
    ]
    rows[-1]["train_loss"] = 0.95  # which rose, too: something else is wrong
    assert len(how_good(rows, "val_top1", FACTS)) == 2
    # The last epoch is the best: there is nothing to add, but for its average.
    assert how_good(rows[:1], "val_top1", {"validation images": 1000}) == [
        "1 epoch: 40.0 ± 3.1 % of 1,000 validation images"
    ]
    assert how_good(rows[:3], "val_top1", {})[1].startswith(
        "best 60.0 % after epoch 3, by averaged"
    )
    # By another measure another epoch is the best, whatever its top-1.
    by_average = how_good([*rows, row(5, 1.7, 50.0, 60.5)], "ema_top1", {})
    assert by_average[1].startswith("best 60.5 % after epoch 5, by averaged weights")
    by_loss = best_of([row(1, 1.0, 50.0), row(2, math.nan, 60.0), row(3, 1.0, 55.0)], "val_loss")
    assert by_loss.row["epoch"] == 1 and by_loss.weights == "model"
    assert "no number says how good" in how_good([row(1, None)], "val_top1", FACTS)[0]


def test_tasks_without_top_1_have_words_of_their_own():
    several = [row(1, 0.5, val_map=70.04, ema_map=69.0), row(2, 0.6, val_map=66.0, ema_map=60.0)]
    facts = FACTS | {"score by guessing": 12.5}
    assert how_good(several, "val_map", facts) == [
        "2 epochs: mAP 66.0 % of 100 validation images (guessing 12.5 %)",
        "best mAP 70.0 % after epoch 1, which best.pt keeps",
    ]
    assert how_good([row(1, 0.5), row(2, 0.51)], "val_loss", {"validation images": 7}) == [
        "2 epochs: loss 0.510 of 7 validation images",
        "best loss 0.500 after epoch 1, which best.pt keeps",
    ]
    # Guesses are of the largest class; of several labels a random order has a class's share.
    for task, counts, images, percent in (
        (Labels("abc"), [2, 2, 2], 6, 33.3),
        (Labels("abc"), [1, 5, 1], 7, 71.4),
        (MultiLabel("abc", {"threshold": 0.5}), [1, 4, 0], 5, 50.0),
    ):
        members = {"class_images": np.array(counts), "__len__": lambda self, n=images: n}
        val_set = type("Images", (), members)()
        assert guessing(task, val_set) == percent


def test_a_run_ends_with_it_and_predict_and_export_take_its_best_weights(
    train_program, small_run, image_tree, tmp_path, capsys, monkeypatch
):
    folder, loaded = tmp_path / "run", []
    tops = iter([(30.0, 40.0), (35.0, 50.0), (20.0, 10.0)])

    def row_of(*given, metrics_row=train_keeper.metrics_row, **how):
        top1, ema = next(tops)
        return metrics_row(*given, **how) | {"val_top1": top1, "ema_top1": ema}

    monkeypatch.setattr(train_keeper, "metrics_row", row_of)
    assert train_program.main(small_run(folder)) == 0
    done, best, *_ = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "epochs: " in line or "best" in line
    ]
    assert done == "done    3 epochs: 20.0 ± 21.0 % of 21 validation images (guessing 33.3 %)"
    assert best == "        best 50.0 % after epoch 2, by averaged weights, which best.pt keeps"
    image = str(image_tree / "val/red/03.png")
    for program, module, words in (
        (predict, "predict", [image]),
        (export, "export", ["--to", "run", "--out"]),
    ):
        real = program.load
        monkeypatch.setattr(
            program,
            "load",
            lambda path, real=real, **how: loaded.append(real(path, **how)) or loaded[-1],
        )
        for number, (path, weights, file, kind) in enumerate(
            (
                (folder, [], "best.pt", "ema"),
                (folder, ["--weights", "model"], "last.pt", "model"),
                (folder, ["--weights", "ema"], "last.pt", "ema"),
                (folder / "last.pt", [], "last.pt", "model"),
            )
        ):
            if program is export:
                words = [*words[:3], str(tmp_path / f"out{number}")]
            assert program.main([str(path), *words, *weights]) == 0
            assert (loaded[0].path, loaded[0].weights) == (folder / file, kind), module
            loaded.clear()
            told = [line for line in capsys.readouterr().err.splitlines() if "weights" in line]
            assert told == [
                f"weights {folder / 'best.pt'}, 50.0 % after epoch 2, by averaged weights; "
                "--weights model or ema: of the last epoch"
            ] * (file == "best.pt")
    (folder / "best.pt").unlink()
    assert predict.main([str(folder), image]) == 0
    assert (loaded[0].path.name, capsys.readouterr().err) == ("last.pt", "")
