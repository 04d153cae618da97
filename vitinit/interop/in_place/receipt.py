"""What inits in place report: what was recognised of a model, and what was achieved."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...init.attentions import Attentions, Layout, SwinLayout
from ...mixing import mean_shares
from ...mixing.filters import Grid
from ...watch.mass import (
    ALIKE,
    InitOptions,
    Masses,
    Targets,
    decimal,
    has_targets,
    masses_on,
    targets_of,
)

__all__ = ["Description", "Report"]


@torch.no_grad()
def measured(
    vit: Attentions, name: str, options: InitOptions, images: Tensor | None
) -> tuple[Targets, Masses, Masses]:
    """The targets of a model of any library, and the masses on them; empty where there are none.

    options: all options of the init. The first masses are on positions alone, for a Swin on its
    relative bias alone; the second, of a ViT, in a forward pass of images, if there are any. The
    targets of offsets that were drawn at random are as in `mass_on_images`, on positions alone.
    """
    if not has_targets(vit, name, options):
        return (), (), ()
    blocks, grids = vit.blocks, vit.grids
    aimed = targets_of(name, options, [len(block.q) for block in blocks])
    if isinstance(vit, SwinLayout):
        maps = [block.bias.softmax(-1) for block in vit.blocks]
        return *masses_on(aimed, maps, grids), ()
    assert isinstance(vit, Layout)
    y = vit.entry(vit.positions[None])
    targets, masses = masses_on(
        aimed, [block.mixing_weights(block.norm(y))[0] for block in blocks], grids
    )
    if images is None:
        return targets, masses, ()
    readers = [
        (block.norm, lambda _, y, block=block: block.mixing_weights(vit.batch_first(y)))
        for block in blocks
    ]
    shares = mean_shares(vit.model, images.detach().to(blocks[0].q), readers, grids)
    aimed = [[[offset] for offset in of_block] for of_block in targets]
    return targets, masses, masses_on(aimed, shares, grids)[1]


@dataclass(frozen=True, kw_only=True)
class Description:
    """What has been recognised of a model; `describe` returns it."""

    model: str  # the model's class
    reason: str = ""  # why nothing was recognised
    blocks: int = 0
    heads: int = 0  # in the first block
    head_dim: int = 0
    grid: Grid = (0, 0)  # patch tokens down and across; of a Swin's window
    in_windows: bool = False  # whether the model is a Swin
    prefix_tokens: int = 0
    checked: str = ""  # what was seen in forward passes, and on which images
    fits: tuple[tuple[str, str], ...] = ()  # (init, why not, or "")

    @property
    def sizes(self) -> str:
        prefix = f" + {self.prefix_tokens}" if self.prefix_tokens else ""
        windows = "windows of " if self.in_windows else ""
        return (
            f"{self.blocks} blocks, {self.heads} heads of {self.head_dim}, "
            f"{windows}{self.grid[0]}×{self.grid[1]} tokens{prefix}"
        )

    def __str__(self) -> str:
        if self.reason:
            return f"{self.model}: not recognised: {self.reason}"
        return "\n".join(
            [
                f"{self.model}: {self.sizes}",
                f"  {self.checked}",
                *(f"  {init}_: {why or 'fits'}" for init, why in self.fits),
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Report(Description):
    """What `init_` has done to a model. `str` of it is the receipt."""

    init: str
    written: tuple[str, ...]  # names of the tensors that changed
    kept: int  # how many others there are
    notes: tuple[str, ...]  # about frozen, tied and rounded weights
    targets: Targets  # may be empty
    mass: Masses  # share of each head's attention on its target, on positions alone
    mass_on_images: Masses  # in a forward pass of images, or deep_impulse's noise; may be empty
    images: int
    uniform: float  # the mass under uniform attention

    def __str__(self) -> str:
        lines = [
            f"{self.init}: {self.model}, {self.sizes}",
            self.checked,
            f"wrote {len(self.written)} tensors: {patterns(self.written) or 'none'}; "
            f"kept {self.kept} others",
        ]
        alone = "the relative bias alone" if self.in_windows else "positions alone"
        on_images = f"{self.images} images" if self.images else "white noise"
        for masses, where in ((self.mass, alone), (self.mass_on_images, on_images)):
            if masses:
                uniform = decimal(self.uniform)
                lines.append(
                    f"mass on the target, on {where}: {by_head(masses)} (uniform {uniform})"
                )
        return "\n".join([*lines, *self.notes])


def by_head(masses: Masses) -> str:
    """For example "all 36 heads .99 to 1.00", or by head of the first, middle and last block."""
    every = [mass for of_block in masses for mass in of_block]
    if max(every) - min(every) <= ALIKE:
        return f"all {len(every)} heads {span(every)}"
    parts = []
    blocks = {0: "first", len(masses) // 2: "middle", len(masses) - 1: "last"}
    for block, title in sorted(blocks.items()):
        heads = masses[block]
        words = " ".join(map(decimal, heads))
        if max(heads) - min(heads) <= ALIKE:
            words = f"all heads {span(heads)}"
        parts.append(f"{title} block {words}")
    return "; ".join(parts)


def span(masses: Sequence[float]) -> str:
    """The least and the largest of some masses, such as ".97 to 1.00", or what both are."""
    return " to ".join(dict.fromkeys([decimal(min(masses)), decimal(max(masses))]))


def patterns(names: Iterable[str]) -> str:
    """Names with * for the numbers of blocks, each once."""
    return ", ".join(dict.fromkeys(re.sub(r"(?<![a-z])\d+", "*", name) for name in names))
