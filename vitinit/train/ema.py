"""Exponential moving average of a model's state."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class Ema:
    """A second model whose state trails the first: v ← d·v + (1 − d)·m after every update.

    The average runs over every floating entry of the state dict, buffers included; integer entries
    are copied. With `warmup` the decay of update k (from 0) is min(decay, 1 − (1 + k)^(−2/3)), so
    that a short run is not dominated by its initial weights.

    Between two updates either model's tensors may be replaced; its modules may not.
    """

    def __init__(self, model: nn.Module, *, decay: float, warmup: bool) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.decay, self.warmup = decay, warmup
        self.updates = 0
        self.source, self.pairs = model, self._pairs(model)

    @property
    def updates(self) -> int:
        """How many there were. Waits for the device where some may have been skipped."""
        return self.tried - int(self.skipped)

    @updates.setter
    def updates(self, count: int) -> None:
        self.tried = count
        self.skipped: int | Tensor = 0               # of those that were tried

    def decay_at(self, update: int | Tensor) -> float | Tensor:
        """That of this update, from 0; a tensor for a tensor, where it changes."""
        if not self.warmup:
            return self.decay
        if isinstance(update, Tensor):
            return (1.0 - (1.0 + update.double()) ** (-2.0 / 3.0)).clamp(max=self.decay)
        return min(self.decay, 1.0 - (1.0 + update) ** (-2.0 / 3.0))

    @torch.no_grad()
    def update(self, model: nn.Module, skipped: Tensor | None = None) -> None:
        """v + (1 − d)(m − v), all tensors of one kind in a few kernels.

        skipped: whether nothing is to change, a truth value on the device. It is not waited for.
        """
        if model is not self.source:
            self.source, self.pairs = model, self._pairs(model)
        weight = 1.0 - self.decay_at(self.tried - self.skipped)
        self.tried += 1
        if skipped is not None:
            self.skipped = self.skipped + skipped
        for pairs in self.pairs:
            ours = [tensors[name] for tensors, _, name in pairs]
            theirs = [tensors[name] for _, tensors, name in pairs]
            floating = ours[0].is_floating_point()
            if skipped is not None:                  # lerp takes no weight that is on the device
                share = (~skipped).double() * weight if floating else ~skipped
                difference = torch._foreach_sub(theirs, ours)
                torch._foreach_mul_(difference, share.to(ours[0].dtype))
                torch._foreach_add_(ours, difference)
            elif floating:
                torch._foreach_lerp_(ours, theirs, weight)
            else:
                torch._foreach_copy_(ours, theirs)

    def _pairs(self, model: nn.Module) -> list[list[tuple[dict, dict, str]]]:
        """Where each entry of the state dict stands in both models: the dictionaries that hold it,
        and its name there; together those of one dtype. Two state dicts a step would take longer.
        """
        kinds: dict[torch.dtype, list[tuple[dict, dict, str]]] = {}
        for path, value in self.model.state_dict().items():
            parent, _, name = path.rpartition(".")
            ours, theirs = (_holding(name, either.get_submodule(parent))
                            for either in (self.model, model))
            kinds.setdefault(value.dtype, []).append((ours, theirs, name))
        return list(kinds.values())

    def state_dict(self) -> dict:
        return {"model": self.model.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.updates = state["updates"]


def _holding(name: str, module: nn.Module) -> dict[str, Any]:
    """The module's own dictionary of parameters, or of buffers."""
    return module._parameters if name in module._parameters else module._buffers
