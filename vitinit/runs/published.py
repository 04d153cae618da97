"""DeiT's published weights by name, for init.checkpoint: fetched once, kept by torch.hub."""

from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

import torch

from ..messages import in_brief, say
from ..train.checkpoint import CheckpointError

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
        torch.hub.download_url_to_file(address, str(file), hash_prefix=digest, progress=False)
    except (OSError, RuntimeError, ValueError, HTTPException) as error:
        reason = in_brief(getattr(error, "reason", error))
        raise CheckpointError(f"{address}: cannot be fetched ({reason}); put the file at {file}, "
                              "or name its path by --set init.checkpoint=…") from None
