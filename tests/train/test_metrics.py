"""The epoch's sums, the progress lines."""

from __future__ import annotations

import itertools

import pytest
import torch

from vitinit.train import metrics
from vitinit.train.distributed import Processes
from vitinit.train.metrics import Diverged, Progress, ProgressBar

ALONE = Processes(0, 0, 1, torch.device("cpu"))


def added(progress: Progress, losses: list[float], at_once: int = 100) -> Progress:
    """Count these losses, and read `at_once` of them together."""
    for number, loss in enumerate(losses, 1):
        progress.add(torch.tensor(loss, dtype=torch.float64), None)
        if number % at_once == 0:
            progress.read_losses(ALONE)
    progress.read_losses(ALONE)
    return progress


def test_losses_add_up_in_order_whatever_their_grouping():
    losses = [0.1 * k for k in range(17)]
    one, many = added(Progress(), losses), added(Progress(), losses, 5)
    assert one == many and one.step == one.epoch_steps == 17


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_loss_names_its_step_and_is_not_counted(bad):
    progress = Progress(step=40)
    with pytest.raises(Diverged, match="loss of step 42 is"):
        added(progress, [1.0, 2.0, bad, 3.0])
    assert progress.step == 42 and progress.loss_sum == 3.0


def test_without_a_terminal_there_are_plain_lines_now_and_then(capsys, monkeypatch):
    clock = iter(range(0, 1000, 20))                 # each reading is 20 s after the previous one
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    with ProgressBar("epoch 1/2", 7, initial=1) as bar:
        for _ in range(6):
            bar.advance("loss 2.000")
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[2] for line in printed] == ["3/7,", "5/7,"]
    assert printed[0] == "epoch 1/2: 3/7, loss 2.000, 80 s left"


def test_on_a_terminal_one_line_is_rewritten_and_erased(capsys, monkeypatch):
    monkeypatch.setattr(metrics, "LINE_SECONDS", {True: 0.0})
    monkeypatch.setattr(metrics.time, "monotonic", itertools.count().__next__)
    monkeypatch.setattr(metrics.sys.stderr, "isatty", lambda: True)
    with ProgressBar("decode", 3) as bar:
        list(bar.over("abc"))
    assert capsys.readouterr() == ("", "decode: 1/3, 2 s left\x1b[K\rdecode: 2/3, 1 s left\x1b[K\r\x1b[K")


def test_other_processes_print_nothing(capsys, monkeypatch):
    monkeypatch.setattr(metrics, "LINE_SECONDS", {True: 0.0, False: 0.0})
    with ProgressBar("epoch 1/2", 7, shown=False) as bar:
        bar.advance("loss 2.000")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("by, values, better", [
    ("val_top1", [None, 3.0, 2.0, 3.0, 4.0], [False, True, False, False, True]),
    ("val_loss", [3.0, 4.0, None, 2.0], [True, False, False, True])])
def test_the_best_metric_is_the_highest_accuracy_or_the_lowest_loss(by, values, better):
    progress = Progress()
    assert [progress.improves(value, by) for value in values] == better
