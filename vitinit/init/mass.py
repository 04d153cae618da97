"""The mass that an init reached: the share of each head's attention on its target, on images.

Inits that write attention aim each head at one neighbour, its target. Whether the head reaches it
depends on the grid, the number of heads, the width and the images, and no loss shows it. train.py
prints it. In Mixer and ConvMixer the shifts are exact by construction: there is nothing to measure.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..filters import Offset
from ..mixing import mixers, shares_of_patches, target_mass
from . import family_of, init_function
from .in_place import AIMED, AT_ONCE, decimal, targets_of


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
        kinds = {kind: (values, known)
                 for kind, values in (("centre", self.centre), ("other", self.others))
                 if (known := [value for value in values if not math.isnan(value)])}
        shown = [decimal(_mean(known)) if max(known) - min(known) <= 0.05 else
                 " ".join("–" if math.isnan(value) else decimal(value) for value in values)
                 for values, known in kinds.values()]
        return (f"{' / '.join(shown)} (uniform {decimal(_mean(self.uniform))}) on the targets of "
                f"{' / '.join(kinds)} heads")


def has_targets(model: nn.Module, name: str, options: Mapping[str, Any]) -> bool:
    """Whether the init `name` with these options aims heads of this model at targets.

    Not so for baselines and controls, for Mixer and ConvMixer, for `mimetic` on a Swin, whose
    tokens have no position embedding, and for queries and keys left as the base drew them.
    """
    families = ("vit", "simple_vit") + ("swin",) * (name != "mimetic")
    return name in AIMED and family_of(model) in families and options.get("qk_init") != "base"


@torch.no_grad()
def mass_on_images(model: nn.Module, name: str, options: Mapping[str, Any], images: Tensor) -> Mass:
    """The masses that an init reached in a forward pass of `images`, (n, 3, H, W), normalised.

    options: those given to the init, which has just been applied to the model and `has_targets`.
    The model runs in evaluation mode, and is left as it was. The target of `mimetic` is the token
    itself. If offsets were drawn at random, the target of a head is the offset of the kernel to
    which it attends most.
    """
    swin = family_of(model) == "swin"
    parameters = inspect.signature(init_function(name, family_of(model))).parameters
    chosen = {key: parameter.default for key, parameter in parameters.items()} | dict(options)
    masses, layers = Mass([], [], []), [mixer for mixer, _ in mixers(model)]
    found = mean_attention(model, layers, images)
    aims, cells = targets_of(name, chosen, [len(weights) for weights in found])
    for layer, weights, targets in zip(layers, found, aims):
        grid = layer.window if swin else model.grid
        centre, others = [], []
        for head, target in enumerate(targets):
            offset, mass = reached(weights[head:head + 1], [target] if target else cells, grid)
            (centre if offset == (0, 0) else others).append(mass)
        masses.centre.append(_mean(centre))
        masses.others.append(_mean(others))
        masses.uniform.append(1.0 / math.prod(grid))
    return masses


def mean_attention(model: nn.Module, layers: list[nn.Module], images: Tensor) -> list[Tensor]:
    """Each layer's attention among the patches, (h, N, N), averaged over images and windows."""
    means: list[Tensor] = [images.new_zeros(())] * len(layers)

    def record(number: int) -> Callable:
        def hook(layer: nn.Module, arguments: tuple) -> None:
            weights = layer.mixing_weights(*arguments)   # of images, or their windows
            grid = layer.window if family_of(model) == "swin" else model.grid
            means[number] = means[number] + len(batch) / len(images) * shares_of_patches(
                weights, grid).mean(0)
        return hook
    hooks = [layer.register_forward_pre_hook(record(number)) for number, layer in enumerate(layers)]
    training = model.training
    model.eval()
    for batch in images.split(AT_ONCE):
        model(batch)
    model.train(training)
    for hook in hooks:
        hook.remove()
    return means


def reached(weights: Tensor, offsets: list[Offset], grid: tuple[int, int]) -> tuple[Offset, float]:
    """The offset with the largest mass in weights, (1, N, N), and that mass, NaN without one."""
    masses = [target_mass(weights, [offset], grid).item() for offset in offsets]
    best = max(range(len(offsets)),
               key=lambda index: (not math.isnan(masses[index]), masses[index]))
    return offsets[best], masses[best]


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
