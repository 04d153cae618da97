"""The engine: training, from a batch to the checkpoint, and one exact evaluation.

This is the only module in which images and the model meet.

A *step* is one update of the weights, computed from one global batch. Each process works through
its share of it in micro-batches and accumulates their gradients; during the last one
DistributedDataParallel averages the gradients over the processes. On a GPU the host only launches
kernels: nothing within a step waits for a value from the device. Only every tenth step
(`STEPS_PER_ROW`) are the losses copied to the host.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.messages import ProgressBar
from .device import copy_to
from .distributed import Processes, agreed
from .interruption import StopRequest
from .metrics import STEPS_PER_ROW, Diverged, Evaluation, Progress, StepRow
from .optim import set_learning_rate
from .state import TrainState

T = TypeVar("T")
MOST_PAIRED = 1_000             # classes of a confusion matrix: 8 MB a model, 3 MB as JSON
AMP_DTYPES = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def set_precision(tf32: bool) -> None:
    """Set whether float32 matrix products and convolutions may run in TensorFloat-32 on CUDA."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


def tune_convolutions(model: nn.Module) -> None:
    """Let cuDNN time its kernels for each convolution and use the fastest.

    Not for a patch embedding alone, whose stride is its kernel size; nor under
    torch.use_deterministic_algorithms, since the fastest kernel can change from run to run.
    """
    torch.backends.cudnn.benchmark = not torch.are_deterministic_algorithms_enabled() and any(
        isinstance(module, nn.Conv2d) and module.kernel_size != module.stride
        for module in model.modules())


def autocast(device: torch.device, amp: str) -> torch.autocast:
    """The autocast context of recipe key engine.amp: "bf16", "fp16", or "off" (disabled)."""
    return torch.autocast(device.type, dtype=AMP_DTYPES[amp], enabled=amp != "off")


def cross_entropy(forward: Callable[..., Tensor], images: Tensor, scales: Sequence[Tensor],
                  targets: Tensor) -> Tensor:
    """The mean of −Σ target · log softmax(logits) over a micro-batch, a scalar.

    images: (B, 3, H, W); targets: (B, K), probabilities; scales: drop-path's (branches, B), or none
    """
    return F.cross_entropy(forward(images, *scales).float(), targets)


class Training(Protocol):
    """What `train_epochs` trains, what it is told, and what it calls on the way: a `Run`, say."""

    state: TrainState           # changed in place; consistent between two steps
    forward: nn.Module          # the model, perhaps compiled, perhaps in DistributedDataParallel
    epochs: int                 # at the end of which training ends
    steps_per_epoch: int        # of the progress bar; 0: none is shown
    global_batch: int           # images of a step, over all processes
    amp: str                    # "off", "bf16" or "fp16"
    clip_norm: float            # the largest norm of the gradients; 0: no clipping
    save_every: int             # steps of the run from one `save` to the next; 0: never

    def steps(self, epoch: int, done: int, /) -> Iterable[tuple[int, Sequence[Any]]]:
        """The steps of an epoch, from 0, of which some are done: numbers within the run, from 0,
        each with this process's micro-batches, which have been loaded.

        A micro-batch has `positions`, (B,), of its images in the global batch, and `prepare()` →
        images (B, 3, H, W) and targets (B, K), class probabilities, on the device.
        """

    def objective(self, forward: nn.Module, images: Tensor, scales: Sequence[Tensor],
                  targets: Tensor, /) -> Tensor:
        """The loss of a micro-batch, within autocast; see `cross_entropy`."""

    def learning_rate(self, step: int, /) -> float: ...
    def drop_path(self, step: int, /) -> Tensor | None: ...      # scales (branches, global batch)
    def record(self, row: StepRow, /) -> object: ...             # on all processes, each tenth step
    def save(self) -> object: ...                                # after multiples of `save_every`
    def finish_epoch(self, epoch: int, /) -> object: ...         # from 1, after its last step


def train_epochs(run: Training, processes: Processes, stop: StopRequest) -> None:
    """Train from where the run's state is to the end of its last epoch.

    Raises Diverged if a loss or a weight is infinite or NaN, and, between two steps, Interrupted
    after a signal and the OneLineErrors of `run.steps`; each on all processes together.
    """
    state, progress, device = run.state, run.state.progress, processes.device
    # Under no_sync, which DistributedDataParallel has, compiled or not, the gradients of a backward
    # pass stay local. Those of the last micro-batch are averaged, with all accumulated before.
    keep_local = getattr(run.forward, "no_sync", nullcontext)
    start, done, last_loss = time.perf_counter(), 0, ""              # for the bar
    for epoch in range(progress.epochs, run.epochs):
        run.forward.train()
        progress.start_clocks()
        idle_since = time.perf_counter()
        with ProgressBar(f"epoch {epoch + 1}/{run.epochs}", run.steps_per_epoch,
                         initial=progress.epoch_steps, scale=run.global_batch,
                         run=(start, done, (run.epochs - epoch - 1) * run.steps_per_epoch),
                         shown=processes.is_main and run.steps_per_epoch > 0) as bar:
            bar.set_postfix_str(last_loss, refresh=False)
            steps = timed(run.steps(epoch, progress.epoch_steps), progress)
            for item in agreed(steps, processes, stop):
                assert item is not None              # all processes have as many steps
                step, micro_batches = item
                progress.waiting_seconds += time.perf_counter() - idle_since
                row_due = (step + 1) % STEPS_PER_ROW == 0
                if row_due and progress.paces is not None and device.type == "cuda":
                    torch.cuda.synchronize(device)   # this step is measured alone
                began = time.perf_counter()
                lr = run.learning_rate(step)
                set_learning_rate(state.optimizer, lr)
                drop_path = run.drop_path(step)                      # (branches, global batch)
                step_loss = torch.zeros((), device=device)
                for number, micro_batch in enumerate(micro_batches, 1):
                    images, targets = micro_batch.prepare()          # (B, 3, H, W), (B, K)
                    scales = () if drop_path is None else (
                        copy_to(drop_path[:, micro_batch.positions], device),)   # (branches, B)
                    last = number == len(micro_batches)
                    with nullcontext() if last else keep_local():
                        with autocast(device, run.amp):
                            loss = run.objective(run.forward, images, scales, targets)
                        loss = loss / len(micro_batches)
                        state.scaler.scale(loss).backward()
                    step_loss += loss.detach()
                grad_norm, scale, skipped = update(state, run.clip_norm, measure=row_due)
                progress.add(step_loss, skipped)
                if row_due:
                    assert grad_norm is not None     # since it was measured
                    progress.read_losses(processes)
                    row = progress.step_row(lr, grad_norm, scale, run.global_batch, began)
                    run.record(row)
                    last_loss = f"loss {row.loss:.3f}"
                    bar.set_postfix_str(last_loss, refresh=False)
                if run.save_every and (step + 1) % run.save_every == 0:
                    run.save()
                    progress.start_clocks()                          # saving is not training
                bar.update()
                done += 1
                idle_since = time.perf_counter()
        read_losses(state, processes)
        progress.clocks = None                                       # nor is evaluating
        run.finish_epoch(epoch + 1)


def timed(steps: Iterable[T], progress: Progress) -> Iterator[T]:
    """The steps; the time until each of them is loaded is added to the progress."""
    began = time.perf_counter()
    for step in steps:
        progress.loading += time.perf_counter() - began
        yield step
        began = time.perf_counter()


def update(state: TrainState, clip_norm: float, *, measure: bool
           ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Do one optimiser step; GradScaler skips it if gradients overflowed in fp16.

    measure: whether to compute the norm of the gradients. Clipping computes it in any case.
    Returns scalars on the device: the norm of the gradients before clipping, or None; the loss
    scale of this step, and whether it was skipped, each None without fp16.

    The host never asks whether the step was skipped, since that would wait for the device: the
    fused optimiser and the moving average read the answer there.
    """
    scaler, norm, scale, skipped = state.scaler, None, None, None
    if scaler.is_enabled():
        unit = torch.ones((), device=next(state.model.parameters()).device)
        scale = scaler.scale(unit)
    if clip_norm > 0:
        scaler.unscale_(state.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), clip_norm)
    elif measure:
        norm = torch.nn.utils.get_total_norm([p.grad for p in state.model.parameters()
                                              if p.grad is not None])
        norm = norm if scale is None else norm / scale
    scaler.step(state.optimizer)
    scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    if scale is not None:
        skipped = scaler.scale(unit) < scale         # it falls exactly when a step is skipped
    if state.ema is not None:
        state.ema.update(skipped)
    return norm, scale, skipped


@torch.no_grad()
def read_losses(state: TrainState, processes: Processes) -> None:
    """Bring the progress up to date, which waits for the device. Raises Diverged, on all processes
    together, if a loss or a weight is infinite or NaN, so that no good checkpoint is overwritten.
    """
    state.progress.read_losses(processes)
    norms = torch._foreach_norm(list(state.model.parameters()))
    if not torch.stack(norms).isfinite().all():
        raise Diverged(f"the weights after step {state.progress.step} are not finite")


@torch.no_grad()
def mean_losses(models: Sequence[nn.Module], batches: Iterable[tuple[Tensor, Tensor]], *,
                objective: Callable[..., Tensor], amp: str, processes: Processes, stop: StopRequest
                ) -> list[Evaluation]:
    """As `evaluate`, of a run that learns no classes: the mean of its objective over images."""
    totals = torch.zeros(len(models) + 1, dtype=torch.float64, device=processes.device)
    for model in models:
        model.eval()
    for batch in agreed(batches, processes, stop):
        if batch is not None:                        # else only other processes have images left
            images, targets = batch
            for index, model in enumerate(models):
                with autocast(processes.device, amp):
                    totals[index] += objective(model, images, (), targets) * len(images)
            totals[-1] += len(images)
    *losses, count = processes.sum(totals).tolist()
    return [Evaluation(loss / count, None, None, int(count), [], [], [], None) for loss in losses]


@torch.no_grad()
def evaluate(models: Sequence[nn.Module], batches: Iterable[tuple[Tensor, Tensor]], *,
             num_classes: int, amp: str, processes: Processes, stop: StopRequest,
             columns: Tensor | None = None) -> list[Evaluation]:
    """Compute the exact loss and accuracy of each model in one pass over the images.

    Each process counts its own images once; then the counts are summed over the processes. These
    may have different numbers of batches, so a forward pass of `models` must not communicate, as
    DistributedDataParallel does. All models are put into evaluation mode. Returns one Evaluation
    per model, the same on all processes; ends as `agreed` does.

    models: each maps images (B, 3, H, W) to logits (B, classes of the model).
    batches: images (B, 3, H, W) and labels (B,) int64 in 0 … K − 1, on the device of `processes`.
    num_classes: K; over MOST_PAIRED there is no confusion matrix. amp: "off", "bf16" or "fp16".
    columns: the indices (K,) int64 of the logits that belong to classes 0 … K − 1; the others take
        no part in ranking and softmax. None: the models have these classes, in this order.
    """
    device = processes.device
    totals = torch.zeros(len(models), 2, dtype=torch.float64, device=device)     # loss, top 5
    hits, guessed = torch.zeros(2, len(models), num_classes, dtype=torch.int64, device=device)
    counts = torch.zeros(num_classes, dtype=torch.int64, device=device)
    confusion = [torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)
                 for _ in models if num_classes <= MOST_PAIRED]
    columns = None if columns is None else columns.to(device)
    for model in models:
        model.eval()
    for batch in agreed(batches, processes, stop):
        if batch is None:                            # only other processes have images left
            continue
        images, labels = batch
        ones = torch.ones_like(labels)
        for index, model in enumerate(models):
            with autocast(device, amp):
                logits = model(images)                               # (B, classes of the model)
            if columns is not None:
                logits = logits[:, columns]                          # (B, K)
            logits = logits.float()
            best = logits.topk(min(5, num_classes)).indices          # (B, 5)
            ranked, guesses = best == labels[:, None], best[:, 0]
            loss = F.cross_entropy(logits, labels, reduction="sum")
            totals[index] += torch.stack([loss, ranked.sum()]).double()
            hits[index].index_add_(0, labels, ranked[:, 0].long())
            guessed[index].index_add_(0, guesses, ones)
            if confusion:
                confusion[index].view(-1).index_add_(0, labels * num_classes + guesses, ones)
        counts.index_add_(0, labels, ones)
    for numbers in (totals, hits, guessed, counts, *confusion):
        processes.sum(numbers)
    total = int(counts.sum())
    matrices: list[Tensor | None] = [matrix.cpu() for matrix in confusion] or [None] * len(models)
    return [Evaluation(loss / total, 100.0 * sum(right) / total,
                       100.0 * top5 / total if num_classes > 5 else None, total, right,
                       counts.tolist(), taken, matrix)
            for (loss, top5), right, taken, matrix
            in zip(totals.tolist(), hits.tolist(), guessed.tolist(), matrices)]
