"""What a run leaves, and whether it is what another run left, to the bit but for times."""

from __future__ import annotations

import json
from pathlib import Path

import torch

TIMES = ("seconds", "images_per_second", "waiting_seconds", "waiting", "tflops_per_device",
         "peak_memory_gib")


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
