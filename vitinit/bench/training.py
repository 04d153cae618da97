"""What a run trains with, set up by the run's own functions, and steps of given tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..recipe.files import fresh_recipe
from ..recipe.sections import Recipe
from ..runs.model import initial_state, wrap_models
from ..train.distributed import Processes
from ..train.engine import cross_entropy, set_precision, train_epochs, tune_convolutions
from ..train.interruption import StopRequest
from ..train.metrics import StepRow
from ..train.state import TrainState

Part = tuple[Tensor, Tensor]    # images (B, 3, H, W) and targets (B, K) on the device


def recipe_of(name: str, sets: Sequence[str] = ()) -> Recipe:
    """The recipe `name` with init "default" and with changes such as "engine.compile=false".

    Of a set whose folder is not given, the recipe has the published number of classes.
    """
    return fresh_recipe(name, init="default", sets=sets)


def alone(device: torch.device) -> Processes:
    """The processes of a run that consists of one process."""
    return Processes(rank=0, local_rank=0, world_size=1, device=device)


def set_up(recipe: Recipe, device: torch.device) -> tuple[TrainState, nn.Module]:
    """The state that a run of the recipe starts from, and the (compiled) model to call.

    The init must be one that reads no images.
    """
    set_precision(recipe.engine.tf32)
    state, _ = initial_state(recipe, alone(device))
    tune_convolutions(state.model)
    return state, wrap_models(state, recipe, alone(device))[0]


class GivenPart(NamedTuple):
    """A micro-batch of given tensors, in the form that the engine expects."""

    part: Part
    positions: np.ndarray       # (B,), of its images in the global batch

    def prepare(self) -> Part:
        return self.part


def given_step(number: int, parts: Sequence[Part]) -> tuple[int, list[GivenPart]]:
    """Step number `number`, on one process, of micro-batches `parts`."""
    ends = np.cumsum([len(images) for images, _ in parts])
    return number, [GivenPart(part, np.arange(end - len(part[0]), end))
                    for part, end in zip(parts, ends)]


@dataclass
class GivenSteps:
    """One epoch of given steps; what the engine's `Training` says of each field holds here."""

    state: TrainState
    forward: nn.Module
    given: Iterable[tuple[int, Sequence[Any]]]
    objective: Callable[..., Tensor] = cross_entropy
    learning_rate: Callable[[int], float] = lambda step: 1e-4
    drop_path: Callable[[int], Tensor | None] = lambda step: None
    amp: str = "off"
    clip_norm: float = 0.0
    global_batch: int = 1
    steps_per_epoch: int = 0
    save_every: int = 0
    save: Callable[[], object] = lambda: None
    record: Callable[[StepRow], object] = lambda row: None
    finish_epoch: Callable[[int], object] = lambda epoch: None

    def __post_init__(self) -> None:
        self.epochs = self.state.progress.epochs + 1

    def steps(self, epoch: int, done: int) -> Iterable[tuple[int, Sequence[Any]]]:
        return self.given


def train_on(state: TrainState, steps: Iterable, *, forward: nn.Module | None = None,
             lr: float = 1e-4, drop_path: Tensor | None = None, **options: Any) -> None:
    """Train on `steps` as one epoch of the engine.

    forward: what computes the logits, such as a compiled model; None: the model itself. lr: of
    every step. drop_path: scales (branches, B) of every step. options: fields of `GivenSteps`.
    """
    given = GivenSteps(state, state.model if forward is None else forward, steps,
                       learning_rate=lambda step: lr, drop_path=lambda step: drop_path, **options)
    train_epochs(given, alone(next(state.model.parameters()).device), StopRequest())
