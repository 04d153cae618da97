"""eval.py on run folders, our checkpoints and foreign ones."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

import vitinit


def printed_json(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_run_folder_gives_the_last_line_of_training(train_program, eval_program, small_run,
                                                      tmp_path, capsys):
    folder = tmp_path / "run"
    assert train_program.main(small_run(folder)) == 0
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    capsys.readouterr()
    for target in (folder, folder / "last.pt"):
        assert eval_program.main([str(target)]) == 0
        result = printed_json(capsys)
        assert result["model"] == {"loss": last["val_loss"], "top1": last["val_top1"],
                                   "top5": last["val_top5"], "images": 21}
        assert (result["ema"]["top1"], result["ema"]["top5"]) == (last["ema_top1"],
                                                                  last["ema_top5"])


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_foreign_checkpoint_needs_only_a_recipe(eval_program, picture_tree, tmp_path, capsys,
                                                  prefix):
    """Laid out as DeiT's files are: a state dict under "model", a Namespace beside it."""
    sizes = dict(embed_dim=12, depth=1, num_heads=3, patch_size=4)
    model = vitinit.build_model("vit_tiny", num_classes=3, image_size=8, **sizes)
    vitinit.init_weights(model, "torch", generator=torch.Generator().manual_seed(0))
    path = tmp_path / "deit.pth"
    torch.save({"model": {prefix + name: value for name, value in model.state_dict().items()},
                "args": argparse.Namespace(lr=1e-3)}, path)
    sets = [f"model.options.{key}={value}" for key, value in sizes.items()]
    sets += ["data.num_classes=3", "data.image_size=8", "data.workers=0", "engine.compile=false",
             "engine.amp=off"]
    arguments = [str(path), "--recipe", "deit_tiny", "--data-dir", str(picture_tree),
                 *(word for text in sets for word in ("--set", text))]
    assert eval_program.main(arguments) == 0
    result = printed_json(capsys)
    assert result["model"]["images"] == 21 and "ema" not in result

    # By hand, one picture at a time.
    from vitinit.data.augment import normalise
    from vitinit.data.datasets import open_split
    from vitinit.data.images import resize_and_centre_crop
    source = open_split("image_folder", str(picture_tree), "val", 3)
    right = 0
    for index in range(21):
        view = resize_and_centre_crop(source.picture(index), (8, 8), 0.875, "bicubic")
        image = normalise(view[None], (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        right += int(model(image).argmax() == source.labels[index])
    assert result["model"]["top1"] == pytest.approx(100 * right / 21)


def test_a_foreign_checkpoint_without_a_recipe_is_one_line(eval_program, tmp_path, capsys):
    torch.save({"model": {"w": torch.ones(1)}}, tmp_path / "a.pth")
    assert eval_program.main([str(tmp_path / "a.pth")]) == 2
    error = capsys.readouterr().err
    assert "say with --recipe what it is a checkpoint of" in error and error.count("\n") == 1


def test_a_checkpoint_of_another_model_is_one_line(eval_program, picture_tree, tmp_path, capsys):
    model = vitinit.build_model("vit_tiny", num_classes=3, image_size=32, depth=1)
    torch.save(model.state_dict(), tmp_path / "a.pth")
    assert eval_program.main([str(tmp_path / "a.pth"), "--recipe", "deit_tiny", "--data-dir",
                              str(picture_tree), "--set", "data.num_classes=3"]) == 2
    error = capsys.readouterr().err
    assert "does not fit the model; missing: blocks.1" in error and error.count("\n") == 1


def test_set_goes_with_a_recipe_only(train_program, eval_program, small_run, tmp_path, capsys):
    folder = tmp_path / "run"
    assert train_program.main(small_run(folder, schedule__epochs="1")) == 0
    assert eval_program.main([str(folder), "--set", "eval.crop_pct=0.9"]) == 2
    assert "brings its own recipe" in capsys.readouterr().err
