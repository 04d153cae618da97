"""What a run leaves, and whether it is what another run left, to the bit but for times."""

import json
from pathlib import Path

import torch

TIMES = (
    "seconds",
    "images_per_second",
    "waiting_seconds",
    "waiting",
    "cpu_seconds",
    "tflops_per_device",
    "peak_memory_gib",
)

# Changes of quickstart for a run of three steps per epoch.
IN_SECONDS = {
    "data.images_per_class": 3,
    "model.options.depth": 1,
    "model.options.embed_dim": 24,
    "schedule.warmup_epochs": 0,
    "optim.global_batch": 13,
    "optim.max_batch_per_process": 13,
}

# Small models of the other families for `family_run`: recipe → model.options.
FAMILIES = {
    "cifar10_swin_tiny": dict(
        patch_size=2, embed_dim=12, depths=[2, 1], num_heads=[3, 3], window_size=2, drop_path=0.3
    ),
    "cifar10_mixer": dict(patch_size=4, embed_dim=12, depth=2, drop_path=0.3),
    "cifar10_convmixer": dict(patch_size=2, embed_dim=12, depth=2, kernel_size=3),
}


def family_run(recipe: str, images: Path, folder: Path, **changes: object) -> list[str]:
    """Arguments of train.py for a run of a small model of a recipe on `image_tree`."""
    sets = {
        "data.name": "image_folder",
        "data.num_classes": 3,
        "data.image_size": 8,
        "data.workers": 0,
        "optim.global_batch": 12,
        "optim.max_batch_per_process": 4,
        "schedule.epochs": 2,
        "schedule.warmup_epochs": 1,
        "engine.compile": "false",
        "engine.amp": "off",
        "optim.muon_dtype": "float32",
        "mix.group": 4,
        "mix.mixup_alpha": 0.8,
        "augment.erase_probability": 0.5,
        "ema.decay": 0.9,
    }
    sets |= {f"model.options.{key}": value for key, value in FAMILIES[recipe].items()}
    sets |= {key.replace("__", "."): value for key, value in changes.items()}
    return [
        "--recipe",
        recipe,
        "--init",
        "impulse",
        "--data-dir",
        str(images),
        "--out-dir",
        str(folder),
        *(word for key, value in sets.items() for word in ("--set", f"{key}={value}")),
    ]


def rows_of(folder: Path, name: str = "metrics") -> list[dict]:
    """The rows of metrics.jsonl, or of steps.jsonl; a run of fewer than ten steps has none."""
    file = folder / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def checkpoint(folder: Path, name: str = "last.pt") -> dict:
    return torch.load(folder / name, weights_only=True)


def assert_identical(first, second, where: str = "") -> None:
    """Nested containers and tensors are equal to the bit, but for entries that are times."""
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), where
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key in first.keys() - set(TIMES):
            assert_identical(first[key], second[key], f"{where}.{key}")
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second), where
        for index, pair in enumerate(zip(first, second)):
            assert_identical(*pair, f"{where}[{index}]")
    else:
        assert first == second, where


def assert_same_run(first: Path, second: Path) -> None:
    for part in (checkpoint, rows_of, lambda folder: rows_of(folder, "steps")):
        assert_identical(part(first), part(second))
