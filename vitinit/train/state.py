"""Everything that training changes, saved and restored in one place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .checkpoint import load_model
from .ema import Ema
from .metrics import Progress


@dataclass
class TrainState:
    """The model and what goes on with it: optimiser, loss scaling, moving average, progress."""

    model: nn.Module            # bare: neither compiled nor wrapped for several processes
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: Ema | None
    progress: Progress

    def weights(self) -> dict[str, Any]:
        """What of the state is a model, to be evaluated or started from."""
        return {"model": self.model.state_dict(), "ema": self.ema.state_dict() if self.ema else None,
                "grid": self.model.grid, "step": self.progress.step,
                "progress": self.progress.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        """All of it, to go on from. The tensors are the state's own, not copies."""
        return self.weights() | {"optimizer": self.optimizer.state_dict(),
                                 "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any], path: Path) -> None:
        """What `state_dict` gave; `path` is what errors name."""
        load_model(self.model, state["model"], path)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.progress = Progress(**state["progress"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
