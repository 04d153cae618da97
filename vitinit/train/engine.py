"""The engine: one epoch of training, one exact evaluation. The only place that sees both images and
model.

A *step* is one update of the weights from one global batch. Each process works through its share in
micro-batches, gradients accumulating; DistributedDataParallel averages them over the processes
during the last one. So a step means the same for any number of processes and any micro-batch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .distributed import Processes, StopRequest
from .ema import Ema
from .metrics import Diverged, Progress, ProgressBar

SETTLE_EVERY = 10               # steps between two looks at the losses, which wait for the device
BROKEN_DATA = 1_000             # agreed on like a signal's number, and larger than any
AMP_DTYPES = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Prepared = tuple[Tensor, Tensor]     # images (B, 3, H, W) float; targets (B, K) or labels (B,)


def autocast(device: torch.device, amp: str) -> torch.autocast:
    """One code path for all precisions: amp "off" is an autocast that is switched off."""
    return torch.autocast(device.type, dtype=AMP_DTYPES[amp], enabled=amp != "off")


class Losses:
    """The losses of recent steps. They stay on the device until `settle`, so that launching the
    next step need not wait for the last one to finish."""

    def __init__(self, progress: Progress, processes: Processes) -> None:
        self.progress, self.processes = progress, processes
        self.pending: list[Tensor] = []
        self.note = ""                               # for the progress bar, until the first look

    def settle(self) -> None:
        """Average over the processes, add to the epoch; Diverged on all of them together."""
        if self.pending:
            mean = self.processes.sum(torch.stack(self.pending)) / self.processes.world_size
            self.pending = []
            losses = mean.tolist()
            self.progress.add_losses(losses)
            self.note = f"loss {losses[-1]:.3f}"


def train_epoch(*, model: nn.Module, forward: Callable[..., Tensor], steps: Iterator[list],
                count: int, prepare: Callable[..., Prepared], progress: Progress,
                lr_at: Callable[[int], float], keep_at: Callable[[int], Tensor | None],
                positions: Callable[[int], slice], optimizer: torch.optim.Optimizer,
                scaler: torch.amp.GradScaler, ema: Ema | None, amp: str, clip_norm: float,
                processes: Processes, stop: StopRequest, save_due: Callable[[int], bool],
                data_errors: tuple[type[Exception], ...], bar: ProgressBar) -> Iterator[int]:
    """Train on `count` global batches; yields where the caller should write a checkpoint.

    It yields 0 for a checkpoint that `save_due` asked for, and a signal's number where the
    processes have agreed to stop. At each yield, and at the end, `progress` is complete.

    model: the bare model, whose parameters are clipped and averaged; forward: the same, compiled
        or wrapped for several processes; called as forward(images, keep).
    steps: lists of micro-batches; prepare(batch, step, micro_step) turns one into images and
        targets on the device. The loss is the mean over images of −Σ target · log softmax(logits).
    lr_at: step → learning rate. keep_at: step → stochastic-depth factors (branches, global batch),
        or None; positions: micro-step → which columns of them are this process'.
    Raises Diverged on all processes together, and one of data_errors likewise.
    """
    losses = Losses(progress, processes)
    device = processes.device
    # DistributedDataParallel, compiled or not, has no_sync: gradients stay local until the last.
    synchronise_later = getattr(forward, "no_sync", contextlib.nullcontext)
    forward.train()
    began = time.perf_counter()
    seconds_before = progress.seconds

    def settle() -> None:
        losses.settle()
        progress.seconds = seconds_before + time.perf_counter() - began

    first = progress.step
    for step in range(first, first + count):
        # Every process has its whole share of the step before any of them begins, so that broken
        # data or a signal on one of them finds all of them between two steps.
        micro_batches, problem, request = [], None, stop.number
        try:
            if not request:                          # else workers may be ending, too
                micro_batches = next(steps)
        except data_errors as error:
            problem = error
        verdict = processes.maximum(BROKEN_DATA if problem else request)
        if verdict:
            settle()
            require_finite_weights(model, progress.step)
            processes.together(lambda: _raise(problem), data_errors)
            yield verdict
            return

        lr = lr_at(step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        keep = keep_at(step)                                             # (branches, global batch)
        step_loss = torch.zeros((), device=device)
        for micro_step, batch in enumerate(micro_batches):
            images, targets = prepare(batch, step, micro_step)
            kept = () if keep is None else (
                keep[:, positions(micro_step)].to(device, non_blocking=True),)
            last = micro_step == len(micro_batches) - 1
            with contextlib.nullcontext() if last else synchronise_later():
                with autocast(device, amp):
                    logits = forward(images, *kept)                      # (B, K)
                loss = F.cross_entropy(logits.float(), targets)
                scaler.scale(loss / len(micro_batches)).backward()
            step_loss += loss.detach() / len(micro_batches)
        if _update(model, optimizer, scaler, clip_norm):
            if ema is not None:
                ema.update(model)
        else:
            progress.skipped_steps += 1

        losses.pending.append(step_loss)
        due = save_due(step + 1)
        if due or (step + 1) % SETTLE_EVERY == 0:
            settle()
        bar.advance(losses.note)
        if due:
            require_finite_weights(model, progress.step)
            yield 0
    settle()
    require_finite_weights(model, progress.step)
    verdict = processes.maximum(stop.number)
    if verdict:
        yield verdict


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler,
            clip_norm: float) -> bool:
    """One optimiser step; False if GradScaler skipped it because gradients overflowed in fp16."""
    if clip_norm > 0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return scaler.get_scale() >= scale               # it falls exactly when a step was skipped


def require_finite_weights(model: nn.Module, step: int) -> None:
    """Diverged if a weight is infinite or NaN: no checkpoint may be written over a good one then.

    The weights are the same on all processes, and so is the verdict.
    """
    norms = torch._foreach_norm([p.detach() for p in model.parameters()])
    if not torch.stack(norms).isfinite().all():
        raise Diverged(f"the weights after step {step} are not finite")


def _raise(problem: Exception | None) -> None:
    if problem is not None:
        raise problem


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
def evaluate(models: Sequence[nn.Module], batches: Iterable, *, num_classes: int,
             prepare: Callable[..., Prepared], amp: str, processes: Processes,
             data_errors: tuple[type[Exception], ...], bar: ProgressBar,
             columns: Sequence[Tensor | None] | None = None) -> list[Evaluation]:
    """Exact loss and accuracy of each model, in one pass over the pictures.

    num_classes: K, those of the labels. columns: of each model, which of its logits belong to these
        classes, (K,) int64 in the labels' order; the others are left out of ranking and softmax.
        None: the model has these classes in this order.

    Each process counts its own images once, then the counts are summed. Processes may have
    different numbers of batches, so `models` must not communicate. One of `data_errors` on any
    process is raised on all of them.
    """
    device, problem = processes.device, None
    totals = torch.zeros(len(models), 2, dtype=torch.float64, device=device)     # loss, top 5
    hits = torch.zeros(len(models), num_classes, dtype=torch.int64, device=device)
    counts = torch.zeros(num_classes, dtype=torch.int64, device=device)
    columns = [None if chosen is None else chosen.to(device)
               for chosen in columns or [None] * len(models)]
    for model in models:
        model.eval()
    try:
        for batch in batches:
            images, labels = prepare(batch)
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
            bar.advance()
    except data_errors as error:
        problem = error
    processes.together(lambda: _raise(problem), data_errors)
    for numbers in (totals, hits, counts):
        processes.sum(numbers)
    images = int(counts.sum())
    return [Evaluation(loss / images, 100.0 * sum(right) / images, 100.0 * top5 / images, images,
                       right, counts.tolist())
            for (loss, top5), right in zip(totals.tolist(), hits.tolist())]
