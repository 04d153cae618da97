"""Learning classes: cross-entropy with class probabilities; loss, top-1 and top-5 on all images."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..train.distributed import Processes, agreed
from ..train.interruption import StopRequest
from ..train.loop import autocast
from ..train.metrics import Evaluation
from . import Batches, Contradiction, Task, TensorFunction

MOST_PAIRED = 1_000  # classes of a confusion matrix: 8 MB a model, 3 MB as JSON


def cross_entropy(
    forward: TensorFunction, images: Tensor, scales: Sequence[Tensor], targets: Tensor
) -> Tensor:
    """The mean of −Σ target · log softmax(logits) over a micro-batch, a scalar.

    images: (B, 3, H, W); targets: (B, K), probabilities; scales: drop-path's (branches, B), or none
    """
    return F.cross_entropy(forward(images, *scales).float(), targets)


@torch.no_grad()
def evaluate(
    models: Sequence[nn.Module],
    batches: Batches,
    *,
    num_classes: int,
    amp: str,
    processes: Processes,
    stop: StopRequest,
    columns: Tensor | None = None,
) -> list[Evaluation]:
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
    totals = torch.zeros(len(models), 2, dtype=torch.float64, device=device)  # loss, top 5
    hits, guessed = torch.zeros(2, len(models), num_classes, dtype=torch.int64, device=device)
    counts = torch.zeros(num_classes, dtype=torch.int64, device=device)
    confusion: list[Tensor] = []  # of each model; none of many classes
    if num_classes <= MOST_PAIRED:
        size = (num_classes, num_classes)
        confusion = [torch.zeros(size, dtype=torch.int64, device=device) for _ in models]
    columns = None if columns is None else columns.to(device)
    for model in models:
        model.eval()
    for batch in agreed(batches, processes, stop):
        if batch is None:  # only other processes have images left
            continue
        images, labels = batch
        ones = torch.ones_like(labels)
        for index, model in enumerate(models):
            with autocast(device, amp):
                logits = model(images)  # (B, classes of the model)
            if columns is not None:
                logits = logits[:, columns]  # (B, K)
            logits = logits.float()
            best = logits.topk(min(5, num_classes)).indices  # (B, 5)
            ranked = best == labels[:, None]
            guesses = best[:, 0]
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
    evaluations = []
    for index, (loss, top5) in enumerate(totals.tolist()):
        right = hits[index].tolist()
        evaluations.append(
            Evaluation(
                loss / total,
                100.0 * sum(right) / total,
                100.0 * top5 / total if num_classes > 5 else None,
                total,
                right,
                counts.tolist(),
                guessed[index].tolist(),
                confusion[index].cpu() if confusion else None,
            )
        )
    return evaluations


class Labels(Task):
    """The classes of the images, as mixing and smoothing leave them."""

    learns_classes = True
    loss = staticmethod(cross_entropy)

    @staticmethod
    def contradictions(recipe: Any) -> Iterator[Contradiction]:
        if recipe.data.name == "images":
            yield (
                ("data.name", "task.name"),
                "another one, such as image_folder: these have no classes",
            )
        if recipe.task.kind.loss is not cross_entropy:  # a class that is made of this one
            yield from Task.contradictions(recipe)

    def measure(
        self,
        models: Sequence[nn.Module],
        batches: Batches,
        *,
        loss: TensorFunction,
        **how: Any,
    ) -> list[Evaluation]:
        return evaluate(models, batches, num_classes=len(self.classes), **how)

    def next_step(self, run: str) -> str:
        return f"vitinit predict {run} photo.jpg"
