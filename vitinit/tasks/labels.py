"""Learning classes: cross-entropy, of all or of each; loss, top-1 and top-5 on all images."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..train.device import dtype_of_sums
from ..train.distributed import Processes, agreed
from ..train.interruption import StopRequest
from ..train.loop import autocast
from ..train.metrics import Evaluation
from . import Batches, Contradiction, Loss, Task, TensorFunction

MOST_PAIRED = 1_000  # classes of a confusion matrix: 8 MB a model, 3 MB as JSON


def cross_entropy(
    forward: TensorFunction,
    images: Tensor,
    scales: Sequence[Tensor],
    targets: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """The mean of −Σ weight · target · log softmax(logits) over a micro-batch, a scalar.

    images: (B, 3, H, W); targets: (B, K), probabilities; scales: drop-path's (branches, B), or none
    weights: (K,) float32, how much each class counts; None: all alike.
    """
    return F.cross_entropy(forward(images, *scales).float(), targets, weights)


def binary_cross_entropy(
    forward: TensorFunction,
    images: Tensor,
    scales: Sequence[Tensor],
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    any_share: bool = False,
) -> Tensor:
    """The mean over a micro-batch and its classes of −w t log σ(z) − (1 − t) log σ(−z), a scalar.

    z: the logits; t: the targets; w: the class's weight. Arguments are those of `cross_entropy`.
    any_share: t is 1 wherever the target is above 0, as in DeiT III's code (arXiv 2204.07118).
    """
    if any_share:
        targets = (targets > 0.0).to(targets.dtype)
    logits = forward(images, *scales).float()
    return F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weights)


def weights_of(loss: Loss, class_images: Sequence[int], device: torch.device) -> Tensor | None:
    """How much each class counts, (K,) float32 on the device; None: all alike. See `Task.objective`.

    balanced: N / (K n) of a class with n of the N labels of all K, as in scikit-learn; with n = 1
    where a part of a set has none, and nothing to weigh.
    """
    if loss.class_weights == "none":
        return None
    if loss.class_weights == "balanced":
        images = torch.tensor(class_images, dtype=torch.float64)
        return (images.sum() / (len(images) * images.clamp(min=1.0))).float().to(device)
    if len(loss.class_weights) != len(class_images):
        raise ValueError(
            f"loss.class_weights has {len(loss.class_weights)} values; expected one for each of the "
            f"{len(class_images)} classes, in their order"
        )
    return torch.tensor(loss.class_weights, device=device)


def logits_of(model: nn.Module, images: Tensor, amp: str, columns: Tensor | None) -> Tensor:
    """The logits (B, K) float32 of a data set's classes; `columns` as of `evaluate`."""
    with autocast(images.device, amp):
        logits = model(images)  # (B, classes of the model)
    if columns is not None:
        logits = logits[:, columns]
    return logits.float()


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
    seen: Callable[[int, Tensor, Tensor], None] | None = None,
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
    seen: called with the number of a model, its logits (B, K) float32 and the labels of each batch.
    """
    device = processes.device
    totals = torch.zeros(len(models), 2, dtype=dtype_of_sums(device), device=device)  # loss, top 5
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
            logits = logits_of(model, images, amp, columns)
            if seen is not None:
                seen(index, logits, labels)
            best = logits.topk(min(5, num_classes)).indices  # (B, 5)
            ranked = best == labels[:, None]
            guesses = best[:, 0]
            loss = F.cross_entropy(logits, labels, reduction="sum")
            totals[index] += torch.stack([loss, ranked.sum()]).to(totals)
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


def contradictions_of(recipe: Any) -> Iterator[Contradiction]:
    """Yield what of [loss] goes neither with itself nor with what mixes or samples the images."""
    loss = recipe.loss
    if loss.targets == "any":
        if loss.name == "cross_entropy":
            yield ("loss.targets", "loss.name"), "share, as its targets are probabilities"
        if recipe.mix.label_smoothing:
            smoothing = "mix.label_smoothing", "loss.targets"
            yield smoothing, "0.0, as it gives every class a share"
    if loss.class_weights == "balanced" and recipe.data.sampling == "balanced":
        keys = "loss.class_weights", "data.sampling"
        yield keys, "none, as all classes come equally often already"


class Labels(Task):
    """The classes of the images, as mixing and smoothing leave them."""

    learns_classes = True
    score = "top1"
    loss: TensorFunction = staticmethod(cross_entropy)

    @staticmethod
    def contradictions(recipe: Any) -> Iterator[Contradiction]:
        if recipe.data.name == "images":
            yield (
                ("data.name", "task.name"),
                "another one, such as image_folder: these have no classes",
            )
        if recipe.task.kind.loss is not cross_entropy:  # a class that is made of this one
            yield from Task.contradictions(recipe)
        if recipe.distill.teacher:
            for key, usual in recipe.loss.unlike_cross_entropy.items():
                keys = f"loss.{key}", "distill.teacher"
                yield keys, f"{usual}: a teacher goes with plain cross-entropy"
        yield from contradictions_of(recipe)

    def objective(
        self, loss: Loss, class_images: Sequence[int], device: torch.device
    ) -> TensorFunction:
        weights = weights_of(loss, class_images, device)
        if loss.name == "binary_cross_entropy":
            any_share = loss.targets == "any"
            return partial(binary_cross_entropy, weights=weights, any_share=any_share)
        if weights is None:
            return self.loss  # which may be that of a teacher
        return partial(cross_entropy, weights=weights)

    def measure(
        self,
        models: Sequence[nn.Module],
        batches: Batches,
        *,
        loss: TensorFunction,
        **how: Any,
    ) -> list[Evaluation]:
        return self.evaluated(models, batches, num_classes=len(self.classes), **how)

    def evaluated(self, *given: Any, **how: Any) -> list[Evaluation]:
        """What `measure` returns; the arguments are those of `evaluate`."""
        return evaluate(*given, **how)

    def next_step(self, run: str) -> str:
        return f"vitinit predict {run} photo.jpg"
