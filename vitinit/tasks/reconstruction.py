"""Learning without labels: a masked autoencoder predicts hidden patches."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Generator, Tensor, nn

from ..init.baseline import default
from ..models import MODELS
from ..models.layers import Classifier
from ..models.masked_autoencoder import MaskedAutoencoder, visible_patches
from ..models.vit import VisionTransformer
from ..train.device import dtype_of_sums
from ..train.distributed import Processes, agreed
from ..train.interruption import StopRequest
from ..train.loop import autocast
from ..train.metrics import Evaluation
from . import Batches, Contradiction, Task, TensorFunction


@torch.no_grad()
def mean_losses(
    models: Sequence[nn.Module],
    batches: Batches,
    *,
    loss: TensorFunction,
    amp: str,
    processes: Processes,
    stop: StopRequest,
) -> list[Evaluation]:
    """As `evaluate`, of a run that learns no classes: the mean loss over images."""
    dtype = dtype_of_sums(processes.device)
    totals = torch.zeros(len(models) + 1, dtype=dtype, device=processes.device)
    for model in models:
        model.eval()
    for batch in agreed(batches, processes, stop):
        if batch is not None:  # else only other processes have images left
            images, targets = batch
            for index, model in enumerate(models):
                with autocast(processes.device, amp):
                    totals[index] += loss(model, images, (), targets) * len(images)
            totals[-1] += len(images)
    *losses, count = processes.sum(totals).tolist()
    return [Evaluation(loss / count, None, None, int(count), [], [], [], None) for loss in losses]


def reconstruction(
    forward: TensorFunction, images: Tensor, scales: Sequence[Tensor], visible: Tensor
) -> Tensor:
    """The objective, a scalar: the mean loss of a micro-batch. scales: as of `cross_entropy`."""
    return forward(images, *scales, visible=visible).mean()


class Reconstruction(Task):
    """The pixels of hidden patches (He et al., arXiv 2111.06377); models/masked_autoencoder.py."""

    hides_patches = True
    head_note = "decoder as drawn: none is read from a checkpoint"
    takes = staticmethod(MaskedAutoencoder.__init__)
    loss = staticmethod(reconstruction)
    measure = staticmethod(mean_losses)

    @staticmethod
    def contradictions(recipe: Any) -> Iterator[Contradiction]:
        if MODELS[recipe.model.name][0] != "vit":
            yield ("model.name", "task.name"), "a ViT, which need not see all patches"
        if recipe.mix.mixes:
            yield ("mix.probability", "task.name"), "0.0"
        if recipe.schedule.shift_epochs:
            yield ("schedule.shift_epochs", "task.name"), "0, as shifts need all patches"
        yield from Task.contradictions(recipe)
        if recipe.optim.train == "head":
            yield ("optim.train", "task.name"), "all"

    def model(self, classifier: Classifier) -> MaskedAutoencoder:
        return MaskedAutoencoder(cast(VisionTransformer, classifier), **self.options)

    def initialise(self, model: nn.Module, generator: Generator) -> None:
        default(cast(MaskedAutoencoder, model).decoder, generator=generator)

    def visible(self, patches: int) -> int:
        return visible_patches(patches, self.options["mask_ratio"])

    def rehearsed(self, model: nn.Module, images: Tensor, targets: Tensor) -> tuple[str, Tensor]:
        return "losses of hidden patches", model(images, visible=targets)
