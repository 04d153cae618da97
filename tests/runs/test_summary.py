"""What train.py prints before training and after each epoch, and a row of metrics."""

import shlex
from types import SimpleNamespace

import pytest
import torch

from vitinit.data.images import JpegDecoder
from vitinit.programs import predict
from vitinit.programs.figures import program as figures
from vitinit.recipe.files import load_recipe, overrides
from vitinit.runs.summary import at_a_glance, cautions, crowded, faster_amp
from vitinit.train import device, metrics
from vitinit.train.device import MATRIX_RATES, fastest_amp, matrix_rate
from vitinit.train.distributed import Processes
from vitinit.train.metrics import METRICS, Evaluation, Progress, epoch_line, metrics_row

NOTHING = SimpleNamespace(left_out="", class_images=[])
DATA = SimpleNamespace(
    train_set=range(1_000),
    whole_set=NOTHING,
    val_set=NOTHING,
    classes=[],
    steps_per_epoch=4,
    plan=SimpleNamespace(cautions=lambda **_: []),
)


def test_few_updates_from_scratch_are_a_warning():
    """Four steps per epoch; it ends at 1000. Trained weights and the drawn shapes need fewer. With
    fewer than 1,000 images more epochs are no advice, but trained weights, which take colours."""
    more = (
        "996 updates in all: from scratch, such a model needs thousands; --set schedule.epochs=250 "
        "makes 1,000"
    )
    grey = ["data.mean=[0.5]", "data.std=[0.3]", "rand_augment.fill=[0]"]
    for images, sets, beginning in (
        (1_000, ["schedule.epochs=200", "schedule.cooldown_epochs=49"], more),
        (1_000, ["schedule.epochs=200", "schedule.cooldown_epochs=50"], None),
        (999, ["schedule.epochs=249"], "999 images, few for a model from scratch"),
        (999, ["schedule.epochs=249", *grey], more),
        (999, ["init.checkpoint=runs/a"], None),
        (999, ["data.name=shapes"], None),
    ):
        recipe = load_recipe(
            "quickstart", overrides(sets=["data.name=cifar10", "data.root=x", *sets])
        )
        data = SimpleNamespace(**vars(DATA) | {"train_set": range(images)})
        lines = cautions(recipe, data, (6, 6), torch.device("meta"))
        assert len(lines) == (beginning is not None)
        assert all(line.startswith(beginning) for line in lines)
        assert all(("photos_finetune" in line) == (beginning != more) for line in lines)


@pytest.mark.parametrize(
    "size, grid, patch",
    [
        ("[48, 30]", (3, 2), 3),
        ("[64, 64]", (4, 4), 8),
        ("[7, 7]", (1, 1), 1),
        ("[64, 64]", (6, 6), None),
    ],
)
def test_few_patches_are_a_warning_with_the_patch_size_that_makes_more(size, grid, patch):
    recipe = load_recipe("quickstart", overrides(sets=[f"data.image_size={size}"]))
    lines = cautions(recipe, DATA, grid, torch.device("meta"))
    assert lines == (
        []
        if patch is None
        else [
            f"{grid[0]}×{grid[1]} patches per image show a model little: --set "
            f"model.options.patch_size={patch} makes more"
        ]
    )


def test_the_faster_precision_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("vitinit.train.device.CPU_INFO", tmp_path / "cpuinfo")
    for computes, amp, words in (
        (True, "off", "engine.amp=bf16 is faster"),
        (True, "bf16", None),
        (False, "bf16", "engine.amp=off is faster"),
        (False, "off", None),
    ):
        (tmp_path / "cpuinfo").write_text("flags: avx512_bf16" + " amx_bf16" * computes)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: computes)
        lines, of_gpu = (faster_amp(amp, torch.device(kind)) for kind in ("cpu", "cuda"))
        assert len(of_gpu) == (amp == "bf16" and not computes)
        assert words in lines[0] if words else lines == []


def test_threads_that_share_cores_with_other_programs_are_told_of(monkeypatch):
    """With 5 cores and 3 threads two other programs find a core each, and a third does not."""
    monkeypatch.setattr("vitinit.runs.summary.cores", lambda: 5)
    for threads, busy, kind, told in (
        (3, 2.9, "cpu", False),
        (3, 3.1, "cpu", True),
        (1, 9.0, "cpu", False),
        (3, 9.0, "cuda", False),
    ):
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        monkeypatch.setattr("os.getloadavg", lambda: (busy, 0.0, 0.0))
        lines = crowded(torch.device(kind))
        assert bool(lines) == told
    monkeypatch.delattr("os.getloadavg")  # a system that has none
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert crowded(torch.device("cpu")) == []


def test_auto_is_the_precision_that_the_device_computes(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "CPU_INFO", tmp_path / "cpuinfo")
    assert fastest_amp(torch.device("cpu")) == "off"  # of a system that has no such file
    for maker, flags, amp in (
        ("AuthenticAMD", "avx512_vnni", "off"),
        ("AuthenticAMD", "avx512_bf16", "bf16"),
        ("GenuineIntel", "avx512_bf16", "off"),
        ("GenuineIntel", "avx512_bf16 amx_bf16", "bf16"),
    ):
        (tmp_path / "cpuinfo").write_text(f"vendor_id : {maker}\nflags : fpu {flags}\n")
        assert fastest_amp(torch.device("cpu")) == amp
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for major, amp in ((7, "fp16"), (8, "bf16"), (12, "bf16")):
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda number: SimpleNamespace(major=major)
        )
        assert fastest_amp(torch.device("cuda")) == amp

    def emulated(including_emulation: bool = True) -> bool:
        return including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", emulated)
    assert fastest_amp(torch.device("cuda")) == "fp16"


def test_the_summary_says_how_many_weights_each_optimiser_trains(
    train_program, small_run, tmp_path, monkeypatch, capsys
):
    """Two blocks of width 12 have 2 · 12 · 12² weights in matrices. Of the weights of a model that
    is channels last, that of the channel is the dimension of stride 1."""
    strides = []
    monkeypatch.setattr(
        "vitinit.runs.start.tune_convolutions",
        lambda model: strides.append(model.patch_embed.proj.weight.stride()),
    )
    for dimension, changes, line in (
        (
            1,
            dict(engine__channels_last="true"),
            "Muon (factor 1, momentum 0.95, in float32) for 3,456 "
            "weights, AdamW for 1,011; × 0.7 per layer from the head down",
        ),
        (
            3,
            dict(engine__channels_last="false", optim__name="adamw", optim__layer_decay="1.0"),
            "AdamW for 4,467 weights",
        ),
        (
            3,
            dict(engine__channels_last="false", optim__name="lamb", optim__layer_decay="1.0"),
            "LAMB for 4,467 weights",
        ),
    ):
        assert (
            train_program.main(small_run(tmp_path / "run", "--dry-run", "--verbose", **changes))
            == 0
        )
        assert f"optim   {line}" in capsys.readouterr().out.splitlines()
        assert strides.pop()[dimension] == 1


@pytest.mark.parametrize("peak, share", [(None, None), (0.7, 0.5)])
def test_a_row_of_metrics_is_of_its_epoch(monkeypatch, peak, share):
    """Seven steps of eleven images in five seconds on two devices, at 5/11 TFLOP per image."""
    monkeypatch.setattr(metrics, "matrix_rate", lambda device: peak)
    monkeypatch.setattr(metrics, "peak_gib", lambda device: 1.5)
    progress = Progress(
        step=20,
        epochs=2,
        epoch_steps=7,
        loss_sum=14.0,
        seconds=5.0,
        cpu_seconds=7.0,
        waiting_seconds=2.0,
        skipped_steps=3,
    )
    model = Evaluation(1.5, 50.0, 90.0, 13, [2, 0, 5], [8, 0, 5], [3, 5, 5], None)
    ema = Evaluation(9.0, 51.0, 90.0, 13, [], [], [], None)
    row = metrics_row(
        progress,
        [model, ema],
        lr=1e-3,
        global_batch=11,
        flops=5e12 / 11,
        processes=Processes(0, 0, 2, torch.device("cpu")),
    )
    assert list(row) == list(METRICS)
    assert row == pytest.approx(
        {
            "epoch": 3,
            "lr": 1e-3,
            "train_loss": 2.0,
            "images_per_second": 15.4,
            "val_loss": 1.5,
            "val_top1": 50.0,
            "val_top5": 90.0,
            "val_balanced": 62.5,
            "ema_top1": 51.0,
            "ema_top5": 90.0,
            "skipped_steps": 3,
            "seconds": 5.0,
            "cpu_seconds": 7.0,
            "waiting": 0.4,
            "tflops_per_device": 3.5,
            "share_of_rate": share and 10 * share,
            "peak_memory_gib": 1.5,
        }
    )


def test_the_rate_of_a_card_is_known_by_its_whole_name(monkeypatch):
    name = "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert matrix_rate(torch.device("cuda")) == MATRIX_RATES[name] == 989.0
    assert matrix_rate(torch.device("cpu")) is None
    name += " MIG 1g.10gb"  # a slice of that card
    assert matrix_rate(torch.device("cuda")) is None


def test_the_epochs_line_fits_a_terminal_and_notes_take_the_place_of_what_is_known():
    row = dict.fromkeys(METRICS) | {"epoch": 3, "train_loss": 2.0, "images_per_second": 51.24}
    assert epoch_line(row, 10) == "epoch  3/10  loss 2.000  51.24 img/s"
    row |= {
        "val_loss": 10.5,
        "val_top1": 100.0,
        "val_top5": 90.0,
        "ema_top1": 51.25,
        "skipped_steps": 2,
        "images_per_second": 51_240.7,
    }
    line = epoch_line(row, 100)
    assert line == "epoch   3/100  loss 2.000  val 10.500  top-1 100.00 %  EMA 51.25 %  51241 img/s"
    assert len(line) <= 80
    lines = [
        f"{title:8}x"
        for title in (
            "recipe",
            "data",
            "root",
            "model",
            "init",
            "start",
            "head",
            "teacher",
            "batch",
            "steps",
            "lr",
            "run",
        )
    ]
    assert [line.split()[0] for line in at_a_glance(lines, "there")] == [
        "recipe",
        "data",
        "model",
        "start",
        "head",
        "teacher",
        "steps",
        "run",
    ]


def test_the_start_fits_a_terminal_and_is_whole_in_the_folder(
    train_program, small_run, tmp_path, monkeypatch, capsys
):
    """Six of eleven cautions; the last of them says where the others are."""
    monkeypatch.setattr(
        "vitinit.runs.summary.cautions", lambda *_: [f"caution {n}" for n in range(11)]
    )
    monkeypatch.setattr("vitinit.run.train_epochs", lambda *_: None)
    folder = tmp_path / ("name" * 20)
    assert train_program.main(small_run(folder)) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = [line.split()[0] for line in lines]
    assert titles == [
        "recipe",
        "data",
        "model",
        "init",
        "mass",
        "batch",
        "steps",
        "run",
        str(folder),
        *["warning"] * 6,
        "done",
        "next",
        "vitinit",
    ]
    for (*_, command), program in zip(
        map(str.partition, lines[-2:], ["vitinit "] * 2), (figures, predict)
    ):
        program.parse_arguments(shlex.split(command)[1:])  # a command that can be typed
    assert max(map(len, lines[:8])) <= 80 and "…" not in "".join(lines[:8])
    assert lines[8].strip() == str(folder)  # in a line of its own, and not cut
    assert lines[14] == f"warning and 6 more, in {folder}/start.txt"
    whole = (folder / "start.txt").read_text(encoding="utf-8").splitlines()
    assert f"run     {folder}" in whole and whole[-11:] == [
        f"warning caution {n}" for n in range(11)
    ]
    assert train_program.main(["--resume", str(folder), "--verbose"]) == 0
    resumed = capsys.readouterr().out.splitlines()
    assert resumed[:-3] == [
        *(
            line
            for line in whole[:-12]
            if not line.startswith(("mass", "blocks", "classes", "files"))
        ),
        f"run     {folder}, resumed at step 0",
        *whole[-11:],
    ]
    report = (folder / "images.txt").read_text(encoding="utf-8")
    assert report.splitlines() == [line for line in whole if line.startswith(("classes", "files"))]


def test_the_start_says_what_decodes_jpegs_and_the_terminal_that_it_is_pillow(
    train_program, small_run, tmp_path, monkeypatch, capsys
):
    shapes = ["--recipe", "quickstart", "--dry-run", "--verbose"]
    files, verbose = small_run(tmp_path, "--dry-run"), ["--verbose"]
    by_pillow = "note    JPEGs are decoded by Pillow, "
    for decoder, arguments, lines in (
        (JpegDecoder("another", torch.clone), files + verbose, ["decode  JPEGs by another"]),
        (None, files, [by_pillow]),
        (None, shapes, []),
    ):
        monkeypatch.setattr("vitinit.runs.summary.jpeg_decoder", lambda found=decoder: found)
        assert train_program.main(arguments) == 0
        found = [line for line in capsys.readouterr().out.splitlines() if "JPEGs" in line]
        assert [line[: len(by_pillow)] for line in found] == lines


@pytest.mark.parametrize("warmup, cautioned", [(2, True), (1, False), (0, False)])
def test_a_warm_up_as_long_as_the_run_is_a_caution(warmup, cautioned):
    recipe = load_recipe(
        "photos",
        overrides(
            sets=[
                "data.root=x",
                "init.checkpoint=y",
                "schedule.epochs=2",
                f"schedule.warmup_epochs={warmup}",
            ]
        ),
    )
    lines = cautions(recipe, DATA, (14, 14), torch.device("meta"))
    assert cautioned == any("all epochs are warm-up" in line for line in lines)
