"""Checkpoints: files of plain tensors and containers, written completely or not at all."""

from __future__ import annotations

import argparse
import os
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..messages import OneLineError, in_brief

PREFIXES = re.compile(r"^((module|_orig_mod)\.)+")    # DistributedDataParallel's, torch.compile's


class CheckpointError(OneLineError):
    """Something is wrong with a checkpoint or a run folder; the message is one line."""


class NoCheckpoint(CheckpointError):
    """The file does not exist."""


class Damaged(CheckpointError):
    """The file is not a checkpoint, or it changed after it was written."""


# Writing --------------------------------------------------------------------------------------


def save_atomically(state: Mapping[str, Any], path: Path, *, keep: Path | None = None) -> None:
    """Write `state` to `path`, and keep the old file at `keep`, as `written_atomically` does."""
    with written_atomically(path, keep=keep) as file:
        torch.save(dict(state), file)


def write_text_atomically(text: str, path: Path) -> None:
    """Write a text file as UTF-8, in the same way as `save_atomically`."""
    with written_atomically(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


@contextmanager
def written_atomically(path: Path, *, keep: Path | None = None) -> Iterator[BinaryIO]:
    """A context that yields a file beside `path`; at the end it is on disk and takes its place.

    At every moment there is an old or a new file at `path`, also after a power failure. Of a
    symbolic link, the target is replaced. A pipe, a terminal and /dev/null are written to, not
    replaced. keep: a path at which the old file is kept. Raises CheckpointError, which names
    `path`, if it cannot be written.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f"{target.name}.partial")   # a resumed run removes one
    replaces = os.path.isfile(path) or not os.path.exists(path)
    try:                                             # /dev/stdout may be a pipe, which has no name
        with open(temporary if replaces else path, "wb") as file:
            yield file
            file.flush()
            if replaces:
                os.fsync(file.fileno())
        if replaces:
            if keep is not None and target.exists():
                _keep(target, keep)
            os.replace(temporary, target)
            sync_folder(target.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        # On a full disk torch's writer raises a RuntimeError, in the context of the system's error.
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(error, Exception) and isinstance(cause, OSError):
            raise CheckpointError(f"{path}: cannot be written: {cause.strerror or cause}") from None
        raise


def _keep(path: Path, keep: Path) -> None:
    """Make the file at `path` that at `keep` as well; `path` is never absent."""
    link = keep.with_name(f"{keep.name}.partial")
    with suppress(OSError):
        link.unlink()                                # of a process that was killed here
    try:
        os.link(path, link)
    except OSError:                                  # a file system without hard links
        shutil.copyfile(path, link)
    os.replace(link, keep)
    with suppress(OSError):                          # if both were one file, replacing did nothing
        link.unlink()


def sync_folder(folder: Path) -> None:
    """Flush the folder to disk, if it can be: only then a rename in it survives a power failure."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# Reading --------------------------------------------------------------------------------------


def load(path: Path, *, mmap: bool = False, verify: bool = True) -> dict[str, Any]:
    """Read a checkpoint into plain containers, with its tensors on the CPU.

    Files are read with weights_only=True, so that nothing in them is executed. One class beyond
    torch's own list is allowed: argparse.Namespace, which official DeiT checkpoints contain. A
    .safetensors file is read as a bare state dict.

    mmap: leave the tensors on disk until they are used. verify: check the file's checksums first,
    which reads the whole file: torch.save stores them, and torch.load does not check them.

    Raises CheckpointError, which names the file: NoCheckpoint if it does not exist, Damaged if it
    is not a readable checkpoint.
    """
    try:
        if path.suffix == ".safetensors":
            try:
                from safetensors.torch import load_file
            except ImportError:
                raise CheckpointError(f"{path}: reading it needs the extra 'safetensors': "
                                      "pip install 'vitinit[safetensors]'") from None
            return load_file(path)
        archive = zipfile.is_zipfile(path)           # not so for torch < 1.6: it cannot be mapped
        if archive and verify:
            with zipfile.ZipFile(path) as zipped:
                if broken := zipped.testzip():
                    raise Damaged(f"{path}: damaged after it was written, the checksum of {broken} "
                                  "in it is wrong")
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            warnings.simplefilter("ignore")          # of a file that is refused, an error says more
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and archive)
    except FileNotFoundError:
        raise NoCheckpoint(f"{path}: no such checkpoint") from None
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:                       # zip, pickle and torch errors of many kinds
        raise Damaged(f"{path}: not a readable checkpoint ({_reason(error)})") from None
    if not isinstance(state, dict):
        raise Damaged(f"{path}: holds a {type(state).__name__}, expected a dictionary")
    return state


def _reason(error: Exception) -> str:
    """Why torch cannot read a file, without torch's advice on how to read it unsafely."""
    if wanted := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return f"it asks for {wanted[1]}, and only tensors and plain values are read"
    if "zip archive" in str(error) or isinstance(error, zipfile.BadZipFile):
        return "a damaged archive, or one cut short"
    if isinstance(error, (pickle.UnpicklingError, EOFError)):
        return "no pickle of tensors and plain values"
    return in_brief(error)


def model_state(state: Mapping[str, Any], path: Path, name: str = "model") -> dict[str, Tensor]:
    """The tensors of one model in a checkpoint, without the prefixes that wrappers add to names.

    name: "model", which timm's trainer stores as "state_dict"; or "ema" for the moving average,
    which DeiT stores as "model_ema" and timm as "state_dict_ema". Without any of these keys it is
    taken for a bare state dict. Raises CheckpointError, which names `path`, if there is none.
    """
    if name == "ema":
        keys = ("ema", "model_ema", "state_dict_ema")
        tensors = next((state[key] for key in keys if state.get(key)), {})
        tensors = tensors.get("model", tensors) if isinstance(tensors, Mapping) else {}
    else:
        tensors = state.get("model", state.get("state_dict", state))
    if not isinstance(tensors, Mapping) or not tensors or not all(
            isinstance(key, str) and isinstance(value, Tensor) for key, value in tensors.items()):
        raise CheckpointError(f"{path}: no model in it; expected a state dict under the key "
                              f"'{name}'" + (", or a bare one" if name == "model" else ""))
    return {PREFIXES.sub("", key): value for key, value in tensors.items()}


def require_finite(tensors: Mapping[str, Tensor], what: str, path: Path) -> None:
    """Raise CheckpointError for the first tensor of a `what` that has an infinity or a NaN."""
    for name, value in tensors.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise CheckpointError(f"{path}: {what} '{name}' is not finite, the run diverged before "
                                  "it was written")


def shortened(names: list[str], limit: int = 5) -> str:
    """The names in one line, separated by commas; of more than `limit` only the first ones."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
