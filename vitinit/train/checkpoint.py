"""Checkpoints: plain tensors and containers, written whole or not at all."""

from __future__ import annotations

import argparse
import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..messages import OneLineError, in_brief

PREFIXES = ("module.", "_orig_mod.")    # what DistributedDataParallel and torch.compile put in front


class CheckpointError(OneLineError):
    """What is wrong with a checkpoint or run folder, in one line."""


class NoCheckpoint(CheckpointError):
    """There is no such file."""


class Damaged(CheckpointError):
    """The file is no checkpoint, or not the one any more that was written."""


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


def save_atomically(state: Mapping[str, Any], path: Path, *, keep: Path | None = None) -> None:
    """Write `state` to `path`; whatever happens meanwhile, `path` is the old file or the new one.

    keep: where the old file goes. For a moment there is only that one, then. Raises CheckpointError
    if it cannot be written; nothing has changed then.
    """
    with written_atomically(path, keep) as file:
        torch.save(dict(state), file)


def write_text_atomically(text: str, path: Path) -> None:
    """The same for a small text file."""
    with written_atomically(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


@contextmanager
def written_atomically(path: Path, keep: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write to, which becomes `path` once it is written and on disk, or not at all.

    keep: where the old file goes. Raises CheckpointError if it cannot be written.
    """
    temporary = path.with_name(path.name + ".partial")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            os.replace(path, keep)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        # torch's writer says of a full disk only that its position is not what it expected.
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(error, Exception) and isinstance(cause, OSError):
            raise CheckpointError(f"{path}: cannot be written: {cause.strerror or cause}") from None
        raise


def _sync_folder(folder: Path) -> None:
    """A rename is safe only once the folder that records it is on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


def load(path: Path, *, mmap: bool = False, verify: bool = True) -> dict[str, Any]:
    """A checkpoint's containers, tensors on the CPU; raises CheckpointError naming the file.

    Files are read with weights_only=True: nothing in them is executed. Official DeiT checkpoints
    also hold the argparse.Namespace that made them, which is allowed. A .safetensors file counts
    as a bare state dict. mmap: leave the tensors on disk until they are used. verify: see `verify`;
    it reads the whole file.
    """
    try:
        if path.suffix == ".safetensors":
            try:
                from safetensors.torch import load_file
            except ImportError:
                raise CheckpointError(f"{path}: reading it needs the extra 'safetensors': "
                                      "pip install 'vitinit[safetensors]'") from None
            return load_file(path)
        archive = zipfile.is_zipfile(path)           # else of torch < 1.6, which cannot be mapped
        if archive and verify:
            require_checksums(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and archive)
        _require_plain_tensors(state, path)
    except FileNotFoundError:
        raise NoCheckpoint(f"{path}: no such checkpoint") from None
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:                       # zip, pickle and torch errors of many kinds
        raise Damaged(f"{path}: not a readable checkpoint ({_reason(error, path)})") from None
    if not isinstance(state, dict):
        raise Damaged(f"{path}: holds a {type(state).__name__}, expected a dictionary")
    return state


def require_checksums(path: Path) -> None:
    """Damaged if a byte of torch's zip archive changed after it was written.

    torch.save writes a CRC-32 of every tensor and torch.load reads none of them.
    """
    with zipfile.ZipFile(path) as archive:
        broken = archive.testzip()
    if broken is not None:
        raise Damaged(f"{path}: damaged after it was written, the checksum of {broken} in it is "
                      "wrong")


def _require_plain_tensors(state: Any, path: Path) -> None:
    """Damaged if a tensor in these containers has no values in memory, one by one."""
    if isinstance(state, Tensor):
        if state.layout != torch.strided or state.device.type != "cpu" or state.is_quantized:
            raise Damaged(f"{path}: holds a tensor that is {str(state.layout).split('.')[-1]} on "
                          f"{state.device}, expected dense ones")
    elif isinstance(state, Mapping):
        for value in state.values():
            _require_plain_tensors(value, path)
    elif isinstance(state, (list, tuple)):
        for value in state:
            _require_plain_tensors(value, path)


def _reason(error: Exception, path: Path) -> str:
    """Why torch cannot read a file, without its advice on how to read it unsafely."""
    wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
    if wanted:
        return f"it asks for {wanted[1]}, and only tensors and plain values are read"
    if path.stat().st_size == 0:
        return "empty file"
    if "zip archive" in str(error) or isinstance(error, zipfile.BadZipFile):
        return "a damaged archive, or one cut short"
    if isinstance(error, (pickle.UnpicklingError, EOFError)):
        return "no pickle of tensors and plain values"
    return in_brief(error)


def model_state(state: Mapping[str, Any], path: Path, name: str = "model") -> dict[str, Tensor]:
    """The model's tensors in a checkpoint, names cleaned of wrappers' prefixes.

    name: "model", or "ema", which DeiT and timm call "model_ema". A checkpoint with none of these
    keys counts as a bare state dict, a model's. Raises CheckpointError if it has no such part.
    """
    if name == "ema":
        tensors = state.get("ema", state.get("model_ema")) or {}         # None: a run without one
        tensors = tensors.get("model", tensors) if isinstance(tensors, Mapping) else {}
    else:
        tensors = state.get("model", state)
    if not isinstance(tensors, Mapping) or not tensors or not all(
            isinstance(key, str) and isinstance(value, Tensor) for key, value in tensors.items()):
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


def require_finite(tensors: Mapping[str, Tensor], what: str, path: Path) -> None:
    """CheckpointError that names the first tensor with an infinity or a NaN in it."""
    for name, value in tensors.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise CheckpointError(f"{path}: {what} '{name}' is not finite, the run diverged before "
                                  "it was written")


def shortened(names: list[str], limit: int = 5) -> str:
    """Names in one line, the first few of many."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
