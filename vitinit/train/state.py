"""The state of training: everything that a step changes, saved and restored in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..messages import in_brief
from .checkpoint import CheckpointError, shortened
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
        """Restore what `state_dict` returned. `path` is the file that error messages name.

        Everything is first checked against this state's own tensors and types, because moments of
        another shape would crash the fused optimiser's kernel. Raises CheckpointError, which names
        the file and the key, for whatever does not fit. The optimiser's hyper-parameters are not
        restored: the recipe states them all.
        """
        progress = restored_progress(state.get("progress"), path)
        groups, moments = self._moments()
        own = self.optimizer.state_dict()
        try:
            numbers = [group["params"] for group in state["optimizer"]["param_groups"]]
            saved = state["optimizer"]["state"]
        except (TypeError, KeyError):
            raise CheckpointError(f"{path}: optimizer is no state of AdamW or Muon") from None
        require_like(numbers, groups, path, "optimizer.groups")
        # At step 0 there are no moments. A step that fp16 skips makes them, too.
        require_like(saved, moments if progress.step else {}, path, "optimizer.state")
        for key, value in self.state_dict().items():
            if key in ("model", "scaler") or key == "ema" and self.ema is not None:
                require_like(state.get(key), value, path, key)

        self.model.load_state_dict(state["model"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(own | {"state": saved})
        for parameter, values in self.optimizer.state.items():
            for name, value in values.items():       # a fused kernel needs all in one memory format
                if value.shape == parameter.shape and value.stride() != parameter.stride():
                    values[name] = torch.empty_like(parameter).copy_(value)
        self.scaler.load_state_dict(state["scaler"])
        self.progress = progress

    def _moments(self) -> tuple[list[list[int]], dict[int, dict[str, Tensor]]]:
        """The numbers of each group's parameters; and by number what the optimiser stores of one.

        That is what it stores after a step, as tensors without values.
        """
        groups = [group["params"] for group in self.optimizer.state_dict()["param_groups"]]
        moments = {}
        for group, numbers in zip(self.optimizer.param_groups, groups):
            for parameter, number in zip(group["params"], numbers):
                moment = torch.empty_like(parameter, device="meta")
                moments[number] = {"momentum_buffer": moment} if group.get("muon") else {
                    "step": torch.empty((), device="meta"), "exp_avg": moment,
                    "exp_avg_sq": moment}
        return groups, moments


def restored_progress(found: Any, path: Path) -> Progress:
    """The Progress of a checkpoint; CheckpointError, naming the file, for anything else."""
    require_like(found, asdict(Progress()), path, "progress")
    return Progress(**found)


def require_like(found: Any, expected: Any, path: Path, key: str) -> None:
    """Raise CheckpointError unless `found` is what `expected` is, but for the values of numbers.

    Dictionaries have the same keys, lists are equal, tensors have the same shape and type; tensors
    and numbers are finite, and numbers not negative. Where None is expected, which stands for "not
    yet known", there may be a number.

    path, key: the file and the part of it that `found` is, for the message.
    """
    theirs, ours = flat(found, key), flat(expected, key)
    missing, surplus = ([name for name in one if name not in other]
                        for one, other in ((ours, theirs), (theirs, ours)))
    if missing or surplus:
        words = [f"{word} {shortened(names)}" for word, names in
                 (("lacks", missing), ("has also", surplus)) if names]
        raise CheckpointError(f"{path}: {key} does not fit: it {' and '.join(words)}")
    for name, wanted in ours.items():
        value, needed = theirs[name], in_brief(wanted)
        if isinstance(wanted, Tensor):
            needed = f"a tensor {tuple(wanted.shape)} {wanted.dtype} of finite numbers"
            fits = isinstance(value, Tensor) and (value.shape, value.dtype) == (
                wanted.shape, wanted.dtype) and bool(value.isfinite().all())
        elif wanted is None or isinstance(wanted, (int, float)):
            kinds = (int, float) if wanted is None else (type(wanted),)
            needed = f"{' or '.join(kind.__name__ for kind in kinds)} from 0 on"
            fits = value is wanted is None or type(value) in kinds and 0 <= value < math.inf
        else:
            fits = value == wanted
        if not fits:
            found = in_brief(value)
            if isinstance(value, Tensor):
                found = (f"{tuple(value.shape)} {value.dtype}"
                         f"{'' if value.isfinite().all() else ', not finite'}")
            raise CheckpointError(f"{path}: {name} is {found}; expected {needed}")


def flat(value: Any, name: str) -> dict[str, Any]:
    """Nested dictionaries as a single one, such as {"model.head.bias": …}."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {place: leaf for key, part in value.items()
            for place, leaf in flat(part, f"{name}.{key}").items()}
