"""Training steps on given batches, made by the engine's `train_epoch`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..train.distributed import Processes
from ..train.ema import Ema
from ..train.engine import train_epoch
from ..train.interruption import StopRequest
from ..train.metrics import Progress
from ..train.state import TrainState

Part = tuple[Tensor, Tensor]    # images (B, 3, H, W) and targets (B, K) on the device


@dataclass(frozen=True)
class GivenStep:
    """A global batch of given tensors on one process, in the form that `train_epoch` expects.

    Iterating gives (images, targets, positions in the global batch) of each micro-batch.
    """

    number: int
    parts: Sequence[Part]       # its micro-batches

    @property
    def global_batch(self) -> int:
        return sum(len(images) for images, _ in self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, np.ndarray]]:
        first = 0
        for images, targets in self.parts:
            yield images, targets, np.arange(first, first + len(images))
            first += len(images)


def alone(device: torch.device) -> Processes:
    """The processes of a run that consists of one process."""
    return Processes(rank=0, local_rank=0, world_size=1, device=device)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, *, ema: Ema | None = None,
             scaler: torch.amp.GradScaler | None = None) -> TrainState:
    """A training state at step 0, by default without loss scaling and without a moving average."""
    device = next(model.parameters()).device
    return TrainState(model, optimizer, scaler or torch.amp.GradScaler(device.type, enabled=False),
                      ema, Progress())


def train_on(state: TrainState, steps: Iterable, *, forward: Callable[..., Tensor] | None = None,
             lr: float | Callable[[int], float] = 1e-3, drop_path: Tensor | None = None,
             amp: str = "off", clip_norm: float = 0.0) -> None:
    """Train on `steps` as one epoch of the engine.

    forward: what computes the logits, such as a compiled model; None: the model itself.
    lr: the learning rate, or a function of the step, which is called once as each step begins.
    drop_path: drop-path scales (branches, B) for every step. amp, clip_norm: as in `train_epoch`.
    """
    for _ in train_epoch(state, state.model if forward is None else forward, steps,
                         lr_at=lr if callable(lr) else lambda step: lr,
                         drop_path_at=lambda step: drop_path, amp=amp, clip_norm=clip_norm,
                         every_steps=0,
                         processes=alone(next(state.model.parameters()).device),
                         stop=StopRequest()):
        pass
