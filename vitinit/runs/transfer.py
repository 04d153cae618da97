"""Load a checkpoint into a model: exactly, or to fine-tune at another size or with new classes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isqrt, prod
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..base.files import CheckpointError
from ..base.messages import shortened
from ..models.layers import PREFIX_TOKENS

Grid = tuple[int, int]  # rows and columns of patches
Tensors = Mapping[str, Tensor]  # a state dict

# Tensors that no forward pass reads: the mask token and the decoder of masked pre-training (DINOv2,
# iBOT, MAE), DINO's projections, and buffers of older Swin checkpoints that follow from the sizes.
UNREAD = re.compile(
    r"^(mask_token$|decoder_|(dino_|ibot_)?head\.(mlp|last_layer)\.)"
    r"|\.(relative_position_index|attn_mask)$"
)


@dataclass(frozen=True)
class Transfer:
    """What `start_from` did with each tensor; `str` of it is a summary of one line."""

    loaded: list[str]  # names of tensors copied unchanged
    resized: list[str]  # such as "pos_embed 14×14 without cls_token → 24×24"
    dropped: list[str]  # in the checkpoint, but not used
    kept: list[str]  # in the model, and left as its init drew them

    def __str__(self) -> str:
        lists = [
            f"{title}: {shortened(names)}"
            for title, names in (("dropped", self.dropped), ("as the init drew them", self.kept))
            if names
        ]
        return "; ".join(
            [
                f"{len(self.loaded)} tensors loaded",
                *(f"{name} resized" for name in self.resized),
                *lists,
            ]
        )


@torch.no_grad()
def start_from(
    model: nn.Module,
    tensors: Tensors,
    path: Path | str,
    grid: Grid | None,
    rows: Sequence[int | None] | None = None,
) -> Transfer:
    """Copy those of `tensors` that fit into `model`, to fine-tune it.

    Position embeddings for another grid are resized with torch's antialiased bicubic interpolation,
    as in timm (DeiT's code does not antialias). The checkpoint and the model may differ in the
    tensors below. Such a tensor is dropped if only the checkpoint has it, and stays as its init
    drew it if only the model has it:

        the classifier (`head…`)            another number of classes, or none; see `rows`
        cls_token, dist_token, reg_token    any that only the model has; the first two also if only
                                            the checkpoint has them, and it has no fc_norm
        norm, fc_norm                       one in place of the other, if the classifier is new
        pos_embed                           if the model's is fixed
        tensors no forward pass reads       mask_token, decoder_…, Swin's indices and masks

    tensors: the checkpoint's state dict, under this package's names. path: what error messages
    name. grid: (rows, columns) of patches in the checkpoint; None: see `_grid_and_entries`. rows:
    for each class of the model the row of the checkpoint's classifiers that it takes, or None; None
    for all: their own, if there are as many.

    Raises CheckpointError, listing the names, and changes nothing, if nothing but the classifier
    fits, or if any other tensor has another shape or is on one side only.
    """
    target = model.state_dict()
    tensors, change = as_in(model, tensors, grid, path)
    heads = _classifiers(target, tensors, rows)
    new_head = not any(name.startswith("head.") for name in heads)
    loaded = {}
    dropped, surplus = list[str](), list[str]()
    for name, value in tensors.items():
        if name == "pos_embed" and name in target and not model.learns_positions:
            dropped.append("pos_embed (the model's are fixed)")
        elif name not in target:
            # With fc_norm the classifier read the patches alone, and the class token acted through
            # attention only: without it the function would change for a model that pools alike.
            may_lack = name in PREFIX_TOKENS[:2] and "fc_norm.weight" not in tensors
            may_lack |= bool(UNREAD.search(name)) or _may_differ(name, target, new_head)
            (dropped if may_lack else surplus).append(name)
        elif name.startswith("head") and name not in heads:
            dropped.append(f"{name} {tuple(value.shape)}")
        else:
            loaded[name] = heads.get(name, value)
    if all(name.startswith("head") for name in loaded):
        raise CheckpointError(
            f"{path}: none of its tensors fits the model; it holds {shortened(list(tensors))}"
        )
    kept = [name for name in target if name not in loaded]
    missing = [
        name
        for name in kept
        if not (
            name in PREFIX_TOKENS
            or name == "pos_embed"
            and not model.learns_positions
            or name.endswith("num_batches_tracked")
            or _may_differ(name, tensors, new_head)
        )
    ]
    _require_fit(target, path, missing=missing, surplus=surplus, loaded=loaded)
    model.load_state_dict(target | loaded)
    return Transfer(
        [name for name in loaded if not (change and name == "pos_embed")],
        [f"pos_embed {change}"] * bool(change),
        dropped,
        kept,
    )


@torch.no_grad()
def load_exactly(model: nn.Module, tensors: Tensors, path: Path) -> None:
    """Copy `tensors` into `model`, built for their image size, so that it is the trained function.

    Tokens without a position get one of zero. Raises CheckpointError, listing what does not fit.
    """
    target = model.state_dict()
    tensors, _ = as_in(model, tensors, getattr(model, "grid", None), path)
    tensors = {
        name: value for name, value in tensors.items() if name in target or not UNREAD.search(name)
    }
    missing = sorted(target.keys() - tensors.keys())
    surplus = sorted(tensors.keys() - target.keys())
    if missing and not surplus and missing == [n for n in sorted(target) if n.startswith("head")]:
        raise CheckpointError(
            f"{path}: holds no classifier ({shortened(missing)}), so that there "
            "is nothing to evaluate; init.checkpoint fine-tunes it"
        )
    _require_fit(target, path, missing=missing, surplus=surplus, loaded=tensors)
    model.load_state_dict(tensors)


def as_in(
    model: nn.Module, tensors: Tensors, grid: Grid | None, path: Path | str
) -> tuple[dict[str, Tensor], str]:
    """The checkpoint's tensors with the tokens and the positions of the model, and how these were
    resized, or "". Tokens that the model does not read become registers, if it has as many.

    The class token of a model that averages over the patches (fine-tuned MAE, timm's `avg` pooling)
    is read by attention alone, as registers are; likewise a distillation token without its head.
    """
    target, tensors, change = model.state_dict(), dict(tensors), ""
    unread = [name for name in PREFIX_TOKENS[:2] if name in tensors and name not in target]
    registers = [tensors[name] for name in (*unread, "reg_token") if name in tensors]
    shapes = {(*token.shape[:1], *token.shape[2:]) for token in registers}
    if (
        unread
        and "reg_token" in target
        and shapes == {target["reg_token"].shape[::2]}
        and (sum(token.shape[1] for token in registers) == target["reg_token"].shape[1])
    ):
        tensors["reg_token"] = torch.cat(registers, dim=1)
        for name in unread:
            del tensors[name]
    if (
        "pos_embed" in target.keys() & tensors.keys()
        and model.learns_positions
        and ((grid, tensors["pos_embed"].shape) != (model.grid, target["pos_embed"].shape))
    ):
        tensors["pos_embed"], change = _fit_pos_embed(
            target, tensors, cast(Grid, model.grid), grid, path
        )
    return tensors, change


def _fit_pos_embed(
    target: Tensors, tensors: Tensors, wanted: Grid, grid: Grid | None, path: Path | str
) -> tuple[Tensor, str]:
    """The checkpoint's position embeddings for the model's tokens, (1, N, D), and the words for
    `Transfer.resized`, or "" if they were not.

    target, wanted: the model's state dict and grid. Tokens before the patches to which the
    checkpoint adds no position get zeros; if it lacks such a token, the model's entry for it stays.
    """
    pos_embed, initial = tensors["pos_embed"], target["pos_embed"]
    if pos_embed.ndim != 3 or pos_embed.shape[2] != initial.shape[2]:
        return pos_embed, ""  # another width: the caller raises the error
    # Tokens of each kind before the patches, such as {"cls_token": 1, "reg_token": 4}.
    saved, needed = (
        {
            name: side[name].shape[1] if side[name].ndim == 3 else 1  # cannot fit
            for name in PREFIX_TOKENS
            if name in side
        }
        for side in (tensors, target)
    )
    grid, entries = _grid_and_entries(pos_embed.shape[1], saved, wanted, grid, path)
    before, patches = pos_embed[:, :entries], pos_embed[:, entries:]
    before = F.pad(before, (0, 0, 0, sum(saved.values()) - entries))  # registers come last
    trained = dict(zip(saved, before.split([*saved.values()], dim=1)))  # name → (1, count, D)
    drawn = initial.to(pos_embed).split([*needed.values(), prod(wanted)], dim=1)
    tokens = [
        trained[name] if saved.get(name) == count else embedding
        for (name, count), embedding in zip(needed.items(), drawn)
    ]
    if grid == wanted:
        return torch.cat([*tokens, patches], dim=1), ""
    image = rearrange(patches.float(), "1 (h w) d -> 1 d h w", h=grid[0])
    image = F.interpolate(image, wanted, mode="bicubic", antialias=True)
    patches = rearrange(image, "1 d h w -> 1 (h w) d").to(pos_embed)
    # Which tokens have no position follows from numbers alone, so the user is told.
    lacking = [name for name, end in zip(saved, accumulate(saved.values())) if end > entries]
    without = f" without {', '.join(lacking)}" if lacking else ""
    return (
        torch.cat([*tokens, patches], dim=1),
        f"{grid[0]}×{grid[1]}{without} → {wanted[0]}×{wanted[1]}",
    )


def _grid_and_entries(
    count: int, saved: Mapping[str, int], wanted: Grid, grid: Grid | None, path: Path | str
) -> tuple[Grid, int]:
    """The grid of the patches among `count` position embeddings, and the number before the patches.

    saved: the checkpoint's tokens before the patches. Either each has an embedding, or all but the
    registers have (DINOv2), or none has (DeiT-III). Which it is follows from `count`, by the first
    grid that agrees: `grid`, or if that is None a square with embeddings for all tokens; the
    model's grid `wanted`; a square with fewer. So n² embeddings and a class token are taken for
    DeiT-III's at n×n, and not for those of a ViT at (n−1)×(n+1).
    """
    total = sum(saved.values())
    possible = (total, total - saved.get("reg_token", 0), 0)  # entries before the patches
    of_model = [(*wanted, entries) for entries in possible]
    squares = [
        (side, side, entries) for entries in possible for side in [isqrt(max(count - entries, 0))]
    ]
    candidates = (
        [(*grid, entries) for entries in possible] + of_model
        if grid
        else [squares[0], *of_model, *squares[1:]]
    )
    for rows, columns, entries in candidates:
        if rows and rows * columns == count - entries:
            return (rows, columns), entries
    shape = "square" if grid is None else "×".join(map(str, grid))
    raise CheckpointError(
        f"{path}: pos_embed has embeddings for {count - total} patches, which is "
        f"no {shape} grid; it cannot be resized"
    )


def _classifiers(
    target: Tensors, tensors: Tensors, rows: Sequence[int | None] | None
) -> dict[str, Tensor]:
    """The classifiers that a model gets, but for those of another width or without any row."""
    heads = {
        name: value
        for name, value in tensors.items()
        if name in target
        and value.ndim
        and name.startswith("head")
        and value.shape[1:] == target[name].shape[1:]
    }
    if rows is None:
        return {name: value for name, value in heads.items() if value.shape == target[name].shape}
    taken = [row for row in rows if row is not None]
    return {
        name: torch.stack(
            [
                initial if row is None else value[row].to(initial)
                for row, initial in zip(rows, target[name], strict=True)
            ]
        )
        for name, value in heads.items()
        if taken and max(taken) < len(value)
    }


def _may_differ(name: str, others: Tensors, new_head: bool) -> bool:
    """Whether the other side may lack this tensor: of a head, or of the norm before a new one."""
    layer, _, part = name.partition(".")
    other = {"norm": "fc_norm", "fc_norm": "norm"}.get(layer)
    return name.startswith("head") or new_head and f"{other}.{part}" in others


def _require_fit(
    target: Tensors, path: Path | str, *, missing: list[str], surplus: list[str], loaded: Tensors
) -> None:
    """Raise CheckpointError, listing names, for tensors on one side only and for other shapes."""
    shapes = [
        f"{name} {tuple(value.shape)} where the model has {tuple(target[name].shape)}"
        for name, value in loaded.items()
        if name in target and value.shape != target[name].shape
    ]
    problems = [
        f"; {title}: {shortened(names)}"
        for title, names in (("missing", missing), ("surplus", surplus), ("other shape", shapes))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{path}: does not fit the model{''.join(problems)}; "
            "vitinit/train/README.md names the options for known checkpoints"
        )
