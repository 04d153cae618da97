"""The engine: one epoch of training, and one exact evaluation.

This is the only module in which images and the model meet.

A *step* is one update of the weights, computed from one global batch. Each process works through
its share of the global batch in micro-batches and accumulates their gradients; during the last
micro-batch DistributedDataParallel averages the gradients over the processes. Up to rounding, the
result of a step therefore does not depend on the number of processes or on the micro-batch size.
The exception is a model with BatchNorm, whose statistics depend on which images share a
micro-batch.

Each micro-batch is trained on as soon as it has been loaded. On a GPU the host only launches
kernels: nothing within a step waits for a value from the device. Only every tenth step
(`SETTLE_EVERY`) are the losses copied to the host.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..messages import OneLineError
from .device import sent
from .distributed import Processes, agreed
from .interruption import Interrupted, StopRequest
from .metrics import Diverged, Progress, StepRow
from .optim import set_learning_rate
from .state import TrainState

SETTLE_EVERY = 10               # steps between two reads of the losses; a read waits for the device
T = TypeVar("T")
AMP_DTYPES = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Step(Protocol):
    """What `train_epoch` needs to know of one step: this process's share of a global batch.

    Iterating yields one tuple (images, targets, positions) per micro-batch; see `MicroBatch`.
    """

    number: int                                      # of the step within the run, from 0
    global_batch: int                                # images, over all processes
    def __len__(self) -> int: ...                    # micro-batches of this process
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, np.ndarray]]: ...


def set_precision(tf32: bool) -> None:
    """Set whether float32 matrix products and convolutions may run in TensorFloat-32 on CUDA."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


def tune_convolutions(model: nn.Module) -> None:
    """Let cuDNN time its kernels for each convolution and use the fastest (no effect without CUDA).

    This is switched on only for models with a convolution whose stride differs from its kernel
    size: a patch embedding alone is not worth the timing. Which kernel is fastest can change from
    run to run, and the last bits of the results with it; the timing therefore stays off under
    torch.use_deterministic_algorithms.
    """
    convolves = any(isinstance(module, nn.Conv2d) and module.kernel_size != module.stride
                    for module in model.modules())
    torch.backends.cudnn.benchmark = (
        convolves and not torch.are_deterministic_algorithms_enabled())


def autocast(device: torch.device, amp: str) -> torch.autocast:
    """The autocast context of recipe key engine.amp: "bf16", "fp16", or "off" (a disabled context)."""
    return torch.autocast(device.type, dtype=AMP_DTYPES[amp], enabled=amp != "off")


def normalises_over_images(model: nn.Module) -> bool:
    """Whether the model has BatchNorm, so that a step depends on which images share a micro-batch."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


class MicroBatch(NamedTuple):
    """The part of a step for which this process runs one forward and one backward pass."""

    step: Step
    number: int                 # of the micro-batch within the step, from 0
    images: Tensor              # (B, 3, H, W)
    targets: Tensor             # (B, K), class probabilities
    positions: np.ndarray       # (B,), index of each image within the global batch

    @property
    def first(self) -> bool:
        return self.number == 0

    @property
    def last(self) -> bool:
        return self.number + 1 == len(self.step)


def micro_batches(steps: Iterable[Step]) -> Iterator[MicroBatch]:
    """Yield the micro-batches of all steps in order, each as soon as it has been loaded."""
    for step in steps:
        for number, parts in enumerate(step):
            yield MicroBatch(step, number, *parts)


class Rollback:
    """Undoes a step that is abandoned before its update.

    Until the update, a step has changed nothing but the gradients and the model's buffers
    (BatchNorm's running statistics). `begin` copies the buffers; `undo` restores them and clears
    the gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.open = model, False
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for buffer in model.buffers():
            kinds.setdefault(buffer.dtype, []).append(buffer)
        self.buffers = [(buffers, [buffer.clone() for buffer in buffers])
                        for buffers in kinds.values()]       # (the model's, copies), per dtype

    def begin(self) -> None:
        """Save the buffers. Call this before the first forward pass of a step of several passes."""
        self.open = True
        for now, before in self.buffers:
            torch._foreach_copy_(before, now)

    def end(self) -> None:
        """The step's update has been done: there is nothing left to undo."""
        self.open = False

    def undo(self) -> None:
        """Return to the state before the step, if a step has begun and has not ended."""
        if not self.open:
            return
        for now, before in self.buffers:
            torch._foreach_copy_(now, before)
        self.model.zero_grad(set_to_none=True)
        self.open = False


class Meter:
    """Adds steps, losses and seconds to the run's progress, and makes the rows of steps.jsonl.

    The loss of a step, and in fp16 whether the step was skipped, stay on the device until `settle`
    is called, so that the host can launch the next step before the device has finished this one.
    """

    def __init__(self, progress: Progress, processes: Processes) -> None:
        self.progress, self.processes = progress, processes
        self.losses: list[Tensor] = []
        self.skipped: list[Tensor] = []
        self.last_loss = math.nan
        self.at_last_row = self._totals()
        self.restart()

    def restart(self) -> None:
        """Count seconds from now on; what passed since the last `settle` is left out."""
        self.began = time.perf_counter()

    def awaited(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items; the time spent waiting for each one is added to `waiting_seconds`.

        This covers waiting for the loader and for the other processes. On a CPU it includes
        augmentation, which then runs when the item is requested.
        """
        items = iter(items)
        while True:
            began = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self.progress.waiting_seconds += time.perf_counter() - began
            yield item

    def add(self, loss: Tensor, update: Update) -> None:
        """Record a finished step: its loss, a scalar on the device, and what its update reported."""
        self.losses.append(loss)
        if update.skipped is not None:
            self.skipped.append(update.skipped)

    def settle(self) -> None:
        """Average the recorded losses over the processes and add them to the progress.

        This waits for the device. Raises Diverged, on all processes together, for a loss that is
        infinite or NaN.
        """
        losses, skipped = [], 0
        if self.losses:
            mean = self.processes.sum(torch.stack(self.losses)) / self.processes.world_size
            losses, self.losses = mean.tolist(), []                      # waits for the device
        if self.skipped:
            skipped, self.skipped = int(torch.stack(self.skipped).sum()), []
        now = time.perf_counter()                    # now the steps are done, and not only launched
        self.progress.seconds += now - self.began
        self.began = now
        self.progress.skipped_steps += skipped
        self.progress.add_losses(losses)
        self.last_loss = losses[-1] if losses else self.last_loss

    def row(self, update: Update, lr: float, global_batch: int) -> StepRow:
        """A row for the last settled step; its rates are those since the previous row."""
        before, self.at_last_row = self.at_last_row, self._totals()
        steps, seconds, waiting = (now - then for now, then in zip(self.at_last_row, before))
        norm, scale = (None if value is None else value.item()
                       for value in (update.grad_norm, update.scale))
        return StepRow(self.progress.step, self.last_loss, lr,
                       norm if norm is not None and math.isfinite(norm) else None, scale,
                       steps * global_batch / seconds, waiting / seconds)

    def _totals(self) -> tuple[int, float, float]:
        return self.progress.epoch_steps, self.progress.seconds, self.progress.waiting_seconds


def train_epoch(state: TrainState, forward: Callable[..., Tensor], steps: Iterable[Step], *,
                lr_at: Callable[[int], float], drop_path_at: Callable[[int], Tensor | None], amp: str,
                clip_norm: float, every_steps: int, processes: Processes, stop: StopRequest,
                record: Callable[[StepRow], None] = lambda row: None) -> Iterator[None]:
    """Train on the global batches of `steps`; yield whenever the caller should write a checkpoint.

    It yields after each step whose number within the run, counted from 1, is a multiple of
    `every_steps` (0: never). At each yield, at the end, and when Interrupted or a OneLineError ends
    the epoch early, `state` is consistent: it is the state between two steps.

    The loss is the mean over the global batch of −Σ target · log softmax(logits).

    Args:
        state: what is trained; it is changed in place.
        forward: the state's model, possibly compiled or wrapped in DistributedDataParallel. Called
            as forward(images (B, 3, H, W), drop_path scales (branches, B)) or forward(images).
        steps: the steps of the epoch, or a part of them; see `Step`.
        lr_at: step number, from 0 → learning rate.
        drop_path_at: step number → drop-path scales (branches, global batch), or None.
        amp: "off", "bf16" or "fp16".
        clip_norm: the largest allowed norm of the gradients; 0 for no clipping.
        record: called on every process with a row after every tenth step of the run.

    Raises Diverged if a loss or a weight is infinite or NaN, Interrupted after a signal, and the
    OneLineErrors of `steps`; each on all processes together.
    """
    progress, meter = state.progress, Meter(state.progress, processes)
    rollback, device = Rollback(state.model), processes.device
    # DistributedDataParallel, compiled or not, has no_sync: under it the gradients of a backward
    # pass stay local. Those of the last micro-batch are averaged, together with all accumulated
    # before.
    synchronise_later = getattr(forward, "no_sync", contextlib.nullcontext)
    forward.train()

    def settle() -> None:
        meter.settle()
        require_finite_weights(state.model, progress.step)

    # The processes wait for each other before the first forward pass of a step, in which
    # DistributedDataParallel broadcasts buffers, and before the last, whose backward pass averages
    # gradients.
    stream = agreed(micro_batches(steps), processes, stop,
                    due=lambda batch: batch.first or batch.last)
    try:
        for batch in meter.awaited(stream):
            step, done = batch.step, batch.step.number + 1
            if batch.first:
                if not batch.last:
                    rollback.begin()
                lr = lr_at(step.number)
                set_learning_rate(state.optimizer, lr)
                drop_path = drop_path_at(step.number)                    # (branches, global batch)
                step_loss = torch.zeros((), device=device)
            factors = () if drop_path is None else (
                sent(drop_path[:, batch.positions], device),)                # (branches, B)
            with contextlib.nullcontext() if batch.last else synchronise_later():
                with autocast(device, amp):
                    logits = forward(batch.images, *factors)             # (B, K)
                loss = F.cross_entropy(logits.float(), batch.targets) / len(step)
                state.scaler.scale(loss).backward()
            step_loss += loss.detach()
            if not batch.last:
                continue

            update = _update(state, clip_norm, measured=done % SETTLE_EVERY == 0)
            rollback.end()
            meter.add(step_loss, update)
            if done % SETTLE_EVERY == 0:
                meter.settle()
                record(meter.row(update, lr, step.global_batch))
            if every_steps > 0 and done % every_steps == 0:
                settle()
                yield
                meter.restart()                      # the caller's own work is not training time
    except (Interrupted, OneLineError) as reason:
        rollback.undo()
        if not isinstance(reason, Diverged):         # else a second cause would replace the first
            settle()
        raise
    settle()


class Update(NamedTuple):
    """What one optimiser step reports: scalars on the device, which the host has not waited for."""

    grad_norm: Tensor | None    # before clipping; None where it was not computed
    scale: Tensor | None        # the loss scale of this step; None without fp16
    skipped: Tensor | None      # bool, gradients overflowed and nothing was updated; None without fp16


def _update(state: TrainState, clip_norm: float, *, measured: bool) -> Update:
    """Do one optimiser step; GradScaler skips it if gradients overflowed in fp16.

    measured: whether to report the norm of the gradients. Clipping computes it in any case.

    The host never asks whether the step was skipped, since that would wait for the device. The
    fused optimiser and the moving average read the answer on the device, and skipped steps are
    counted when the losses are read. In contrast, DeiT uses timm's NativeScaler with an optimiser
    that is not fused, which waits for the device at every step, and updates its moving average on
    skipped steps too.
    """
    scaler, norm, scale, skipped = state.scaler, None, None, None
    if scaler.is_enabled():
        one = torch.ones((), device=next(state.model.parameters()).device)
        scale = scaler.scale(one)
    if clip_norm > 0:
        scaler.unscale_(state.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), clip_norm)
    elif measured:
        norm = torch.nn.utils.get_total_norm([p.grad for p in state.model.parameters()
                                              if p.grad is not None])
        norm = norm if scale is None else norm / scale
    scaler.step(state.optimizer)
    scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    if scale is not None:
        skipped = scaler.scale(one) < scale          # the scale falls exactly when a step is skipped
    if state.ema is not None:
        state.ema.update(state.model, skipped)
    return Update(norm, scale, skipped)


def require_finite_weights(model: nn.Module, step: int) -> None:
    """Raise Diverged if a weight is infinite or NaN, so that no good checkpoint is overwritten.

    The weights are equal on all processes, so all of them raise or none does.
    """
    norms = torch._foreach_norm([p.detach() for p in model.parameters()])
    if not torch.stack(norms).isfinite().all():
        raise Diverged(f"the weights after step {step} are not finite")


@dataclass(frozen=True)
class Evaluation:
    """Loss and accuracy of one model, over every image of a split exactly once."""

    loss: float                 # mean cross-entropy per image
    top1: float                 # percent
    top5: float | None          # percent; None with five classes or fewer, where it says nothing
    images: int
    class_hits: list[int]       # per class: its images whose highest logit is the right one
    class_images: list[int]     # per class: its images


@torch.no_grad()
def evaluate(models: Sequence[nn.Module], batches: Iterable[tuple[Tensor, Tensor]], *,
             num_classes: int, amp: str, processes: Processes, stop: StopRequest,
             columns: Sequence[Tensor | None] | None = None) -> list[Evaluation]:
    """Compute the exact loss and accuracy of each model in one pass over the images.

    Each process counts its own images once; then the counts are summed over the processes. The
    processes may have different numbers of batches, so a forward pass of `models` must not
    communicate (do not pass a DistributedDataParallel module). All models are put into evaluation
    mode.

    Args:
        models: each maps images (B, 3, H, W) to logits (B, classes of the model).
        batches: images (B, 3, H, W) and labels (B,) int64, both on the device of `processes`.
        num_classes: K; labels lie in 0 … K − 1.
        amp: "off", "bf16" or "fp16".
        columns: per model, the indices (K,) int64 of the logits that belong to classes 0 … K − 1;
            the remaining logits take no part in ranking and softmax. None for a model, or for all
            of them: it has exactly these classes, in this order.

    Returns one Evaluation per model, the same on all processes. A OneLineError that `batches`
    raises on one process, or Interrupted, is raised on all of them.
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
        if batch is None:                            # only other processes have images left
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
    return [Evaluation(loss / images, 100.0 * sum(right) / images,
                       100.0 * top5 / images if num_classes > 5 else None, images, right,
                       counts.tolist())
            for (loss, top5), right in zip(totals.tolist(), hits.tolist())]
