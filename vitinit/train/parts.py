"""Learning rates of parts of a model: a factor per part, a factor per layer, and parts that wait.

The parts are queries and keys ("qk"), position embeddings ("pos_embed"), the patch embedding
("patch_embed") and the classifier ("head"). Everything else has the learning rate as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

PARTS = ("qk", "pos_embed", "patch_embed", "head")
PART_NAMES = {"pos_embed": re.compile(r"(.*\.)?(pos_embed|relative_position_bias_table)$"),
              "patch_embed": re.compile(r"(patch_embed|stem)\."),
              "head": re.compile(r"head(_dist)?\.")}
BLOCK = re.compile(r"((.*\.)?blocks\.\d+)\.")

# The rows of a parameter that belong to queries and keys, by the parameter's id.
QueryKeyRows = dict[int, slice]


@dataclass(frozen=True)
class PartRates:
    """Factors on the learning rate, weight decay's share of the step included.

    scales: part → factor; a part that is not named has 1.
    layer_decay: a parameter of layer i has the factor layer_decay ** (L + 1 − i): 0 is everything
        before the first of L blocks, L + 1 what follows the last one (ELECTRA, arXiv 2003.10555;
        for ViT: BEiT, arXiv 2106.08254). It multiplies the part's factor.
    hold_steps: part → how many steps its rate is 0 at first.
    """

    scales: Mapping[str, float] = field(default_factory=dict)
    layer_decay: float = 1.0
    hold_steps: Mapping[str, int] = field(default_factory=dict)

    def of_part(self, part: str | None) -> tuple[float, int]:
        """(factor, hold_steps) of a part; None: of a parameter that belongs to no part."""
        return self.scales.get(part, 1.0), self.hold_steps.get(part, 0)


def query_key_rows(model: nn.Module) -> QueryKeyRows:
    """Which rows of which parameters make queries and keys, as the attention modules say."""
    return {id(parameter): rows for module in model.modules()
            if hasattr(module, "query_key_parameters")
            for parameter, rows in module.query_key_parameters()}


def part_of(name: str) -> str | None:
    """The part that a parameter belongs to by its name; queries and keys have none."""
    return next((part for part, names in PART_NAMES.items() if names.match(name)), None)


def layer_numbers(names: Iterable[str]) -> list[int]:
    """The layer of each parameter, given all names in the model's order.

    0 before the first block, i for the i-th block and what lies between it and the one before
    (Swin's downsampling), L + 1 behind the last of L blocks.
    """
    seen: dict[str, int] = {}
    numbers = []
    for name in names:
        block = BLOCK.match(name)
        numbers.append(seen.setdefault(block[1], len(seen) + 1) if block else
                       len(seen) + 1 if seen else 0)
    return numbers


def rates_by_name(model: nn.Module, rates: PartRates) -> dict[str, tuple[float, int]]:
    """Parameter name → (factor, hold_steps).

    Where queries and keys are rows of a larger parameter, this is the rate of its other rows.
    """
    named = dict(model.named_parameters())
    layers = dict(zip(named, layer_numbers(named)))
    last, rows = max(layers.values(), default=0), query_key_rows(model)
    found = {}
    for name, parameter in named.items():
        whole = rows.get(id(parameter)) == slice(None)
        factor, hold_steps = rates.of_part("qk" if whole else part_of(name))
        found[name] = (factor * rates.layer_decay ** (last - layers[name]), hold_steps)
    return found


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float, step: int) -> None:
    """Give every group of an optimiser its learning rate for `step`, counted from 0."""
    for group in optimizer.param_groups:
        held = step < group.get("hold_steps", 0)
        group["lr"] = 0.0 if held else lr * group.get("factor", 1.0)
    if isinstance(optimizer, PartAdamW):
        optimizer.start(step)


class PartAdamW(torch.optim.AdamW):
    """AdamW whose groups have a factor on the learning rate, and with them some rows of a parameter.

    `set_learning_rate` reads the factor. AdamW's update is proportional to the
    learning rate, decay included, and its moments do not depend on it. So rows that are to have
    `factor` times the rate of their parameter take the whole step and go back by the rest of it:
    old + factor · (new − old). That is what a parameter of their own would do, up to rounding.
    Scaling their gradients would do nothing: AdamW divides each gradient by its size.
    """

    def __init__(self, groups: list[dict[str, Any]], rows: list[tuple[nn.Parameter, slice]],
                 rates: PartRates, **options: Any) -> None:
        """rows: parameters in `groups`, and those of their rows that are queries and keys."""
        super().__init__(groups, **options)
        self.rows = rows
        self.rows_factor, self.rows_hold_steps = rates.of_part("qk")
        self.factor_now = self.rows_factor

    def start(self, step: int) -> None:
        """Say which step is next, counted from 0; some rows may have to wait."""
        self.factor_now = 0.0 if step < self.rows_hold_steps else self.rows_factor

    @torch.no_grad()
    def step(self, closure=None):
        """One update. Where gradients overflowed in fp16, AdamW changes nothing, and neither do rows."""
        if self.factor_now == 1.0 or not self.rows:
            return super().step(closure)
        before = [parameter[rows].clone() for parameter, rows in self.rows]
        loss = super().step(closure)
        after = [parameter[rows] for parameter, rows in self.rows]
        torch._foreach_copy_(after, torch._foreach_lerp(before, after, self.factor_now))
        return loss
