"""The epoch's sums, the metrics file, the progress lines."""

from __future__ import annotations

import json

import pytest

from vitinit.train import metrics
from vitinit.train.metrics import (METRICS, Diverged, MetricsFile, Progress, ProgressBar,
                                   epoch_line)


def test_losses_add_up_in_order_whatever_their_grouping():
    losses = [0.1 * k for k in range(17)]
    one, many = Progress(), Progress()
    one.add_losses(losses)
    for first in range(0, 17, 5):
        many.add_losses(losses[first:first + 5])
    assert one == many and one.step == one.epoch_steps == 17


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_loss_names_its_step_and_is_not_counted(bad):
    progress = Progress(step=40)
    with pytest.raises(Diverged, match="loss of step 42 is"):
        progress.add_losses([1.0, 2.0, bad, 3.0])
    assert progress.step == 42 and progress.loss_sum == 3.0


def test_progress_survives_a_checkpoint():
    progress = Progress(step=5, epochs=2, epoch_steps=1, loss_sum=0.1 + 0.2, best=3.5)
    assert Progress(**json.loads(json.dumps(progress.state_dict()))) == progress


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.cut_back(3)                                 # nothing there yet
    for epoch in range(1, 6):
        file.append({"epoch": epoch, "val_top1": None})
    with open(file.path, "a") as handle:
        handle.write('{"epoch": 6, "val_t')          # a crash cut this line short
    file.cut_back(3)
    lines = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]


def test_without_a_terminal_there_are_plain_lines_now_and_then(capsys, monkeypatch):
    clock = iter(range(0, 1000, 20))                 # every look at the clock is 20 s later
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    with ProgressBar("epoch 1/2", 7, initial=1) as bar:
        for _ in range(6):
            bar.advance("loss 2.000")
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[2] for line in printed] == ["3/7,", "5/7,"]
    assert printed[0] == "epoch 1/2: 3/7, loss 2.000, 80 s left"


def test_other_processes_print_nothing(capsys, monkeypatch):
    monkeypatch.setattr(metrics, "PLAIN_LINE_SECONDS", 0.0)
    with ProgressBar("epoch 1/2", 7, shown=False) as bar:
        bar.advance("loss 2.000")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("by, values, better", [
    ("val_top1", [None, 3.0, 2.0, 3.0, 4.0], [False, True, False, False, True]),
    ("val_loss", [3.0, 4.0, None, 2.0], [True, False, False, True])])
def test_the_best_metric_is_the_highest_accuracy_or_the_lowest_loss(by, values, better):
    progress = Progress()
    assert [progress.improves(value, by) for value in values] == better


def test_the_epochs_line_shows_what_was_measured():
    row = dict.fromkeys(METRICS) | {"epoch": 3, "lr": 1e-3, "train_loss": 2.0,
                                    "images_per_second": 512.4, "skipped_steps": 0}
    assert epoch_line(row, 10) == "epoch  3/10  lr 1.00e-03  train loss 2.000  512 images/s"
    row |= {"val_loss": 1.5, "val_top1": 50.0, "val_top5": 90.0, "ema_top1": 51.25,
            "skipped_steps": 2}
    assert ("val loss 1.500  top-1 50.00 %  top-5 90.00 %  EMA top-1 51.25 %  2 steps skipped"
            in epoch_line(row, 10))
