"""The exponential moving average (EMA) of a model's weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class Ema:
    """A second model whose state v follows the model's state m: v ← d·v + (1 − d)·m per update.

    Every floating-point entry of the state dict is averaged, buffers included; integer entries are
    copied. With `warmup` the decay d of update k, from 0, is min(decay, 1 − (1 + k)^(−2/3)), so
    that the initial weights do not dominate the average of a short run.

    `ema.model` is the average: a copy of `model` in evaluation mode, without gradients. Both models
    must keep their tensors; another device or memory format is to be chosen before.
    """

    def __init__(self, model: nn.Module, *, decay: float, warmup: bool) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.decay, self.warmup = decay, warmup
        self.updates: int | Tensor = 0               # on the device where fp16 may skip updates
        kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for average, value in zip(*(one.state_dict(keep_vars=True).values()
                                    for one in (self.model, model))):
            averages, values = kinds.setdefault(value.dtype, ([], []))
            averages.append(average)
            values.append(value)
        self.pairs = list(kinds.values())            # per dtype: the average's tensors, the model's

    def decay_now(self) -> float | Tensor:
        """The decay d of the next update; a tensor on the device if `updates` is."""
        if not self.warmup:
            return self.decay
        if isinstance(self.updates, Tensor):
            return (1.0 - (1.0 + self.updates.double()) ** (-2.0 / 3.0)).clamp(max=self.decay)
        return min(self.decay, 1.0 - (1.0 + self.updates) ** (-2.0 / 3.0))

    @torch.no_grad()
    def update(self, skipped: Tensor | None = None) -> None:
        """Set v to v + (1 − d)(m − v), in a few kernels for all tensors of one dtype.

        skipped: a boolean scalar on the device: whether the optimiser skipped the step, in which
            case nothing changes. The host does not wait for its value.
        """
        weight = 1.0 - self.decay_now()
        self.updates = self.updates + (1 if skipped is None else ~skipped)
        for averages, values in self.pairs:
            floating = averages[0].is_floating_point()
            if skipped is not None:                  # lerp takes no weight that is on the device
                share = (~skipped).double() * weight if floating else ~skipped
                difference = torch._foreach_sub(values, averages)
                torch._foreach_mul_(difference, share.to(averages[0].dtype))
                torch._foreach_add_(averages, difference)
            elif floating:
                torch._foreach_lerp_(averages, values, weight)
            else:
                torch._foreach_copy_(averages, values)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "updates": int(self.updates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.updates = state["updates"]
