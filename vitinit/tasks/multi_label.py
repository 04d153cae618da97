"""Learning several labels per image: a yes or no for each class; average precision and F1.

The sets are lists of images with several labels (data/lists.py). What is measured is what
scikit-learn calls average_precision_score and f1_score, with what its averages are called.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.values import Proportion
from ..train.distributed import Processes, agreed
from ..train.interruption import StopRequest
from ..train.metrics import Evaluation
from . import Batches, Contradiction
from .labels import Labels, contradictions_of, logits_of


def options(*, threshold: Proportion = 0.5) -> None:
    """threshold: an image is of the classes that have at least this probability."""


def average_precision(scores: Tensor, truths: Tensor) -> float | None:
    """Σ (recall now − recall before) · precision over the distinct scores, from the highest; None
    if no image is of the class.

    scores: (N,); truths: (N,) bool, whether an image is of it. Images of one score count at once.
    """
    total = int(truths.sum())
    if not total:
        return None
    if scores.isnan().any():
        return math.nan  # which is no best one
    order = scores.argsort(descending=True)
    scores, hits = scores[order], truths[order].cumsum(0)  # among the first so many
    last = torch.ones_like(truths)  # of those with its score
    last[:-1] = scores[1:] != scores[:-1]
    places = last.nonzero()[:, 0]
    hits = hits[places].double()
    precision = hits / (places + 1)
    recall = hits / total
    return float((recall.diff(prepend=recall.new_zeros(1)) * precision).sum())


@torch.no_grad()
def evaluate(
    models: Sequence[nn.Module],
    batches: Batches,
    *,
    num_classes: int,
    threshold: float,
    amp: str,
    processes: Processes,
    stop: StopRequest,
    columns: Tensor | None = None,
) -> list[Evaluation]:
    """As `labels.evaluate`, of labels (B, K). The loss is the mean binary cross-entropy of an image
    and a class, all alike. Precision needs all scores at once: for each image and class 4 bytes of
    each model are kept in memory, and 1 of the label, and 18 more while one model's are measured:
    of 50,000 images and 1,000 classes 250 MB, and at the end 1.2 GB.
    """
    none = torch.empty(0, num_classes)  # of a process without images
    scores_of, truths = [[none] for _ in models], [none.byte()]
    columns = None if columns is None else columns.to(processes.device)
    for model in models:
        model.eval()
    for batch in agreed(batches, processes, stop):
        if batch is None:  # only other processes have images left
            continue
        images, labels = batch
        for scores, model in zip(scores_of, models):
            scores.append(logits_of(model, images, amp, columns).cpu())
        truths.append(labels.byte().cpu())
    of_all = of_all_processes(torch.cat(truths), processes).bool()
    return [
        evaluation_of(of_all_processes(torch.cat(scores), processes), of_all, threshold)
        for scores in scores_of
    ]


def of_all_processes(rows: Tensor, processes: Processes) -> Tensor:
    """The rows (n, K) of each process, of all of them (N, K) float32, in the images' order: image i
    is number i // world_size of process i % world_size.
    """
    count = int(processes.sum(torch.tensor(len(rows), device=processes.device)))
    table = torch.zeros(count, rows.shape[1], device=processes.device)
    table[processes.rank :: processes.world_size] = rows.to(processes.device)
    return processes.sum(table).cpu()  # beside zeros


def evaluation_of(logits: Tensor, truths: Tensor, threshold: float) -> Evaluation:
    """What the logits (N, K) float32 of all images say, whose labels are (N, K) bool."""
    chosen = logits.sigmoid() >= threshold
    precisions, loss = [], 0.0
    for scores, of_class in zip(logits.T, truths.T):  # all at once would take four times as much
        precisions.append(average_precision(scores, of_class))
        loss += F.binary_cross_entropy_with_logits(
            scores.double(), of_class.double(), reduction="sum"
        ).item()
    return Evaluation(
        loss=loss / max(truths.numel(), 1),
        top1=None,
        top5=None,
        images=len(truths),
        class_hits=(chosen & truths).sum(0).tolist(),
        class_images=truths.sum(0).tolist(),
        class_guesses=chosen.sum(0).tolist(),
        confusion=None,
        precisions=precisions,
        threshold=threshold,
    )


class MultiLabel(Labels):
    """All classes that an image is of, each decided for itself."""

    takes = staticmethod(options)
    several_labels = True
    score = "map"

    @staticmethod
    def contradictions(recipe: Any) -> Iterator[Contradiction]:
        if recipe.data.name != "image_list":
            yield ("data.name", "task.name"), "image_list, which may state several labels"
        if recipe.loss.name != "binary_cross_entropy":
            yield ("loss.name", "task.name"), "binary_cross_entropy"
        if recipe.mix.label_smoothing:
            yield ("mix.label_smoothing", "task.name"), "0.0"
        if recipe.data.sampling != "shuffled":
            yield ("data.sampling", "task.name"), "shuffled, as an image is of several classes"
        if recipe.distill.teacher:
            yield ("distill.teacher", "task.name"), "none: a teacher goes with plain cross-entropy"
        yield from contradictions_of(recipe)

    def evaluated(self, *given: Any, **how: Any) -> list[Evaluation]:
        return evaluate(*given, threshold=self.options["threshold"], **how)
