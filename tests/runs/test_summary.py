"""What train.py prints before training."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from vitinit.recipe.files import load_recipe, overrides
from vitinit.runs.summary import cautions, faster_amp


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
