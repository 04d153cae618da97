"""What train.py prints before training."""

from __future__ import annotations

import pytest


def warnings(train_program, capsys, arguments: list[str]) -> list[str]:
    assert train_program.main(arguments) == 0
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning ")]


@pytest.mark.parametrize("epochs, cooldown, updates", [
    ("3", "0", "12"), ("400", "99", "1,996"), ("400", "100", None), ("501", "0", None)])
def test_few_updates_from_scratch_are_a_warning(train_program, small_run, tmp_path, capsys, epochs,
                                                cooldown, updates):
    """Four steps per epoch; the warning ends at 2000 steps."""
    found = warnings(train_program, capsys, small_run(
        tmp_path / "run", "--dry-run", schedule__epochs=epochs, schedule__cooldown_epochs=cooldown))
    assert found == ([] if updates is None else [
        f"warning {updates} update(s) in all: from scratch, such a model needs thousands; more "
        "schedule.epochs or a smaller optim.global_batch make more of them"])


def test_trained_weights_and_the_embedded_images_need_few_updates(train_program, small_run, tmp_path,
                                                                  capsys):
    first = tmp_path / "first"
    assert train_program.main(small_run(first, schedule__epochs="1",
                                        schedule__warmup_epochs="0")) == 0
    capsys.readouterr()
    assert not warnings(train_program, capsys, small_run(
        tmp_path / "second", "--dry-run", init__checkpoint=str(first)))
    assert not warnings(train_program, capsys, [
        "--recipe", "quickstart", "--dry-run", "--out-dir", str(tmp_path / "third")])


def test_the_summary_says_how_many_weights_each_optimiser_trains(train_program, small_run, tmp_path,
                                                                 capsys):
    """Two blocks of width 12 have 2 · 12 · 12² weights in matrices."""
    for changes, line in [
            ({}, "optim   Muon (factor 1, momentum 0.95) for 3,456 weights, AdamW for 1,011; × 0.7 per "
             "layer from the head down\n"),
            ({"optim__name": "adamw", "optim__layer_decay": "1.0"}, "optim   AdamW for 4,467 weights\n")]:
        assert train_program.main(small_run(tmp_path / "run", "--dry-run", **changes)) == 0
        assert line in capsys.readouterr().out


def test_channels_last_is_the_format_of_images_and_convolutions(train_program, small_run, tmp_path,
                                                                monkeypatch):
    seen = []
    real = train_program.train_epochs

    def looked_at(state, forward, steps, **options):
        seen.append(state.model.patch_embed.proj.weight.stride())
        return real(state, forward, steps, **options)
    monkeypatch.setattr(train_program, "train_epochs", looked_at)
    for name, value in (("a", "true"), ("b", "false")):
        assert train_program.main(small_run(tmp_path / name, engine__channels_last=value,
                                            schedule__epochs="1", schedule__warmup_epochs="0")) == 0
    assert seen[0][1] == 1 and seen[1][3] == 1       # the stride of channels, and that of columns
