"""What train.py prints before training."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vitinit.recipe.files import load_recipe, overrides
from vitinit.runs.start import cautions


@pytest.mark.parametrize("sets, updates", [
    (["schedule.epochs=400", "schedule.cooldown_epochs=99"], "1,996"),
    (["schedule.epochs=400", "schedule.cooldown_epochs=100"], None),
    (["init.checkpoint=runs/a"], None), (["data.name=shapes"], None)])
def test_few_updates_from_scratch_are_a_warning(repository, sets, updates):
    """Four steps per epoch; it ends at 2000. Trained weights and the drawn shapes need fewer."""
    recipe = load_recipe(repository / "recipes" / "quickstart.toml", overrides(
        sets=["data.name=cifar10", "data.root=x", *sets]))
    data = SimpleNamespace(train_batches=SimpleNamespace(steps_per_epoch=4),
                           plan=SimpleNamespace(cautions=lambda **_: []))
    assert cautions(recipe, data) == ([] if updates is None else [
        f"{updates} update(s) in all: from scratch, such a model needs thousands; more "
        "schedule.epochs or a smaller optim.global_batch make more of them"])


def test_the_summary_says_how_many_weights_each_optimiser_trains(train_program, small_run, tmp_path,
                                                                 capsys):
    """Two blocks of width 12 have 2 · 12 · 12² weights in matrices."""
    for changes, line in (
            (dict(), "Muon (factor 1, momentum 0.95) for 3,456 weights, AdamW for 1,011; × 0.7 per "
             "layer from the head down"),
            (dict(optim__name="adamw", optim__layer_decay="1.0"), "AdamW for 4,467 weights")):
        assert train_program.main(small_run(tmp_path / "run", "--dry-run", **changes)) == 0
        assert f"optim   {line}" in capsys.readouterr().out.splitlines()


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
