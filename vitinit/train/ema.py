"""The exponential moving average (EMA) of a model's weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class Ema:
    """A second model whose state v follows the model's state m: v ← d·v + (1 − d)·m per update.

    Every floating-point entry of the state dict is averaged, buffers included; integer entries are
    copied. With `warmup` the decay d of update k, counted from 0, is

        min(decay, 1 − (1 + k)^(−2/3)),

    so that the initial weights do not dominate the average of a short run.

    `ema.model` is the average: a copy of `model` in evaluation mode, without gradients. Between two
    updates the tensors of either model may be replaced, but not its modules.
    """

    def __init__(self, model: nn.Module, *, decay: float, warmup: bool) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.decay, self.warmup = decay, warmup
        self.updates = 0
        self.source, self.pairs = model, self._pairs(model)

    @property
    def updates(self) -> int:
        """How many updates there were. Reading it waits for the device if steps may be skipped."""
        return self.tried - int(self.skipped)

    @updates.setter
    def updates(self, count: int) -> None:
        self.tried = count
        self.skipped: int | Tensor = 0               # how many of `tried` changed nothing; () in fp16

    def decay_at(self, update: int | Tensor) -> float | Tensor:
        """The decay d of update number `update`, from 0.

        A tensor gives a tensor, which need not be waited for; without warm-up it is the constant.
        """
        if not self.warmup:
            return self.decay
        if isinstance(update, Tensor):
            return (1.0 - (1.0 + update.double()) ** (-2.0 / 3.0)).clamp(max=self.decay)
        return min(self.decay, 1.0 - (1.0 + update) ** (-2.0 / 3.0))

    @torch.no_grad()
    def update(self, model: nn.Module, skipped: Tensor | None = None) -> None:
        """Set v to v + (1 − d)(m − v), in a few kernels for all tensors of one dtype.

        skipped: a boolean scalar on the device: whether the optimiser skipped the step, in which
            case nothing changes. The host does not wait for its value.
        """
        if model is not self.source:
            self.source, self.pairs = model, self._pairs(model)
        weight = 1.0 - self.decay_at(self.tried - self.skipped)
        self.tried += 1
        if skipped is not None:
            self.skipped = self.skipped + skipped
        for pairs in self.pairs:
            averages = [tensors[name] for tensors, _, name in pairs]
            values = [tensors[name] for _, tensors, name in pairs]
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

    def _pairs(self, model: nn.Module) -> list[list[tuple[dict, dict, str]]]:
        """Where each entry of the state dict is stored in both models, grouped by dtype.

        Each entry is (a module's dictionary in the average, the same in `model`, the name in both).
        Looking these up once is faster than building two state dicts per step.
        """
        kinds: dict[torch.dtype, list[tuple[dict, dict, str]]] = {}
        for path, value in self.model.state_dict().items():
            parent, _, name = path.rpartition(".")
            averages, values = (_holding(name, either.get_submodule(parent))
                                for either in (self.model, model))
            kinds.setdefault(value.dtype, []).append((averages, values, name))
        return list(kinds.values())

    def state_dict(self) -> dict:
        return {"model": self.model.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.updates = state["updates"]


def _holding(name: str, module: nn.Module) -> dict[str, Any]:
    """The module's own dictionary that holds `name`: that of its parameters or of its buffers."""
    return module._parameters if name in module._parameters else module._buffers
