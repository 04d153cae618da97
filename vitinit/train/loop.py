"""The training loop, from a batch to the checkpoint.

Images and the model meet here, and in the measures of tasks.

A *step* is one update of the weights, computed from one global batch. Each process works through
its share of it in micro-batches and accumulates their gradients; during the last one
DistributedDataParallel averages the gradients over the processes. On a GPU the host only launches
kernels: nothing within a step waits for a value from the device. Only every tenth step
(`STEPS_PER_ROW`) are the losses copied to the host.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..base.messages import ProgressBar
from .device import copy_to
from .distributed import Processes, agreed
from .interruption import StopRequest
from .metrics import STEPS_PER_ROW, Diverged, Progress, StepRow
from .optim import set_learning_rate
from .state import TrainState

T = TypeVar("T")
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
        for module in model.modules()
    )


def autocast(device: torch.device, amp: str) -> torch.autocast:
    """The autocast context of recipe key engine.amp: "bf16", "fp16", or "off" (disabled)."""
    return torch.autocast(device.type, dtype=AMP_DTYPES[amp], enabled=amp != "off")


class Training(Protocol):
    """What `train_epochs` trains, what it is told, and what it calls on the way: a `Run`, say."""

    state: TrainState  # changed in place; consistent between two steps
    forward: nn.Module  # the model, perhaps compiled, perhaps in DistributedDataParallel
    epochs: int  # at the end of which training ends
    steps_per_epoch: int  # of the progress bar; 0: none is shown
    global_batch: int  # images of a step, over all processes
    amp: str  # "off", "bf16" or "fp16"
    clip_norm: float  # the largest norm of the gradients; 0: no clipping
    save_every: int  # steps of the run from one `save` to the next; 0: never

    def steps(self, epoch: int, done: int, /) -> Iterable[tuple[int, Sequence[Any]]]:
        """The steps of an epoch, from 0, of which some are done: numbers within the run, from 0,
        each with this process's micro-batches, which have been loaded.

        A micro-batch has `positions`, (B,), of its images in the global batch, and `prepare()` →
        images (B, 3, H, W) and targets (B, K), class probabilities, on the device.
        """

    def loss(
        self, forward: nn.Module, images: Tensor, scales: Sequence[Tensor], targets: Tensor, /
    ) -> Tensor:
        """The loss of a micro-batch, within autocast; see `Task.loss` in tasks/__init__.py."""

    def learning_rate(self, step: int, /) -> float: ...
    def drop_path(self, step: int, /) -> Tensor | None: ...  # scales (branches, global batch)
    def record(self, row: StepRow, /) -> object: ...  # on all processes, each tenth step
    def save(self) -> object: ...  # after multiples of `save_every`
    def finish_epoch(self, epoch: int, /) -> object: ...  # from 1, after its last step


def train_epochs(run: Training, processes: Processes, stop: StopRequest) -> None:
    """Train from where the run's state is to the end of its last epoch.

    Raises Diverged if a loss or a weight is infinite or NaN, and, between two steps, Interrupted
    after a signal and the OneLineErrors of `run.steps`; each on all processes together.
    """
    state, progress, device = run.state, run.state.progress, processes.device
    # Under no_sync, which DistributedDataParallel has, compiled or not, the gradients of a backward
    # pass stay local. Those of the last micro-batch are averaged, with all accumulated before.
    keep_local = getattr(run.forward, "no_sync", nullcontext)
    start, done, last_loss = time.perf_counter(), 0, ""  # for the bar
    for epoch in range(progress.epochs, run.epochs):
        run.forward.train()
        progress.start_clocks()
        idle_since = time.perf_counter()
        with ProgressBar(
            f"epoch {epoch + 1}/{run.epochs}",
            run.steps_per_epoch,
            initial=progress.epoch_steps,
            scale=run.global_batch,
            run=(start, done, (run.epochs - epoch - 1) * run.steps_per_epoch),
            shown=processes.is_main and run.steps_per_epoch > 0,
        ) as bar:
            bar.set_postfix_str(last_loss, refresh=False)
            steps = timed(run.steps(epoch, progress.epoch_steps), progress)
            for item in agreed(steps, processes, stop):
                assert item is not None  # all processes have as many steps
                step, micro_batches = item
                progress.waiting_seconds += time.perf_counter() - idle_since
                row_due = (step + 1) % STEPS_PER_ROW == 0
                if row_due and progress.paces is not None and device.type == "cuda":
                    torch.cuda.synchronize(device)  # this step is measured alone
                began = time.perf_counter()
                lr = run.learning_rate(step)
                set_learning_rate(state.optimizer, lr)
                drop_path = run.drop_path(step)  # (branches, global batch)
                step_loss = torch.zeros((), device=device)
                for number, micro_batch in enumerate(micro_batches, 1):
                    images, targets = micro_batch.prepare()  # (B, 3, H, W), (B, K)
                    scales = (
                        ()
                        if drop_path is None
                        else (copy_to(drop_path[:, micro_batch.positions], device),)
                    )  # (branches, B)
                    last = number == len(micro_batches)
                    with nullcontext() if last else keep_local():
                        with autocast(device, run.amp):
                            loss = run.loss(run.forward, images, scales, targets)
                        loss = loss / len(micro_batches)
                        state.scaler.scale(loss).backward()
                    step_loss += loss.detach()
                grad_norm, scale, skipped = update(state, run.clip_norm, measure=row_due)
                progress.add(step_loss, skipped)
                if row_due:
                    assert grad_norm is not None  # since it was measured
                    progress.read_losses(processes)
                    row = progress.step_row(lr, grad_norm, scale, run.global_batch, began)
                    run.record(row)
                    last_loss = f"loss {row.loss:.3f}"
                    bar.set_postfix_str(last_loss, refresh=False)
                if run.save_every and (step + 1) % run.save_every == 0:
                    run.save()
                    progress.start_clocks()  # saving is not training
                bar.update()
                done += 1
                idle_since = time.perf_counter()
        read_losses(state, processes)
        progress.clocks = None  # nor is evaluating
        run.finish_epoch(epoch + 1)


def timed(steps: Iterable[T], progress: Progress) -> Iterator[T]:
    """The steps; the time until each of them is loaded is added to the progress."""
    began = time.perf_counter()
    for step in steps:
        progress.loading += time.perf_counter() - began
        yield step
        began = time.perf_counter()


def update(
    state: TrainState, clip_norm: float, *, measure: bool
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
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in state.model.parameters() if p.grad is not None]
        )
        norm = norm if scale is None else norm / scale
    scaler.step(state.optimizer)
    scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    if scale is not None:
        skipped = scaler.scale(unit) < scale  # it falls exactly when a step is skipped
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
