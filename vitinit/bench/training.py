"""What train.py trains with, set up by its own functions; no other module of bench calls them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..recipe.files import fresh_recipe
from ..recipe.sections import Recipe
from ..train.distributed import Processes
from ..train.engine import cross_entropy, set_precision, train_epochs, tune_convolutions
from ..train.interruption import StopRequest
from ..train.state import TrainState

REPOSITORY = Path(__file__).resolve().parents[2]
Part = tuple[Tensor, Tensor]    # images (B, 3, H, W) and targets (B, K) on the device


def train_program() -> ModuleType:
    """train.py as a module, from the repository around the package."""
    spec = importlib.util.spec_from_file_location("measured_train_program", REPOSITORY / "train.py")
    program = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = program
    spec.loader.exec_module(program)
    return program


def recipe_of(name: str, sets: Sequence[str] = ()) -> Recipe:
    """The recipe `name` with init "default" and with changes such as "engine.compile=false".

    Of a set whose folder is not given, the recipe has the published number of classes.
    """
    return fresh_recipe(name, init="default", sets=sets)


def alone(device: torch.device) -> Processes:
    """The processes of a run that consists of one process."""
    return Processes(rank=0, local_rank=0, world_size=1, device=device)


def set_up(recipe: Recipe, device: torch.device) -> tuple[TrainState, Callable[..., Tensor]]:
    """The state that train.py starts a run of the recipe from, and the (compiled) model to call.

    The init must be one that reads no images.
    """
    program = train_program()
    set_precision(recipe.engine.tf32)
    state, _ = program.initial_state(recipe, alone(device), None, Path(), None)
    tune_convolutions(state.model)
    return state, program.wrap_models(state, recipe, alone(device))[0]


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


def train_on(state: TrainState, steps: Iterable, *, forward: Callable[..., Tensor] | None = None,
             lr: float = 1e-4, drop_path: Tensor | None = None, amp: str = "off",
             clip_norm: float = 0.0, objective: Callable[..., Tensor] = cross_entropy) -> None:
    """Train on `steps` as one epoch of the engine.

    forward: what computes the logits, such as a compiled model; None: the model itself.
    drop_path: drop-path scales (branches, B) for every step. amp, clip_norm, objective: as in
        `train_epochs`.
    """
    train_epochs(state, state.model if forward is None else forward, lambda epoch, done: steps,
                 epochs=state.progress.epochs + 1, global_batch=1, lr_at=lambda step: lr,
                 drop_path_at=lambda step: drop_path, amp=amp, clip_norm=clip_norm,
                 objective=objective, stop=StopRequest(),
                 processes=alone(next(state.model.parameters()).device))
