"""What is recorded of a run: its progress, and the rows of steps.jsonl and metrics.jsonl."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..base.messages import OneLineError
from .device import matrix_rate, peak_gib
from .distributed import Processes

# The keys of a line of metrics.jsonl, in order.
# fmt: off
METRICS = ("epoch", "lr", "train_loss", "images_per_second", "val_loss", "val_top1", "val_top5",
           "val_balanced", "ema_top1", "ema_top5", "skipped_steps", "seconds", "cpu_seconds",
           "waiting", "tflops_per_device", "share_of_rate", "peak_memory_gib")
# Behind them, where an image has several labels.
OF_SEVERAL = ("val_map", "val_f1", "val_macro_f1", "ema_map", "ema_f1", "ema_macro_f1")
# fmt: on
# What an evaluation measures, in words.
MEASURES = {"top1": "top-1", "top5": "top-5", "map": "mAP", "f1": "F1", "macro_f1": "macro F1"}
BACKWARD_COST = 2  # in forward passes: gradients of the inputs and of the weights


class Pace(NamedTuple):  # of the steps of one process
    step: float  # seconds from one to the next
    alone: float  # seconds of a step by itself, once its images are loaded
    waiting: float  # share of the time that the host waited: for its images and other processes
    loading: float  # the same for its images alone. A GPU may be at work meanwhile.


class StepRow(NamedTuple):
    """A row of steps.jsonl. All but its last two values are the same for a resumed run."""

    step: int  # number of steps done, including this one
    loss: float  # mean over the global batch of this step alone
    lr: float
    grad_norm: float | None  # over all weights, before clipping; None where fp16 overflowed
    scale: float | None  # the loss scale of this step; None without fp16
    images_per_second: float  # of all processes since the previous row, or since the epoch began
    waiting: float  # share of that time in which the host waited for data or processes


class Diverged(OneLineError):
    """The loss, a weight or a moment became infinite or NaN; the message names the step."""

    status = 1  # exit status: the recipe is valid, but training failed


class Clock:
    """Wall-clock time, and processor time of all threads of this process, while it runs."""

    def __init__(self) -> None:
        self.runs = False
        self.since = 0.0, 0.0  # when it was started, or asked last: by wall clock, and processor

    def start(self) -> None:
        self.runs = True
        self.since = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.runs = False

    def lap(self) -> tuple[float, float]:
        """The seconds since it was started or last asked, of both kinds; zeros while it stands."""
        if not self.runs:
            return 0.0, 0.0
        before, processor = self.since
        self.start()
        return self.since[0] - before, self.since[1] - processor


@dataclass
class Progress:
    """How far a run has come, and the sums of its current epoch; every checkpoint has the fields.

    All of it is as of the last `read_losses`: until then what a step says stays on the device, so
    that the host can launch the next.
    """

    step: int = 0  # global batches since the start of the run, skipped steps included
    epochs: int = 0  # epochs finished, including their evaluation
    epoch_steps: int = 0  # steps of the current epoch
    loss_sum: float = 0.0  # over the steps of the current epoch
    seconds: float = 0.0  # spent on training in the current epoch, without evaluation
    cpu_seconds: float = 0.0  # of processor time meanwhile, of all threads of this process
    waiting_seconds: float = 0.0  # of `seconds`: the host waited for the loader and processes
    skipped_steps: int = 0  # since the start of the run: gradients overflowed in fp16
    best: float | None = None  # the best value so far of the metric checkpoint.best_by

    def __post_init__(self) -> None:
        self.losses: list[Tensor] = []  # of steps not yet read, () on the device
        self.skipped: list[Tensor] = []
        self.last_loss = math.nan
        self.clock = Clock()  # runs while the time is spent on training

    def add(self, loss: Tensor, skipped: Tensor | None) -> None:
        """Add a step that was launched: its loss, () on the device, and whether fp16 skipped it."""
        self.losses.append(loss)
        if skipped is not None:
            self.skipped.append(skipped)

    def read_losses(self, processes: Processes) -> None:
        """Add the steps since the last call; raises Diverged if a loss is infinite or NaN."""
        losses = []
        if self.losses:
            mean = processes.sum(torch.stack(self.losses)) / processes.world_size
            losses = mean.tolist()  # waits for the device
            self.losses = []
        if self.skipped:
            self.skipped_steps += int(torch.stack(self.skipped).sum())
            self.skipped = []
        seconds, cpu_seconds = self.clock.lap()  # now the steps are done, and not only launched
        self.seconds += seconds
        self.cpu_seconds += cpu_seconds
        for loss in losses:
            if not math.isfinite(loss):
                raise Diverged(f"the loss of step {self.step + 1} is {loss}")
            self.loss_sum += loss
            self.epoch_steps += 1
            self.step += 1
            self.last_loss = loss

    def improves(self, value: float | None, by: str) -> bool:
        """Whether `value` of the metric `by` is the best so far, and remember it; NaN never is."""
        if value is None or not math.isfinite(value):
            return False
        if self.best is None:
            better = True
        elif by == "val_loss":
            better = value < self.best
        else:
            better = value > self.best
        if better:
            self.best = value
        return better

    def finish_epoch(self) -> None:
        self.epochs += 1
        self.epoch_steps = 0
        self.loss_sum = self.seconds = self.cpu_seconds = self.waiting_seconds = 0.0


@torch.no_grad()
def training_flops(
    model: nn.Module, batch_size: int, size: tuple[int, int], channels: int = 3
) -> float:
    """The model FLOPs of training per image: its share of one forward and one backward pass.

    size: (H, W), of images of so many channels. A multiplication followed by an addition counts as two. torch counts products,
    attention and convolutions by the shapes of their operands, on the meta device. What a kernel
    repeats does not count, as in PaLM (arXiv 2204.02311, appendix B), nor gradients below a
    classifier that is trained alone.
    """
    from torch.utils.flop_counter import FlopCounterMode  # here, as it imports Triton

    weights = {
        name: torch.empty_like(value, device="meta")
        for name, value in (*model.named_parameters(), *model.named_buffers())
    }
    visible = getattr(model, "visible", None)  # patches of an image, to an autoencoder
    masked = {}
    if visible is not None:
        masked["visible"] = torch.empty(batch_size, visible, dtype=torch.int64, device="meta")
    images = torch.empty(batch_size, channels, *size, device="meta")
    with FlopCounterMode(display=False) as counter:
        functional_call(model, weights, (images,), masked)
    passes = 1  # forward, and alone if all below the classifier is frozen
    if next(model.parameters()).requires_grad:
        passes += BACKWARD_COST
    return passes * counter.get_total_flops() / batch_size


@dataclass(frozen=True)
class Evaluation:
    """Loss and accuracy of one model, over every image of a split exactly once."""

    loss: float  # mean cross-entropy per image
    top1: float | None  # percent; None in a run that learns no classes, or several of an image
    top5: float | None  # percent; None with five classes or fewer, where it says nothing
    images: int
    class_hits: list[int]  # per class: its images that are taken for it
    class_images: list[int]  # per class: its images
    class_guesses: list[int]  # per class: the images that are taken for it
    confusion: Tensor | None  # (K, K) int64 on the CPU: images of a class, a row, by their guess
    # Per class, in [0, 1], None without images; [] if an image has one label.
    precisions: Sequence[float | None] = ()
    threshold: float | None = None  # from which probability on an image is taken for a class

    @property
    def measures(self) -> dict[str, float | None]:
        """Its MEASURES, in percent, which metrics.jsonl has after val_ and ema_. If an image has
        several labels: the mean average precision; F1 over all pairs of an image and a class, and
        its mean over the classes that have images.
        """
        if not self.precisions:
            return {"top1": self.top1, "top5": self.top5}
        known = [share for share in self.precisions if share is not None]
        counts = zip(self.class_hits, self.class_images, self.class_guesses)
        shares = [2 * hits / (images + taken) for hits, images, taken in counts if images]
        hits, both = sum(self.class_hits), sum(self.class_images) + sum(self.class_guesses)
        return {
            "map": 100.0 * fmean(known) if known else None,
            "f1": 100.0 * 2 * hits / both if both else None,
            "macro_f1": 100.0 * fmean(shares) if shares else None,
        }


def balanced_accuracy(hits: Sequence[int], images: Sequence[int]) -> float:
    """The mean accuracy, in percent, of the classes that have images, by their hits of these."""
    return 100.0 * fmean(right / total for right, total in zip(hits, images) if total)


def metrics_row(
    progress: Progress,
    results: Sequence[Evaluation],
    *,
    lr: float,
    global_batch: int,
    flops: float,
    processes: Processes,
) -> dict[str, Any]:
    """The line of metrics.jsonl for the epoch that has just ended; None stands for "not known".

    results: the evaluation of the model and, if there is one, of its moving average; empty if none
        took place. flops: see `training_flops`. lr: learning rate of the epoch's last step.
    """
    rate = progress.epoch_steps * global_batch / progress.seconds  # images/s, all processes
    tflops = rate * flops / processes.world_size / 1e12
    peak = matrix_rate(processes.device)
    row = dict.fromkeys(METRICS) | {
        "epoch": progress.epochs + 1,
        "lr": lr,
        "train_loss": progress.loss_sum / progress.epoch_steps,
        "images_per_second": rate,
        "val_loss": results[0].loss if results else None,
        "skipped_steps": progress.skipped_steps,
        "seconds": progress.seconds,
        "cpu_seconds": progress.cpu_seconds,
        "waiting": progress.waiting_seconds / progress.seconds,
        "tflops_per_device": tflops,
        "share_of_rate": tflops / peak if peak else None,
        "peak_memory_gib": peak_gib(processes.device),
    }
    if results and results[0].top1 is not None:
        row["val_balanced"] = balanced_accuracy(results[0].class_hits, results[0].class_images)
    for name, result in zip(("val", "ema"), results):
        row |= {f"{name}_{measure}": value for measure, value in result.measures.items()}
    return row


def epoch_line(row: Mapping[str, Any], epochs: int) -> str:
    """What a terminal of 80 columns has room for of a row of metrics, if it was measured."""
    digits = 0 if row["images_per_second"] >= 100 else 2
    texts = {
        "train_loss": "loss {:.3f}",
        "val_loss": "val {:.3f}",
        "val_top1": "top-1 {:.2f} %",
        "val_map": "mAP {:.2f} %",
        "ema_top1": "EMA {:.2f} %",
        "ema_map": "EMA {:.2f} %",
        "images_per_second": f"{{:.{digits}f}} img/s",
    }
    parts = [f"epoch {row['epoch']:>{len(str(epochs))}}/{epochs}"]
    known = [key for key in texts if row.get(key) is not None]
    parts += [texts[key].format(row[key]) for key in known]
    return "  ".join(parts)
