"""Load a checkpoint into a model with other classes or another image size, or exactly as it is.

`start_from` is for fine-tuning, `load_exactly` and `change_size` are for evaluation.
"""

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

from .checkpoint import CheckpointError, shortened

PREFIX_TOKENS = ("cls_token", "dist_token", "reg_token")     # before the patches, in this order

# Tensors that no forward pass reads: the mask token and the decoder of masked pre-training (DINOv2,
# iBOT, MAE), and buffers of older Swin checkpoints that follow from the sizes.
UNREAD = re.compile(r"^(mask_token$|decoder_)|\.(relative_position_index|attn_mask)$")

# Parts of names that only models of other functions have, and what they stand for.
STRANGERS = {
    r"(^|\.)(rope|freqs)": "rotary positions",
    r"\.mlp\.(w12|w3|weights_in|fc1_g|gate_proj)\.": "SwiGLU in place of the MLP",
    r"^backbone\.": "a model around a backbone, such as DINOv2's classifiers",
    r"\.attn\.[qv]_bias$": "queries and values with biases of their own and keys without (EVA)",
    r"^(norm_pre|ln_pre|pre_layrnorm|pre_layernorm)\.": "a norm before the blocks (CLIP)",
    r"\.(q_norm|k_norm|norm_q|norm_k)\.": "norms of queries and keys",
    r"^attn_pool\.": "pooling by attention (SigLIP)",
    r"\.(logit_scale|cpb_mlp)": "cosine attention (Swin V2)",
    r"^blocks\.\d+\.attn\.(relative_position_bias_table|rel_pos)": "relative positions (BEiT)",
    r"\.(attn1|mlp1|gamma_\d_1)\b": "parallel branches",
}


@dataclass(frozen=True)
class Transfer:
    """What `start_from` did with each tensor of the checkpoint and of the model.

    `str` of it is a summary of one line.
    """

    loaded: list[str]           # names of tensors copied unchanged
    resized: list[str]          # such as "pos_embed 14×14 → 24×24"
    dropped: list[str]          # in the checkpoint, but not used
    kept: list[str]             # in the model, and left as its init drew them

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} tensors loaded",
                 *(f"{name} resized" for name in self.resized)]
        for title, names in (("dropped", self.dropped), ("as the init drew them", self.kept)):
            if names:
                parts.append(f"{title}: {shortened(names)}")
        return "; ".join(parts)


@torch.no_grad()
def start_from(model: nn.Module, tensors: Mapping[str, Tensor], path: Path,
               grid: tuple[int, int] | None) -> Transfer:
    """Copy those of `tensors` that fit into `model`, to fine-tune it.

    Position embeddings for another grid are resized with torch's antialiased bicubic interpolation,
    as in timm. DeiT's code does not antialias, which gives other values, also when they grow. Those
    of tokens before the patches (class token and the like) are not resized. The checkpoint and the
    model may differ in the tensors below. Such a tensor is dropped if only the checkpoint has it,
    and stays as its init drew it if only the model has it:

        the classifier (`head…`)            another number of classes, or none
        cls_token, dist_token, reg_token    any that only the model has; the first two also if only
                                            the checkpoint has them, and it has no fc_norm
        norm, fc_norm                       one in place of the other, if the classifier is new
        blocks                              those at the end of the deeper of the two
        pos_embed                           if the model's is fixed
        tensors no forward pass reads       mask_token, decoder_…, Swin's indices and masks

    Args:
        model: its init must have run, since some tensors keep their initial values.
        tensors: the checkpoint's state dict, under this package's names.
        path: the file that error messages name.
        grid: (rows, columns) of patches in the checkpoint; None: a square grid if that agrees with
            the number of position embeddings, and otherwise the model's own.

    Returns what was done with each tensor. Raises CheckpointError, listing the names, if nothing
    but the classifier fits, or if any other tensor has another shape or is on one side only: the
    model would then compute another function than the one that was trained. The model is unchanged
    then.
    """
    own = model.state_dict()
    tensors = unread_tokens_as_registers(own, tensors)
    new_head = all(name in own and value.shape != own[name].shape
                   for name, value in tensors.items() if name.startswith("head."))
    loaded, resized, dropped, surplus = {}, [], [], []
    for name, value in tensors.items():
        if name == "pos_embed" and name in own:
            if not model.learns_positions:
                dropped.append("pos_embed (the model's are fixed)")
                continue
            value, change = _fitted_pos_embed(own, tensors, model.grid, grid, path)
            resized += [f"pos_embed {change}"] * bool(change)
        if name not in own:
            (dropped if _may_lack(name, own, tensors, new_head) else surplus).append(name)
        elif value.shape != own[name].shape and name.startswith("head"):
            dropped.append(f"{name} {tuple(value.shape)}")
        else:
            loaded[name] = value
    if all(name.startswith("head") for name in loaded):
        raise CheckpointError(f"{path}: none of its tensors fits the model; it holds "
                              f"{shortened(list(tensors))}")
    kept = [name for name in own if name not in loaded]
    missing = [name for name in kept if not _may_draw(name, model, tensors, new_head)]
    _require_fit(own, tensors, path, missing=missing, surplus=surplus, loaded=loaded)
    model.load_state_dict(own | loaded)
    return Transfer([name for name in loaded if not (resized and name == "pos_embed")], resized,
                    dropped, kept)


@torch.no_grad()
def load_exactly(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy `tensors` into `model`, to evaluate it: all of them, or none.

    model: built for the checkpoint's own image size. It then computes exactly the function that was
    trained; if it cannot, CheckpointError lists the tensors that do not fit. Tensors that no
    forward pass reads are left out (see `start_from`). Position embeddings without entries for the
    tokens before the patches get entries of zero there, which does not change the function.
    """
    own = model.state_dict()
    tensors = {name: value for name, value in unread_tokens_as_registers(own, tensors).items()
               if name in own or not UNREAD.search(name)}
    heads = [name for name in own if name.startswith("head")]
    if heads and not any(name.startswith("head") for name in tensors):
        raise CheckpointError(f"{path}: holds no classifier ({shortened(heads)}), so that there is "
                              "nothing to evaluate; init.checkpoint fine-tunes it")
    if "pos_embed" in own.keys() & tensors.keys() and (
            tensors["pos_embed"].shape != own["pos_embed"].shape and model.learns_positions):
        tensors["pos_embed"], _ = _fitted_pos_embed(own, tensors, model.grid, model.grid, path)
    _require_fit(own, tensors, path, missing=sorted(own.keys() - tensors.keys()),
                 surplus=sorted(tensors.keys() - own.keys()), loaded=tensors)
    model.load_state_dict(tensors)


@torch.no_grad()
def change_size(model: nn.Module, resized: nn.Module, path: Path) -> None:
    """Copy the weights of `model` into `resized`, the same model built for another image size.

    Learned position embeddings are resized as in `start_from`; fixed ones are those of the new
    size. Raises CheckpointError, listing the names, if any other tensor depends on the image size.
    """
    own, tensors = resized.state_dict(), model.state_dict()
    if "pos_embed" in own and not model.learns_positions:
        tensors["pos_embed"] = own["pos_embed"]
    elif "pos_embed" in own:
        tensors["pos_embed"], _ = _fitted_pos_embed(own, tensors, resized.grid, model.grid, path)
    bound = [name for name in own if own[name].shape != tensors[name].shape]
    if bound:
        raise CheckpointError(f"{path}: this {type(model).__name__} is bound to its image size of "
                              f"training, by {shortened(bound)}")
    resized.load_state_dict(tensors)


# ---------------------------------------------------------------------------------------------
# Tokens before the patches, and their position embeddings
# ---------------------------------------------------------------------------------------------


def unread_tokens_as_registers(own: Mapping[str, Tensor],
                               tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Make tokens of the checkpoint that the model does not read into registers, if it has those.

    In a model that averages over the patches alone (fine-tuned MAE, timm's `avg` pooling), the
    class token takes part in attention but is not read afterwards. It is therefore a register
    token. So is the distillation token of a DeiT whose only classifier reads the class token, as in
    transformers.
    own: the model's state dict. The tokens are renamed if the model has as many registers as there
    are registers and unread tokens in the checkpoint.
    """
    tensors = dict(tensors)
    unread = [name for name in ("cls_token", "dist_token") if name in tensors and name not in own]
    registers = [tensors[name] for name in (*unread, "reg_token") if name in tensors]
    if unread and "reg_token" in own and (
            sum(token.shape[1] for token in registers) == own["reg_token"].shape[1]):
        tensors["reg_token"] = torch.cat(registers, dim=1)
        for name in unread:
            del tensors[name]
    return tensors


def _prefix_counts(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of tokens of each kind before the patches: {"cls_token": 1, "reg_token": 4}."""
    return {name: tensors[name].shape[1] for name in PREFIX_TOKENS if name in tensors}


def _fitted_pos_embed(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor],
                      wanted: tuple[int, int], grid: tuple[int, int] | None, path: Path
                      ) -> tuple[Tensor, str]:
    """The checkpoint's position embeddings for the model's tokens, (1, N, D), and a description.

    own, wanted: the model's state dict and grid. If the checkpoint lacks a token that the model has
    before the patches, the model's own entry for it stays. The description is such as
    "14×14 → 24×24", or empty if the patches' embeddings were not resized.
    """
    pos_embed, own_pos_embed = tensors["pos_embed"], own["pos_embed"]
    if pos_embed.ndim != 3 or pos_embed.shape[2] != own_pos_embed.shape[2]:
        return pos_embed, ""                         # another width: the caller raises the error
    saved, needed = _prefix_counts(tensors), _prefix_counts(own)         # tokens before the patches
    total = sum(saved.values())
    grid, entries = _grid_and_entries(pos_embed.shape[1], total, saved.get("reg_token", 0), wanted,
                                      grid, path)
    zeros = pos_embed.new_zeros(1, total - entries, pos_embed.shape[2])
    pos_embed = torch.cat([pos_embed[:, :entries], zeros, pos_embed[:, entries:]], dim=1)

    # The embeddings of each kind of token before the patches, by its name: (1, count, D).
    trained = dict(zip(saved, pos_embed.split([*saved.values(), grid[0] * grid[1]], dim=1)))
    initial = dict(zip(needed,
                       own_pos_embed.split([*needed.values(), wanted[0] * wanted[1]], dim=1)))
    prefix = [trained[name] if saved.get(name) == count else initial[name].to(pos_embed)
              for name, count in needed.items()]
    patches, change = pos_embed[:, total:], ""
    if grid != wanted:
        image = rearrange(patches.float(), "1 (h w) d -> 1 d h w", h=grid[0])
        image = F.interpolate(image, wanted, mode="bicubic", antialias=True)
        patches = rearrange(image, "1 d h w -> 1 (h w) d").to(pos_embed.dtype)
        change = f"{grid[0]}×{grid[1]} → {wanted[0]}×{wanted[1]}"
    return torch.cat([*prefix, patches], dim=1), change


def _grid_and_entries(count: int, total: int, registers: int, wanted: tuple[int, int],
                      grid: tuple[int, int] | None, path: Path) -> tuple[tuple[int, int], int]:
    """The grid of the patches among `count` position embeddings, and the number before the patches.

    The checkpoint has `total` tokens before the patches. Either each of them has a position
    embedding, or all but the registers do, or none does. The first of these grids that agrees with
    `count` is returned: `grid`, which the checkpoint states; a square, if each token has an
    embedding; `wanted`, the model's own. Raises CheckpointError if none agrees.
    """
    side = isqrt(max(count - total, 0))
    possible = (total, total - registers, 0)
    candidates = ([((side, side), total)] if grid is None else
                  [(grid, entries) for entries in possible])
    for (rows, columns), entries in candidates + [(wanted, entries) for entries in possible]:
        if rows and rows * columns == count - entries:
            return (rows, columns), entries
    shape = "square" if grid is None else f"{grid[0]}×{grid[1]}"
    raise CheckpointError(f"{path}: pos_embed has embeddings for {count - total} patches, which is "
                          f"no {shape} grid; it cannot be resized")


# ---------------------------------------------------------------------------------------------
# What a checkpoint and a model may differ in
# ---------------------------------------------------------------------------------------------


def _may_lack(name: str, own: Mapping[str, Tensor], tensors: Mapping[str, Tensor],
              new_head: bool) -> bool:
    """Whether fine-tuning may drop this tensor, which only the checkpoint has."""
    if name in ("cls_token", "dist_token"):
        # With fc_norm the classifier read the patches alone, and this token acted through attention
        # only: without it the function would change even for a model that pools the same way.
        return "fc_norm.weight" not in tensors
    return bool(name.startswith("head") or UNREAD.search(name) or _is_of_deeper_block(name, own)
                or new_head and _other_norm(name) in own)


def _may_draw(name: str, model: nn.Module, tensors: Mapping[str, Tensor], new_head: bool) -> bool:
    """Whether fine-tuning may leave this tensor, which only the model has, as its init drew it."""
    return (name.startswith("head") or name in PREFIX_TOKENS
            or name == "pos_embed" and not model.learns_positions
            or name.endswith("num_batches_tracked") or _is_of_deeper_block(name, tensors)
            or new_head and _other_norm(name) in tensors)


def _other_norm(name: str) -> str | None:
    """norm.weight → fc_norm.weight and vice versa: a model has only one of them; else None."""
    layer, _, part = name.partition(".")
    other = {"norm": "fc_norm", "fc_norm": "norm"}.get(layer)
    return other and f"{other}.{part}"


def _is_of_deeper_block(name: str, others: Mapping[str, Tensor]) -> bool:
    """Whether `name` lies in a block, or stage, beyond the last one that `others` have."""
    for found in re.finditer(r"(?<![^.])(?:blocks|layers)\.(\d+)\.", name):
        siblings = [other for other in others if other.startswith(name[:found.start(1)])]
        if not any(other.startswith(name[:found.end()]) for other in siblings):
            return bool(siblings)
    return False


def _require_fit(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], path: Path, *,
                 missing: list[str], surplus: list[str], loaded: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError, listing names, for tensors on one side only and for other shapes.

    own, tensors: of the model and of the checkpoint. loaded: those to be copied into the model.
    """
    shapes = [f"{name} {tuple(value.shape)} where the model has {tuple(own[name].shape)}"
              for name, value in loaded.items() if name in own and value.shape != own[name].shape]
    if missing or surplus or shapes:
        problems = [f"; {title}: {shortened(names)}" for title, names in (
            ("missing", missing), ("surplus", surplus), ("other shape", shapes)) if names]
        raise CheckpointError(f"{path}: does not fit the model{''.join(problems)}"
                              f"{_advice(own, tensors, sorted(missing + surplus))}")


def _advice(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], names: list[str]) -> str:
    """What the tensors `names` stand for, or which model options would give the model their shapes.

    "" if neither is known.
    """
    stranger = _stranger(own, tensors)
    if stranger:
        return f"; {stranger}, which no model here has"
    registers, advice = _prefix_counts(tensors).get("reg_token", 0), {}
    if "fc_norm.weight" in names and "fc_norm.weight" in tensors:
        advice["pool"] = "mean"
    for name in names:
        if name.startswith("fc_norm."):
            advice["fc_norm"] = str(name in tensors).lower()
        elif name == "reg_token":
            advice["num_registers"] = registers
        elif name.endswith("attn.qkv.bias") and (
                name.replace("bias", "weight") in own.keys() & tensors.keys()):
            advice["qkv_bias"] = str(name in tensors).lower()
    if "cls_token" in tensors and "fc_norm.weight" in tensors and (
            "cls_token" in names or "pool" in advice):
        advice["num_registers"] = registers + 1      # the class token counts as one
    if not advice:
        return ""
    return "; its shapes, which do not show the function, fit with " + " ".join(
        f"model.options.{key}={value}" for key, value in advice.items())


def _stranger(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str:
    """What a checkpoint has that no model here has, as far as its tensors show that; else ""."""
    for name in (name for name in tensors if name not in own):
        for pattern, what in STRANGERS.items():
            if re.search(pattern, name):
                return f"{name} stands for {what}"
    for name in tensors:
        hidden = tensors.get(name.replace("fc1", "fc2"))
        if name.endswith("mlp.fc1.weight") and hidden is not None and (
                tensors[name].shape[0] == 2 * hidden.shape[1]):
            return f"{name} makes gates as well: SwiGLU in place of the MLP"
    if "pos_embed" in own and "pos_embed" not in tensors and "patch_embed.proj.weight" in tensors:
        return "positions without a position embedding are rotary or relative"
    heads = [one.get("head.weight") for one in (tensors, own)]
    if None not in heads and heads[0].shape[1:] == (2 * heads[1].shape[-1],):
        return "its classifier reads the class token and the mean of the patches together (DINOv2)"
    return ""
