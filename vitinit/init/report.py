"""What `init_` and `describe` say of a model: what was measured, and the receipt as its text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..filters import Offset
from ..mixing import mean_shares
from .layout import Block, Layout
from .mass import AIMED, decimal, masses_on, targets_of

Masses = tuple[tuple[float, ...], ...]           # by block and head


@dataclass(frozen=True, kw_only=True)
class Description:
    """What has been recognised of a model; `describe` returns it."""

    model: str                  # the model's class
    reason: str = ""            # why nothing was recognised
    blocks: int = 0
    heads: int = 0              # in the first block
    head_dim: int = 0
    grid: tuple[int, int] = (0, 0)               # patch tokens down and across; of a Swin's window
    in_windows: bool = False    # whether the model is a Swin
    prefix_tokens: int = 0
    fits: tuple[tuple[str, str], ...] = ()       # (init, why not, or "")

    @property
    def sizes(self) -> str:
        tokens = f"{self.grid[0]}×{self.grid[1]} tokens"
        tokens = f"windows of {tokens}" if self.in_windows else tokens
        prefix = f" + {self.prefix_tokens}" if self.prefix_tokens else ""
        return f"{self.blocks} blocks, {self.heads} heads of {self.head_dim}, {tokens}{prefix}"

    def __str__(self) -> str:
        if self.reason:
            return f"{self.model}: not recognised: {self.reason}"
        return "\n".join([f"{self.model}: {self.sizes}", *(
            f"  {init}_: {why or 'fits'}" for init, why in self.fits)])


@dataclass(frozen=True, kw_only=True)
class Report(Description):
    """What `init_` has done to a model. `str` of it is the receipt."""

    init: str
    written: tuple[str, ...]    # names of the tensors that changed
    kept: int                   # how many others there are
    notes: tuple[str, ...]      # about frozen, tied and rounded weights
    targets: tuple[tuple[Offset, ...], ...]      # (down, right), by block and head; may be empty
    mass: Masses                # share of each head's attention on its target, on positions alone
    mass_on_images: Masses      # the same in a forward pass of images; empty without. deep_impulse
                                #   takes white noise where none are given
    images: int
    uniform: float              # the mass under uniform attention

    def __str__(self) -> str:
        lines = [f"{self.init}: {self.model}, {self.sizes}",
                 f"wrote {len(self.written)} tensors: {patterns(self.written) or 'none'}; "
                 f"kept {self.kept} others"]
        alone = "the relative bias alone" if self.in_windows else "positions alone"
        on_images = f"{self.images} images" if self.images else "white noise"
        for masses, where in ((self.mass, alone), (self.mass_on_images, on_images)):
            if masses:
                blocks = {0: "first", len(masses) // 2: "middle", len(masses) - 1: "last"}
                shown = "; ".join(f"{word} block {' '.join(map(decimal, masses[block]))}"
                                  for block, word in sorted(blocks.items()))
                lines.append(f"mass on the target, on {where}: {shown} "
                             f"(uniform {decimal(self.uniform)})")
        return "\n".join([*lines, *self.notes])


def patterns(names: Iterable[str]) -> str:
    """Names with * for the numbers of blocks, each once."""
    return ", ".join(dict.fromkeys(re.sub(r"(?<![a-z])\d+", "*", name) for name in names))


# ---------------------------------------------------------------------------------------------
# The mass
# ---------------------------------------------------------------------------------------------


def projected(y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Queries, keys or values of each head: y (n, T, D), weight (h, d, D) → (n, h, T, d)."""
    return y[:, None] @ weight.mT + (0.0 if bias is None else bias[:, None])


def attention(block: Block, y: Tensor) -> Tensor:
    """softmax(Q Kᵀ / √d) of a norm's output y, (n, T, D): (n, h, T, T)."""
    query, key = projected(y, block.q, block.q_bias), projected(y, block.k, block.k_bias)
    return (query @ key.mT * block.q.shape[1] ** -0.5).softmax(-1)


@torch.no_grad()
def measured(vit: Layout, name: str, options: Mapping[str, Any], images: Tensor | None
             ) -> dict[str, tuple]:
    """The fields `targets`, `mass` and `mass_on_images` of a Report.

    options: all options of the init. Where offsets were drawn at random, a head's target is the
    offset to which it attends most on positions alone.
    """
    fields = dict.fromkeys(("targets", "mass", "mass_on_images"), ())
    if name not in AIMED or options.get("qk_init") == "base" or (
            vit.in_windows and name == "mimetic"):
        return fields
    if vit.in_windows:
        grids = [block.window for block in vit.blocks]
        shares = [block.bias_table[block.bias_rows].softmax(1).movedim(2, 0)
                  for block in vit.blocks]
    else:
        grids, y = [vit.grid] * len(vit.blocks), vit.positions[None]
        shares = [attention(block, block.norm(y))[0] for block in vit.blocks]
    targets = targets_of(name, options, [len(block.q) for block in vit.blocks])
    found = masses_on(targets, shares, grids)
    fields["mass"] = tuple(tuple(mass for _, mass in block) for block in found)
    fields["targets"] = tuple(tuple(offset for offset, _ in block) for block in found)
    if images is not None:
        shares = mean_shares(vit.model, images.detach().to(vit.pos_embed), [
            (block.norm, lambda _, y, block=block: attention(block, y)) for block in vit.blocks],
            grids)
        targets = [[[offset] for offset in block] for block in fields["targets"]]
        fields["mass_on_images"] = tuple(tuple(mass for _, mass in block)
                                         for block in masses_on(targets, shares, grids))
    return fields
