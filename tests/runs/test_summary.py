"""What train.py prints before training."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from optimisers import adamw, muon
from vitinit.recipe.files import load_recipe, overrides
from vitinit.runs.start import cautions, disk_space


@pytest.fixture
def printed(train_program, small_run, tmp_path, capsys):
    """What a dry run of a small run prints, in lines."""
    def run(**changes: str) -> list[str]:
        assert train_program.main(small_run(tmp_path / "run", "--dry-run", **changes)) == 0
        return capsys.readouterr().out.splitlines()
    return run


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


def test_the_summary_says_how_many_weights_each_optimiser_trains(printed):
    """Two blocks of width 12 have 2 · 12 · 12² weights in matrices."""
    assert ("optim   Muon (factor 1, momentum 0.95) for 3,456 weights, AdamW for 1,011; × 0.7 per "
            "layer from the head down") in printed()
    assert "optim   AdamW for 4,467 weights" in printed(optim__name="adamw",
                                                        optim__layer_decay="1.0")


def test_what_a_run_takes_on_disk_is_what_its_files_have(tmp_path):
    """Up to what the archive format adds to the tensors."""
    model = nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(301, 293))})
    optimizer = adamw(model, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8)
    model.blocks(torch.ones(1, 301)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()},
               tmp_path / "last.pt")
    best = 4 * 293 * 302
    assert (tmp_path / "last.pt").stat().st_size == pytest.approx(3 * best, rel=0.02)
    assert disk_space(model, optimizer, ema=False, kept=2) == (
        "last.pt and previous.pt 1.1 MB each, best.pt and 2 kept epoch(s) 0.4 MB each; 4.2 MB at "
        "most")
    assert 3 * 3 * best + 3 * best == pytest.approx(4.2e6, rel=0.02)
    assert disk_space(model, optimizer, ema=True, kept=0).startswith(
        "last.pt and previous.pt 1.4 MB each, best.pt and 0 kept epoch(s) 0.7 MB each; ")
    optimizer = muon(model, factor=1.0, momentum=0.9, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8)
    assert disk_space(model, optimizer, ema=False,
                      kept=0).startswith("last.pt and previous.pt 0.7 MB")


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
