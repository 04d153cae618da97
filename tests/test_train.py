"""train.py end to end: the files of a run, what it prints, and what stops it."""

import json
import os
import shutil
import signal
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from same_run import FAMILIES, assert_identical, assert_same_run, checkpoint, family_run, rows_of

import vitinit
from vitinit.data import images, sources
from vitinit.programs import compare, export
from vitinit.programs.figures import program as figures
from vitinit.recipe.files import load_recipe
from vitinit.runs import data, start
from vitinit.runs.start import drop_path_of
from vitinit.train.metrics import METRICS, StepRow
from vitinit.watch.mass import mass_on_images


def test_a_run_leaves_all_that_its_folder_promises(train_program, small_run, tmp_path, capsys):
    folder = tmp_path / "run"
    arguments = small_run(folder, init="impulse", checkpoint__keep_epochs="[0, 2]")
    assert train_program.main(arguments) == 0
    assert sorted(os.listdir(folder)) == [
        "best.pt",
        "epoch_0000.pt",
        "epoch_0002.pt",
        "images.txt",
        "last.pt",
        "metrics.jsonl",
        "previous.pt",
        "recipe.toml",
        "run.json",
        "run.lock",
        "start.txt",
        "steps.jsonl",
    ]
    rows = rows_of(folder)
    assert [list(row) for row in rows] == [list(METRICS)] * 3
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert all(
        isinstance(row[key], float)
        for row in rows
        for key in METRICS
        if key not in ("epoch", "skipped_steps", "share_of_rate", "val_top5", "ema_top5")
    )
    for key in ("share_of_rate", "val_top5", "ema_top5"):  # on a CPU, and of three classes
        assert [row[key] for row in rows] == [None] * 3
    (step,) = rows_of(folder, "steps")  # one row for twelve steps
    assert tuple(step) == StepRow._fields and step["step"] == 10 and step["scale"] is None
    assert rows[2]["lr"] < step["lr"] < rows[1]["lr"]
    last = checkpoint(folder)
    assert {"model", "ema", "optimizer", "scaler", "step", "recipe"} <= last.keys()
    assert last["step"] == 12
    assert max(row["val_top1"] for row in rows) == checkpoint(folder, "best.pt")["progress"]["best"]
    (start,) = json.loads((folder / "run.json").read_text())
    assert {
        "recipe",
        "arguments",
        "command",
        "vitinit",
        "git_commit",
        "torch",
        "python",
        "device",
        "processes",
    } <= start.keys()
    printed = capsys.readouterr().out
    assert "12 = 1 process × 3 micro-batches × 4 images" in printed
    assert "\ninit    impulse\n" in printed and "\noptions" not in printed
    start = (folder / "start.txt").read_text(encoding="utf-8")
    assert '\noptions init: {base = "default", kernel_size = 3' in start
    # All options are written out, and the recorded recipe repeats the run.
    recipe = load_recipe(folder / "recipe.toml")
    assert recipe.init.options["qk_norm"] == 7.0 and recipe.model.options["mlp_ratio"] == 4.0
    again = tmp_path / "again"
    assert (
        train_program.main(["--recipe", str(folder / "recipe.toml"), "--out-dir", str(again)]) == 0
    )
    assert_identical(checkpoint(folder)["model"], checkpoint(again)["model"])


def test_a_run_starts_from_another_runs_weights(
    train_program, stop_before, small_run, straight, tmp_path, monkeypatch, capsys
):
    """At another resolution, from the moving average, with two heads, and the first as teacher.
    When resumed, it does not read the weights again."""
    second, teacher = tmp_path / "second", straight()
    first = shutil.copytree(teacher, tmp_path / "first")
    how = dict(
        init__checkpoint=str(first),
        init__checkpoint_weights="ema",
        data__image_size="12",
        checkpoint__keep_epochs="[0]",
        model__name="vit_tiny_distilled",
        model__options__pool="class",
        distill__teacher=str(teacher),
    )
    monkeypatch.setattr("vitinit.run.StopRequest", stop_before(5))
    assert train_program.main(small_run(second, "--verbose", **how)) == 128 + signal.SIGTERM
    printed = capsys.readouterr().out
    assert "tensors loaded; pos_embed 2×2 → 3×3 resized" in printed
    assert "views resized to 8×8; the second head learns its decisions" in printed
    before, after = checkpoint(first)["ema"]["model"], checkpoint(second, "epoch_0000.pt")["model"]
    assert after["pos_embed"].shape == (1, 2 + 9, 12)
    for name, value in before.items():
        assert name == "pos_embed" or torch.equal(after[name], value)
    (first / "last.pt").unlink()
    monkeypatch.setattr("vitinit.run.StopRequest", stop_before(10**6))
    assert train_program.main(["--resume", str(second)]) == 0


CANNOT_START = [
    (dict(init__checkpoint="nowhere.pt"), "nowhere.pt: no such checkpoint"),
    (
        dict(init="impulse", model__options__pos_embed="sincos"),
        "cannot use the model's fixed position embedding",
    ),
    (
        dict(optim__max_batch_per_process="1"),
        "optim.max_batch_per_process = 1, but images are "
        "mixed in pairs; expected at least 2, or mix.probability = 0",
    ),
    (dict(optim__global_batch="103", mix__probability="0"), "51 images in 2 views each, fewer"),
    (dict(model__options__patch_size="5"), "train.py: recipe quickstart: patches of 5×5 pixels do"),
    (dict(optim__name="muon", model__options__depth="0"), "train.py: recipe quickstart: "),
    (dict(data__images_per_class="18"), "class 'blue' has 17 images, too few to train on 18"),
    (dict(data__root="nowhere"), "nowhere: no such folder; image_folder is train/<class>/… and"),
    (dict(data__root="nowhere", data__name="shapes"), "shapes is drawn and needs no folder: leave"),
]


def test_what_cannot_be_started_is_one_line(train_program, small_run, tmp_path, capsys):
    for changes, message in CANNOT_START:
        assert train_program.main(small_run(tmp_path / "run", **changes)) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
        assert not (tmp_path / "run").exists()


def test_batches_that_are_probably_a_mistake_are_a_warning_at_the_start(
    train_program, small_run, tmp_path, capsys
):
    for changes, warning in (
        (dict(augment__repeats="4"), "some of the mix.group = 4 images that share a draw of "),
        (
            dict(optim__global_batch="13", mix__mixup_alpha="0", mix__cutmix_alpha="0"),
            "micro-batches have 1 image: ",
        ),
    ):
        assert train_program.main(small_run(tmp_path / "run", "--dry-run", **changes)) == 0
        batches, updates, *_ = [
            line for line in capsys.readouterr().out.splitlines() if line.startswith("warning ")
        ]
        assert batches.startswith(f"warning {warning}") and "51 images, few for" in updates


def test_a_dry_run_shows_everything_and_writes_nothing(
    train_program, small_run, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    arguments = small_run(tmp_path / "run", "--dry-run", "--verbose", eval__batch_size="13")
    assert train_program.main(arguments) == 0
    printed = capsys.readouterr().out  # few images, or a CPU would take minutes
    assert "images (8, 3, 8, 8) → logits (8, 3); nothing was written" in printed
    assert "steps   12 = 3 epochs × 4, by Muon and AdamW, learning rate up to 0.001" in printed
    assert "lr      peak 0.001; first step 1e-06" in printed
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_validates_on_few_images_at_once_and_its_init_reads_those_of_a_run(
    train_program, small_run, tmp_path, monkeypatch
):
    """Workers decode several batches ahead of the one that it uses."""
    views, batches = Mock(wraps=start.training_views), Mock(wraps=data.EvaluationBatches)
    monkeypatch.setattr("vitinit.runs.start.training_views", views)
    monkeypatch.setattr("vitinit.runs.data.EvaluationBatches", batches)
    arguments = small_run(tmp_path / "run", init="whitened", eval__batch_size="19")
    assert train_program.main([*arguments, "--dry-run"]) == 0
    assert train_program.main(arguments) == 0
    assert [call.args[2] for call in views.call_args_list] == [512, 512]
    assert [call.kwargs["batch_size"] for call in batches.call_args_list] == [8, 19]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_dry_run_lists_all_images_that_cannot_be_read(
    train_program, small_run, image_tree, tmp_path, capsys, workers
):
    arguments = small_run(tmp_path / "run", "--dry-run", data__workers=workers)
    assert train_program.main(arguments) == train_program.main([*arguments, "--read-images"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "nothing was written; --read-images decodes all images" in lines[-1]
    assert lines.count("images  all 72 can be read") == 1
    damaged = sorted(image_tree.glob("train/*/*3.png")) + sorted(image_tree.glob("val/*/06.png"))
    for path in damaged:
        path.write_bytes(b"no image")
    assert train_program.main([*arguments, "--read-images"]) == 1 < len(damaged)
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.partition(": not a readable image, 8 bytes (")[0] for line in lines] == [
        str(path) for path in damaged
    ]
    assert last == f"images  {len(damaged)} of 72 cannot be read; nothing was written"
    assert not (tmp_path / "run").exists()
    arguments.remove("--dry-run")
    assert train_program.main([*arguments, "--read-images"]) == 2
    assert "--read-images is what a dry run may do" in capsys.readouterr().err


def test_dark_16_bit_images_are_a_warning(train_program, small_run, image_tree, tmp_path, capsys):
    for path in image_tree.glob("train/*/*"):
        Image.fromarray(np.full((10, 14), 4095, np.uint16)).save(path)
    assert train_program.main(small_run(tmp_path / "run", "--dry-run")) == 0
    assert "\nwarning 51 images of 16 bits were looked at, and their highest value is 6.2 %" in (
        capsys.readouterr().out
    )


def test_the_mass_on_the_targets_in_training_images_stands_below_the_init(
    train_program, small_run, tmp_path, monkeypatch, capsys
):
    found = []

    def measured(model, name, options, images):
        found.append((mass_on_images(model, name, options, images), images))
        return found[-1][0]

    monkeypatch.setattr("vitinit.watch.mass.mass_on_images", measured)
    arguments = small_run(
        tmp_path / "run",
        "--dry-run",
        "--verbose",
        init="deep_impulse",
        model__options__patch_size="2",
        model__options__embed_dim="48",
    )
    assert train_program.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("mass "))
    ((mass, images),) = found
    assert lines[first : first + 2] == [
        f"mass    attention on targets: {mass.in_brief()}",
        f"blocks  mass {mass}, on {len(images)} training images",
    ]
    assert lines[first - 1].startswith("options init") and lines[first + 2].startswith("batch ")
    assert images.shape == (51, 3, 8, 8)  # all there are
    assert train_program.main(small_run(tmp_path / "run", "--dry-run", init="default")) == 0
    assert "\nmass " not in capsys.readouterr().out  # a baseline has no targets


@pytest.mark.parametrize(
    "name, step, workers", [("train/green/05.png", 5, "2"), ("val/blue/03.png", 4, "0")]
)
def test_a_broken_image_costs_no_step_and_no_epoch(
    train_program, small_run, straight, image_tree, tmp_path, capsys, name, step, workers
):
    """The run stops with one line that names the file, and resumes once the image is repaired.
    tests/data/test_loader.py has how a program ends whose workers are at work."""
    broken = tmp_path / "broken"
    image = image_tree / name
    content = image.read_bytes()
    image.write_bytes(content[: len(content) // 2])
    capsys.readouterr()
    assert train_program.main(small_run(broken, data__workers=workers)) == 2
    output = capsys.readouterr()
    assert str(image) in output.err and output.err.count("\n") == 1
    assert f"go on with --resume {broken}" in output.out and checkpoint(broken)["step"] == step
    image.write_bytes(content)
    assert train_program.main(["--resume", str(broken), "--set", "data.workers=0"]) == 0
    assert_same_run(straight(data__workers="0"), broken)


@pytest.mark.parametrize(
    "init, workers", [("deep_impulse", "0"), ("default", "0"), ("default", "1")]
)
def test_too_little_memory_for_an_image_names_its_file(
    train_program, small_run, image_tree, tmp_path, capsys, monkeypatch, init, workers
):
    monkeypatch.setattr(images, "resize", Mock(side_effect=RuntimeError("not enough memory: 9 GB")))
    assert train_program.main(small_run(tmp_path / "run", init=init, data__workers=workers)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    path, _, reason = line.removeprefix("train.py: ").partition(": ")
    assert image_tree / "train" in Path(path).parents
    assert reason.startswith("too little memory to read it (not enough memory: 9 GB)")


def test_a_diverging_run_leaves_a_last_good_checkpoint(train_program, small_run, tmp_path, capsys):
    folder = tmp_path / "run"
    assert (
        train_program.main(
            small_run(
                folder, optim__base_lr="1e30", optim__clip_norm="0", checkpoint__every_steps="1"
            )
        )
        == 1
    )
    error = capsys.readouterr().err
    assert "the weights after step 2 are not finite" in error and error.count("\n") == 1
    assert f"{folder / 'last.pt'} is from before, but would go" in error
    last = checkpoint(folder)
    assert last["step"] == 1  # the learning rate of step 0 is warmup_lr
    assert all(value.isfinite().all() for value in last["model"].values())


@pytest.fixture
def phone(tmp_path) -> Path:
    """photos/<class>/: two classes of 13 lying PNGs, which their EXIF data turn, and a film."""
    rng, exif = np.random.default_rng(0), Image.Exif()
    exif[0x0112] = 6
    for channel, name in enumerate(("red", "green")):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for index in range(13):
            pixels = rng.integers(0, 160, (8, 8, 3))
            pixels[:4, :, channel] += 60  # the upper half; the right one, once upright
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index:02}.png", exif=exif)
        (folder / "film.mov").touch()
    return tmp_path / "photos"


ONE_FOLDER = dict(
    data__num_classes="0",
    data__held_out_per_class="3",
    schedule__epochs="1",
    data__apply_exif_orientation="true",
)


def test_one_folder_without_val_is_trained_on_and_evaluated(
    train_program, eval_program, small_run, phone, tmp_path, capsys
):
    folder = tmp_path / "run"
    command = small_run(folder, "--data-dir", str(phone), "--resume", "auto", **ONE_FOLDER)
    assert train_program.main([*command, "--dry-run"]) == 0 and not folder.exists()
    assert train_program.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "data    image_folder: 20 of 26 images, 2 classes, 8×8; 6 held out" in lines
    line = f"warning left out: 2 .mov in {phone}"
    assert lines.count(line) == 2  # by the dry run and the run
    assert "num_classes = 2" in (folder / "recipe.toml").read_text(encoding="utf-8")
    assert checkpoint(folder)["recipe"]["data"]["num_classes"] == 2
    assert rows_of(folder)[0]["val_top5"] is None and not any("top-5" in line for line in lines)
    assert eval_program.main([str(folder), "--json", "-"]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert f"warning {first}" == line
    assert json.loads(last)["model"]["top1"] == rows_of(folder)[0]["val_top1"]
    shutil.rmtree(phone / "green")
    command[command.index(str(folder))] = str(tmp_path / "new")
    assert train_program.main(command) == 2
    assert "one class found, 'red'; expected two at least" in capsys.readouterr().err


def test_a_class_without_images_to_validate_on_is_said_once_and_counts_in_no_mean(
    train_program, eval_program, small_run, image_tree, tmp_path, capsys
):
    lost, *others = sorted((image_tree / "val").iterdir())
    shutil.rmtree(lost)
    folder = tmp_path / "run"
    assert train_program.main(small_run(folder, schedule__epochs="1")) == 0
    line = f"no image to validate on of 1 class: {lost.name}; what is measured is of the others"
    assert capsys.readouterr().out.count(line) == 1
    assert eval_program.main([str(folder), "--json", "-", "--per-class"]) == 0
    *lines, result = capsys.readouterr().out.splitlines()
    assert [sum(f"| {path.name} |" in row for row in lines) for path in (lost, *others)] == [
        0,
        1,
        1,
    ]
    found, (row,) = json.loads(result)["model"], rows_of(folder)
    absent, *present = found["confusion"]  # in the order of all three classes
    hits = [counts[number] / 7 for number, counts in enumerate(present, 1)]
    assert sum(absent) == 0 and [*map(sum, present)] == [7, 7]
    assert row["val_balanced"] == found["balanced_accuracy"] == pytest.approx(50 * sum(hits))
    assert row["val_top1"] == found["top1"] and row["val_loss"] == found["loss"]


@pytest.mark.parametrize("held_out", ["0.0", "0.3"])
def test_a_run_may_validate_nothing(
    train_program, eval_program, small_run, image_tree, tmp_path, capsys, held_out
):
    """Images that it holds out are for later. To resume it and to report on it needs none."""
    shutil.rmtree(image_tree / "val")
    folder = tmp_path / "run"
    changes = dict(eval__every_epochs="0", data__held_out=held_out, schedule__epochs="2")
    command = small_run(folder, "--resume", "auto", **changes)
    assert train_program.main([*command, "--dry-run"]) == train_program.main(command) == 0
    text = capsys.readouterr().out
    assert text.count("nothing is validated, as eval.every_epochs is 0") == 2
    assert "done    metrics.jsonl has no validated epoch, so no number says" in text
    rows = rows_of(folder)
    assert all(row[key] is None for row in rows for key in METRICS if key[:4] in ("val_", "ema_"))
    assert not (folder / "best.pt").exists()
    assert train_program.main(command) == 0
    (page, curves, again) = (str(tmp_path / name) for name in ("page.html", "curves.png", "again"))
    assert figures.main(["report", str(folder), "--out", page]) == 0
    assert figures.main(["curves", str(folder), "--out", curves]) == 0
    assert compare.main([str(folder)]) == 0
    assert compare.main([str(folder), "--replay", "run", "--out", again]) == 0
    assert "equal to the bit" in capsys.readouterr().out
    evaluated = held_out == "0.3"
    assert eval_program.main([str(folder)]) == (0 if evaluated else 2)
    printed = capsys.readouterr()
    assert "over 15 images" in printed.out if evaluated else "no val/ or test/" in printed.err


@pytest.mark.parametrize("fit", ["squash", "pad"])
def test_the_whole_image_is_trained_on_evaluated_prepared_and_exported(
    train_program, eval_program, small_run, image_tree, tmp_path, capsys, fit
):
    """Images of 10×14 as 8×8. To timm, and transformers if it can say it, and back."""
    folder, mean = tmp_path / "run", (0.52, 0.31, 0.74)
    whole = dict(augment__crop_scale="[1, 1]", augment__crop_ratio="[1, 1]", eval__crop_pct="1.0")
    how = whole | dict(
        augment__fit=fit, data__mean=str([*mean]), data__apply_exif_orientation="true"
    )
    seen, real = [], data.augmentation_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "augmentation_of", lambda *a: (seen.append(real(*a)), seen[0])[1])
        assert train_program.main(small_run(folder, schedule__epochs="1", **how)) == 0
    border = None if fit == "squash" else (133, 79, 189)
    assert seen[0].augmentation.border == border and seen[0].augmentation.augment.fit == fit
    trained, paths = vitinit.load(folder), sorted((image_tree / "val").glob("*/*.png"))
    views = [
        images.fit_whole(images.decode_image(str(path)), (8, 8), "bicubic", border)
        for path in paths
    ]
    prepared = trained.preprocess(paths)
    assert torch.equal(prepared, data.as_input(torch.stack(views), trained.recipe))
    if border:  # 10×14 → 6×8
        assert prepared[:, :, [0, -1]].abs().max() <= 0.5 / 255 / min(trained.recipe.data.std)
    assert eval_program.main([str(folder), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["model"]
    (row,) = rows_of(folder)
    guesses = trained.probabilities(prepared).argmax(1).reshape(3, 7)
    right = sum(int((part == number).sum()) for number, part in enumerate(guesses))
    assert found["top1"] == row["val_top1"] == pytest.approx(100 * right / 21)
    for library, code in (("timm", 0), ("transformers", 0 if fit == "squash" else 2)):
        out = tmp_path / library
        command = ["--to", "safetensors", "--names", library, "--out", str(out)]
        assert export.main([str(folder), *command]) == code
        if code:
            assert "augment.fit is pad, and transformers' image" in capsys.readouterr().err
            assert not out.exists()
            continue
        recipe = "quickstart" if library == "timm" else None
        again = vitinit.load(out / "model.safetensors", recipe=recipe)
        assert torch.equal(again.preprocess(paths), prepared)


def test_the_recipes_orientation_is_that_of_training_and_of_evaluation(
    train_program, eval_program, small_run, phone, tmp_path, monkeypatch
):
    decoded = {True: [], False: []}
    real, turn = sources.decode_bytes, None

    def recorded(content: bytes, path: str, **options: bool) -> torch.Tensor:
        assert options == {"apply_exif_orientation": turn, "channels": 3}
        decoded[turn].append(path)
        return real(content, path, **options)

    monkeypatch.setattr(sources, "decode_bytes", recorded)
    both = tmp_path / "both"
    both.mkdir()
    for split in ("train", "val"):
        (both / split).symlink_to(phone)
    for turn, root, held_out in ((True, phone, 3), (False, both, 0), (True, both, 0)):
        folder = tmp_path / f"{turn} {root.name}"
        changes = ONE_FOLDER | dict(
            data__held_out_per_class=str(held_out),
            eval__cache_gib="0.0",
            data__apply_exif_orientation=str(turn).lower(),
        )
        assert train_program.main(small_run(folder, "--data-dir", str(root), **changes)) == 0
        before = len(decoded[turn])
        assert eval_program.main([str(folder)]) == 0
        assert len(decoded[turn]) - before == (6 if held_out else 26)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_resumes_and_evaluates(
    train_program, stop_before, eval_program, tmp_path, image_tree, capsys, monkeypatch, family
):
    """With all augmentation, in fp16 with a loss scale, which changes, and by LAMB. BatchNorm's statistics
    are saved and restored, too, and it goes on with its micro-batches of 4 alone, which are also
    the largest of at most 5 that fit."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    how = dict(engine__amp="fp16") if family == "cifar10_mixer" else {}
    if family == "cifar10_swin_tiny":
        how = dict(optim__name="lamb")
    assert train_program.main(family_run(family, image_tree, straight, **how)) == 0
    assert bool(checkpoint(straight)["scaler"]) == ("engine__amp" in how)
    monkeypatch.setattr("vitinit.run.StopRequest", stop_before(2))
    assert train_program.main(family_run(family, image_tree, stopped, **how)) == 143
    more = []
    monkeypatch.setattr("vitinit.run.StopRequest", stop_before(10**6))
    capsys.readouterr()
    if family == "cifar10_convmixer":
        more = ["--set", "optim.max_batch_per_process=5"]
        assert train_program.main(["--resume", str(stopped), more[0], more[1][:-1] + "6"]) == 2
        assert "with images per micro-batch = 4 and not 6" in capsys.readouterr().err
    assert train_program.main(["--resume", str(stopped), *more]) == 0
    first, second = (checkpoint(folder) | {"recipe": None} for folder in (straight, stopped))
    assert_identical([first, rows_of(straight)], [second, rows_of(stopped)])
    capsys.readouterr()
    assert eval_program.main([str(straight), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["model"]["top1"] == pytest.approx(rows_of(straight)[-1]["val_top1"])
    assert found["ema"]["top1"] == pytest.approx(rows_of(straight)[-1]["ema_top1"])


def test_a_classifier_trained_alone_leaves_the_rest_and_resumes(
    train_program, stop_before, small_run, tmp_path, monkeypatch, capsys
):
    """By Muon, too, whose matrices then rest, with a moving average; what is left is exported."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    changes = dict(optim__train="head", checkpoint__keep_epochs="[0]")
    assert train_program.main(small_run(straight, **changes)) == 0
    assert "AdamW for 39 weights" in (straight / "start.txt").read_text()
    again = vitinit.Run(resume=straight).train()
    assert drop_path_of(again.state.model, again.recipe)(0) is None  # as it is noise
    monkeypatch.setattr("vitinit.run.StopRequest", stop_before(5))
    assert train_program.main(small_run(stopped, **changes)) == 143
    monkeypatch.setattr("vitinit.run.StopRequest", stop_before(10**6))
    assert train_program.main(["--resume", str(stopped)]) == 0
    assert_same_run(straight, stopped)
    before, after = (checkpoint(straight, name) for name in ("epoch_0000.pt", "last.pt"))
    for name, value in before["model"].items():
        for weights in (after["model"], after["ema"]["model"]):
            assert torch.equal(value, weights[name]) == (not name.startswith("head")), name
    moments = after["optimizer"]["state"].values()
    assert sum(moment["exp_avg"].numel() for moment in moments) == 39  # of 12 channels, 3 classes
    assert export.main([str(straight), "--to", "run", "--out", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert (
        train_program.main(
            family_run("cifar10_convmixer", tmp_path, tmp_path / "no", optim__train="head")
        )
        == 2
    )
    assert 'optim.train = "head" with model.name' in capsys.readouterr().err
