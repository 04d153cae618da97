"""The state of training: everything that a step changes, saved and restored in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..messages import in_brief
from .checkpoint import CheckpointError, model_state, require_finite, require_fit
from .ema import Ema
from .metrics import Progress

# What the optimiser stores per tensor, by whether Muon trains it: the kind's name, and the names.
MOMENTS = {False: ("AdamW", ("step", "exp_avg", "exp_avg_sq")), True: ("Muon", ("momentum_buffer",))}


@dataclass
class TrainState:
    """The model, its optimiser, loss scaling and moving average, and the progress of the run."""

    model: nn.Module            # bare: neither compiled nor wrapped for several processes
    optimizer: torch.optim.Optimizer     # AdamW, or Muon with AdamW
    scaler: torch.amp.GradScaler         # disabled unless engine.amp is "fp16"
    ema: Ema | None
    progress: Progress

    def weights(self) -> dict[str, Any]:
        """The part of the state that evaluation and fine-tuning need: the models and the progress.

        The tensors are the state's own, not copies.
        """
        return {"model": self.model.state_dict(), "ema": self.ema.state_dict() if self.ema else None,
                "grid": self.model.grid, "step": self.progress.step,
                "progress": self.progress.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        """The whole state, from which training can resume. The tensors are not copies."""
        return self.weights() | {"optimizer": self.optimizer.state_dict(),
                                 "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any], path: Path) -> None:
        """Restore what `state_dict` returned. `path` is the file that error messages name.

        Everything is first checked against this state's own tensors and types, because moments of
        another shape would crash the fused optimiser's kernel. Raises CheckpointError for whatever
        does not fit. The optimiser's hyper-parameters are not restored: the recipe states them all.
        """
        progress = restored_progress(state.get("progress"), path)
        weights, averaged = model_state(state, path), None
        require_finite(weights, "model", path)
        require_fit(self.model, weights, path)
        if self.ema is not None:
            average = state.get("ema")
            if not isinstance(average, Mapping) or type(average.get("updates")) is not int:
                raise CheckpointError(f"{path}: holds no moving average, which the recipe asks for")
            averaged = model_state(state, path, "ema")
            require_finite(averaged, "ema", path)
            require_fit(self.ema.model, averaged, path)
        moments = self._fitting_moments(state.get("optimizer"), progress, path)
        scaling = self._fitting_scaling(state.get("scaler"), path)

        self.model.load_state_dict(weights)
        if self.ema is not None:
            self.ema.load_state_dict({"model": averaged, "updates": state["ema"]["updates"]})
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": moments})
        for parameter, values in self.optimizer.state.items():
            for name, value in values.items():       # a fused kernel needs all in one memory format
                if value.shape == parameter.shape and value.stride() != parameter.stride():
                    values[name] = torch.empty_like(parameter).copy_(value)
        self.scaler.load_state_dict(scaling)
        self.progress = progress

    def _fitting_moments(self, state: Any, progress: Progress, path: Path) -> dict[int, Any]:
        """The optimiser's moments per parameter number, checked for their parameters' shapes."""
        groups = self.optimizer.param_groups
        numbers = [group["params"] for group in self.optimizer.state_dict()["param_groups"]]
        try:
            saved_numbers = [group["params"] for group in state["param_groups"]]
            moments = dict(state["state"])
        except (TypeError, KeyError, ValueError):
            raise CheckpointError(f"{path}: its optimizer is no state of AdamW or Muon") from None
        if saved_numbers != numbers:
            raise CheckpointError(
                f"{path}: its optimizer has parameter groups of {_counts(saved_numbers)} tensors, "
                f"and the model's have {_counts(numbers)}")
        parameters = {number: (parameter, MOMENTS[group.get("muon", False)])
                      for group_numbers, group in zip(numbers, groups)
                      for number, parameter in zip(group_numbers, group["params"])}
        trained = {number for number, (parameter, _) in parameters.items() if parameter.requires_grad}
        expected = trained if progress.step else set()   # a step that fp16 skips makes them, too
        if moments.keys() != expected:
            raise CheckpointError(f"{path}: its optimizer has moments of {len(moments)} tensors at "
                                  f"step {progress.step}, expected {len(expected)}")
        for number, values in moments.items():
            parameter, (kind, names) = parameters[number]
            if not isinstance(values, Mapping) or values.keys() != set(names):
                raise CheckpointError(f"{path}: its optimizer holds no moments of {kind} for tensor "
                                      f"{number}")
            for name in names:
                value = values[name]
                if name == "step":
                    if not isinstance(value, Tensor) or value.numel() != 1 or not value >= 0:
                        raise CheckpointError(f"{path}: its optimizer has counted no steps of tensor "
                                              f"{number}")
                    continue
                if not isinstance(value, Tensor) or value.shape != parameter.shape or (
                        value.dtype != parameter.dtype):
                    found = (f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else
                             type(value).__name__)
                    raise CheckpointError(
                        f"{path}: its optimizer's {name} of tensor {number} is {found} where the "
                        f"model has {tuple(parameter.shape)} {parameter.dtype}")
                require_finite({str(number): value}, f"optimizer's {name}", path)
        return moments

    def _fitting_scaling(self, state: Any, path: Path) -> dict[str, Any]:
        """GradScaler's saved state, checked for the keys of this run's precision and finite values."""
        own = self.scaler.state_dict()
        if not isinstance(state, Mapping) or state.keys() != own.keys() or not all(
                type(value) in (int, float) and math.isfinite(value) for value in state.values()):
            raise CheckpointError(f"{path}: its loss scaling is not that of the recipe's engine.amp; "
                                  f"expected {', '.join(own) or 'none'}")
        return dict(state)


def restored_progress(state: Any, path: Path) -> Progress:
    """The Progress whose `state_dict` is given.

    Keys that are missing, as in checkpoints of earlier versions, keep their defaults. Raises
    CheckpointError, naming the file `path`, for unknown keys and for values of the wrong type.
    """
    own = Progress()
    known = own.state_dict()
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path}: its progress is {in_brief(state)}, expected a dictionary")
    for key, value in state.items():
        if key not in known:
            raise CheckpointError(f"{path}: its progress has an unknown key '{in_brief(key)}'")
        if isinstance(known[key], int):
            fits = type(value) is int and value >= 0
        elif key == "best":
            fits = value is None or type(value) in (int, float)
        else:
            fits = type(value) in (int, float) and math.isfinite(value) and value >= 0
        if not fits:
            raise CheckpointError(f"{path}: its progress has {key} = {in_brief(value)}")
    return Progress(**state)


def _counts(groups: list[Any]) -> str:
    """The lengths of the groups, in words: "50 + 102"."""
    return " + ".join(str(len(group)) if isinstance(group, list) else "?" for group in groups)
