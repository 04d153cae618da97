"""Exponential moving average of a model's state."""

from __future__ import annotations

import copy

import torch
from torch import nn


class Ema:
    """A second model whose state trails the first: v ← d·v + (1 − d)·m after every update.

    The average runs over every floating entry of the state dict, buffers included; integer entries
    are copied. With `warmup` the decay of update k (from 0) is min(decay, 1 − (1 + k)^(−2/3)), so
    that a short run is not dominated by its initial weights.
    """

    def __init__(self, model: nn.Module, *, decay: float, warmup: bool) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.decay, self.warmup = decay, warmup
        self.updates = 0

    def decay_now(self) -> float:
        if not self.warmup:
            return self.decay
        return min(self.decay, 1.0 - (1.0 + self.updates) ** (-2.0 / 3.0))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        ours, theirs = self.model.state_dict(), model.state_dict()
        floating = [name for name, value in ours.items() if value.is_floating_point()]
        # v + (1 − d)(m − v), all tensors in a few kernels.
        torch._foreach_lerp_([ours[name] for name in floating],
                             [theirs[name] for name in floating], 1.0 - self.decay_now())
        for name in ours.keys() - set(floating):
            ours[name].copy_(theirs[name])
        self.updates += 1

    def state_dict(self) -> dict:
        return {"model": self.model.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.updates = state["updates"]
