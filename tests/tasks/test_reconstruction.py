"""Runs that learn to reconstruct images: the same however they are done; a classifier uses them."""

import shutil
from pathlib import Path

import pytest
import torch
from refused import refused
from same_run import assert_identical, assert_same_run, checkpoint, rows_of

import vitinit
from vitinit.models.masked_autoencoder import MaskedAutoencoder, take
from vitinit.programs import compare, predict
from vitinit.programs.figures import program as figures
from vitinit.programs.figures.reconstruct import pasted
from vitinit.recipe.files import RecipeError, load_recipe, overrides

TASK = {
    "task__name": "reconstruct",
    "task__options__decoder_dim": "8",
    "task__options__decoder_depth": "1",
    "task__options__decoder_heads": "2",
    "model__options__patch_size": "2",
    "mix__mixup_alpha": "0.0",
    "mix__cutmix_alpha": "0.0",
    "checkpoint__best_by": "val_loss",
}


@pytest.fixture
def learned(train_program, small_run, tmp_path) -> Path:
    """A run of three epochs of 16 patches, of which four are seen; it kept its first weights."""
    assert (
        train_program.main(small_run(tmp_path / "learned", checkpoint__keep_epochs="[0]", **TASK))
        == 0
    )
    return tmp_path / "learned"


def test_it_is_the_same_resumed_and_with_workers(
    train_program, small_run, tmp_path, learned, stop_before, monkeypatch
):
    """All is saved; rows have losses of training and validation, and no accuracy."""
    assert [row["val_top1"] for row in rows_of(learned)] == [None] * 3
    assert all(0.5 < row[key] < 2 for row in rows_of(learned) for key in ("train_loss", "val_loss"))
    stopped, workers, how = (
        tmp_path / "stopped",
        tmp_path / "workers",
        dict(checkpoint__keep_epochs="[0]", **TASK),
    )
    monkeypatch.setattr("vitinit.run.StopRequest", stop_before(6))
    assert train_program.main(small_run(stopped, **how)) == 143
    monkeypatch.setattr("vitinit.run.StopRequest", stop_before(10**6))
    assert train_program.main(["--resume", str(stopped)]) == 0
    assert_same_run(learned, stopped)
    assert train_program.main(small_run(workers, data__workers="2", **how)) == 0
    assert_identical(checkpoint(learned)["model"], checkpoint(workers)["model"])
    again = vitinit.Run(resume=learned)  # which is finished
    assert again.train().rows == rows_of(learned)


def test_a_classifier_starts_from_the_encoder_and_other_programs_say_what_it_is(
    train_program, eval_program, small_run, tmp_path, learned, image_tree, capsys
):
    tuned = tmp_path / "tuned"
    assert (
        train_program.main(
            small_run(
                tuned,
                init__checkpoint=str(learned),
                model__options__patch_size="2",
                checkpoint__keep_epochs="[0]",
                schedule__epochs="1",
            )
        )
        == 0
    )
    first, source = checkpoint(tuned, "epoch_0000.pt")["model"], checkpoint(learned)["model"]
    for name, value in first.items():
        assert name.startswith("head.") or torch.equal(value, source[f"encoder.{name}"]), name
    vitinit.Run(
        learned / "recipe.toml",
        out_dir=tmp_path / "again",
        verbose=True,
        overrides={
            "init.checkpoint": str(learned),
            "schedule.epochs": 1,
            "schedule.warmup_epochs": 0,
        },
    ).train()
    assert "\ndecoder as drawn: none is read from a checkpoint" in capsys.readouterr().out
    trained = vitinit.load(learned)
    image, *_ = image_tree.rglob("*.png")
    assert trained.classes == () and trained.model(trained.preprocess(image)).shape == (1, 12)
    for main, words, line in (
        (predict.main, [learned, image], "holds no classifier, so there are no classes"),
        (eval_program.main, [learned], "learned to reconstruct images, and has no classes"),
    ):
        assert main([*map(str, words)]) == 2
        assert line in capsys.readouterr().err
    assert compare.main([str(learned)]) == 0
    loss = rows_of(learned)[-1]["val_loss"]
    assert f"| mimetic | 1 | – | – | – | – | {loss:.4f} |" in capsys.readouterr().out
    for words, file in (
        (["reconstruct", image, "--run", learned], "a.png"),
        (["curves", learned], "b.png"),
        (["report", learned], "c.html"),
    ):
        assert figures.main([*map(str, words), "--out", str(tmp_path / file)]) == 0


@pytest.mark.parametrize("normalise", [True, False])
def test_what_a_perfect_model_makes_of_a_photograph_is_the_photograph(normalise):
    data = load_recipe("own_images", overrides(sets={"data.std": [0.2, 0.3, 0.25]})).data
    encoder = vitinit.build_model("vit_tiny", num_classes=0, image_size=(6, 15), patch_size=(2, 3))
    model = MaskedAutoencoder(encoder, decoder_dim=8, decoder_heads=2, normalise_targets=normalise)
    views = torch.arange(2 * 3 * 6 * 15).mul(37).view(2, 3, 6, 15).to(torch.uint8)
    visible, hidden = (torch.arange(15) * torch.tensor([[7], [11]]) % 15).split([3, 12], dim=1)
    model.reconstruct = lambda inputs, _: (hidden, take(model.targets(inputs), hidden))
    seen, whole = pasted(model, data, views, visible)
    torch.testing.assert_close(whole, views / 255)
    assert (seen != 0.5).sum() == 2 * 3 * 3 * 6 and (seen == views / 255)[seen != 0.5].all()


def test_images_without_classes_in_any_folders(
    train_program, small_run, tmp_path, image_tree, capsys
):
    """Nested and flat; without held-out images nothing is validated."""
    pictures = tmp_path / "pictures"
    shutil.copytree(image_tree / "train", pictures / "2024" / "summer")
    shutil.copy(next(image_tree.rglob("*.png")), pictures / "one.png")
    how = TASK | {"data__name": "images", "data__num_classes": "0"}
    for folder, held_out in ("a", "0"), ("b", "5"):
        run = small_run(
            tmp_path / folder,
            "--data-dir",
            str(pictures),
            schedule__epochs="1",
            data__held_out_per_class=held_out,
            **how,
        )
        assert train_program.main(run) == train_program.main([*run, "--dry-run"]) == 0
        count = len(list(pictures.rglob("*.png"))) - int(held_out)
        assert f"images: {count}" in capsys.readouterr().out
        assert (
            figures.main(
                ["curves", str(tmp_path / folder), "--out", str(tmp_path / f"{folder}.png")]
            )
            == 0
        )
        (row,) = rows_of(tmp_path / folder)
        assert (row["val_loss"] is None) == (held_out == "0")


def test_what_a_task_cannot_be_with_is_refused():
    for changes, message in (
        ({"task.options": {}, "task.name": "classify"}, "these have no classes"),
        ({"model.name": "mixer_s16", "model.options": {}}, "a ViT, which need not see all"),
        ({"mix.mixup_alpha": 0.5}, "expected 0.0"),
        ({"optim.train": "head"}, "expected all"),
        ({"distill.teacher": "x"}, "a teacher goes with cross-entropy"),
        ({"checkpoint.best_by": "val_top1"}, "expected val_loss"),
        ({"task.options.ratio": 0.5}, "has no key 'ratio'"),
    ):
        assert message in refused(RecipeError, load_recipe, "own_images", overrides(sets=changes))
    encoder = vitinit.build_model(
        "vit_tiny", num_classes=0, image_size=8, patch_size=2, embed_dim=12, depth=1
    )
    for sizes in (dict(decoder_dim=18, decoder_heads=3), dict(decoder_dim=16, decoder_heads=3)):
        assert f"decoder_dim is {sizes['decoder_dim']}, expected a multiple of 4, and of decod" in (
            refused(ValueError, MaskedAutoencoder, encoder, **sizes)
        )
