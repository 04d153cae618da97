"""The engine: one epoch of training, one exact evaluation. The only place that sees both images and
model.

A *step* is one update of the weights from one global batch. Each process works through its share in
micro-batches, gradients accumulating; DistributedDataParallel averages them over the processes
during the last one. So a step means the same for any number of processes and any micro-batch; only
models with BatchNorm see which images came in one micro-batch.

Micro-batches train as they come. The host launches a GPU's work and goes on to the next: nothing
within a step asks the device for a value, but every tenth step looks at the losses.
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
from .state import TrainState

SETTLE_EVERY = 10               # steps between two looks at the losses, which wait for the device
T = TypeVar("T")
AMP_DTYPES = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Step(Protocol):
    """One global batch: this process' share of it, as `train_epoch` needs it."""

    number: int                                      # global, from 0
    global_batch: int                                # images of all processes
    def __len__(self) -> int: ...                    # micro-batches
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, np.ndarray]]: ...


def set_precision(tf32: bool) -> None:
    """Whether float32 matrix products and convolutions may run in TensorFloat-32 on CUDA."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


def tune_convolutions(model: nn.Module) -> None:
    """Let cuDNN time its kernels for each convolution, and keep the fastest; on CUDA alone.

    A patch embedding, whose kernel is its stride, is not worth it. Which kernel wins depends on the
    moment, and so do the last bits of a run: not under torch.use_deterministic_algorithms.
    """
    convolves = any(isinstance(module, nn.Conv2d) and module.kernel_size != module.stride
                    for module in model.modules())
    torch.backends.cudnn.benchmark = (
        convolves and not torch.are_deterministic_algorithms_enabled())


def autocast(device: torch.device, amp: str) -> torch.autocast:
    """One code path for all precisions: amp "off" is an autocast that is switched off."""
    return torch.autocast(device.type, dtype=AMP_DTYPES[amp], enabled=amp != "off")


def normalises_over_images(model: nn.Module) -> bool:
    """Whether a step depends on which images share a micro-batch, as BatchNorm's statistics do."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


class MicroBatch(NamedTuple):
    """What of a step this process carries at once."""

    step: Step
    number: int                 # within the step, from 0
    images: Tensor              # (B, 3, H, W)
    targets: Tensor             # (B, K)
    positions: np.ndarray       # of the images in the global batch, (B,)

    @property
    def first(self) -> bool:
        return self.number == 0

    @property
    def last(self) -> bool:
        return self.number + 1 == len(self.step)


def micro_batches(steps: Iterable[Step]) -> Iterator[MicroBatch]:
    """Of all steps, one after the other, each as soon as it is there."""
    for step in steps:
        for number, parts in enumerate(step):
            yield MicroBatch(step, number, *parts)


class Retreat:
    """The way back out of a step that is abandoned before its update.

    Until then a step has changed no more than gradients and buffers: BatchNorm's running
    statistics.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.open = model, False
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for buffer in model.buffers():
            kinds.setdefault(buffer.dtype, []).append(buffer)
        self.buffers = [(buffers, [buffer.clone() for buffer in buffers])
                        for buffers in kinds.values()]       # now, and as they were

    def begin(self) -> None:
        """Call before the first forward pass of a step that may be abandoned after it."""
        self.open = True
        for now, before in self.buffers:
            torch._foreach_copy_(before, now)

    def end(self) -> None:
        self.open = False

    def take(self) -> None:
        """Back to where the step began, if one is open."""
        if not self.open:
            return
        for now, before in self.buffers:
            torch._foreach_copy_(now, before)
        self.model.zero_grad(set_to_none=True)
        self.open = False


class Meter:
    """Adds steps and seconds to the epoch's, and makes rows of steps.

    A step's loss, and in fp16 whether it was skipped, stay on the device until `settle`, so that
    launching the next step need not wait for the last one to finish.
    """

    def __init__(self, progress: Progress, processes: Processes) -> None:
        self.progress, self.processes = progress, processes
        self.losses: list[Tensor] = []
        self.skipped: list[Tensor] = []
        self.at_last_row = self._totals()
        self.restart()

    def restart(self) -> None:
        self.began = time.perf_counter()

    def awaited(self, items: Iterable[T]) -> Iterator[T]:
        """The items; the time until each is there counts as waiting.

        That is for the loader and for other processes, and on a CPU for augmentation, too.
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
        """A step that is done."""
        self.losses.append(loss)
        if update.skipped is not None:
            self.skipped.append(update.skipped)

    def settle(self) -> None:
        """Average over the processes, add to the epoch; Diverged on all of them together."""
        now = time.perf_counter()
        self.progress.seconds += now - self.began
        self.began = now
        if self.losses:
            mean = self.processes.sum(torch.stack(self.losses)) / self.processes.world_size
            losses, self.losses = mean.tolist(), []
            if self.skipped:
                self.progress.skipped_steps += int(torch.stack(self.skipped).sum())
                self.skipped = []
            self.progress.add_losses(losses)
            self.last_loss = losses[-1]

    def row(self, update: Update, lr: float, global_batch: int) -> StepRow:
        """The last step that was settled, and the rate since the row before."""
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
    """Train on the global batches of `steps`; yields where the caller should write a checkpoint.

    That is after every so many steps of the run as `every_steps` says (0: never). At each yield, at
    the end, and when Interrupted or a OneLineError ends it, the state is whole, between two steps.

    forward: the state's model, compiled or wrapped for several processes; called as
        forward(images, drop_path).
    steps: of each, its global number, its length, and by iterating its micro-batches: images,
        targets, and which of the global batch they are. The loss is the mean over images of
        −Σ target · log softmax(logits).
    lr_at: step → learning rate. drop_path_at: step → drop-path scales (branches, global batch),
        or None.
    record: called after every tenth step of the run, on each process.
    Raises Diverged on all processes together; Interrupted and a OneLineError of `steps` likewise.
    """
    progress, meter = state.progress, Meter(state.progress, processes)
    retreat, device = Retreat(state.model), processes.device
    # DistributedDataParallel, compiled or not, has no_sync: gradients stay local until the last.
    synchronise_later = getattr(forward, "no_sync", contextlib.nullcontext)
    forward.train()

    def settle() -> None:
        meter.settle()
        require_finite_weights(state.model, progress.step)

    # Processes meet before a step's first forward pass, in which DistributedDataParallel shares
    # buffers, and before its last backward pass, in which it shares gradients.
    stream = agreed(micro_batches(steps), processes, stop,
                    due=lambda batch: batch.first or batch.last)
    try:
        for batch in meter.awaited(stream):
            step, done = batch.step, batch.step.number + 1
            if batch.first:
                if not batch.last:
                    retreat.begin()
                lr = lr_at(step.number)
                for group in state.optimizer.param_groups:
                    group["lr"] = lr
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
            retreat.end()
            meter.add(step_loss, update)
            if done % SETTLE_EVERY == 0:
                meter.settle()
                record(meter.row(update, lr, step.global_batch))
            if every_steps > 0 and done % every_steps == 0:
                settle()
                yield
                meter.restart()                      # what the caller does is not training
    except (Interrupted, OneLineError):
        retreat.take()
        settle()
        raise
    settle()


class Update(NamedTuple):
    """Of one optimiser step, on the device."""

    grad_norm: Tensor | None    # before clipping; None where it was not asked for
    scale: Tensor | None        # of the loss, and
    skipped: Tensor | None      # whether gradients overflowed, so that nothing was updated; in fp16


def _update(state: TrainState, clip_norm: float, *, measured: bool) -> Update:
    """One optimiser step; none if GradScaler finds that gradients overflowed in fp16.

    measured: whether the gradients' norm is asked for. Clipping has it anyway.

    Whether a step was skipped is never asked on the host, which would wait for the device: the
    fused optimiser reads it there, so does the moving average, and skipped steps are counted with
    the losses. DeiT has timm's NativeScaler over an optimiser that is not fused, which waits for
    the device at every step; it updates its average on skipped steps too.
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
        skipped = scaler.scale(one) < scale          # it falls exactly when a step was skipped
    if state.ema is not None:
        state.ema.update(state.model, skipped)
    return Update(norm, scale, skipped)


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
