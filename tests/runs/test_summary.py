"""What train.py prints before training and after each epoch, and a row of metrics."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vitinit.recipe.files import load_recipe, overrides
from vitinit.runs.summary import cautions, faster_amp
from vitinit.train import metrics
from vitinit.train.device import MATRIX_RATES, matrix_rate
from vitinit.train.distributed import Processes
from vitinit.train.metrics import METRICS, Evaluation, Progress, epoch_line, metrics_row


def test_few_updates_from_scratch_are_a_warning():
    """Four steps per epoch; it ends at 2000. Trained weights and the drawn shapes need fewer."""
    data = SimpleNamespace(train_set=None, train_batches=SimpleNamespace(steps_per_epoch=4),
                           plan=SimpleNamespace(cautions=lambda **_: []))
    for sets, updates in ((["schedule.epochs=400", "schedule.cooldown_epochs=99"], "1,996"),
                          (["schedule.epochs=400", "schedule.cooldown_epochs=100"], None),
                          (["init.checkpoint=runs/a"], None), (["data.name=shapes"], None)):
        recipe = load_recipe("quickstart", overrides(sets=["data.name=cifar10", "data.root=x",
                                                           *sets]))
        assert cautions(recipe, data) == ([] if updates is None else [
            f"{updates} update(s) in all: from scratch, such a model needs thousands; more "
            "schedule.epochs or a smaller optim.global_batch make more of them"])


def test_the_faster_precision_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("vitinit.runs.summary.CPU_INFO", tmp_path / "cpuinfo")
    for computes, amp, words in ((True, "off", "engine.amp=bf16 is faster"), (True, "bf16", None),
                                 (False, "bf16", "engine.amp=off is faster"), (False, "off", None)):
        (tmp_path / "cpuinfo").write_text("flags: avx512f avx512_" + ["vnni", "bf16"][computes])
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: computes)
        lines, of_gpu = (faster_amp(amp, torch.device(kind)) for kind in ("cpu", "cuda"))
        assert len(of_gpu) == (amp == "bf16" and not computes)
        assert words in lines[0] if words else lines == []


def test_the_summary_says_how_many_weights_each_optimiser_trains(train_program, small_run, tmp_path,
                                                                 monkeypatch, capsys):
    """Two blocks of width 12 have 2 · 12 · 12² weights in matrices. Of the weights of a model that
    is channels last, that of the channel is the dimension of stride 1."""
    strides = []
    monkeypatch.setattr(train_program, "tune_convolutions", lambda model: strides.append(
        model.patch_embed.proj.weight.stride()))
    for dimension, changes, line in (
            (1, dict(engine__channels_last="true"), "Muon (factor 1, momentum 0.95) for 3,456 "
             "weights, AdamW for 1,011; × 0.7 per layer from the head down"),
            (3, dict(engine__channels_last="false", optim__name="adamw",
                     optim__layer_decay="1.0"), "AdamW for 4,467 weights")):
        assert train_program.main(small_run(tmp_path / "run", "--dry-run", **changes)) == 0
        assert f"optim   {line}" in capsys.readouterr().out.splitlines()
        assert strides.pop()[dimension] == 1


@pytest.mark.parametrize("peak, share", [(None, None), (0.7, 0.5)])
def test_a_row_of_metrics_is_of_its_epoch(monkeypatch, peak, share):
    """Seven steps of eleven images in five seconds on two devices, at 5/11 TFLOP per image."""
    monkeypatch.setattr(metrics, "matrix_rate", lambda device: peak)
    monkeypatch.setattr(metrics, "peak_gib", lambda device: 1.5)
    progress = Progress(step=20, epochs=2, epoch_steps=7, loss_sum=14.0, seconds=5.0,
                        waiting_seconds=2.0, skipped_steps=3)
    model = Evaluation(1.5, 50.0, 90.0, 13, [], [])
    ema = Evaluation(9.0, 51.0, 90.0, 13, [], [])
    row = metrics_row(progress, [model, ema], lr=1e-3, global_batch=11, flops=5e12 / 11,
                      processes=Processes(0, 0, 2, torch.device("cpu")))
    assert list(row) == list(METRICS)
    assert row == pytest.approx({
        "epoch": 3, "lr": 1e-3, "train_loss": 2.0, "images_per_second": 15.4, "val_loss": 1.5,
        "val_top1": 50.0, "val_top5": 90.0, "ema_top1": 51.0, "ema_top5": 90.0, "skipped_steps": 3,
        "seconds": 5.0, "waiting": 0.4, "tflops_per_device": 3.5,
        "share_of_rate": share and 10 * share, "peak_memory_gib": 1.5})


def test_the_rate_of_a_card_is_known_by_its_whole_name(monkeypatch):
    name = "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert matrix_rate(torch.device("cuda")) == MATRIX_RATES[name] == 989.0
    assert matrix_rate(torch.device("cpu")) is None
    name += " MIG 1g.10gb"                           # a slice of that card
    assert matrix_rate(torch.device("cuda")) is None


def test_the_epochs_line_shows_what_was_measured():
    row = dict.fromkeys(METRICS) | {
        "epoch": 3, "lr": 1e-3, "train_loss": 2.0, "images_per_second": 512.4, "skipped_steps": 0,
        "waiting": 0.034, "tflops_per_device": 0.04567, "peak_memory_gib": 0.875}
    assert epoch_line(row, 10) == (
        "epoch  3/10  lr 1.00e-03  train loss 2.000  512 images/s  0.0457 TFLOP/s/device  "
        "waiting 3 %  0.88 GiB")
    row |= {"val_loss": 1.5, "val_top1": 50.0, "val_top5": 90.0, "ema_top1": 51.25,
            "skipped_steps": 2, "tflops_per_device": 497.2, "share_of_rate": 0.5027}
    line = epoch_line(row, 10)
    assert ("val loss 1.500  top-1 50.00 %  top-5 90.00 %  EMA top-1 51.25 %  2 steps skipped"
            in line)
    assert line.endswith("  497 TFLOP/s/device = 50 % of its rate  waiting 3 %  0.88 GiB")
