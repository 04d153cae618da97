"""Checkpoints of any project are read: files of plain tensors and containers; no code is run."""

import hashlib
import json
import pickle
import re
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from shlex import join
from typing import Any

import torch
from torch import Tensor

from ..base.files import (
    CheckpointError,
    Damaged,
    FileError,
    NoCheckpoint,
    in_one_line,
    nested_deeply,
    parse_json,
    parse_toml,
    read_bytes,
)
from ..base.messages import in_brief, warn, without_warnings
from ..base.table import find
from ..base.values import Size, Table, convert
from ..train.state import fault

# What other projects write: who knows names of tensors, and the files beside them; and, by the end
# of a file's name, who reads it.
READERS = {
    "tensors": ".interop.weights.readers:Reader",
    ".npz": ".interop.weights.flax:read_npz",
}
# The weights in a folder that transformers or timm wrote.
FOREIGN_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",  # of shards
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Files that hold parts of tensors → the command that puts together what is spread over a folder.
DEEPSPEED = "python -m deepspeed.utils.zero_to_fp32"
SHARDED = {
    "*.distcp": "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} {path}.pt",
    "*/*_optim_states.pt": f"{DEEPSPEED} {{path}} {{path}}-whole",
    "*_optim_states.pt": f"{DEEPSPEED} {{path.parent}} {{path}}-whole --tag {{path.name}}",
}
# Where programs keep a model's state dict, and that of its moving average. Of several in one file
# the first counts: a target_encoder stands beside the encoder that it is the average of (I-JEPA).
CONTAINERS = (
    *("model", "state_dict", "model_state_dict", "module", "teacher"),
    *("target_encoder", "net", "params", "weights"),
)
AVERAGES = ("ema", "model_ema", "state_dict_ema")
# MoCo-v3 has two encoders and a predictor in one state dict. This is the one that it evaluates,
# without the projection that it was trained with.
BASE_ENCODER = re.compile(r"(module\.)?base_encoder\.(?!head\.)")
# What wrappers put before all names, or before all but those of a classifier beside the wrapped.
PREFIX = re.compile(r"(model|backbone|net|encoder|base_encoder|module|_orig_mod)\.")
CLASSIFIER = re.compile(r"(head|heads|head_dist|fc|(cls_|distillation_)?classifier)\.")
# A program: a file that holds state dicts among objects of classes, and the file to write them to.
ALONE = (
    "import sys, torch; _, old, new = sys.argv; "
    "tensors = lambda table: {k: v for k, v in table.items() if torch.is_tensor(v)}; "
    "state = torch.load(old, weights_only=False); "
    "tables = {k: tensors(v) for k, v in state.items() if hasattr(v, 'items')}; "
    "torch.save(tensors(state) | {k: v for k, v in tables.items() if v}, new)"
)
AS_CODE = "which may run code in what it reads: for what you trust alone"
# What other programs write beside weights: settings, paths, numpy's numbers. An `Unread` is made in
# its place, so that none of their code runs; numpy's, for one, trusts the bytes that it reads.
BESIDE = (
    "argparse.Namespace",
    "numpy.dtype",
    "numpy.ndarray",
    "numpy.core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy._core.multiarray._reconstruct",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib.PurePosixPath",
    "pathlib.PureWindowsPath",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
    "pathlib._local.PurePosixPath",
    "pathlib._local.PureWindowsPath",
)


def read_checkpoint_file(path: Path, *, mmap: bool = False, verify: bool = True) -> Table:
    """Read a checkpoint into plain containers, with its tensors on the CPU.

    Nothing in a file is executed; what is named in BESIDE, such as DeiT's argparse.Namespace, is
    not read. A .safetensors file, or the shards that a .index.json names, are a bare state dict, but
    for one that `vitinit export` wrote, whose metadata state a recipe and names of classes.
    Raises NoCheckpoint, Damaged or CheckpointError, which name the file.

    mmap: leave the tensors on disk until they are used. verify: check the file's checksums first,
    which reads the whole file: torch.save stores them, and torch.load does not check them.
    """
    if path.exists() and not path.is_file():  # a pipe may wait for ever
        raise CheckpointError(f"{path}: is a folder, a pipe or a device; expected a file")
    with in_one_line(path, "read"):
        try:
            state = _load(path, mmap=mmap, verify=verify)
        except ImportError:
            raise CheckpointError(
                f"{path}: reading it needs the extra 'safetensors': "
                "pip install 'vitinit[safetensors]'"
            ) from None
        except FileNotFoundError:
            raise NoCheckpoint(f"{path}: no such checkpoint") from None
        except (FileError, OSError):
            raise
        except Exception as error:  # zip, pickle and torch errors of many kinds
            raise Damaged(f"{path}: not a readable checkpoint ({_reason(error, path)})") from None
    if not isinstance(state, dict):
        raise Damaged(f"{path}: holds a {type(state).__name__}, expected a dictionary")
    if nested_deeply(state):
        raise Damaged(f"{path}: its tables are nested too deeply")
    return state


def _load(path: Path, *, mmap: bool, verify: bool) -> Any:
    """What `read_checkpoint_file` returns, or what else there is; errors of any kind."""
    if path.suffix == ".safetensors":
        from safetensors import safe_open
        from safetensors.torch import load_file

        with safe_open(path, "pt") as file:
            notes = file.metadata() or {}
        if notes.get("made_by", "").startswith("vitinit ") and "recipe" in notes:
            recipe, classes = parse_toml(notes["recipe"].encode()), json.loads(notes["classes"])
            return {"model": load_file(path), "recipe": recipe, "classes": classes}
        return load_file(path)
    if path.name.endswith(".index.json"):
        return _load_shards(path, mmap=mmap, verify=verify)
    # Torch before 1.6 wrote no archives; and torch maps no file whose name is not UTF-8.
    recorded = Counter[int]()  # how often the archive has a part of so many bytes
    is_archive = zipfile.is_zipfile(path)
    if is_archive:
        recorded = _require_sound(path, verify=verify)
    if path.suffix in READERS:
        return find(READERS[path.suffix])(path)
    mmap = mmap and is_archive and not re.search("[\ud800-\udfff]", str(path))
    asked = Counter[int]()  # the same of its pickle

    def on_cpu(storage: Any, place: str) -> Any:
        asked[storage.nbytes()] += 1
        return storage

    # Of a file that is refused, an error says more than warnings.
    with (
        without_warnings(),
        torch.serialization.safe_globals([(Unread, name) for name in BESIDE]),
    ):
        state = torch.load(path, map_location=on_cpu, weights_only=True, mmap=mmap)
    if mmap and any(asked - recorded):  # else torch has compared them; 0 bytes have no record
        raise Damaged(f"{path}: damaged, a tensor in it is shorter or longer than its shape says")
    return state


def _require_sound(path: Path, *, verify: bool) -> Counter[int]:
    """How often a part of an archive has so many bytes; Damaged if all would fill the memory, or,
    to `verify`, if a checksum is wrong.
    """
    with zipfile.ZipFile(path) as archive:
        sizes = [part.file_size for part in archive.infolist()]
        size = sum(sizes)
        if size > path.stat().st_size:  # compressed, which torch's never are
            raise Damaged(f"{path}: holds {size:,} bytes in a file of fewer")
        broken = archive.testzip() if verify else None
    if broken:
        raise Damaged(
            f"{path}: damaged after it was written, the checksum of {broken} in it is wrong"
        )
    return Counter(sizes)


def read_checkpoint(path: Path, *, mmap: bool = False, verify: bool = True) -> tuple[Table, Path]:
    """The contents of a checkpoint, as `read_checkpoint_file` reads them, and their file.

    path: a checkpoint, or a run folder, which stands for its last.pt; if that is damaged or
    missing, previous.pt is read, with a warning. A folder that transformers or timm wrote stands
    for its weights.
    """
    files = [path]
    if path.is_dir():
        files = [path / "last.pt", path / "previous.pt"]
        if not any(file.exists() for file in files):
            files = [path / name for name in FOREIGN_WEIGHTS if (path / name).exists()]
        if not files:
            _require_whole(path)
            raise NoCheckpoint(
                f"{path}: holds no checkpoint; expected last.pt or one of "
                f"{', '.join(FOREIGN_WEIGHTS)}"
            )
    problems = []
    for file in files:
        try:
            state = read_checkpoint_file(file, mmap=mmap, verify=verify)
        except (NoCheckpoint, Damaged) as error:
            problems.append(error)
            continue
        if problems:
            warn(f"{problems[0]}; going on with {file}")
        _make_plain(state, file)
        return state, file
    raise CheckpointError("; and ".join(map(str, problems)))


def _require_whole(folder: Path) -> None:
    """Raise CheckpointError for a folder over which a program has spread the parts of tensors."""
    for parts, command in SHARDED.items():
        if any(folder.glob(parts)):
            words = [word.format(path=folder) for word in command.split()]
            raise CheckpointError(
                f"{folder}: holds parts of tensors, which are not read here; whole ones are "
                f"written by {join(words)} ({AS_CODE})"
            )


def _make_plain(state: Table, file: Path) -> None:
    """Convert what a checkpoint says beside its tensors; CheckpointError for other types."""
    for key, kind, form in (
        ("recipe", Mapping[str, Any], _as_from_a_text),
        ("classes", tuple[str, ...], list),
        ("grid", Size, tuple),
    ):
        if state.get(key) is not None:
            try:
                state[key] = form(convert(state[key], kind))
            except (TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{file}: its '{key}' cannot be used ({in_brief(error)})"
                ) from None


def _as_from_a_text(table: Mapping[str, Any]) -> Any:
    """A table of plain values within the limits of a text; else TypeError or ValueError."""
    return parse_json(json.dumps(table).encode())


def _load_shards(index: Path, *, mmap: bool, verify: bool) -> Table:
    """The tensors that an index names, each from the file beside it that it names."""
    files = parse_json(read_bytes(index))["weight_map"]
    shards = {}
    for file in sorted({*files.values()}):
        if Path(file).name != file or file.endswith(".json"):
            raise Damaged(f"{index}: names {file}, expected a file of tensors in the same folder")
        shards[file] = read_checkpoint_file(index.with_name(file), mmap=mmap, verify=verify)
    for name, file in files.items():
        if name not in shards[file]:
            raise Damaged(f"{index}: names {name} in {file}, which does not hold it")
    return {name: shards[file][name] for name, file in files.items()}


class Unread:
    """Stands for a value in a checkpoint that is not read, whatever it is made from."""

    def __init__(self, *parts: Any) -> None:
        pass

    __setstate__ = __init__


def _reason(error: Exception, path: Path) -> str:
    """Why torch cannot read a file, and how its weights are had apart from what else it holds."""
    wanted = re.search(r"GLOBAL ([\w.]+)", str(error))
    if wanted:
        files = join(map(str, (path, path.with_suffix(".weights.pt"))))
        return (
            f"it asks for {wanted[1]}, and only tensors and plain values are read; its tensors "
            f'alone are written by python -c "{ALONE}" {files} ({AS_CODE})'
        )
    if "zip archive" in str(error) or isinstance(error, zipfile.BadZipFile):
        return "a damaged archive, or one cut short"
    if isinstance(error, (pickle.UnpicklingError, EOFError)):
        return "no pickle of tensors and plain values"
    return in_brief(error)


def stored_tensors(state: Table, path: Path, name: str) -> dict[str, Tensor]:
    """The tensors of the "model", or of its moving average "ema", as the checkpoint calls them.

    Without CONTAINERS it is taken for a bare state dict. Raises CheckpointError if there is none.
    """
    part = state
    if name == "ema":
        part = _table_in(state, AVERAGES, default={})
    for _ in CONTAINERS:  # one may contain another
        part = _table_in(part, CONTAINERS, default=part)
    # torch's AveragedModel counts in n_averaged.
    tensors = {key: value for key, value in part.items() if not str(key).endswith("n_averaged")}
    encoder = {key: value for key, value in tensors.items() if BASE_ENCODER.match(str(key))}
    tensors = encoder or tensors
    of_a_model = all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in tensors.items()
    )
    if not tensors or not of_a_model:
        or_bare = ", or a bare one" if name == "model" else ""
        raise CheckpointError(
            f"{path}: no model in it; expected a state dict under the key '{name}'{or_bare}"
        )
    return tensors


def _table_in(state: Table, keys: Iterable[str], *, default: Table) -> Table:
    """The first table under one of these keys."""
    return next((state[key] for key in keys if isinstance(state.get(key), Mapping)), default)


def model_state(state: Table, path: Path, name: str = "model") -> dict[str, Tensor]:
    """`stored_tensors` without a wrapper's prefix; raises for a tensor that cannot be a model's."""
    tensors = stored_tensors(state, path, name)
    for key, value in tensors.items():
        problem = fault(key, value)
        if problem:
            raise CheckpointError(
                f"{path}: {name} '{key}' is {problem}; expected a dense tensor "
                "of finite floating-point numbers of 16 to 64 bits"
            )
    return dict(zip(without_prefix(tensors)[1], tensors.values()))


def without_prefix(names: Iterable[str]) -> tuple[str, list[str]]:
    """The prefix before all names, or all but a classifier's, and the names without it.

    ["model.net.norm.bias", "model.head.bias"] → "model.net.", ["norm.bias", "head.bias"]
    """
    prefix, names = "", list(names)
    while True:
        others = [name for name in names if not CLASSIFIER.match(name)]
        match = PREFIX.match(others[0]) if others else None
        if match is None or not all(name.startswith(match[0]) for name in others):
            return prefix, names
        shorter = [name.removeprefix(match[0]) for name in names]
        if len({*shorter}) < len(names):  # two would become one
            return prefix, names
        prefix, names = prefix + match[0], shorter


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """A digest of names, types, shapes and values of tensors on the CPU."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        if value.ndim:
            digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        else:
            digest.update(str(value.item()).encode())
    return digest.hexdigest()[:16]
