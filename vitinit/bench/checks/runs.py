"""Checks of whole runs: train.py and eval.py are started in processes, as a user starts them."""

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
# The small run uses every feature with state that a resume could lose. eps is large because some
# gradients, such as those of keys' biases, are zero but for rounding, which AdamW would blow up.
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
# Without these settings a GPU may sum in another order in every run, so that rounding differs.
DETERMINISTIC = ("import runpy, sys, torch\n"
                 "torch.use_deterministic_algorithms(True, warn_only=True)\n"
                 "sys.argv = sys.argv[1:]\n"
                 "runpy.run_path(sys.argv[0], run_name='__main__')")
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def start(*words: object, launcher: tuple[str, ...] = ("-c", DETERMINISTIC)) -> subprocess.Popen:
    """Start a program of this repository. Its standard output is a pipe; errors go to the log.

    words: the program and its arguments. launcher: arguments of Python before them. Raises Skipped
    if the package was installed without the programs.
    """
    if not (REPOSITORY / "train.py").is_file():
        raise Skipped("needs train.py and eval.py, the repository around vitinit/")
    return subprocess.Popen([sys.executable, *launcher, *map(str, words)], cwd=REPOSITORY, text=True,
                            stdout=subprocess.PIPE, env=os.environ | ENVIRONMENT)


def finished(*words: object, status: int = 0, **options: Any) -> str:
    """Run a program to its end and return what it printed.

    Raises AssertionError if its exit status is another than `status`.
    """
    process = start(*words, **options)
    output, _ = process.communicate()
    print(output, flush=True)
    assert process.returncode == status, \
        f"{words[0]} ended with {process.returncode}, not {status}: {output.strip()[-200:]}"
    return output


def small_run(data: Path, folder: Path, **changes: str) -> list[str]:
    """Arguments of train.py for a run that takes seconds.

    changes: recipe keys to override, with "__" in place of the dot.
    """
    values = SMALL | {name.replace("__", "."): value for name, value in changes.items()}
    return ["train.py", "--recipe", "quickstart", "--init", "mimetic", "--data-dir", str(data),
            "--out-dir", str(folder),
            *(word for name, value in values.items() for word in ("--set", f"{name}={value}"))]


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a nested checkpoint with its path, such as ".model.head.weight"."""
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
    found, expected = (dict(tensors_in(load(folder / "last.pt"))) for folder in (one, other))
    assert found.keys() == expected.keys() and found
    return max(float((found[name].double() - tensor.double()).norm()
                     / (tensor.double().norm() + 1e-12)) for name, tensor in expected.items())


def last_line(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


# ---------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------


def resume(conditions: Conditions) -> list[Row]:
    """A run stopped by SIGTERM in an epoch and resumed equals an uninterrupted one; eval.py agrees.

    With deterministic algorithms the last checkpoints (weights, moments, moving average) have to be
    equal to the bit. If two uninterrupted runs differ already on this device, the resumed run may
    differ by up to ten times as much.
    """
    data = draw_classes(conditions.scratch / "images", train=60, val=20, side=24)
    whole, stopped = conditions.scratch / "whole", conditions.scratch / "stopped"
    finished(*small_run(data, whole))

    process = start(*small_run(data, stopped))
    previous = time.monotonic()                      # when the previous line was printed
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.startswith("epoch") and f"{STOPPED_AFTER}/{EPOCHS}" in line:
            time.sleep((time.monotonic() - previous) / 2)    # half an epoch
            process.send_signal(signal.SIGTERM)
            break
        previous = time.monotonic()
    output, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, \
        f"stopped by SIGTERM it ended with {process.returncode}: {output.strip()[-200:]}"
    epochs = last_line(stopped)["epoch"]
    assert epochs < EPOCHS, "it had finished before the signal came"
    step = load(stopped / "last.pt")["progress"]["step"]
    finished("train.py", "--resume", stopped)

    row: Row = {"stopped after step": step, "apart": apart(stopped, whole)}
    if row["apart"] > 0:
        again = conditions.scratch / "again"
        finished(*small_run(data, again))
        row["two whole runs apart"] = apart(again, whole)
        assert row["apart"] <= 10 * row["two whole runs apart"], row
    assert last_line(stopped)["epoch"] == EPOCHS
    evaluated = json.loads(finished("eval.py", whole).splitlines()[-1])
    trained = last_line(whole)
    assert evaluated["model"]["top1"] == trained["val_top1"] and evaluated["ema"]["top1"] == \
        trained["ema_top1"], (evaluated, trained)
    return [row]


def two_processes(conditions: Conditions) -> list[Row]:
    """Two processes, on two GPUs or on the CPU, train the same model as one, within rounding.

    They sum gradients in another order. After one epoch the relative distance of every tensor of
    weights has to be less than 1e-3.
    """
    if conditions.on_gpu and torch.cuda.device_count() < 2:
        raise Skipped("there is one GPU")
    data = draw_classes(conditions.scratch / "images", train=60, val=20, side=24)
    one, two = conditions.scratch / "one", conditions.scratch / "two"
    finished(*small_run(data, one, schedule__epochs="1", schedule__warmup_epochs="0"))
    finished(*small_run(data, two, schedule__epochs="1", schedule__warmup_epochs="0"),
             launcher=("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"))
    found, expected = (load(folder / "last.pt")["model"] for folder in (two, one))
    distance = max(float((found[name] - value).norm() / (value.norm() + 1e-12))
                   for name, value in expected.items())
    assert distance < 1e-3, f"weights {distance:.2g} apart"
    return [{"weights apart": distance}]


def quickstart(conditions: Conditions) -> list[Row]:
    """The README's first run, recipe quickstart with impulse initialisation: top-1 and seconds.

    Raises AssertionError for a top-1 of 70 % or less, which is far below what its seeds reach.
    """
    folder = conditions.scratch / "quickstart"
    began = time.perf_counter()
    finished("train.py", "--recipe", "quickstart", "--init", "impulse", "--out-dir", folder,
             launcher=())
    seconds = time.perf_counter() - began
    row = last_line(folder)
    assert row["val_top1"] > 70, f"top-1 {row['val_top1']} %, where seeds 0 to 2 gave 82.4 to 85.5"
    return [{"epochs": row["epoch"], "top-1 %": row["val_top1"], "EMA top-1 %": row["ema_top1"],
             "images/s in the last epoch": row["images_per_second"], "seconds in all": seconds}]
