"""The state of training: everything that a step changes, saved and restored in one place.

Among it is the exponential moving average (EMA) of the model's weights, if there is one.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..messages import in_brief
from .checkpoint import CheckpointError
from .metrics import Progress


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


@dataclass
class TrainState:
    """The model, its optimiser, loss scaling and moving average, and the progress of the run."""

    model: nn.Module            # bare: neither compiled nor wrapped for several processes
    optimizer: torch.optim.Optimizer     # AdamW, or Muon with AdamW
    scaler: torch.amp.GradScaler         # disabled unless engine.amp is "fp16"
    ema: Ema | None
    progress: Progress
    about: dict[str, Any] = field(default_factory=dict)  # further entries of every checkpoint

    def weights(self) -> dict[str, Any]:
        """The part of the state that evaluation and fine-tuning need: the models and the progress.

        The tensors are the state's own, not copies.
        """
        return {"model": self.model.state_dict(),
                "ema": self.ema.state_dict() if self.ema else None, "grid": self.model.grid,
                "step": self.progress.step, "progress": asdict(self.progress), **self.about}

    def state_dict(self) -> dict[str, Any]:
        """The whole state, from which training can resume. The tensors are not copies."""
        return self.weights() | {"optimizer": self.optimizer.state_dict(),
                                 "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], path: Path) -> None:
        """Restore what `state_dict` of a run with the same recipe returned.

        The optimiser's hyper-parameters are not restored: the recipe states them all. Raises
        CheckpointError, which names the file `path`, for a checkpoint of something else.
        """
        try:
            self.model.load_state_dict(state["model"])
            if self.ema is not None:
                self.ema.load_state_dict(state["ema"])
            own = self.optimizer.state_dict()
            self.optimizer.load_state_dict(own | {"state": state["optimizer"]["state"]})
            self.scaler.load_state_dict(state["scaler"])
            self.progress = Progress(**state["progress"])
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path}: is not of this run: {in_brief(error)}") from None
        for parameter, values in self.optimizer.state.items():
            for name, value in values.items():       # a fused kernel needs all in one memory format
                if value.shape == parameter.shape and value.stride() != parameter.stride():
                    values[name] = torch.empty_like(parameter).copy_(value)
