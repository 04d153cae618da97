"""Whole runs of train.py and eval.py in processes of their own, as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...train.checkpoint import load
from ..drawn import draw_classes
from ..item import Conditions, Row, Skipped

REPOSITORY = Path(__file__).resolve().parents[3]
EPOCHS, STOPPED_AFTER = 12, 3
# Everything is on that could go wrong on resume. eps is large, so that AdamW does not make a step of
# what is rounding in a gradient that is zero, such as that of a key's bias.
SMALL = {
    "data.name": "image_folder", "data.num_classes": "3", "data.image_size": "16",
    "data.workers": "2", "eval.batch_size": "7", "optim.global_batch": "12",
    "optim.max_batch_per_process": "6", "optim.base_lr": "1e-3", "optim.eps": "1e-4",
    "optim.clip_norm": "1.0", "ema.decay": "0.99", "ema.warmup": "true",
    "schedule.epochs": str(EPOCHS), "model.options.embed_dim": "24", "model.options.depth": "2",
    "model.options.drop_path": "0.3", "augment.repeats": "2", "augment.crop_scale": "[0.3, 1.0]",
    "augment.crop_ratio": "[0.75, 1.25]", "augment.crop_padding": "0",
    "augment.erase_probability": "0.5", "rand_augment.layers": "2", "mix.group": "4",
    "mix.mixup_alpha": "0.8", "mix.cutmix_alpha": "1.0", "engine.tf32": "false",
}
# Without these two a GPU's matrix products and sums may be ordered anew in every run.
DETERMINISTIC = ("import runpy, sys, torch\n"
                 "torch.use_deterministic_algorithms(True, warn_only=True)\n"
                 "sys.argv = sys.argv[1:]\n"
                 "runpy.run_path(sys.argv[0], run_name='__main__')")
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def start(*words: object, launcher: tuple[str, ...] = ("-c", DETERMINISTIC)) -> subprocess.Popen:
    """A program of this repository; what it prints can be read, errors go to the log."""
    return subprocess.Popen([sys.executable, *launcher, *map(str, words)], cwd=REPOSITORY, text=True,
                            stdout=subprocess.PIPE, env=os.environ | ENVIRONMENT)


def finished(*words: object, status: int = 0, **options: Any) -> str:
    """What it printed, once it has ended with this status."""
    process = start(*words, **options)
    said, _ = process.communicate()
    print(said, flush=True)
    assert process.returncode == status, \
        f"{words[0]} ended with {process.returncode}, not {status}: {said.strip()[-200:]}"
    return said


def small_run(data: Path, folder: Path, **changes: str) -> list[str]:
    """Arguments of train.py for a run of seconds."""
    values = SMALL | {name.replace("__", "."): value for name, value in changes.items()}
    return ["train.py", "--recipe", "quickstart", "--init", "mimetic", "--data-dir", str(data),
            "--out-dir", str(folder),
            *(word for name, value in values.items() for word in ("--set", f"{name}={value}"))]


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a checkpoint, by where it stands."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from tensors_in(inner, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from tensors_in(inner, f"{name}.{number}")


def apart(one: Path, other: Path) -> float:
    """The largest relative distance between tensors of two runs' last checkpoints: 0 if equal."""
    ours, theirs = (dict(tensors_in(load(folder / "last.pt"))) for folder in (one, other))
    assert ours.keys() == theirs.keys() and ours
    return max(float((ours[name].double() - tensor.double()).norm()
                     / (tensor.double().norm() + 1e-12)) for name, tensor in theirs.items())


def last_line(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


# ---------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------


def resume(conditions: Conditions) -> list[Row]:
    """A run that is stopped by SIGTERM in an epoch and resumed = one that never was; eval.py agrees.

    To the bit (weights, moments, moving average) with deterministic algorithms. Where two whole runs
    differ already, no further apart than ten times that.
    """
    data = draw_classes(conditions.scratch / "images", train=60, val=20, side=24)
    whole, broken = conditions.scratch / "whole", conditions.scratch / "broken"
    finished(*small_run(data, whole))

    process = start(*small_run(data, broken))
    seen = time.monotonic()
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.startswith("epoch") and f"{STOPPED_AFTER}/{EPOCHS}" in line:
            time.sleep((time.monotonic() - seen) / 2)    # amid the next epoch
            process.send_signal(signal.SIGTERM)
            break
        seen = time.monotonic()
    said, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, \
        f"stopped by SIGTERM it ended with {process.returncode}: {said.strip()[-200:]}"
    epochs = last_line(broken)["epoch"]
    assert epochs < EPOCHS, "it had finished before the signal came"
    step = load(broken / "last.pt")["progress"]["step"]
    finished("train.py", "--resume", broken)

    row: Row = {"stopped after step": step, "apart": apart(broken, whole)}
    if row["apart"] > 0:
        again = conditions.scratch / "again"
        finished(*small_run(data, again))
        row["two whole runs apart"] = apart(again, whole)
        assert row["apart"] <= 10 * row["two whole runs apart"], row
    assert last_line(broken)["epoch"] == EPOCHS
    said = json.loads(finished("eval.py", whole).splitlines()[-1])
    measured = last_line(whole)
    assert said["model"]["top1"] == measured["val_top1"] and said["ema"]["top1"] == \
        measured["ema_top1"], (said, measured)
    return [row]


def two_processes(conditions: Conditions) -> list[Row]:
    """Two processes, on two GPUs or on the CPU, make the run that one makes, within rounding.

    Their gradients are sums in another order: after an epoch weights are within 1e-3 of their norm.
    """
    if conditions.on_gpu and torch.cuda.device_count() < 2:
        raise Skipped("there is one GPU")
    data = draw_classes(conditions.scratch / "images", train=60, val=20, side=24)
    one, two = conditions.scratch / "one", conditions.scratch / "two"
    finished(*small_run(data, one, schedule__epochs="1", schedule__warmup_epochs="0"))
    finished(*small_run(data, two, schedule__epochs="1", schedule__warmup_epochs="0"),
             launcher=("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"))
    ours, theirs = (load(folder / "last.pt")["model"] for folder in (two, one))
    distance = max(float((ours[name] - value).norm() / (value.norm() + 1e-12))
                   for name, value in theirs.items())
    assert distance < 1e-3, f"weights {distance:.2g} apart"
    return [{"weights apart": distance}]


def quickstart(conditions: Conditions) -> list[Row]:
    """The README's first run, quickstart with impulse initialisation: top-1 and seconds."""
    folder = conditions.scratch / "quickstart"
    began = time.perf_counter()
    finished("train.py", "--recipe", "quickstart", "--init", "impulse", "--out-dir", folder,
             launcher=())
    seconds = time.perf_counter() - began
    row = last_line(folder)
    assert row["val_top1"] > 70, f"top-1 {row['val_top1']} %, where seeds 0 to 2 gave 82.4 to 85.5"
    return [{"epochs": row["epoch"], "top-1 %": row["val_top1"], "EMA top-1 %": row["ema_top1"],
             "images/s in the last epoch": row["images_per_second"], "seconds in all": seconds}]
