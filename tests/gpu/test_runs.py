"""Whole runs of train.py on the device: resumed, evaluated, traced, and on two GPUs."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import vitinit.run
from vitinit.recipe.files import load_recipe, overrides
from vitinit.runs.checkpoint import read_checkpoint_file as load
from vitinit.runs.data import open_sets

EPOCHS = {"schedule__epochs": "4", "engine__tf32": "false", "data__workers": "2"}


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a nested checkpoint with its path, such as ".model.head.weight"."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (dict, list, tuple)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_in(inner, f"{name}.{key}")


def apart(one: Path, other: Path, part: str = "") -> float:
    """The largest relative distance between tensors of two runs' last checkpoints: 0 if equal."""
    found, expected = (dict(tensors_in(load(folder / "last.pt"))) for folder in (one, other))
    assert found.keys() == expected.keys() and found
    return max(
        float((found[name].double() - tensor.double()).norm() / (tensor.double().norm() + 1e-12))
        for name, tensor in expected.items()
        if name.startswith(part)
    )


@pytest.mark.filterwarnings("ignore")  # of what cannot be deterministic
def test_a_stopped_and_resumed_run_is_the_uninterrupted_one(
    cuda, train_program, small_run, tmp_path, stop_before, monkeypatch, record_property
):
    """To the bit, if two uninterrupted runs are equal here; else up to ten times as far apart. On a
    CPU, test_interruptions.py does it at every step. Without deterministic algorithms a GPU may sum
    in another order in every run, so that rounding differs."""
    whole, stopped, again = (tmp_path / name for name in ("whole", "stopped", "again"))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with monkeypatch.context() as patch:  # two steps after two epochs, 4 steps each
            patch.setattr("vitinit.run.StopRequest", stop_before(2 * (5 + 7) + 2))
            assert train_program.main(small_run(stopped, **EPOCHS)) == 128 + signal.SIGTERM
        assert load(stopped / "last.pt")["progress"]["step"] == 10
        for words in (
            small_run(whole, **EPOCHS),
            ["--resume", str(stopped)],
            small_run(again, **EPOCHS),
        ):
            assert train_program.main(words) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    distances = apart(stopped, whole), apart(again, whole)
    record_property("resumed apart, two whole runs apart", distances)
    assert distances[0] <= 10 * distances[1]


def test_a_run_is_evaluated_as_it_measured_itself(
    device, train_program, eval_program, small_run, tmp_path, capsys
):
    assert train_program.main(small_run(tmp_path / "run", schedule__epochs="1")) == 0
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    capsys.readouterr()
    assert eval_program.main([str(tmp_path / "run"), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["model"]["top1"], found["ema"]["top1"]) == (row["val_top1"], row["ema_top1"])


def test_two_gpus_train_as_one(
    cuda, train_program, repository, small_run, tmp_path, record_property
):
    """Within rounding, as they sum gradients in another order."""
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    one, two = tmp_path / "one", tmp_path / "two"
    assert train_program.main(small_run(one, schedule__epochs="1")) == 0
    subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            str(repository / "train.py"),
            *small_run(two, schedule__epochs="1"),
        ],
        check=True,
    )
    record_property("weights apart", apart(two, one, ".model"))
    assert apart(two, one, ".model") < 1e-3


def copies_and_overlap(events: list[dict[str, Any]]) -> tuple[set[str], float, float]:
    """Of a trace in Chrome's format: the kinds of copies to the device, µs of copies and kernels,
    and µs of these in which more than one stream of the GPU has work."""
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kinds = {event["name"] for event in work if "HtoD" in event["name"]}
    changes = sorted(
        (time, change, event["args"]["stream"])
        for event in work
        for time, change in ((event["ts"], 1), (event["ts"] + event["dur"], -1))
    )
    running: dict[int, int] = {}
    busy = both = last = 0.0
    for time, change, stream in changes:
        streams = sum(count > 0 for count in running.values())
        busy, both, last = (
            busy + (time - last) * (streams > 0),
            both + (time - last) * (streams > 1),
            time,
        )
        running[stream] = running.get(stream, 0) + change
    return kinds, busy, both


# A model that keeps a GPU busy, and images enough.
PROFILED = (
    "schedule.epochs=1",
    "schedule.warmup_epochs=0",
    "data.on_device_gib=0",
    "data.workers=4",
    "rand_augment.layers=2",
    "model.options.embed_dim=768",
    "model.options.num_heads=12",
    "model.options.depth=16",
    "optim.global_batch=100",
    "optim.max_batch_per_process=100",
    "mix.group=100",
    "data.images_per_class=40",
    "engine.amp=off",
    "engine.tf32=false",
)


def test_the_run_that_is_profiled_has_images_enough():
    """On a CPU, too, where the next check is skipped, so that it cannot rot unseen."""
    _, training_set, _ = open_sets(load_recipe("quickstart", overrides(sets=PROFILED)))
    assert len(training_set) >= 3 * 100


def test_copies_are_pinned_and_batches_are_prepared_beside_training(
    cuda, train_program, tmp_path, record_property, monkeypatch
):
    """By torch's profiler, with images from loader processes, and a model that keeps a GPU busy for
    longer than its launches and its images take: 4 TFLOP per 100 images, in float32 without TF32.
    """
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    )
    train_epochs = vitinit.run.train_epochs

    def profiled(*given) -> None:  # without what is copied before: the model
        with profiler:
            train_epochs(*given)

    monkeypatch.setattr("vitinit.run.train_epochs", profiled)
    assert (
        train_program.main(
            [
                "--recipe",
                "quickstart",
                "--init",
                "default",
                "--out-dir",
                str(tmp_path / "run"),
                *(word for text in PROFILED for word in ("--set", text)),
            ]
        )
        == 0
    )
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_bytes())
    kinds, busy, both = copies_and_overlap(trace["traceEvents"])
    record_property("copies", " ".join(sorted(kinds)))
    record_property("µs busy, in two streams", f"{busy:.0f} {both:.0f}")
    assert kinds and all("Pinned" in kind for kind in kinds) and both > 0, f"{busy:.0f} µs busy"
