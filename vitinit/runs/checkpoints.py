"""Reading checkpoints of any kind, by path or name; DeiT's are fetched once, kept by torch.hub."""

import json
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..base.files import parse_json
from ..base.messages import in_brief, say, warn
from ..base.values import Size, convert
from ..recipe.files import RECIPES
from ..train.checkpoint import CheckpointError, Damaged, NoCheckpoint, read_checkpoint_file
from ..train.interruption import raising_signals

BOXED = RECIPES / "trained"                          # models that come with the package, by name
# The weights in a folder that transformers or timm wrote.
FOREIGN_WEIGHTS = tuple(f"{name}{index}" for name in ("model.safetensors", "pytorch_model.bin")
                        for index in ("", ".index.json"))    # in one file, or in shards
ADDRESS = "https://dl.fbaipublicfiles.com/deit/"    # as DeiT's README has it


class Weights(NamedTuple):
    """A file at ADDRESS, whose name ends with the first digits of its SHA-256, and its model."""

    file: str
    model: str


PUBLISHED = {
    "deit_tiny": Weights("deit_tiny_patch16_224-a1311bcf.pth", "vit_tiny"),
    "deit_small": Weights("deit_small_patch16_224-cd65a155.pth", "vit_small"),
    "deit_base": Weights("deit_base_patch16_224-b5f2ef4d.pth", "vit_base"),
    "deit_base_384": Weights("deit_base_patch16_384-8de9b5d1.pth", "vit_base")}


def published(name: str) -> Weights | None:
    """The published weights of this name; None if there are none, or a path of this name exists."""
    return None if Path(name).exists() else PUBLISHED.get(name)


def kept_file(weights: Weights) -> Path:
    """Where torch.hub keeps these weights, whether or not they are there yet."""
    return Path(torch.hub.get_dir(), "checkpoints", weights.file)


def fetch(weights: Weights) -> None:
    """Fetch published weights into torch.hub's folder, unless they are there.

    Raises CheckpointError, and leaves no file, if that fails or the file has another hash.
    """
    file = kept_file(weights)
    if file.exists():
        return
    address, digest = ADDRESS + weights.file, file.stem.rpartition("-")[2]
    say(f"fetch   {address} → {file}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with raising_signals():                      # or the part that is there would stay
            torch.hub.download_url_to_file(address, str(file), hash_prefix=digest, progress=False)
    except (OSError, RuntimeError, ValueError, HTTPException) as error:
        reason = in_brief(getattr(error, "reason", error))
        raise CheckpointError(f"{address}: cannot be fetched ({reason}); put the file at {file}, "
                              "or name its path by --set init.checkpoint=…") from None


def by_name(path: Path) -> Path:
    """The path as it is, or, where nothing exists at a mere name, the model in recipes/trained, or
    the file of published weights; NoCheckpoint if that is not there.
    """
    if path.parent != Path(".") or path.exists():
        return path
    if weights := published(path.name):
        if not (file := kept_file(weights)).exists():
            raise NoCheckpoint(f"{path}: expected its weights at {file}, where training with "
                               f"init.checkpoint={path} puts them")
        return file
    return BOXED / path if (BOXED / path).is_dir() else path


def read_checkpoint(path: Path, *, mmap: bool = False, verify: bool = True
                    ) -> tuple[dict[str, Any], Path]:
    """The contents of a checkpoint, as `read_checkpoint_file` reads them, and their file.

    path: a checkpoint, or a run folder, which stands for its last.pt; if that is damaged or
    missing, previous.pt is read, with a warning. A folder that transformers or timm wrote stands
    for its weights; see `by_name` for a name at which nothing exists.
    """
    path = by_name(path)
    files, problems = [path], []
    if path.is_dir():
        files = [path / "last.pt", path / "previous.pt"]
        if not any(file.exists() for file in files):
            files = [path / name for name in FOREIGN_WEIGHTS if (path / name).exists()]
        if not files:
            raise NoCheckpoint(f"{path}: holds no checkpoint; expected last.pt or one of "
                               f"{', '.join(FOREIGN_WEIGHTS)}")
    for file in files:
        try:
            state = read_checkpoint_file(file, mmap=mmap, verify=verify)
        except (NoCheckpoint, Damaged) as error:
            problems.append(error)
            continue
        if problems:
            warn(f"{problems[0]}; going on with {file}")
        require_plain(state, file)
        return state, file
    if isinstance(problems[-1], NoCheckpoint):
        raise problems[0]
    raise CheckpointError("; and ".join(map(str, problems)))


def require_plain(state: dict[str, Any], file: Path) -> None:
    """Convert what a checkpoint says beside its tensors; CheckpointError for other types."""
    if isinstance(state.get("recipe"), dict):        # a checkpoint of ours
        try:                                         # the same limits as of a text
            state["recipe"] = parse_json(json.dumps(state["recipe"]).encode())
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{file}: its 'recipe' is no table of plain values "
                                  f"({in_brief(error)})") from None
    for key, kind, form in (("classes", tuple[str, ...], list), ("grid", Size, tuple)):
        if state.get(key) is not None:
            try:
                state[key] = form(convert(state[key], kind))
            except TypeError as error:
                raise CheckpointError(f"{file}: its '{key}' is {error}") from None
