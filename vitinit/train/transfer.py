"""Another run's weights, with other classes or at another resolution: to fine-tune or evaluate."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .checkpoint import CheckpointError, load_model, shortened

PREFIX_TOKENS = ("cls_token", "dist_token", "reg_token")     # before the patches, in this order

# What no forward pass reads: the mask token and decoder of masked pretraining (DINOv2, iBOT, MAE), and
# buffers that follow from the sizes, which older Swin checkpoints hold.
UNREAD = re.compile(r"^(mask_token$|decoder_)|\.(relative_position_index|attn_mask)$")


@dataclass(frozen=True)
class Transfer:
    """What became of a checkpoint's tensors and of the model's."""

    loaded: list[str]           # copied, as their shapes agree
    resized: list[str]          # "pos_embed 14×14 → 24×24"
    dropped: list[str]          # in the checkpoint, not used
    kept: list[str]             # in the model, as its init drew them

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} tensors loaded", *(f"{name} resized" for name in self.resized)]
        for title, names in (("dropped", self.dropped), ("as the init drew them", self.kept)):
            if names:
                parts.append(f"{title}: {shortened(names)}")
        return "; ".join(parts)


@torch.no_grad()
def start_from(model: nn.Module, tensors: Mapping[str, Tensor], path: Path,
               grid: tuple[int, int] | None) -> Transfer:
    """Copy `tensors` into `model`, whose init has run, to fine-tune it; all or nothing.

    Position embeddings of another grid are resized, bicubic and antialiased when they shrink, as in
    DeiT and timm; those of tokens before the patches are kept. grid: that of the checkpoint's; None:
    square, or the model's own. What the checkpoint and the model may differ in is dropped, or stays
    as its init drew it, and is reported:

        the classifier (`head…`)            of another class count, or missing
        cls_token, dist_token, reg_token    that the model adds, and the first two where it has none
        norm, fc_norm                       the one for the other, where the classifier is new, too
        blocks                              at the end of the deeper one
        pos_embed                           where the model's is fixed
        what no forward pass reads          mask_token, decoder_…, Swin's indices and masks

    Raises CheckpointError, listing the names, if nothing but the classifier fits, and for anything
    else of another shape, without a place in the model, or without a value for it: with that, the
    weights would no longer be the function that was trained.
    """
    own = model.state_dict()
    tensors = class_token_as_register(own, tensors)
    new_head = all(name in own and value.shape != own[name].shape
                   for name, value in tensors.items() if name.startswith("head."))
    loaded, resized, dropped, odd, strange = {}, [], [], [], []
    for name, value in tensors.items():
        if name == "pos_embed" and name in own:
            if not model.learns_positions:
                dropped.append("pos_embed (the model's codes are fixed)")
                continue
            value, change = _fitted_pos_embed(own, tensors, model.grid, grid, path)
            resized += [f"pos_embed {change}"] * bool(change)
        if name not in own:
            (dropped if _may_lack(name, own, tensors, new_head) else strange).append(name)
        elif value.shape == own[name].shape:
            loaded[name] = value
        elif name.startswith("head"):
            dropped.append(f"{name} {tuple(value.shape)}")
        else:
            odd.append(f"{name} {tuple(value.shape)} where the model has {tuple(own[name].shape)}")
    if odd:
        raise CheckpointError(f"{path}: does not fit the model; other shape: {shortened(odd)}")
    if all(name.startswith("head") for name in loaded):
        raise CheckpointError(f"{path}: none of its tensors fits the model; it holds "
                              f"{shortened(list(tensors))}")
    kept = [name for name in own if name not in loaded]
    missing = [name for name in kept if not _may_draw(name, model, tensors, new_head)]
    if strange or missing:
        raise CheckpointError(f"{path}: is another function than the model's" +
                              _listed(surplus=strange, missing=missing) +
                              _advice(own, tensors, strange + missing))
    model.load_state_dict(own | loaded)
    return Transfer([name for name in loaded if not (resized and name == "pos_embed")], resized,
                    dropped, kept)


@torch.no_grad()
def load_exactly(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy `tensors` into `model`, of the checkpoint's own image size, to evaluate it; all or nothing.

    The model is then the checkpoint's function, or CheckpointError lists what stands in the way. Only
    what no forward pass reads is left out (see `start_from`). Position embeddings without entries
    for the tokens before the patches get zeros there, which is the same.
    """
    own = model.state_dict()
    tensors = {name: value for name, value in class_token_as_register(own, tensors).items()
               if name in own or not UNREAD.search(name)}
    heads = [name for name in own if name.startswith("head")]
    if heads and not any(name.startswith("head") for name in tensors):
        raise CheckpointError(f"{path}: holds no classifier ({shortened(heads)}), so that there is "
                              "nothing to evaluate; init.checkpoint fine-tunes it")
    pos_embed = tensors.get("pos_embed")
    if "pos_embed" in own and pos_embed is not None and pos_embed.shape != own["pos_embed"].shape \
            and pos_embed.ndim == own["pos_embed"].ndim == 3:
        missing = own["pos_embed"].shape[1] - pos_embed.shape[1]
        counts = _prefix_counts(tensors)
        total = sum(counts.values())
        if missing in (total, counts.get("reg_token")):
            tensors["pos_embed"] = _with_zeros(pos_embed, total - missing, total)
    try:
        load_model(model, tensors, path)
    except CheckpointError as error:
        differ = sorted(own.keys() ^ tensors.keys())
        raise CheckpointError(f"{error}{_advice(own, tensors, differ)}") from None


@torch.no_grad()
def change_size(model: nn.Module, resized: nn.Module, path: Path) -> None:
    """Copy the weights of `model` into `resized`, the same model built for another image size.

    Learned position embeddings are resized as above, fixed ones are those of the new size. Raises
    CheckpointError, listing the names, if any other tensor depends on the size.
    """
    own, tensors = resized.state_dict(), model.state_dict()
    if "pos_embed" in own:
        tensors["pos_embed"] = own["pos_embed"] if not model.learns_positions else _fitted_pos_embed(
            own, tensors, resized.grid, model.grid, path)[0]
    bound = [name for name in own if own[name].shape != tensors[name].shape]
    if bound:
        raise CheckpointError(f"{path}: this {type(model).__name__} is bound to its image size of "
                              f"training, by {shortened(bound)}")
    resized.load_state_dict(tensors)


# ---------------------------------------------------------------------------------------------
# Tokens before the patches, and their position embeddings
# ---------------------------------------------------------------------------------------------


def class_token_as_register(own: Mapping[str, Tensor],
                            tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The class token as the model's first register, where it has one more than the checkpoint.

    A model that pools over the patches alone (MAE's fine-tuned ones, timm's `avg`) has a class token
    that takes part in attention and is read by nothing else, which is what a register is.
    """
    tensors = dict(tensors)
    registers = [tensors[name] for name in ("cls_token", "reg_token") if name in tensors]
    if ("cls_token" in tensors and "cls_token" not in own and "reg_token" in own
            and sum(token.shape[1] for token in registers) == own["reg_token"].shape[1]):
        tensors["reg_token"] = torch.cat(registers, dim=1)
        del tensors["cls_token"]
    return tensors


def _prefix_counts(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensors[name].shape[1] for name in PREFIX_TOKENS if name in tensors}


def _with_zeros(pos_embed: Tensor, entries: int, total: int) -> Tensor:
    """(1, entries + patches, D) → (1, total + patches, D): zeros behind the first `entries`."""
    zeros = pos_embed.new_zeros(1, total - entries, pos_embed.shape[2])
    return torch.cat([pos_embed[:, :entries], zeros, pos_embed[:, entries:]], dim=1)


def _fitted_pos_embed(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], wanted: tuple[int, int],
                      grid: tuple[int, int] | None, path: Path) -> tuple[Tensor, str]:
    """The checkpoint's pos_embed for the model's tokens, (1, N, D), and in words what changed.

    own, wanted: the model's state and grid. Where the checkpoint lacks a token before the patches,
    the model's own entry for it stays.
    """
    pos_embed, own_pos_embed = tensors["pos_embed"], own["pos_embed"]
    if pos_embed.ndim != 3 or pos_embed.shape[2] != own_pos_embed.shape[2]:
        return pos_embed, ""                         # of another width: the caller complains
    theirs, ours = _prefix_counts(tensors), _prefix_counts(own)
    total = sum(theirs.values())
    grid, entries = _grid_and_entries(pos_embed.shape[1], total, theirs.get("reg_token", 0), wanted, grid,
                                      path)
    pos_embed = _with_zeros(pos_embed, entries, total)

    # The entries of each token before the patches, by its name.
    found = dict(zip(theirs, pos_embed.split([*theirs.values(), grid[0] * grid[1]], dim=1)))
    drawn = dict(zip(ours, own_pos_embed.split([*ours.values(), wanted[0] * wanted[1]], dim=1)))
    prefix = [found[name] if theirs.get(name) == count else drawn[name].to(pos_embed)
              for name, count in ours.items()]
    patches, change = pos_embed[:, total:], ""
    if grid != wanted:
        image = rearrange(patches.float(), "1 (h w) d -> 1 d h w", h=grid[0])
        image = F.interpolate(image, wanted, mode="bicubic", antialias=True)
        patches = rearrange(image, "1 d h w -> 1 (h w) d").to(pos_embed.dtype)
        change = f"{grid[0]}×{grid[1]} → {wanted[0]}×{wanted[1]}"
    return torch.cat([*prefix, patches], dim=1), change


def _grid_and_entries(count: int, total: int, registers: int, wanted: tuple[int, int],
                      grid: tuple[int, int] | None, path: Path) -> tuple[tuple[int, int], int]:
    """Of `count` position embeddings: the patches' grid, and how many stand before the patches.

    There are `total` tokens before the patches, which have an entry each, or all but the registers,
    or none. The first that holds of: the grid that the checkpoint states; a square, if all have one;
    the model's own grid.
    """
    possible = (total, total - registers, 0)
    for shape in [grid] * (grid is not None):
        for entries in possible:
            if shape[0] * shape[1] == count - entries:
                return (shape[0], shape[1]), entries
    side = isqrt(max(count - total, 0))
    if grid is None and 0 < side**2 == count - total:
        return (side, side), total
    for entries in possible:
        if wanted[0] * wanted[1] == count - entries:
            return wanted, entries
    shape = grid or (round(max(count - total, 0) ** 0.5),) * 2
    raise CheckpointError(f"{path}: pos_embed has codes for {count - total} patches, which is no "
                          f"{shape[0]}×{shape[1]} grid; it cannot be resized")


# ---------------------------------------------------------------------------------------------
# What a checkpoint and a model may differ in
# ---------------------------------------------------------------------------------------------


def _may_lack(name: str, own: Mapping[str, Tensor], tensors: Mapping[str, Tensor],
              new_head: bool) -> bool:
    """Whether the model can do without this tensor of the checkpoint, when it is fine-tuned."""
    if name in ("cls_token", "dist_token"):
        # With fc_norm it was not what was pooled, so that another pooling is no reason to drop it.
        return "fc_norm.weight" not in tensors
    return bool(name.startswith("head") or UNREAD.search(name) or _is_of_deeper_block(name, own)
                or new_head and _other_norm(name) in own)


def _may_draw(name: str, model: nn.Module, tensors: Mapping[str, Tensor], new_head: bool) -> bool:
    """Whether this tensor of the model may stay as its init drew it, when it is fine-tuned."""
    return (name.startswith("head") or name in PREFIX_TOKENS
            or name == "pos_embed" and not model.learns_positions
            or name.endswith("num_batches_tracked") or _is_of_deeper_block(name, tensors)
            or new_head and _other_norm(name) in tensors)


def _other_norm(name: str) -> str | None:
    """fc_norm.weight for norm.weight, and the other way round: only one of them is in a model."""
    layer, _, part = name.partition(".")
    other = {"norm": "fc_norm", "fc_norm": "norm"}.get(layer)
    return other and f"{other}.{part}"


def _is_of_deeper_block(name: str, others: Mapping[str, Tensor]) -> bool:
    """Whether `name` lies in a block, or stage, beyond the last that `others` have."""
    parts = name.split(".")
    for place, part in enumerate(parts[:-1], 1):
        if part in ("blocks", "layers") and parts[place].isdecimal():
            list_of_blocks = ".".join(parts[:place]) + "."
            present = [other for other in others if other.startswith(list_of_blocks)]
            if not any(other.startswith(f"{list_of_blocks}{parts[place]}.") for other in present):
                return bool(present)
    return False


def _listed(**names: list[str]) -> str:
    return "".join(f"; {title}: {shortened(group)}" for title, group in names.items() if group)


def _advice(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], names: list[str]) -> str:
    """The model options that would give these tensors their place."""
    registers, advice = _prefix_counts(tensors).get("reg_token", 0), {}
    if "fc_norm.weight" in names and "fc_norm.weight" in tensors:
        advice["pool"] = "mean"
    for name in names:
        if name.startswith("fc_norm."):
            advice["fc_norm"] = str(name in tensors).lower()
        elif name == "reg_token":
            advice["num_registers"] = registers
        elif name.endswith("attn.qkv.bias"):
            advice["qkv_bias"] = str(name in tensors).lower()
    if "cls_token" in tensors and "fc_norm.weight" in tensors and (
            "cls_token" in names or "pool" in advice):
        advice["num_registers"] = registers + 1      # the class token counts as one
    if not advice:
        return ""
    return "; what would fit: " + ", ".join(f"model.options.{key}={value}"
                                            for key, value in advice.items())
