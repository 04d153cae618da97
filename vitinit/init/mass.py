"""The mass that an init reached: the share of each head's attention on its target.

Inits that write attention aim each head at one neighbour, its target. Whether the head reaches it
depends on the grid, the number of heads, the width and the images, and no loss shows it. train.py
prints it. In Mixer and ConvMixer the shifts are exact by construction: there is nothing to measure.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from ..filters import Offset, head_offsets, ordered_offsets
from ..mixing import blocks_of, mean_shares, target_mass
from . import family_of, init_function
from .layout import Layout

AIMED = ("impulse", "impulse_gd", "deep_impulse", "mimetic")         # have a target per head
ALIKE = 0.05            # blocks whose masses differ by less are shown by their mean


class Mass(NamedTuple):
    """The mass on the heads' targets, one entry per block; NaN where a block has no such head."""

    centre: list[float]         # mean over the heads whose target is their own token
    others: list[float]         # mean over all other heads
    uniform: list[float]        # the share of one token under uniform attention

    def __str__(self) -> str:
        """For example ".99 / .05 (uniform .001) on the targets of centre / other heads".

        The numbers are means over the blocks, or one for each block where they differ by more than
        0.05, with "–" for a block that has no such head.
        """
        shown, kinds = [], []
        for kind, values in (("centre", self.centre), ("other", self.others)):
            known = [value for value in values if not math.isnan(value)]
            if known:
                alike = max(known) - min(known) <= ALIKE
                kinds.append(kind)
                shown.append(" ".join(map(decimal, [sum(known) / len(known)] if alike else values)))
        uniform = decimal(sum(self.uniform) / len(self.uniform))
        return (f"{' / '.join(shown)} (uniform {uniform}) on the targets of {' / '.join(kinds)} "
                "heads")


def has_targets(model: nn.Module, name: str, options: Mapping[str, Any]) -> bool:
    """Whether the init `name` with these options aims heads of this model at targets.

    Not so for baselines and controls, for Mixer and ConvMixer, for `mimetic` on a Swin, whose
    tokens have no position embedding, and for queries and keys left as the base drew them.
    """
    families = ("vit", "simple_vit") + ("swin",) * (name != "mimetic")
    return (name in AIMED and options.get("qk_init") != "base" and family_of(model) in families)


def targets_of(name: str, options: Mapping[str, Any], heads: Sequence[int]
               ) -> list[list[list[Offset]]]:
    """The offsets among which the target of each head of each block is: one, unless it was drawn.

    options: all options of the init. heads: their number by block.
    """
    targets, before, cells = [], 0, [(0, 0)]
    if name != "mimetic":
        cells = ordered_offsets(options["kernel_size"])
    for count in heads:
        if options.get("offsets") == "random":
            targets.append([cells] * count)
        else:
            chosen = head_offsets(count, cells, "ordered", Generator(),
                                  first=before if name == "deep_impulse" else 0)
            targets.append([[offset] for offset in chosen])
        before += count
    return targets


def with_defaults(function: Callable, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of an init, by name: those given, and the defaults of the others."""
    chosen = dict(options)
    for key, parameter in inspect.signature(function).parameters.items():
        chosen.setdefault(key, parameter.default)
    return chosen


def masses_on(targets: list[list[list[Offset]]], shares: list[Tensor],
              grids: Sequence[tuple[int, int]]) -> list[list[tuple[Offset, float]]]:
    """The target of each head of each block, that with the largest mass, and the mass on it.

    targets: see `targets_of`. shares: by block, attention among the patches of its grid, (h, N, N).
    """
    found = []
    for of_block, weights, grid in zip(targets, shares, grids):
        found.append([])
        for head, offsets in enumerate(of_block):
            masses = target_mass(weights[[head] * len(offsets)], offsets, grid)
            best = int(masses.argmax())
            found[-1].append((offsets[best], masses[best].item()))
    return found


def mass_on_images(model: nn.Module, name: str, options: Mapping[str, Any], images: Tensor) -> Mass:
    """The masses that an init reached in a forward pass of `images`, (n, 3, H, W), normalised.

    options: those given to the init, which has just been applied to the model and `has_targets`.
    The model runs in evaluation mode, and is left as it was. The target of `mimetic` is the token
    itself. If offsets were drawn at random, the target of a head is the offset of the kernel to
    which it attends most.
    """
    chosen = with_defaults(init_function(name, family_of(model)), options)
    readers, grids = [], []
    for block in blocks_of(model):
        readers.append((block.attn, lambda x, _, mixer=block.attn: mixer.mixing_weights(*x)))
        grids.append(block.window if model.family == "swin" else model.grid)
    shares = mean_shares(model, images, readers, grids)
    targets = targets_of(name, chosen, list(map(len, shares)))
    mass = Mass([], [], [])
    for grid, of_block in zip(grids, masses_on(targets, shares, grids)):
        centre, others = [], []
        for offset, value in of_block:
            (others if any(offset) else centre).append(value)
        mass.centre.append(sum(centre) / len(centre) if centre else math.nan)
        mass.others.append(sum(others) / len(others) if others else math.nan)
        mass.uniform.append(1.0 / (grid[0] * grid[1]))
    return mass


@torch.no_grad()
def measured(vit: Layout, name: str, options: Mapping[str, Any], images: Tensor | None
             ) -> dict[str, Any]:
    """By block and head the target, (down, right), and the mass on it, of a model of any library.

    options: all options of the init. "mass" is that on positions alone, for a Swin on its relative
    bias alone; "mass_on_images" that in a forward pass of images, if there are any. Where offsets
    were drawn at random, a head's target is the offset to which it attends most on positions alone.
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
        y = y if vit.entry is None else vit.entry(y)
        shares = [block.mixing_weights(block.norm(y))[0] for block in vit.blocks]
    found = masses_on(targets_of(name, options, [len(block.q) for block in vit.blocks]), shares,
                      grids)
    fields["targets"], fields["mass"] = _apart(found)
    if images is not None and not vit.in_windows:
        shares = mean_shares(vit.model, images.detach().to(vit.pos_embed), [
            (block.norm, lambda _, y, block=block: block.mixing_weights(vit.batch_first(y)))
            for block in vit.blocks], grids)
        targets = [[[offset] for offset in block] for block in fields["targets"]]
        _, fields["mass_on_images"] = _apart(masses_on(targets, shares, grids))
    return fields


def _apart(found: list[list[tuple[Offset, float]]]) -> tuple[tuple, tuple]:
    """The targets and the masses by block and head."""
    return tuple(tuple(tuple(head[part] for head in block) for block in found) for part in (0, 1))


def decimal(value: float) -> str:
    """For example .99, .05, .0013: two decimals, or, below 0.1, two digits; "–" for NaN."""
    if math.isnan(value):
        return "–"
    text = f"{value:.2f}" if value >= 0.0995 else f"{float(f'{value:.2g}'):.6f}".rstrip("0")
    return text.removeprefix("0")
