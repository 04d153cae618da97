"""The training loop, from a batch to the next weights.

A *step* is one update of the weights, computed from one global batch. Each process works through
its share of it in micro-batches and accumulates their gradients; during the last one
DistributedDataParallel averages the gradients over the processes. On a GPU the host only launches
kernels: nothing within a step waits for a value from the device.

`Training` is all that the loop is given. A `Keeper` saves and evaluates, a `Meter` measures.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .device import copy_to
from .distributed import Processes, agreed
from .interruption import StopRequest
from .meter import Meter, Update
from .metrics import Diverged
from .optim import set_learning_rate
from .state import TrainState

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


@dataclass(frozen=True)
class Training:
    """What the loop is given."""

    state: TrainState  # changed in place; consistent between two steps
    forward: nn.Module  # the state's model, perhaps compiled, perhaps in DistributedDataParallel
    # (epoch from 0, steps of it that are done) → its remaining steps, each a pair: the step's number
    # within the run, from 0, and this process's micro-batches, loaded; see `MicroBatch` in data/.
    steps: Callable[[int, int], Iterable[tuple[int, Sequence[Any]]]]
    # (forward, images, scales, targets) → the mean loss of a micro-batch; see `Task.loss` in tasks/.
    loss: Callable[..., Tensor]
    learning_rate: Callable[[int], float]  # of a step
    drop_path: Callable[[int], Tensor | None]  # of a step: scales (branches, global batch), if any
    processes: Processes
    stop: StopRequest
    epochs: int  # of the whole run
    amp: str = "off"  # "off", "bf16" or "fp16"
    clip_norm: float = 0.0  # the largest norm of the gradients; 0: no clipping
    save_every: int = 0  # steps of the run from one `Keeper.save` to the next; 0: none
    # Called before the steps of an epoch, from 0: lets attention be shifts in the first ones.
    mixing: Callable[[int], None] = lambda epoch: None


class Keeper:
    """What the loop calls on all processes, to keep what is trained. This one keeps nothing."""

    def save(self) -> None:
        """Called after every `Training.save_every` steps."""

    def end_epoch(self, epoch: int) -> None:
        """Called after the last step of an epoch, which is counted from 1."""


def train_epochs(training: Training, keeper: Keeper, meter: Meter) -> None:
    """Train from where the state is to the end of the last epoch.

    Raises Diverged as `check_finite` does, which is called now and then, and, between two steps,
    Interrupted after a signal and the OneLineErrors of `Training.steps`; each on all processes
    together.
    """
    for epoch in range(training.state.progress.epochs, training.epochs):
        train_epoch(training, epoch, keeper, meter)
        keeper.end_epoch(epoch + 1)


def train_epoch(training: Training, epoch: int, keeper: Keeper, meter: Meter) -> None:
    """Train on the steps of an epoch, from 0, that are not done yet; see `train_epochs`."""
    state, processes, save_every = training.state, training.processes, training.save_every
    training.forward.train()
    training.mixing(epoch)
    with meter.epoch(epoch):
        steps = meter.loading(training.steps(epoch, state.progress.epoch_steps))
        for item in agreed(steps, processes, training.stop):
            assert item is not None  # all processes have as many steps
            step, micro_batches = item
            meter.begin_step(step)
            update = train_step(training, step, micro_batches, with_norm=meter.wants_norm(step))
            meter.end_step(update)
            if save_every and (step + 1) % save_every == 0:
                keeper.save()
                meter.saved()
        check_finite(state, processes)


def train_step(
    training: Training, step: int, micro_batches: Sequence[Any], *, with_norm: bool
) -> Update:
    """Update the weights once, by the gradients of this process's micro-batches, which
    DistributedDataParallel averages over the processes. with_norm: see `update_weights`.
    """
    state, device = training.state, training.processes.device
    lr = training.learning_rate(step)
    set_learning_rate(state.optimizer, lr)
    drop_path = training.drop_path(step)  # (branches, global batch)
    # Under no_sync, which DistributedDataParallel has, compiled or not, the gradients of a backward
    # pass stay local. Those of the last micro-batch are averaged, with all accumulated before.
    keep_local = getattr(training.forward, "no_sync", nullcontext)
    step_loss = torch.zeros((), device=device)
    for number, micro_batch in enumerate(micro_batches, 1):
        is_last = number == len(micro_batches)
        images, targets = micro_batch.prepare()  # (B, 3, H, W); (B, K), or visible patches (B, n)
        drop_path_scales: tuple[Tensor, ...] = ()
        if drop_path is not None:
            of_images = drop_path[:, micro_batch.positions]  # (branches, B)
            drop_path_scales = (copy_to(of_images, device),)
        with nullcontext() if is_last else keep_local():
            with autocast(device, training.amp):
                loss = training.loss(training.forward, images, drop_path_scales, targets)
            loss = loss / len(micro_batches)
            state.scaler.scale(loss).backward()
        step_loss += loss.detach()
    grad_norm, loss_scale, skipped = update_weights(state, training.clip_norm, with_norm=with_norm)
    state.progress.add(step_loss, skipped)
    return Update(lr, grad_norm, loss_scale)


def update_weights(
    state: TrainState, clip_norm: float, *, with_norm: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Clip the gradients, do one optimiser step, and let the moving average follow. GradScaler
    skips the step if gradients overflowed in fp16.

    with_norm: whether to compute the norm of the gradients. Clipping computes it in any case.
    Returns scalars on the device: the norm of the gradients before clipping, or None; the loss
    scale of this step, and whether it was skipped, each None without fp16.

    The host never asks whether the step was skipped, since that would wait for the device: the
    fused optimiser and the moving average read the answer there.
    """
    scaler, model = state.scaler, state.model
    norm = scale = skipped = None
    if scaler.is_enabled():
        one = torch.ones((), device=next(model.parameters()).device)
        scale = scaler.scale(one)
    if clip_norm > 0:
        scaler.unscale_(state.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    elif with_norm:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if scale is not None:
            norm = norm / scale
    scaler.step(state.optimizer)
    scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    if scale is not None:
        # GradScaler lowers its scale after a step that it skipped, and after no other.
        skipped = scaler.scale(one) < scale
    if state.ema is not None:
        state.ema.update(skipped)
    return norm, scale, skipped


@torch.no_grad()
def check_finite(state: TrainState, processes: Processes) -> None:
    """Read the losses of the steps since the last call, which waits for the device. Raises Diverged,
    on all processes together, if a loss, a weight or what the optimiser keeps of one is infinite or
    NaN, so that no checkpoint replaces a good one.
    """
    state.progress.read_losses(processes)
    norms = [*torch._foreach_norm(list(state.model.parameters()))]
    for kept in state.optimizer.state.values():
        # The largest value, as the squares of moments are of the fourth power.
        norms += (moment.norm(torch.inf) for name, moment in kept.items() if name != "step")
    if not torch.stack(norms).isfinite().all():
        raise Diverged(
            f"the optimiser's moments or the weights after step {state.progress.step} are not finite"
        )
