"""The state of training: everything that a step changes, saved and restored in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..messages import in_brief
from .checkpoint import CheckpointError
from .ema import Ema
from .metrics import Progress


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
