"""Different learning rates for parts of a model: factors per part and per layer, and held parts.

The parts are queries and keys ("qk"), position embeddings ("pos_embed"), the patch embedding
("patch_embed") and the classifier ("head"). The factor of all other parameters is that of their
layer alone. A held part is not trained during the first steps.
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
    """Factors on the learning rate, which also scale weight decay: AdamW multiplies it by the rate.

    scales: part → factor; 1 for a part that is not named.
    layer_decay: a parameter of layer i has the further factor layer_decay ** (L + 1 − i), where
        layer 0 is everything before the first of L blocks, layers 1 … L are the blocks, and layer L
        + 1 is everything after the last one (ELECTRA, arXiv 2003.10555; for ViT: BEiT, arXiv
        2106.08254).
    hold_steps: part → number of steps at the start of the run in which its learning rate is 0.
    """

    scales: Mapping[str, float] = field(default_factory=dict)
    layer_decay: float = 1.0
    hold_steps: Mapping[str, int] = field(default_factory=dict)

    def of_part(self, part: str | None) -> tuple[float, int]:
        """(factor, hold_steps) of a part; None stands for parameters that belong to no part."""
        return self.scales.get(part, 1.0), self.hold_steps.get(part, 0)


def query_key_rows(model: nn.Module) -> QueryKeyRows:
    """The rows of parameters that compute queries and keys, as the attention modules state them."""
    return {id(parameter): rows for module in model.modules()
            if hasattr(module, "query_key_parameters")
            for parameter, rows in module.query_key_parameters()}


def part_of(name: str) -> str | None:
    """The part that a parameter belongs to, by its name; None for queries and keys and all others."""
    return next((part for part, names in PART_NAMES.items() if names.match(name)), None)


def layer_numbers(names: Iterable[str]) -> list[int]:
    """The layer number of each parameter, given all names in the model's order.

    Layer 0 is everything before the first block, layer i the i-th block together with what is
    between it and the previous block (Swin's patch merging), and layer L + 1 everything after the
    last of L blocks.
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

    If queries and keys are only some rows of a parameter, these are the values of its other rows.
    """
    named = dict(model.named_parameters())
    layers = dict(zip(named, layer_numbers(named)))
    last, rows = max(layers.values(), default=0), query_key_rows(model)
    rate_of = {}
    for name, parameter in named.items():
        all_rows = rows.get(id(parameter)) == slice(None)        # queries and keys alone
        factor, hold_steps = rates.of_part("qk" if all_rows else part_of(name))
        rate_of[name] = (factor * rates.layer_decay ** (last - layers[name]), hold_steps)
    return rate_of


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float, step: int) -> None:
    """Set the learning rate of every parameter group for step number `step`, counted from 0.

    lr: the schedule's learning rate, which the groups' factors multiply.
    """
    for group in optimizer.param_groups:
        held = step < group.get("hold_steps", 0)
        group["lr"] = 0.0 if held else lr * group.get("factor", 1.0)
    if isinstance(optimizer, PartAdamW):
        optimizer.start(step)


class PartAdamW(torch.optim.AdamW):
    """AdamW in which some rows of a parameter may have a learning rate of their own.

    In most models queries, keys and values are rows of one parameter. AdamW's update, weight decay
    included, is proportional to the learning rate, and its moments do not depend on the learning
    rate. Rows that are to have `factor` times the learning rate of their parameter therefore take
    the whole step first and are then set to old + factor · (new − old). Up to rounding, this is the
    update of a separate parameter with that learning rate. Scaling the gradients of these rows
    instead would have no effect, because AdamW's update does not depend on the scale of the
    gradients.

    The parameter groups have their own factors, which `set_learning_rate` applies.
    """

    def __init__(self, groups: list[dict[str, Any]], rows: list[tuple[nn.Parameter, slice]],
                 rates: PartRates, **options: Any) -> None:
        """rows: each a parameter in `groups`, and the slice of its rows that are queries and keys."""
        super().__init__(groups, **options)
        self.rows = rows
        self.rows_factor, self.rows_hold_steps = rates.of_part("qk")
        self.factor_now = self.rows_factor

    def start(self, step: int) -> None:
        """Set the factor of the rows for step number `step`, counted from 0: 0 while they are held."""
        self.factor_now = 0.0 if step < self.rows_hold_steps else self.rows_factor

    @torch.no_grad()
    def step(self, closure=None):
        """Do one update. If gradients overflowed in fp16, nothing changes, in these rows either."""
        if self.factor_now == 1.0 or not self.rows:
            return super().step(closure)
        before = [parameter[rows].clone() for parameter, rows in self.rows]
        loss = super().step(closure)
        after = [parameter[rows] for parameter, rows in self.rows]
        torch._foreach_copy_(after, torch._foreach_lerp(before, after, self.factor_now))
        return loss
