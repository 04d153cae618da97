"""eval.py on run folders, on their checkpoints, and on those of other projects."""

import argparse
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from counting import calibration_error_by_hand, counted_by_hand
from forks import in_two_processes
from PIL import Image
from small_models import written
from torch import nn

import vitinit.run
from vitinit.data.augment import IMAGENET_MEAN, IMAGENET_STD, normalise
from vitinit.data.datasets import imagenet_wnids, open_split
from vitinit.data.images import DataError, resize_and_centre_crop
from vitinit.data.sources import ImageFiles
from vitinit.interop.weights.readers import ForeignConfig
from vitinit.programs import predict
from vitinit.programs.evaluate import EvaluatedSet, columns_of
from vitinit.programs.figures.report import judge
from vitinit.programs.shared.sureness import Sureness
from vitinit.recipe.files import load_recipe, overrides
from vitinit.runs.load import open_saved
from vitinit.runs.model import build
from vitinit.tasks import CROSS_ENTROPY, labels
from vitinit.train import distributed

SIZES = dict(embed_dim=12, depth=1, num_heads=3, patch_size=4)


@pytest.fixture
def one_epoch_run(straight, capsys) -> Path:
    """The folder of a run on `image_tree`, with a moving average."""
    folder = straight(schedule__epochs="1")
    capsys.readouterr()
    return folder


def tiny_vit(classes: int, seed: int = 0) -> torch.nn.Module:
    """A ViT for 8-pixel images; `as_recipe` describes it."""
    model = vitinit.build_model("vit_tiny", num_classes=classes, image_size=8, **SIZES)
    return written("torch", model, seed)


def as_recipe(classes: int) -> list[str]:
    sets = [f"model.options.{key}={value}" for key, value in SIZES.items()]
    sets += [
        f"data.num_classes={classes}",
        "data.image_size=8",
        "data.workers=0",
        "eval.batch_size=4",
        "engine.compile=false",
        "engine.amp=off",
    ]
    return ["--recipe", "deit_tiny", *(word for text in sets for word in ("--set", text))]


def by_hand(model, source, columns, size=(8, 8), crop_pct=0.875) -> dict:
    """The numbers of the JSON, computed one image at a time in float64."""
    views = [
        resize_and_centre_crop(source.image(index), size, crop_pct, "bicubic")
        for index in range(len(source))
    ]
    images = [normalise(view[None], IMAGENET_MEAN, IMAGENET_STD)[0] for view in views]
    loss, top1, top5, confusion = counted_by_hand(model, images, source.labels, columns)
    hits, totals = confusion.diagonal(), confusion.sum(1)
    recalls, guesses = 100 * hits / totals, confusion.sum(0)
    with torch.no_grad():
        shares = model(torch.stack(images).double())[:, columns].softmax(1).numpy()
    return {
        "calibration_error": pytest.approx(calibration_error_by_hand(shares, source.labels), 1e-4),
        "temperature": 1.0,
        "loss": pytest.approx(loss, rel=1e-5),
        "top1": pytest.approx(top1),
        "top5": pytest.approx(top5) if len(source.classes) > 5 else None,
        "balanced_accuracy": pytest.approx(recalls.mean()),
        "images": len(source),
        "confusion": confusion.tolist(),
        "per_class": [
            {
                "class": name,
                "correct": hits[k],
                "total": totals[k],
                "precision": pytest.approx(100 * hits[k] / guesses[k]) if guesses[k] else None,
                "recall": pytest.approx(recalls[k]),
                "f1": pytest.approx(200 * hits[k] / (totals[k] + guesses[k])),
            }
            for k, name in enumerate(source.classes)
        ],
    }


def write_images(root: Path, classes: list[str], seed: int) -> Path:
    """val/<class>/: 2, 3, 4 … noisy PNGs of 10×14 pixels."""
    rng = np.random.default_rng(seed)
    for number, name in enumerate(classes):
        (root / "val" / name).mkdir(parents=True)
        for index in range(2 + number):
            pixels = rng.integers(0, 256, (10, 14, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "val" / name / f"{index}.png")
    return root


def rows_of(eval_program, capsys, *arguments: object) -> list[dict]:
    """The JSON objects that eval.py prints."""
    assert eval_program.main([*map(str, arguments), "--json", "-"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line[:1] == "{"]


def decodings(monkeypatch) -> list[int]:
    """The images that are decoded from now on, by their numbers."""
    decoded, original = [], ImageFiles.image
    monkeypatch.setattr(
        ImageFiles,
        "image",
        lambda self, index, *view: (decoded.append(index), original(self, index, *view))[1],
    )
    return decoded


def test_a_run_folder_gives_the_last_line_of_training(eval_program, straight, capsys):
    folder = straight(init="deep_impulse", checkpoint__keep_epochs="[0, 2]")
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    capsys.readouterr()
    for target in (folder, folder / "last.pt"):
        (result,) = rows_of(eval_program, capsys, target)
        assert {key: result["model"][key] for key in ("loss", "top1", "top5", "images")} == {
            "loss": last["val_loss"],
            "top1": last["val_top1"],
            "top5": last["val_top5"],
            "images": 21,
        }
        assert (result["ema"]["top1"], result["ema"]["top5"]) == (
            last["ema_top1"],
            last["ema_top5"],
        )
    for name in ("last.pt", "best.pt", "epoch_0000.pt"):
        assert open_saved(folder / name).classes == ["blue", "green", "red"]


def test_auto_is_decided_where_another_projects_checkpoint_is_evaluated(
    eval_program, straight, tmp_path, image_tree, monkeypatch
):
    """And where a run's own recipe is asked for it; otherwise it states one."""
    taken, real = [], eval_program.results_of
    monkeypatch.setattr(
        eval_program,
        "results_of",
        lambda models, batches, engine, *given, **more: (
            taken.append(engine.amp),
            real(models, batches, engine, *given, **more),
        )[1],
    )
    monkeypatch.setattr("vitinit.train.device.fastest_amp", lambda device: "bf16")
    torch.save(tiny_vit(3).state_dict(), tmp_path / "theirs.pth")
    sizes = [
        "model.options.pool=class" if word == "engine.amp=off" else word
        for word in as_recipe(3)[2:]
    ]
    run = str(straight(schedule__epochs="1"))
    for arguments in (
        ["--recipe", "photos", str(tmp_path / "theirs.pth"), *sizes, "--data-dir", str(image_tree)],
        [run, "--set", "engine.amp=auto"],
        [run],
    ):
        assert eval_program.main(arguments) == 0
    assert taken == ["bf16", "bf16", "off"]


PART = dict(
    schedule__epochs="1",
    data__held_out_per_class="4",
    data__subset_seed="3",
    data__mean="[0.485, 0.456, 0.406]",
    data__std="[0.229, 0.224, 0.225]",
    eval__crop_pct="0.875",
    eval__interpolation="bicubic",
)


@pytest.fixture
def run_on_part(train_program, small_run, tmp_path, capsys, monkeypatch):
    """Makes a run on a part of `image_tree`; returns its folder and the data that it used."""

    def make(name: str, **changes: str):
        used, real = [], vitinit.run.open_data
        with monkeypatch.context() as patch:
            patch.setattr(
                "vitinit.run.open_data",
                lambda *arguments, **how: (used.append(real(*arguments, **how)), used[0])[1],
            )
            assert train_program.main(small_run(tmp_path / name, **PART | changes)) == 0
        capsys.readouterr()
        return tmp_path / name, used[0]

    return make


def test_each_run_is_evaluated_on_its_own_training_images_and_on_those_of_data(
    eval_program, run_on_part, image_tree, capsys, monkeypatch
):
    """Runs of two seeds share the training images, decoded once; others have others."""
    shares = [
        dict(data__images_per_class="5"),
        dict(data__images_per_class="5", run__seed="7"),
        dict(data__images_per_class="5", data__subset_seed="4"),
        dict(data__images_per_class="5", data__subset_seed="run", run__seed="7"),
    ]
    runs = [run_on_part(str(number), **share) for number, share in enumerate(shares)]
    decoded = decodings(monkeypatch)
    rows = rows_of(
        eval_program,
        capsys,
        *(folder for folder, _ in runs),
        "--train-images",
        "--data",
        f"image_folder={image_tree}",
        "--data-dir",
        image_tree,
    )
    assert len(decoded) == 15 + 15 + 15 + 21
    assert [(row["data"], row["model"]["images"]) for row in rows] == 4 * [
        ("train", 15),
        ("image_folder", 21),
    ]
    for (folder, data), row in zip(runs, rows[::2]):
        assert row["model"] == by_hand(vitinit.load(folder).model, data.train_set, [0, 1, 2])


@pytest.mark.parametrize("share", ["0.0", "0.22"])
def test_a_run_is_validated_on_held_out_images(
    eval_program, run_on_part, image_tree, capsys, share
):
    """Of 17 images per class, 4 are held out, ⌊0.22 · 17 + ½⌋, and 9 trained on: ⌊0.7 · 13 + ½⌋."""
    by_share = {} if share == "0.0" else dict(data__held_out_per_class="0", data__held_out=share)
    folder, data = run_on_part("run", data__subset="0.7", **by_share)
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    (row,) = rows_of(eval_program, capsys, folder)
    assert (row["data"], row["data_dir"]) == ("held_out", str(image_tree))
    assert row["model"] == by_hand(vitinit.load(folder).model, data.val_set, [0, 1, 2])
    assert (row["model"]["loss"], row["ema"]["top1"]) == (last["val_loss"], last["ema_top1"])
    row, test = rows_of(
        eval_program, capsys, folder, "--train-images", "--data", f"image_folder={image_tree}"
    )
    assert (row["data"], row["ema"]["images"]) == ("train", 27)
    assert row["ema"] == by_hand(
        vitinit.load(folder, weights="ema").model, data.train_set, [0, 1, 2]
    )
    assert (test["data"], test["model"]["images"]) == ("image_folder", 21)
    added = next((image_tree / "train").glob("*/*"))
    shutil.copy(added, added.with_name(f"0 {added.name}"))
    for more, words in (((), "held out; "), (("--train-images",), "was trained on; ")):
        assert eval_program.main([str(folder), *more]) == 2  # others may be held out now
        assert f"these are not the images that it {words}expected" in capsys.readouterr().err
    with pytest.raises(DataError, match="not the images that it held out"):
        judge(folder, None, 100, "model")


def test_a_list_may_lack_a_class_of_those_trained_on(eval_program, image_tree, tmp_path, capsys):
    torch.save(tiny_vit(3).state_dict(), tmp_path / "a.pth")
    for name, classes in (("train", ("blue", "green", "red")), ("val", ("red", "blue"))):
        (image_tree / f"{name}.csv").write_text(
            "path,label\n"
            + "".join(
                f"{name}/{label}/0{number}.png,{label}\n"
                for label in classes
                for number in range(5)
            )
        )
    assert (
        eval_program.main(
            [
                str(tmp_path / "a.pth"),
                "--data",
                f"image_list={image_tree}",
                "--per-class",
                *as_recipe(3),
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "  over 10 images\n" in printed
    assert {line.split()[1] for line in printed.splitlines() if line.endswith(" |")} == {
        "class",
        "---",
        "red",
        "blue",
    }


def test_a_foreign_checkpoint_needs_only_a_recipe_and_one_that_misfits_is_one_line(
    eval_program, image_tree, tmp_path, capsys
):
    """Like DeiT's files: a state dict under "model", and a Namespace beside it."""
    state = {f"module.{name}": value for name, value in tiny_vit(3).state_dict().items()}
    torch.save({"model": state, "args": argparse.Namespace(lr=1e-3)}, tmp_path / "deit.pth")
    given = (tmp_path / "deit.pth", "--data-dir", image_tree, *as_recipe(3))
    (result,) = rows_of(eval_program, capsys, *given)
    source = open_split("image_folder", str(image_tree), "val", 3)
    assert result["model"] == by_hand(tiny_vit(3), source, [0, 1, 2]) and "ema" not in result
    (row,) = rows_of(
        eval_program, capsys, *given, "--train-images", "--set", "data.held_out_per_class=10"
    )
    assert (row["data"], row["model"]["images"]) == ("train", 21)
    torch.save(tiny_vit(5).state_dict(), tmp_path / "a.pth")
    for arguments, message in (
        ([], "say with --recipe what it is a checkpoint of"),
        (
            ["--recipe", "deit_tiny", "--data-dir", str(image_tree), "--set", "data.num_classes=3"],
            "does not fit the model; missing: blocks.1",
        ),
        (
            ["--data", f"image_folder={image_tree}", *as_recipe(5)],
            f"{image_tree}: 3 classes found, and {tmp_path / 'a.pth'} is a model of 5 whose",
        ),
    ):
        assert eval_program.main([str(tmp_path / "a.pth"), *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_outputs_without_names_have_one_order_in_eval_and_predict_and_a_file_states_another(
    eval_program, tmp_path, capsys
):
    names = [str(number) for number in range(12)]
    root = write_images(tmp_path / "images", names, seed=2)
    torch.save(tiny_vit(12).state_dict(), tmp_path / "a.pth")
    (tmp_path / "names.txt").write_text("\n".join(names))
    shares = []
    for more, columns in (
        ([], range(12)),
        (["--classes", tmp_path / "names.txt"], map(int, sorted(names))),
    ):
        assert (
            eval_program.main(
                [
                    *map(str, [tmp_path / "a.pth", "--data", f"image_folder={root}", *more]),
                    *as_recipe(12),
                    *("--json", "-"),
                ]
            )
            == 0
        )
        printed = capsys.readouterr().out
        found = json.loads(printed.splitlines()[-1])["model"]
        source = open_split("image_folder", str(root), "val", 12)
        assert found == by_hand(tiny_vit(12), source, list(columns))
        given = [tmp_path / "a.pth", root / "val", *more, "--set", "eval.crop_pct=0.875"]
        assert predict.main([*map(str, given), *as_recipe(12)]) == 0
        guessed = capsys.readouterr()
        right = round(found["top1"] * len(source) / 100)
        assert f"{right} of {len(source)} images are classified as their folder" in guessed.out
        shares.append(found["top1"])
        for text in (printed, guessed.err):
            assert ("output 2 has no name and is taken for '10'" in text) == (not more)
    assert shares[0] != shares[1]
    # Folders that are not all of them show no order, so that none is the truth.
    assert (
        predict.main(list(map(str, [tmp_path / "a.pth", root / "val" / "2"])) + as_recipe(12)) == 0
    )
    assert "as their folder says" not in capsys.readouterr().out


def test_a_grey_model_and_one_of_colours_share_no_images(
    eval_program, image_tree, tmp_path, capsys
):
    sets = as_recipe(3)[3::2]
    paths = []
    for name, more in (("colours", []), ("grey", ["data.mean=[0.5]", "data.std=[0.5]"])):
        recipe = load_recipe("deit_tiny", overrides(sets=[*sets, *more]))
        model = written("torch", build(recipe), 0)
        paths.append(tmp_path / f"{name}.pt")
        torch.save({"model": model.state_dict(), "recipe": recipe.as_dict()}, paths[-1])
    data = ("--data", f"image_folder={image_tree}")
    alone = [row for path in paths for row in rows_of(eval_program, capsys, path, *data)]
    assert rows_of(eval_program, capsys, *paths, *data) == alone
    assert alone[0]["model"]["loss"] != alone[1]["model"]["loss"]


def test_names_of_another_number_than_the_outputs_and_names_twice_are_one_line(
    eval_program, one_epoch_run, image_tree, tmp_path, capsys
):
    torch.save(tiny_vit(3).state_dict(), tmp_path / "a.pth")
    (tmp_path / "names.txt").write_text("blue\ngreen")
    data = ["--data", f"image_folder={image_tree}", "--classes", str(tmp_path / "names.txt")]
    for arguments, words in (
        (
            [str(tmp_path / "a.pth"), *as_recipe(3)],
            "is a model of 3 classes with 2 names; expected",
        ),
        ([str(one_epoch_run)], "last.pt: names its classes itself; "),
    ):
        assert eval_program.main([*arguments, *data]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1


def test_a_part_of_the_models_classes_competes_among_itself(eval_program, tmp_path, capsys):
    """Two models of 1000 unnamed classes on seven of ImageNet's, at their known indices."""
    wnids = imagenet_wnids()[998:2:-143]
    root = write_images(tmp_path / "part", wnids, seed=1)
    source = open_split("image_folder", str(root), "val", 0)
    columns = [imagenet_wnids().index(name) for name in source.classes]
    paths = []
    for seed in (0, 1):
        paths.append(str(tmp_path / f"{seed}.pth"))
        torch.save(tiny_vit(1000, seed).state_dict(), paths[-1])
    assert (
        eval_program.main(
            [*paths, "--data", f"image_folder={root}", *as_recipe(1000), "--json", "-"]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert f"image_folder={root}: 7 of the 1000 classes of {paths[0]}; the others" in printed
    rows = [json.loads(line) for line in printed.splitlines()[-2:]]
    for seed, row in enumerate(rows):
        expected = by_hand(tiny_vit(1000, seed), source, columns)
        assert row["model"] == expected and row["checkpoint"] == paths[seed]
        assert (row["classes"], row["model_classes"]) == (7, 1000)
    assert rows[0]["model"]["loss"] != rows[1]["model"]["loss"]
    saved = open_saved(
        Path(paths[0]), recipe="deit_tiny", changes=overrides(sets=as_recipe(1000)[3::2])
    )
    for names, expected in (
        (imagenet_wnids()[::-1], [999 - column for column in columns]),
        ([f"no {index}" for index in range(1000)], columns),
    ):
        beside = saved._replace(
            reader=SimpleNamespace(config=ForeignConfig(Path("config.json"), "", {}, names))
        )
        found = columns_of(beside, EvaluatedSet("image_folder", str(root)), source)
        assert found.tolist() == expected


def test_another_resolution_and_crop_and_class_names_of_a_checkpoint_in_another_order(
    eval_program, image_tree, tmp_path, capsys
):
    """tests/runs/test_transfer.py says how position embeddings are resized."""
    torch.save(tiny_vit(3).state_dict(), tmp_path / "a.pth")
    (result,) = rows_of(
        eval_program,
        capsys,
        tmp_path / "a.pth",
        "--data",
        f"image_folder={image_tree}",
        "--image-size",
        "12,20",
        *as_recipe(3),
        "--set",
        "eval.crop_pct=1.0",
    )
    resized = open_saved(
        tmp_path / "a.pth",
        recipe="deit_tiny",
        image_size=(12, 20),
        changes=overrides(sets=as_recipe(3)[3::2]),
    ).model("model")
    source = open_split("image_folder", str(image_tree), "val", 3)
    assert result["model"] == by_hand(resized, source, [0, 1, 2], (12, 20), 1.0)
    assert result["image_size"] == [12, 20]
    torch.save(
        {"model": tiny_vit(5).state_dict(), "classes": ["red", "pink", "blue", "grey", "green"]},
        tmp_path / "a.pth",
    )
    (row,) = rows_of(
        eval_program,
        capsys,
        tmp_path / "a.pth",
        "--data",
        f"image_folder={image_tree}",
        *as_recipe(5),
    )
    source = open_split("image_folder", str(image_tree), "val", 3)
    assert row["model"] == by_hand(tiny_vit(5), source, [2, 4, 0])


def test_images_are_decoded_once_for_all_models_that_see_them_alike(
    eval_program, straight, image_tree, tmp_path, monkeypatch, capsys
):
    """Two runs of one crop and batch size, that differ in std, and five others, on two sets. All
    results equal those of separate evaluations. Where nothing can be kept, each run decodes. Only
    the models at work are on the device. tests/runs/test_results.py has the table."""
    whole = dict(augment__crop_scale="[1, 1]", augment__crop_ratio="[1, 1]", eval__crop_pct="1.0")
    folders = [
        straight(schedule__epochs="1", **changes)
        for changes in (
            {},
            dict(data__std="[0.3, 0.2, 0.1]"),
            dict(eval__crop_pct="0.8"),
            dict(eval__interpolation="bilinear"),
            whole | dict(augment__fit="squash"),
            whole | dict(augment__fit="pad"),
            whole | dict(augment__fit="pad", data__mean="[0.9, 0.5, 0.1]"),
        )
    ]
    capsys.readouterr()
    alone = [rows_of(eval_program, capsys, folder)[0] for folder in folders]
    decoded = decodings(monkeypatch)
    there, to, cpu, real = set(), nn.Module.to, nn.Module.cpu, labels.evaluate
    monkeypatch.setattr(
        nn.Module, "to", lambda self, *where, **how: (there.add(self), to(self, *where, **how))[1]
    )
    monkeypatch.setattr(nn.Module, "cpu", lambda self: (there.discard(self), cpu(self))[1])
    alone_there = []
    monkeypatch.setattr(
        labels,
        "evaluate",
        lambda models, *what, **how: (
            alone_there.append(there == set(models)),
            real(models, *what, **how),
        )[1],
    )
    other = write_images(tmp_path / "other", ["blue", "green", "red"], seed=2)
    for gib, times in (("0.5", 6), ("0.0", 7)):
        decoded.clear()
        assert (
            eval_program.main(
                [
                    *map(str, folders),
                    "--data",
                    f"image_folder={image_tree}",
                    f"image_folder={other}",
                    "--json",
                    str(tmp_path / "out.json"),
                    "--set",
                    "data.on_device_gib=0.0",
                    "--set",
                    f"eval.cache_gib={gib}",
                ]
            )
            == 0
        )
        assert len(decoded) == times * (21 + 9)
        together = [json.loads(line) for line in (tmp_path / "out.json").read_text().splitlines()]
        assert together[::2] == alone and set(alone_there) == {True}
        assert [(row["checkpoint"], row["data_dir"]) for row in together] == [
            (str(folder / "last.pt"), str(root))
            for folder in folders
            for root in (image_tree, other)
        ]


def test_a_folder_of_classes_is_evaluated_whole(eval_program, one_epoch_run, image_tree, capsys):
    """Where it is the recipe's own folder, it is not: it might be what was trained on."""
    given = ["--data", f"image_folder={image_tree / 'train'}"]
    assert eval_program.main([str(one_epoch_run), *given, "--json", "-"]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == f"{image_tree / 'train'}: no splits in it, so that all 51 images are evaluated"
    (row,) = rows_of(eval_program, capsys, one_epoch_run, "--train-images")
    assert json.loads(last)["model"] == row["model"]
    assert eval_program.main([str(one_epoch_run), "--data-dir", str(image_tree / "train")]) == 2
    assert f"eval.py evaluates all images of a folder of classes by {' '.join(given)}\n" in (
        capsys.readouterr().err
    )


def test_dark_16_bit_images_are_told_of(eval_program, one_epoch_run, tmp_path, capsys):
    for name in ("blue", "green", "red"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.full((10, 14), 4095, np.uint16)).save(tmp_path / name / "a.png")
    assert eval_program.main([str(one_epoch_run), "--data", f"image_folder={tmp_path}"]) == 0
    assert "\nwarning 3 images of 16 bits were looked at, and their highest value is" in (
        capsys.readouterr().out
    )


def test_what_is_measured_is_printed_though_the_next_set_fails(
    eval_program, one_epoch_run, image_tree, tmp_path, capsys
):
    (tmp_path / "bad" / "red").mkdir(parents=True)
    (tmp_path / "bad" / "red" / "1.png").write_bytes(b"no image")
    good, bad = image_tree / "train", tmp_path / "bad"
    assert (
        eval_program.main(
            [
                str(one_epoch_run),
                "--data",
                f"image_folder={good}",
                f"image_folder={bad}",
                "--json",
                str(tmp_path / "x.json"),
            ]
        )
        == 2
    )
    printed = capsys.readouterr()
    assert "over 51 images" in printed.out and "1.png" in printed.err
    assert json.loads((tmp_path / "x.json").read_text())["model"]["images"] == 51


def test_a_fitted_temperature_is_of_these_weights_alone_and_every_program_divides_by_it(
    eval_program, one_epoch_run, image_tree, tmp_path, capsys
):
    folder = shutil.copytree(one_epoch_run, tmp_path / "run")
    (plain,) = rows_of(eval_program, capsys, folder)
    (folder / "calibration.lock").symlink_to(tmp_path / "elsewhere")
    assert eval_program.main([str(folder), "--fit-temperature"]) == 2
    assert "calibration.lock: is a symbolic link" in capsys.readouterr().err
    assert not (tmp_path / "elsewhere").exists()
    (folder / "calibration.lock").unlink()
    assert eval_program.main([str(folder), "--fit-temperature"]) == 0
    assert (
        f"over 21 images of image_folder, in {folder}/calibration.json" in capsys.readouterr().out
    )
    rows = json.loads((folder / "calibration.json").read_text())
    of_model, of_ema = rows.values()
    assert [row["weights"] for row in rows.values()] == ["model", "ema"]
    assert of_model["temperature"] != of_ema["temperature"]
    paths = sorted((image_tree / "val").glob("*/*.png"))
    (fitted,) = rows_of(eval_program, capsys, folder)
    for weights, row in (("model", of_model), ("ema", of_ema)):
        trained, before = (vitinit.load(path, weights=weights) for path in (folder, one_epoch_run))
        images = trained.preprocess(paths)
        logits = before.model(images).double()
        shares = (logits / row["temperature"]).softmax(1)
        torch.testing.assert_close(
            trained.probabilities(images).double(), shares, rtol=1e-5, atol=0
        )
        found = fitted[weights]
        assert found["temperature"] == row["temperature"] != 1.0
        labels = [trained.classes.index(path.parent.name) for path in paths]
        error = calibration_error_by_hand(shares.numpy(), labels)
        assert found["calibration_error"] == pytest.approx(error, 1e-4)
        assert row["calibration error after"] == pytest.approx(error, 1e-4)
        assert row["calibration error before"] == plain[weights]["calibration_error"]
        assert found["loss"] < plain[weights]["loss"] and found["top1"] == plain[weights]["top1"]
    judged = judge(folder, None, 99, "ema")
    assert judged["temperature"] == pytest.approx(of_ema["temperature"], 1e-3)
    error = dict(judged["numbers"])["expected calibration error"]
    assert error == pytest.approx(fitted["ema"]["calibration_error"], 1e-3)
    capsys.readouterr()
    vitinit.load(folder, image_size=12, overrides=["eval.crop_pct=0.7"])
    assert (
        "the temperature of model was fitted to views of 8×8, crop 1.0, bicubic, and these are of "
        "12×12, crop 0.7, bicubic; eval.py"
    ) in capsys.readouterr().err
    vitinit.load(folder)
    assert capsys.readouterr().err == ""
    assert eval_program.main([str(folder), "--fit-temperature"]) == 0  # not on top of the first
    assert json.loads((folder / "calibration.json").read_text()) == rows

    state = torch.load(folder / "last.pt")  # as after another step
    state["model"]["head.bias"] += 1e-3
    torch.save(state, folder / "last.pt")
    capsys.readouterr()
    assert vitinit.load(folder).temperature == 1.0
    assert "calibration.json beside it has no temperature of these weights" in (
        capsys.readouterr().err
    )
    assert vitinit.load(folder, weights="ema").temperature == of_ema["temperature"]
    (folder / "calibration.json").write_text('{"a": {"temperature": 0}}')
    with pytest.raises(ValueError, match="calibration.json: expected a table with a temperature"):
        vitinit.load(folder)


def sureness_here() -> tuple:
    """Of this process's part of 53 images: bins and logits of all."""
    rng = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(53, 7, generator=rng)
    labels = torch.randint(7, (53,), generator=rng)
    with distributed.joined() as processes:
        part = slice(processes.rank, None, processes.world_size)
        seen = Sureness(CROSS_ENTROPY, keeps=True)
        for batch in zip(logits[part].split(5), labels[part].split(5)):
            seen.add(*batch)
        seen.gather(processes)
    return seen.bins.tolist(), seen.rows[0].tolist()


def test_two_processes_fit_to_the_logits_of_one(tmp_path):
    bins, rows = sureness_here()
    for ended in in_two_processes(sureness_here, tmp_path):
        np.testing.assert_allclose(ended.result[0], bins, rtol=1e-12)
        assert ended.result[1] == rows and len(rows) == 53


def test_where_no_temperature_can_be_fitted_is_one_line(eval_program, one_epoch_run, capsys):
    for words, message in (
        (
            ["cifar10_small"],
            "comes with the package, whose files stay as they are; expected a copy",
        ),
        (
            [str(one_epoch_run), "--train-images"],
            "on one view of each image that the recipe validates on",
        ),
    ):
        assert eval_program.main([*words, "--fit-temperature"]) == 2
        out, error = capsys.readouterr()
        assert out == "" and error.count("\n") == 1 and message in error


WRONG = [  # arguments after a run's folder, part of the error message
    (
        ["--set", "data.held_out_per_class=0"],
        "--set data.held_out_per_class=0: the checkpoint "
        "brings its own recipe, of which only how to evaluate can change; valid: data.on_",
    ),
    (["--set", "eval.crop_pc=0.9"], "can change; did you mean 'eval.crop_pct'?"),
    (["--set", "eval.crop_pct=1.5"], "--set eval.crop_pct=1.5: eval.crop_pct is 1.5, expected"),
    (["--set", "eval.crop_pct=true"], "eval.crop_pct is true, expected a number ≥ 0.1"),
    (["--train-images", "--data-dir", "nowhere"], "nowhere: no such folder; image_folder is"),
    (["--recipe", "quickstart"], "brings its own recipe; the recipe quickstart that was given is"),
    (["--data", "shape"], "there is no data set 'shape'; did you mean 'shapes'?"),
    (["--data", "cifar10"], "cifar10: expected cifar10=DIR"),
    (["--data", "shapes=x"], "shapes=x: expected shapes, which needs no folder"),
    (
        ["--data", "shapes"],
        "shapes: class 'disc' is none of the model's 3 classes (blue, green, red); the model is",
    ),
    (["--data", "shapes", "--data-dir", "x"], "--data-dir x: the folder of the recipe's own data"),
    (["--image-size", "8,0"], "the image size is [8, 0], expected an integer or a list of 2"),
    (["--image-size", "10"], "last.pt at 10×10: patches of 4×4 pixels do not tile an image"),
]


def test_every_wrong_input_is_one_line(eval_program, one_epoch_run, capsys):
    for arguments, message in WRONG:
        assert eval_program.main([str(one_epoch_run), *arguments]) == 2, arguments
        out, error = capsys.readouterr()
        assert error.startswith("eval.py: ") and message in error and error.count("\n") == 1
        assert out == "", arguments


def test_nan_weights_are_one_line_and_no_accuracy(eval_program, one_epoch_run, tmp_path, capsys):
    state = torch.load(one_epoch_run / "last.pt")
    state["ema"]["model"]["head.bias"][1] = float("nan")
    path = tmp_path / "diverged.pt"
    torch.save(state, path)
    assert eval_program.main([str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"eval.py: {path}: ema 'head.bias' is not finite")
    assert printed.err.count("\n") == 1 and "top-1" not in printed.out
