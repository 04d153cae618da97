"""The mass that an init reached: the share of each head's attention on its target.

Inits that write attention aim each head at one neighbour, its target. Whether the head reaches it
depends on the grid, the number of heads, the width and the images, and no loss shows it. In Mixer
and ConvMixer the shifts are exact by construction (a narrow Mixer's to 1.5 %): nothing to measure.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Generator, Tensor, nn

from ..init import ROTARY, family_of, init_function
from ..init.attentions import Attentions
from ..mixing import block_grids, mean_shares, target_mass
from ..mixing.filters import Grid, Offset, head_offsets, ordered_offsets
from ..models.attention import Attention
from ..models.shift import Shift
from ..models.simple_vit import SimpleAttention

if TYPE_CHECKING:
    from ..data.sources import Source
    from ..recipe.sections import Recipe

InitOptions = Mapping[str, Any]  # of an init
Targets = tuple[tuple[Offset, ...], ...]  # (down, right), by block and head
Masses = tuple[tuple[float, ...], ...]  # by block and head
AIMED = ("impulse", "impulse_gd", "deep_impulse", "mimetic")  # have a target per head
MASS_IMAGES = 64  # of a run, on which the mass is measured at its start
ALIKE = 0.05  # blocks whose masses differ by more are shown one by one, else by a mean


class Mass(NamedTuple):
    """The mass on the heads' targets, one entry per block; NaN where a block has no such head,
    or mixes by shifts.
    """

    centre: list[float]  # mean over the heads whose target is their own token
    others: list[float]  # mean over all other heads
    uniform: list[float]  # the share of one token under uniform attention

    def __str__(self) -> str:
        """For example ".99 / .05 (uniform .001) on the targets of centre / other heads"."""
        shown = {}
        for kind, values in (("centre", self.centre), ("other", self.others)):
            known = [value for value in values if not math.isnan(value)]
            if known:
                if max(known) - min(known) <= ALIKE:
                    values = [mean(known)]
                shown[kind] = " ".join(map(decimal, values))
        return (
            f"{' / '.join(shown.values())} (uniform {decimal(mean(self.uniform))}) on the targets "
            f"of {' / '.join(shown)} heads"
        )

    def in_brief(self) -> str:
        """For example ".99 the own patch, .05 a neighbour, .001 by chance"."""
        parts = []
        for target, values in (("the own patch", self.centre), ("a neighbour", self.others)):
            known = [value for value in values if not math.isnan(value)]
            if known:
                parts.append(f"{decimal(mean(known))} {target}")
        return f"{', '.join(parts)}, {decimal(mean(self.uniform))} by chance"


def mean(values: Sequence[float]) -> float:
    """The mean of some numbers, NaN of none."""
    return sum(values) / len(values) if values else math.nan


def shifts_alone(model: nn.Module | Attentions) -> bool:
    """Whether all of its blocks mix tokens by shifts."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    kinds = {type(module) for module in modules}
    return Shift in kinds and Attention not in kinds


def has_targets(model: nn.Module | Attentions, name: str, options: InitOptions) -> bool:
    """Whether the init `name` with these options aims heads of this model at targets.

    Not so for baselines and controls, for Mixer and ConvMixer, for `mimetic` on a Swin, whose
    tokens have no position embedding, for queries and keys left as the base drew them, and where
    there are none.
    """
    family = family_of(model)
    return (
        name in AIMED
        and not shifts_alone(model)
        and options.get("qk_init") != "base"
        and (family in ("vit", "simple_vit", ROTARY) or family == "swin" and name != "mimetic")
    )


def targets_of(name: str, options: InitOptions, heads: Sequence[int]) -> list[list[list[Offset]]]:
    """The offsets among which the target of each head of each block is: one, unless it was drawn.

    options: all options of the init. heads: their number by block. Inits with an option "offsets"
    begin with the first offset in every block; the others go on from block to block.
    """
    cells = [(0, 0)] if name == "mimetic" else ordered_offsets(options["kernel_size"])
    if options.get("offsets") == "random":
        return [[cells] * count for count in heads]
    starts = repeat(0) if "offsets" in options else accumulate(heads, initial=0)
    return [
        [[offset] for offset in head_offsets(count, cells, "ordered", Generator(), first=start)]
        for count, start in zip(heads, starts)
    ]


def targets_in(
    model: nn.Module, name: str, options: InitOptions, heads: Sequence[int]
) -> list[list[list[Offset]]]:
    """`targets_of` an init of this model, of which only the options that were given are known; [] of
    one that has none.
    """
    if not has_targets(model, name, options):
        return []
    complete = with_defaults(init_function(name, family_of(model)), options)
    return targets_of(name, complete, heads)


def with_defaults(function: Callable, options: InitOptions) -> dict[str, Any]:
    """All options of an init, by name: those given, and the defaults of the others."""
    parameters = inspect.signature(function).parameters
    return {key: parameter.default for key, parameter in parameters.items()} | dict(options)


def masses_on(
    targets: list[list[list[Offset]]], shares: list[Tensor], grids: Sequence[Grid]
) -> tuple[Targets, Masses]:
    """The target of each head of each block, that with the largest mass, and the mass on it.

    targets: see `targets_of`. shares: by block, attention among the patches of its grid, (h, N, N).
    """
    best_targets, best_masses = [], []
    for of_block, weights, grid in zip(targets, shares, grids):
        best = []  # by head
        for head, offsets in enumerate(of_block):
            masses = target_mass(weights[[head] * len(offsets)], offsets, grid)
            best.append((offsets[int(masses.argmax())], masses.max().item()))
        of_heads, on_them = zip(*best)
        best_targets.append(of_heads)
        best_masses.append(on_them)
    return tuple(best_targets), tuple(best_masses)


def mass_on_images(model: nn.Module, name: str, options: InitOptions, images: Tensor) -> Mass:
    """The masses that an init reached in a forward pass of `images`, (n, 3, H, W), normalised.

    options: those given to the init, which has just been applied to the model and `has_targets`.
    The target of `mimetic` is the token itself; of drawn offsets, that which has the most mass.
    """
    attentions = [
        module
        for module in model.modules()
        if isinstance(module, (Attention, Shift, SimpleAttention))
    ]
    grids = [
        getattr(attention, "window", grid)  # of a Swin
        for attention, grid in zip(attentions, block_grids(model))
    ]
    readers = [
        (attention, lambda inputs, _, attention=attention: attention.mixing_weights(*inputs))
        for attention in attentions
    ]
    shares = mean_shares(model, images, readers, grids)
    aimed = targets_in(model, name, options, list(map(len, shares)))
    mass = Mass([], [], [])
    for attention, grid, targets, masses in zip(
        attentions, grids, *masses_on(aimed, shares, grids)
    ):
        by_head = [] if isinstance(attention, Shift) else list(zip(targets, masses))
        mass.centre.append(mean([value for offset, value in by_head if offset == (0, 0)]))
        mass.others.append(mean([value for offset, value in by_head if offset != (0, 0)]))
        mass.uniform.append(1.0 / math.prod(grid))
    return mass


def decimal(value: float) -> str:
    """For example .99, .05, .0013: two decimals, or, below 0.1, two digits; "–" for NaN."""
    if math.isnan(value):
        return "–"
    text = f"{value:.2f}"
    if value < 0.0995:
        text = f"{float(f'{value:.2g}'):.6f}".rstrip("0")
    return text.removeprefix("0") if float(text) else "0"


class MassWatcher:
    """Prints how much attention is on the init's targets, if it has any, in MASS_IMAGES images."""

    def initialised(self, model: nn.Module, recipe: Recipe, train_set: Source) -> list[str]:
        # Here, since inits of other people's models measure masses, too, and load no data pipeline.
        from ..data.images import DataError
        from ..runs.data import training_views

        name, options = recipe.init.name, recipe.init.options
        if not has_targets(model, name, options):
            return []
        try:
            images = training_views(recipe, train_set, MASS_IMAGES)
        except DataError:  # training will say so when it needs the image
            return []
        mass = mass_on_images(model, name, options, images)
        return [
            f"mass    attention on targets: {mass.in_brief()}",
            f"blocks  mass {mass}, on {len(images)} training images",
        ]
