"""The lines of metrics and steps: written, read back, cut back, and in words."""

from __future__ import annotations

import json

from vitinit.runs.records import METRICS, JsonLines, epoch_line


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path):
    file = JsonLines(tmp_path / "metrics.jsonl", "epoch")
    file.cut_back(3)                                 # nothing there yet
    for epoch in range(1, 6):
        file.append({"epoch": epoch, "val_top1": None})
    with open(file.path, "a") as handle:
        handle.write('{"epoch": 6, "val_t')          # a crash cut this line short
    file.cut_back(3)
    lines = [json.loads(line) for line in file.path.read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]


def test_the_epochs_line_shows_what_was_measured():
    row = dict.fromkeys(METRICS) | {"epoch": 3, "lr": 1e-3, "train_loss": 2.0,
                                    "images_per_second": 512.4, "skipped_steps": 0}
    assert epoch_line(row, 10) == "epoch  3/10  lr 1.00e-03  train loss 2.000  512 images/s"
    row |= {"val_loss": 1.5, "val_top1": 50.0, "val_top5": 90.0, "ema_top1": 51.25,
            "skipped_steps": 2}
    assert ("val loss 1.500  top-1 50.00 %  top-5 90.00 %  EMA top-1 51.25 %  2 steps skipped"
            in epoch_line(row, 10))
