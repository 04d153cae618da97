"""Another run's weights, with other classes or at another resolution: to fine-tune or evaluate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .checkpoint import CheckpointError, shortened

PREFIX_TOKENS = ("cls_token", "dist_token", "reg_token")     # tokens that stand before the patches


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
    """Copy `tensors` into `model`, whose init has run, where they fit; all or nothing.

    Position codes of another grid are resized, bicubic and antialiased when they shrink, as in
    DeiT and timm; codes of tokens before the patches are kept. A classifier (`head…`) of another
    class count is dropped. grid: that of the checkpoint's position codes; None: square.

    Raises CheckpointError, listing the names, if any other tensor has another shape, or if nothing
    but the classifier fits.
    """
    own = model.state_dict()
    loaded, resized, dropped, odd = {}, [], [], []
    for name, value in tensors.items():
        if name == "pos_embed" and name in own:
            if not model.learns_positions:
                dropped.append("pos_embed (the model's codes are fixed)")
                continue
            value, change = _fitted_code(own[name], value, tensors, model, grid, path)
            resized += [f"pos_embed {change}"] * bool(change)
        if name not in own:
            dropped.append(name)
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
    model.load_state_dict(own | loaded)
    return Transfer([name for name in loaded if not (resized and name == "pos_embed")], resized,
                    dropped, kept)


@torch.no_grad()
def change_size(model: nn.Module, resized: nn.Module, path: Path) -> None:
    """Copy the weights of `model` into `resized`, the same model built for another image size.

    Learned position codes are resized as above, fixed ones are those of the new size. Raises
    CheckpointError, listing the names, if any other tensor depends on the size.
    """
    own, tensors = resized.state_dict(), model.state_dict()
    if "pos_embed" in own:
        tensors["pos_embed"] = own["pos_embed"] if not model.learns_positions else _fitted_code(
            own["pos_embed"], tensors["pos_embed"], tensors, resized, model.grid, path)[0]
    bound = [name for name in own if own[name].shape != tensors[name].shape]
    if bound:
        raise CheckpointError(f"{path}: this {type(model).__name__} is bound to its image size of "
                              f"training, by {shortened(bound)}")
    resized.load_state_dict(tensors)


def _fitted_code(own: Tensor, code: Tensor, tensors: Mapping[str, Tensor], model: nn.Module,
                 grid: tuple[int, int] | None, path: Path) -> tuple[Tensor, str]:
    """A position code (1, N', D) for the model's tokens: (1, N, D), and in words what changed.

    Where the checkpoint lacks a token before the patches, the model's own code for it stays.
    """
    if code.ndim != 3 or code.shape[2] != own.shape[2]:
        return code, ""                              # of another width: the caller complains
    before = sum(tensors[name].shape[1] for name in PREFIX_TOKENS if name in tensors)
    count = code.shape[1] - before
    if grid is None:
        side = round(max(count, 0) ** 0.5)
        grid = (side, side)
    ours = model.num_prefix_tokens
    if count < 1 or grid[0] * grid[1] != count:
        if code.shape == own.shape and before == ours:   # no square, but it fits as it is
            return code, ""
        raise CheckpointError(f"{path}: pos_embed has codes for {count} patches, which is no "
                              f"{grid[0]}×{grid[1]} grid; it cannot be resized")
    prefix, patches = code[:, :before], code[:, before:]
    prefix = torch.cat([prefix[:, :ours], own[:, prefix.shape[1]:ours].to(prefix)], dim=1)
    change = ""
    if grid != model.grid:
        picture = rearrange(patches.float(), "1 (h w) d -> 1 d h w", h=grid[0])
        picture = F.interpolate(picture, model.grid, mode="bicubic", antialias=True)
        patches = rearrange(picture, "1 d h w -> 1 (h w) d").to(code.dtype)
        change = f"{grid[0]}×{grid[1]} → {model.grid[0]}×{model.grid[1]}"
    return torch.cat([prefix, patches], dim=1), change
