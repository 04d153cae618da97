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
