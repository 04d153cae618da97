"""What a model may learn: a task is one file here, and one row in `TASKS`.

A task has its objective and its measures, and says what a run's start, folder and report show of
it. To add one: a class like these, here or elsewhere, a row, and a recipe whose [task] names it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Generator, Tensor, nn

from ..base.values import PositiveNumber, ReadOnly
from ..models.layers import Classifier
from ..train.distributed import Processes
from ..train.metrics import Evaluation

__all__ = ["TASKS", "Task"]

# The tasks by the names that [task] takes. A teacher, which [distill] names, is one more: distillation.py.
TASKS: dict[str, Any] = {
    "classify": ".tasks.labels:Labels",
    "multi_label": ".tasks.multi_label:MultiLabel",
    "reconstruct": ".tasks.reconstruction:Reconstruction",
}
TensorFunction = Callable[..., Tensor]  # a model's forward pass, or an objective
Batches = Iterable[tuple[Tensor, Tensor]]  # of images with labels, or with visible patches
Contradiction = tuple[Sequence[str], str]  # keys, and what is expected of the first one's value


@dataclass(frozen=True)
class Loss:
    """[loss]: how the logits of an image are held against its classes."""

    # binary_cross_entropy decides each class for itself, as in DeiT III (arXiv 2204.07118).
    name: Literal["cross_entropy", "binary_cross_entropy"]
    targets: Literal["share", "any"]  # of a mixed image: each class's share; any: 1 for all it has
    # How much each class counts; balanced: the less, the more images it has.
    class_weights: Literal["none", "balanced"] | tuple[PositiveNumber, ...]

    @property
    def unlike_cross_entropy(self) -> dict[str, str]:
        """The keys whose values are not those of plain cross-entropy, with these."""
        usual = vars(CROSS_ENTROPY)
        return {key: value for key, value in usual.items() if getattr(self, key) != value}

    def probabilities(self, logits: Tensor) -> Tensor:
        """Of the classes, (B, K), float32 at least: of all together 1, or of each for itself."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.name == "binary_cross_entropy":
            return logits.sigmoid()
        return logits.softmax(dim=1)


CROSS_ENTROPY = Loss(name="cross_entropy", targets="share", class_weights="none")


class Task:
    """What all tasks have; the answers here are those of one that needs nothing more."""

    # A function whose keyword-only arguments, with their types, are the task's options.
    takes: Callable[..., Any] = staticmethod(lambda: None)
    # (forward, images (B, 3, H, W), scales, targets) → the mean loss of a micro-batch, a scalar,
    # within autocast. forward(images, *scales): the model. scales: drop-path's (branches, B), or
    # none. targets: (B, K), class probabilities, or visible patches (B, n).
    loss: TensorFunction
    # (models, batches, loss=, amp=, processes=, stop=) → an evaluation of each model on all images,
    # each once, by this process's batches. loss: the run's objective.
    measure: Callable[..., list[Evaluation]]
    learns_classes = False
    several_labels = False  # whether an image has a label for each class, (B, K) of 0 and 1
    score = "loss"  # which of its measures says how good a model is, as after val_ in metrics.jsonl
    hides_patches = False  # whether a model sees some of the patches, `visible(patches)`
    head_note = ""  # what the start prints of the classifier, in place of how its rows matched
    digest = "none"  # of a teacher, which a resumed run needs again

    @staticmethod
    def contradictions(recipe: Any) -> Iterator[Contradiction]:
        """Yield keys of a recipe whose values go with no such task, and what is expected of the
        first.
        """
        if recipe.distill.teacher:
            yield ("distill.teacher", "task.name"), "none: a teacher goes with cross-entropy"
        for key, usual in recipe.loss.unlike_cross_entropy.items():
            yield (f"loss.{key}", "task.name"), f"{usual}, as the task has a loss of its own"

    def __init__(
        self, classes: Sequence[str] = (), options: Mapping[str, Any] = ReadOnly()
    ) -> None:
        self.classes, self.options = [*classes], options

    def objective(
        self, loss: Loss, class_images: Sequence[int], device: torch.device
    ) -> TensorFunction:
        """The task's `loss`, as [loss] of a recipe says it. class_images: how many training images
        each class has. Raises ValueError for another number of weights than classes.
        """
        return self.loss

    def model(self, classifier: Classifier) -> nn.Module:
        """What is trained: the classifier, or what holds it."""
        return classifier

    def initialise(self, model: nn.Module, generator: Generator) -> None:
        """Draw the weights of what is beside the classifier."""

    def visible(self, patches: int) -> int:
        """How many of an image's patches a model sees, where some are hidden."""
        return patches

    def notes(self) -> list[str]:
        """Lines about the task, for the start of a run."""
        return []

    def rehearsed(self, model: nn.Module, images: Tensor, targets: Tensor) -> tuple[str, Tensor]:
        """What a dry run shows: what the model's output is called, and the output."""
        return "logits", model(images)

    def cost(self, images: Tensor) -> str:
        """A line on what a step costs beside the model, for a dry run."""
        return ""

    def fault(self, processes: Processes) -> str:
        """Why a loss is not finite, if the task knows; the same on all processes."""
        return ""

    def next_step(self, run: str) -> str:
        """What a finished run is good for: a command, or a part of one."""
        return f"--set init.checkpoint={run} starts a classifier from it"
