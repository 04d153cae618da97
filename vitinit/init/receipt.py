"""What `init_` and `describe` say of a model; the text of a report is the receipt."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .mass import Masses, Targets, decimal


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
    checked: str = ""           # what was seen in forward passes, and on which images
    fits: tuple[tuple[str, str], ...] = ()       # (init, why not, or "")

    @property
    def sizes(self) -> str:
        windows = "windows of " * self.in_windows
        prefix = f" + {self.prefix_tokens}" if self.prefix_tokens else ""
        return (f"{self.blocks} blocks, {self.heads} heads of {self.head_dim}, "
                f"{windows}{self.grid[0]}×{self.grid[1]} tokens{prefix}")

    def __str__(self) -> str:
        if self.reason:
            return f"{self.model}: not recognised: {self.reason}"
        return "\n".join([f"{self.model}: {self.sizes}", f"  {self.checked}", *(
            f"  {init}_: {why or 'fits'}" for init, why in self.fits)])


@dataclass(frozen=True, kw_only=True)
class Report(Description):
    """What `init_` has done to a model. `str` of it is the receipt."""

    init: str
    written: tuple[str, ...]    # names of the tensors that changed
    kept: int                   # how many others there are
    notes: tuple[str, ...]      # about frozen, tied and rounded weights
    targets: Targets            # may be empty
    mass: Masses                # share of each head's attention on its target, on positions alone
    mass_on_images: Masses      # the same in a forward pass of images; empty without. deep_impulse
                                #   takes white noise where none are given
    images: int
    uniform: float              # the mass under uniform attention

    def __str__(self) -> str:
        lines = [f"{self.init}: {self.model}, {self.sizes}", self.checked,
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
