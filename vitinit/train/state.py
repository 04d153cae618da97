"""The state of training: everything that a step changes, saved and restored in one place."""

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..base.files import CheckpointError
from ..base.messages import in_brief, shortened
from ..base.values import Table
from .metrics import Progress

INTEGERS = (torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Tensors of integers that are no weights.
COUNTED = re.compile(r"(^|\.)(num_batches_tracked|relative_position_index|position_ids)$")


def fault(name: str, value: object, like: Tensor | None = None) -> str:
    """What is wrong with a tensor of a model or optimiser, which is to be `like` another; or ""."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    if value.is_meta:
        return "without values (meta)"
    if value.is_nested or value.layout != torch.strided:
        return f"sparse or nested ({value.layout})"
    if like is not None and (value.shape, value.dtype) != (like.shape, like.dtype):
        return (
            f"{tuple(value.shape)} {value.dtype} where the run has {tuple(like.shape)} {like.dtype}"
        )
    allowed = INTEGERS + FLOATS if COUNTED.search(name) else FLOATS
    if value.dtype not in allowed:
        return str(value.dtype)
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        return f"longer than what is stored of it, by its stride {value.stride()}"
    # A sum takes no memory; only one that overflows has to be looked at more closely.
    if value.sum().isfinite() or value.isfinite().all():
        return ""
    return "not finite, the run diverged before it was written"


class Ema:
    """An exponential moving average v of the model's state m: v ← d·v + (1 − d)·m per update.

    Every floating-point entry of the state dict is averaged, buffers included; integer entries are
    copied. With `warmup` the decay d of update k, from 0, is min(decay, 1 − (1 + k)^(−2/3)), so
    that the initial weights do not dominate the average of a short run.

    `ema.model` is the average: a copy of `model` in evaluation mode, without gradients. Both models
    must keep their tensors; another device or memory format is to be chosen before.
    """

    def __init__(self, model: nn.Module, *, decay: float, warmup: bool) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.decay, self.warmup = decay, warmup
        self.updates: int | Tensor = 0  # on the device where fp16 may skip updates
        kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        own = self.model.state_dict(keep_vars=True).values()
        for average, value in zip(own, model.state_dict(keep_vars=True).values()):
            averages, values = kinds.setdefault(value.dtype, ([], []))
            averages.append(average)
            values.append(value)
        self.pairs = list(kinds.values())  # per dtype: the average's tensors, the model's

    @torch.no_grad()
    def update(self, skipped: Tensor | None = None) -> None:
        """Set v to v + (1 − d)(m − v), in a few kernels for all tensors of one dtype; not if
        `skipped`, a boolean scalar on the device, for which the host does not wait.
        """
        decay: float | Tensor = self.decay
        if self.warmup and isinstance(self.updates, Tensor):
            decay = (1.0 - (1.0 + self.updates.double()) ** (-2.0 / 3.0)).clamp(max=self.decay)
        elif self.warmup:
            decay = min(self.decay, 1.0 - (1.0 + self.updates) ** (-2.0 / 3.0))
        weight = 1.0 - decay
        done = 1 if skipped is None else ~skipped
        self.updates = self.updates + done
        for averages, values in self.pairs:
            floating = averages[0].is_floating_point()
            if skipped is not None:  # lerp takes no weight that is on the device
                share = (~skipped).double() * weight if floating else ~skipped
                difference = torch._foreach_sub(values, averages)
                torch._foreach_mul_(difference, share.to(averages[0].dtype))
                torch._foreach_add_(averages, difference)
            elif floating:
                torch._foreach_lerp_(averages, values, float(weight))
            else:
                torch._foreach_copy_(averages, values)

    def state_dict(self) -> Table:
        return {"model": self.model.state_dict(), "updates": int(self.updates)}

    def load_state_dict(self, state: Table) -> None:
        self.model.load_state_dict(state["model"])
        self.updates = state["updates"]


@dataclass
class TrainState:
    """The model, its optimiser, loss scaling and moving average, and the progress of the run."""

    model: nn.Module  # bare: neither compiled nor wrapped for several processes
    optimizer: torch.optim.Optimizer  # AdamW, Muon with AdamW, or LAMB
    scaler: torch.amp.GradScaler  # disabled unless engine.amp is "fp16"
    ema: Ema | None
    progress: Progress
    about: Table = field(default_factory=dict)  # further entries of every checkpoint

    def weights(self) -> Table:
        """What evaluation and fine-tuning need: models and progress. The tensors are no copies."""
        return {
            "model": self.model.state_dict(),
            "ema": self.ema.state_dict() if self.ema else None,
            "grid": self.model.grid,
            "step": self.progress.step,
            "progress": asdict(self.progress),
            **self.about,
        }

    def state_dict(self) -> Table:
        """The whole state, from which training can resume; see `weights`."""
        return self.weights() | {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: Table, path: Path) -> None:
        """Restore what `state_dict` of a run with the same recipe returned.

        The optimiser's hyper-parameters are not restored: the recipe states them all. Raises
        CheckpointError, as `require_like` does, for a checkpoint of something else.
        """
        progress = progress_of(state["progress"], path)
        saved = state["optimizer"].get("state")
        # Before the first step that fp16 did not skip, there are no moments.
        begun = saved != {} or progress.step > progress.skipped_steps
        parts: dict[str, Any] = {"model": self.model}
        if self.ema is not None:
            parts["ema"] = self.ema
        if self.scaler.is_enabled():
            parts["scaler"] = self.scaler
        for name, part in parts.items():
            require_like(state.get(name), part.state_dict(), name, path)
        require_like(saved, self._moments() if begun else {}, "optimizer", path)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": saved})
        self.progress = progress
        for parameter, values in self.optimizer.state.items():
            for name, value in values.items():  # a fused kernel needs all in one memory format
                if value.shape == parameter.shape and value.stride() != parameter.stride():
                    values[name] = torch.empty_like(parameter).copy_(value)

    def _moments(self) -> dict[int, dict[str, Tensor]]:
        """What the optimiser keeps of each weight, by its number, once it has made a step."""
        moments = dict[int, dict[str, Tensor]]()
        for group in self.optimizer.param_groups:
            for weight in group["params"]:
                if group.get("muon"):
                    kept = {"momentum_buffer": weight}
                else:
                    kept = {"step": torch.zeros(()), "exp_avg": weight, "exp_avg_sq": weight}
                moments[len(moments)] = kept
        return moments


def progress_of(stored: Table, path: Path) -> Progress:
    """The progress that the checkpoint at `path` holds; CheckpointError if it is no run's."""
    expected = asdict(Progress())
    known = expected | stored  # of an older run
    require_like(known, expected, "progress", path)
    return Progress(**known)


def require_like(stored: Any, expected: Any, place: str, path: Path) -> None:
    """Raise CheckpointError unless `stored` has the form of `expected`, and values that a run has.

    That is the same names, finite tensors of the same shapes and types, and numbers of the same
    types: above 0 where those of `expected` are, and whole ones, such as steps, at least 0; for
    None, a number or None.
    """
    for problem in _differences(stored, expected, place):
        other = "" if "finite" in problem else "is not of this run: "
        raise CheckpointError(f"{path}: {other}{problem}")


def _differences(stored: Any, expected: Any, place: str) -> Iterator[str]:
    if isinstance(expected, Tensor):
        problem = fault(place, stored, like=expected)
        if not problem and place.endswith((".step", ".exp_avg_sq")) and stored.min() < 0:
            problem = "below 0"
    elif not isinstance(expected, Mapping):
        problem = _number_fault(stored, like=expected)
    elif not isinstance(stored, Mapping):
        problem = f"a {type(stored).__name__}, expected a table"
    elif stored.keys() != expected.keys():
        odd = sorted(map(str, expected.keys() ^ stored.keys()))
        problem = f"of another run, which differs in {shortened(odd)}"
    else:
        problem = ""
        for name, part in expected.items():
            yield from _differences(stored[name], part, f"{place}.{name}")
    if problem:
        yield f"{place} is {problem}"


def _number_fault(value: Any, like: float | None) -> str:
    """What is wrong with a number that is to be `like` another, or with None; or ""."""
    if value is None and like is None:
        return ""
    above, limit = -(2**63), ""
    if like:
        above, limit = 0, " > 0"
    elif type(like) is int:
        above, limit = -1, " ≥ 0"
    kind = float if like is None else type(like)
    if type(value) is kind and above < value < 2**63:
        return ""
    return f"{in_brief(repr(value))}, expected a number{limit}"
