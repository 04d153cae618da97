"""The engine: one epoch of training, one exact evaluation. The only place that sees both images and
model.

A *step* is one update of the weights from one global batch. Each process works through its share in
micro-batches, gradients accumulating; DistributedDataParallel averages them over the processes
during the last one. So a step means the same for any number of processes and any micro-batch; only
models with BatchNorm see which images came in one micro-batch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..messages import OneLineError
from .distributed import Processes, agreed
from .interruption import Interrupted, StopRequest
from .metrics import Diverged, Progress
from .state import TrainState

SETTLE_EVERY = 10               # steps between two looks at the losses, which wait for the device
AMP_DTYPES = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Step(Protocol):
    """One global batch: this process' share of it, as `train_epoch` needs it."""

    number: int                                      # global, from 0
    def __len__(self) -> int: ...                    # micro-batches
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, np.ndarray]]: ...


def set_precision(tf32: bool) -> None:
    """Whether float32 matrix products and convolutions may run in TensorFloat-32 on CUDA."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


def autocast(device: torch.device, amp: str) -> torch.autocast:
    """One code path for all precisions: amp "off" is an autocast that is switched off."""
    return torch.autocast(device.type, dtype=AMP_DTYPES[amp], enabled=amp != "off")


def normalises_over_images(model: nn.Module) -> bool:
    """Whether a step depends on which images share a micro-batch, as BatchNorm's statistics do."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


class Clock:
    """Adds the seconds of training to the epoch's."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.restart()

    def restart(self) -> None:
        self.began = time.perf_counter()

    def settle(self) -> None:
        self.progress.seconds += time.perf_counter() - self.began
        self.restart()


class Losses:
    """The losses of recent steps. They stay on the device until `settle`, so that launching the
    next step need not wait for the last one to finish."""

    def __init__(self, progress: Progress, processes: Processes) -> None:
        self.progress, self.processes = progress, processes
        self.pending: list[Tensor] = []

    def settle(self) -> None:
        """Average over the processes, add to the epoch; Diverged on all of them together."""
        if self.pending:
            mean = self.processes.sum(torch.stack(self.pending)) / self.processes.world_size
            self.pending = []
            self.progress.add_losses(mean.tolist())


def train_epoch(state: TrainState, forward: Callable[..., Tensor], steps: Iterable[Step], *,
                lr_at: Callable[[int], float], keep_at: Callable[[int], Tensor | None], amp: str,
                clip_norm: float, every_steps: int, processes: Processes,
                stop: StopRequest) -> Iterator[None]:
    """Train on the global batches of `steps`; yields where the caller should write a checkpoint.

    That is after every so many steps of the run as `every_steps` says (0: never). At each yield, at
    the end, and when Interrupted or a OneLineError ends it, the state is whole, between two steps.

    forward: the state's model, compiled or wrapped for several processes; called as
        forward(images, keep).
    steps: of each, its global number, its length, and by iterating its micro-batches: images,
        targets, and which of the global batch they are. The loss is the mean over images of
        −Σ target · log softmax(logits).
    lr_at: step → learning rate. keep_at: step → stochastic-depth factors (branches, global batch),
        or None.
    Raises Diverged on all processes together; Interrupted and a OneLineError of `steps` likewise.
    """
    progress, losses = state.progress, Losses(state.progress, processes)
    device = processes.device
    # DistributedDataParallel, compiled or not, has no_sync: gradients stay local until the last.
    synchronise_later = getattr(forward, "no_sync", contextlib.nullcontext)
    forward.train()
    clock = Clock(progress)

    def settle() -> None:
        losses.settle()
        clock.settle()
        require_finite_weights(state.model, progress.step)

    try:
        for step in agreed(steps, processes, stop):
            lr = lr_at(step.number)
            for group in state.optimizer.param_groups:
                group["lr"] = lr
            keep = keep_at(step.number)                                  # (branches, global batch)
            step_loss = torch.zeros((), device=device)
            for micro_step, (images, targets, places) in enumerate(step, 1):
                factors = () if keep is None else (keep[:, places].to(device, non_blocking=True),)
                with contextlib.nullcontext() if micro_step == len(step) else synchronise_later():
                    with autocast(device, amp):
                        logits = forward(images, *factors)               # (B, K)
                    loss = F.cross_entropy(logits.float(), targets)
                    state.scaler.scale(loss / len(step)).backward()
                step_loss += loss.detach() / len(step)
            _update(state, clip_norm)

            losses.pending.append(step_loss)
            if every_steps > 0 and (step.number + 1) % every_steps == 0:
                settle()
                yield
                clock.restart()                      # what the caller does is not training
            elif (step.number + 1) % SETTLE_EVERY == 0:
                losses.settle()
    except (Interrupted, OneLineError):
        settle()
        raise
    settle()


def _update(state: TrainState, clip_norm: float) -> None:
    """One optimiser step; none if GradScaler finds that gradients overflowed in fp16."""
    if clip_norm > 0:
        state.scaler.unscale_(state.optimizer)
        torch.nn.utils.clip_grad_norm_(state.model.parameters(), clip_norm)
    scale = state.scaler.get_scale()
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    if state.scaler.get_scale() < scale:             # it falls exactly when a step was skipped
        state.progress.skipped_steps += 1
    elif state.ema is not None:
        state.ema.update(state.model)


def require_finite_weights(model: nn.Module, step: int) -> None:
    """Diverged if a weight is infinite or NaN: no checkpoint may be written over a good one then.

    The weights are the same on all processes, and so is the verdict.
    """
    norms = torch._foreach_norm([p.detach() for p in model.parameters()])
    if not torch.stack(norms).isfinite().all():
        raise Diverged(f"the weights after step {step} are not finite")


@dataclass(frozen=True)
class Evaluation:
    """Over every image of the split once."""

    loss: float
    top1: float                 # percent
    top5: float                 # percent; of fewer than five classes all are in the top five
    images: int
    class_hits: list[int]       # by class: images of it that rank first
    class_images: list[int]     # by class: images of it


@torch.no_grad()
def evaluate(models: Sequence[nn.Module], batches: Iterable[tuple[Tensor, Tensor]], *,
             num_classes: int, amp: str, processes: Processes, stop: StopRequest,
             columns: Sequence[Tensor | None] | None = None) -> list[Evaluation]:
    """Exact loss and accuracy of each model, in one pass over the images.

    batches: images (B, 3, H, W) and labels (B,) on the device.
    num_classes: K, those of the labels. columns: of each model, which of its logits belong to these
        classes, (K,) int64 in the labels' order; the others are left out of ranking and softmax.
        None: the model has these classes in this order.

    Each process counts its own images once, then the counts are summed. Processes may have
    different numbers of batches, so `models` must not communicate. A OneLineError of
    `batches` on any process is raised on all of them.
    """
    device = processes.device
    totals = torch.zeros(len(models), 2, dtype=torch.float64, device=device)     # loss, top 5
    hits = torch.zeros(len(models), num_classes, dtype=torch.int64, device=device)
    counts = torch.zeros(num_classes, dtype=torch.int64, device=device)
    columns = [None if chosen is None else chosen.to(device)
               for chosen in columns or [None] * len(models)]
    for model in models:
        model.eval()
    for batch in agreed(batches, processes, stop):
        if batch is None:                            # others have more
            continue
        images, labels = batch
        for index, model in enumerate(models):
            with autocast(device, amp):
                logits = model(images)                               # (B, classes of the model)
            if columns[index] is not None:
                logits = logits[:, columns[index]]                   # (B, K)
            logits = logits.float()
            ranked = logits.topk(min(5, num_classes)).indices == labels[:, None]
            loss = F.cross_entropy(logits, labels, reduction="sum")
            totals[index] += torch.stack([loss, ranked.sum()]).double()
            hits[index].index_add_(0, labels, ranked[:, 0].long())
        counts.index_add_(0, labels, torch.ones_like(labels))
    for numbers in (totals, hits, counts):
        processes.sum(numbers)
    images = int(counts.sum())
    return [Evaluation(loss / images, 100.0 * sum(right) / images, 100.0 * top5 / images, images,
                       right, counts.tolist())
            for (loss, top5), right in zip(totals.tolist(), hits.tolist())]
