"""Load a checkpoint into a model: exactly, or to fine-tune at another size or with new classes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isqrt, prod
from typing import cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ..base.files import CheckpointError
from ..base.messages import shortened, times
from ..mixing.filters import Grid
from ..models.layers import PREFIX_TOKENS

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
        parts = [f"{len(self.loaded)} tensors loaded"]
        parts += [f"{name} resized" for name in self.resized]
        for title, names in (("dropped", self.dropped), ("as the init drew them", self.kept)):
            if names:
                parts.append(f"{title}: {shortened(names)}")
        return "; ".join(parts)


@torch.no_grad()
def start_from(
    model: nn.Module,
    tensors: Tensors,
    path: object,
    grid: Grid | None,
    rows: Sequence[int | None] | None = None,
    *,
    antialias: bool = True,
) -> Transfer:
    """Copy those of `tensors` that fit into `model`, to fine-tune it.

    A patch embedding, a convolution, for another number of channels gets in each of these the sum of
    the checkpoint's kernels over its channels, divided by their new number: of an image with the
    same values in all channels it computes the same, so also of a grey one. Position embeddings for
    another grid are resized with torch's bicubic interpolation; antialias: as in timm, or, if False,
    as in DeiT's code. The checkpoint and the model may differ in the
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
    tensors, change = as_in(model, tensors, grid, path, antialias=antialias)
    heads = _classifiers(target, tensors, rows)
    new_head = not any(name.startswith("head.") for name in heads)
    tensors, changed = _with_channels(target, tensors)
    loaded = {}
    dropped = []
    surplus = []
    for name, value in tensors.items():
        if name not in target:
            if _model_may_lack(name, target, tensors, new_head):
                dropped.append(name)
            else:
                surplus.append(name)
        elif name == "pos_embed" and not model.learns_positions:
            dropped.append("pos_embed (the model's are fixed)")
        elif name.startswith("head") and name not in heads:
            dropped.append(f"{name} {tuple(value.shape)}")
        else:
            loaded[name] = heads.get(name, value)
    if loaded.keys() <= heads.keys():
        raise CheckpointError(
            f"{path}: none of its tensors fits the model; it holds {shortened(list(tensors))}"
        )
    kept = [name for name in target if name not in loaded]
    missing = [name for name in kept if not _may_stay(name, model, tensors, new_head)]
    _copy(loaded, model, path, missing=missing, surplus=surplus)
    if change:
        changed["pos_embed"] = change
    copied = [name for name in loaded if name not in changed]
    resized = [f"{name} {way}" for name, way in changed.items()]
    return Transfer(copied, resized, dropped, kept)


def _with_channels(target: Tensors, tensors: Tensors) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors with kernels (D, C, p, q) for the model's C, and, for each that had another, in
    words how it was changed.
    """
    fitted, words = dict(tensors), {}
    for name, kernel in tensors.items():
        before, after = kernel.shape, target.get(name, kernel).shape
        if (
            len(before) == 4
            and before != after
            and before[:1] + before[2:] == after[:1] + after[2:]
        ):
            fitted[name] = (kernel.float().sum(1, keepdim=True) / after[1]).expand(after)
            words[name] = f"{before[1]} → {after[1]} channels (each the sum of all / {after[1]})"
    return fitted, words


def _model_may_lack(name: str, target: Tensors, tensors: Tensors, new_head: bool) -> bool:
    """Whether a model may start from a checkpoint without this one of its tensors."""
    if name in PREFIX_TOKENS[:2]:
        # With fc_norm the classifier read the patches alone, and the class token acted through
        # attention only: without it the function would change for a model that pools alike.
        return "fc_norm.weight" not in tensors
    return UNREAD.search(name) is not None or _may_differ(name, target, new_head)


def _may_stay(name: str, model: nn.Module, tensors: Tensors, new_head: bool) -> bool:
    """Whether a tensor that the checkpoint lacks may stay as the model's init drew it."""
    if name == "pos_embed":
        return not model.learns_positions
    is_counter = name.endswith("num_batches_tracked")
    return name in PREFIX_TOKENS or is_counter or _may_differ(name, tensors, new_head)


def _may_differ(name: str, others: Tensors, new_head: bool) -> bool:
    """Whether the other side may lack this tensor: of a head, or of the norm before a new one."""
    layer, _, part = name.partition(".")
    other = {"norm": "fc_norm", "fc_norm": "norm"}.get(layer)
    return name.startswith("head") or new_head and f"{other}.{part}" in others


@torch.no_grad()
def load_exactly(model: nn.Module, tensors: Tensors, path: object) -> None:
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
    heads = sorted(name for name in target if name.startswith("head"))
    if missing and missing == heads and not surplus:
        raise CheckpointError(
            f"{path}: holds no classifier ({shortened(missing)}), so that there "
            "is nothing to evaluate; init.checkpoint fine-tunes it"
        )
    _copy(tensors, model, path, missing=missing, surplus=surplus)


def _copy(
    tensors: Tensors, model: nn.Module, path: object, *, missing: list[str], surplus: list[str]
) -> None:
    """Copy tensors into the model; CheckpointError, listing names, for tensors on one side only and
    for other shapes.
    """
    target = model.state_dict()
    shapes = [
        f"{name} {tuple(value.shape)} where the model has {tuple(target[name].shape)}"
        for name, value in tensors.items()
        if name in target and value.shape != target[name].shape
    ]
    problems = ""
    for title, names in (("missing", missing), ("surplus", surplus), ("other shape", shapes)):
        if names:
            problems += f"; {title}: {shortened(names)}"
    if problems:
        raise CheckpointError(
            f"{path}: does not fit the model{problems}; "
            "the pages vitinit/models/README.md and vitinit/train/README.md name the options for known ones"
        )
    model.load_state_dict({**target, **tensors})


def as_in(
    model: nn.Module,
    tensors: Tensors,
    grid: Grid | None,
    path: object,
    *,
    antialias: bool = True,
) -> tuple[dict[str, Tensor], str]:
    """The checkpoint's tensors with the tokens and the positions of the model, and how these were
    resized, or "". Tokens that the model does not read become registers, if it has as many.

    The class token of a model that averages over the patches (fine-tuned MAE, timm's `avg` pooling)
    is read by attention alone, as registers are; likewise a distillation token without its head.
    """
    target = model.state_dict()
    tensors = _with_registers(target, dict(tensors))
    if "pos_embed" not in target or "pos_embed" not in tensors or not model.learns_positions:
        return tensors, ""
    if grid == model.grid and tensors["pos_embed"].shape == target["pos_embed"].shape:
        return tensors, ""
    tensors["pos_embed"], change = _fit_pos_embed(
        target, tensors, cast(Grid, model.grid), grid, path, antialias=antialias
    )
    return tensors, change


def _with_registers(target: Tensors, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint's tensors, in which tokens that the model does not read may be registers."""
    if "reg_token" not in target:
        return tensors
    registers = target["reg_token"]  # (1, count, D)
    unread = [name for name in PREFIX_TOKENS[:2] if name in tensors and name not in target]
    tokens = [tensors[name] for name in (*unread, "reg_token") if name in tensors]
    if any(token.ndim != 3 or token.shape[::2] != registers.shape[::2] for token in tokens):
        return tensors
    if sum(token.shape[1] for token in tokens) != registers.shape[1]:
        return tensors
    others = {name: value for name, value in tensors.items() if name not in unread}
    return others | {"reg_token": torch.cat(tokens, dim=1)}


def _fit_pos_embed(
    target: Tensors,
    tensors: Tensors,
    wanted: Grid,
    grid: Grid | None,
    path: object,
    *,
    antialias: bool,
) -> tuple[Tensor, str]:
    """The checkpoint's position embeddings for the model's tokens, (1, N, D), and the words for
    `Transfer.resized`, or "" if they were not.

    target, wanted: the model's state dict and grid. Tokens before the patches to which the
    checkpoint adds no position get zeros; if it lacks such a token, the model's entry for it stays.
    """
    pos_embed, initial = tensors["pos_embed"], target["pos_embed"]
    if pos_embed.ndim != 3 or pos_embed.shape[2] != initial.shape[2]:
        return pos_embed, ""  # another width: the caller raises the error
    saved, needed = _tokens_in(tensors), _tokens_in(target)
    grid, entries = _grid_and_entries(pos_embed.shape[1], saved, wanted, grid, path)
    if needed and initial.shape[1] == prod(wanted):  # none of these tokens has a position
        if entries:
            raise CheckpointError(
                f"{path}: pos_embed has {entries} more than the patches, for {', '.join(saved)}; "
                "expected model.options.prefix_positions = true"
            )
        needed = {}
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
    image = F.interpolate(image, wanted, mode="bicubic", antialias=antialias)
    patches = rearrange(image, "1 d h w -> 1 (h w) d").to(pos_embed)
    # Which tokens have no position follows from numbers alone, so the user is told.
    lacking = [name for name, end in zip(saved, accumulate(saved.values())) if end > entries]
    without = f" without {', '.join(lacking)}" if lacking else ""
    change = f"{times(grid)}{without} → {times(wanted)}"
    return torch.cat([*tokens, patches], dim=1), change


def _tokens_in(side: Tensors) -> dict[str, int]:
    """The tokens of each kind before the patches, such as {"cls_token": 1, "reg_token": 4}."""
    return {
        name: side[name].shape[1] if side[name].ndim == 3 else 1  # cannot fit
        for name in PREFIX_TOKENS
        if name in side
    }


def _grid_and_entries(
    count: int, saved: Mapping[str, int], wanted: Grid, grid: Grid | None, path: object
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
    candidates = [(*wanted, entries) for entries in possible]
    if grid is not None:
        candidates = [(*grid, entries) for entries in possible] + candidates
    else:
        sides = [isqrt(max(count - entries, 0)) for entries in possible]
        squares = list(zip(sides, sides, possible))
        candidates = squares[:1] + candidates + squares[1:]
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
    taken = [row for row in rows or () if row is not None]
    heads = {}
    for name, value in tensors.items():
        if name not in target or not name.startswith("head"):
            continue
        initial = target[name]
        if rows is None:
            if value.shape == initial.shape:
                heads[name] = value
        elif taken and value.shape[1:] == initial.shape[1:] and value.ndim:
            if max(taken) < len(value):
                pairs = zip(rows, initial, strict=True)
                chosen = [own if row is None else value[row].to(own) for row, own in pairs]
                heads[name] = torch.stack(chosen)
    return heads
