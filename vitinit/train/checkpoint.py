"""Checkpoints: plain tensors and containers, written whole or not at all."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..messages import OneLineError

PREFIXES = ("module.", "_orig_mod.")    # what DistributedDataParallel and torch.compile put in front


class CheckpointError(OneLineError):
    """What is wrong with a checkpoint or run folder, in one line."""


def save_atomically(state: Mapping[str, Any], path: Path) -> None:
    """Write `state` to `path`; whatever happens meanwhile, `path` is the old file or the new one."""
    with _replacement(path) as file:
        torch.save(dict(state), file)


def write_text_atomically(text: str, path: Path) -> None:
    """The same for a small text file."""
    with _replacement(path) as file:
        file.write(text.encode("utf-8"))


@contextmanager
def _replacement(path: Path) -> Iterator[BinaryIO]:
    """A temporary file that becomes `path` once it is written and on disk."""
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """A rename is safe only once the folder that records it is on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """A checkpoint's containers, tensors on the CPU; raises CheckpointError naming the file.

    Files are read with weights_only=True: nothing in them is executed. Official DeiT checkpoints
    also hold the argparse.Namespace that made them, which is allowed. A .safetensors file counts
    as a bare state dict. mmap: leave the tensors on disk until they are used, where a few plain
    values are all that is wanted.
    """
    try:
        if path.suffix == ".safetensors":
            try:
                from safetensors.torch import load_file
            except ImportError:
                raise CheckpointError(f"{path}: reading it needs the extra 'safetensors': "
                                      "pip install 'vitinit[safetensors]'") from None
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such checkpoint") from None
    except CheckpointError:
        raise
    except Exception as error:                       # zip, pickle and I/O errors of many kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "empty file"
        raise CheckpointError(f"{path}: not a readable checkpoint ({reason[:160]})") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds a {type(state).__name__}, expected a dictionary")
    return state


def model_state(state: Mapping[str, Any], path: Path, name: str = "model") -> dict[str, Tensor]:
    """The model's tensors in a checkpoint, names cleaned of wrappers' prefixes.

    name: "model", or "ema", which DeiT and timm call "model_ema". A checkpoint with none of these
    keys counts as a bare state dict, a model's. Raises CheckpointError if it has no such part.
    """
    if name == "ema":
        tensors = state.get("ema", state.get("model_ema")) or {}         # None: a run without one
        tensors = tensors.get("model", tensors)
    else:
        tensors = state.get("model", state)
    if not tensors or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise CheckpointError(f"{path}: no model in it; expected a state dict under the key "
                              f"'{name}'" + (", or a bare one" if name == "model" else ""))
    return {_without_prefixes(key): value for key, value in tensors.items()}


def _without_prefixes(name: str) -> str:
    while name.startswith(PREFIXES):
        name = name.partition(".")[2]
    return name


def load_model(model: torch.nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy `tensors` into `model`, all or nothing; the error lists what fits on neither side."""
    own = model.state_dict()
    missing = sorted(own.keys() - tensors.keys())
    surplus = sorted(tensors.keys() - own.keys())
    shapes = [f"{name} {tuple(tensors[name].shape)} where the model has {tuple(own[name].shape)}"
              for name in own if name in tensors and tensors[name].shape != own[name].shape]
    problems = [f"{title}: {shortened(names)}" for title, names in
                (("missing", missing), ("surplus", surplus), ("other shape", shapes)) if names]
    if problems:
        raise CheckpointError(f"{path}: does not fit the model; {'; '.join(problems)}")
    model.load_state_dict(dict(tensors))


def shortened(names: list[str], limit: int = 5) -> str:
    """Names in one line, the first few of many."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
