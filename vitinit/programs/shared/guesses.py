"""What a model takes the images of a set for: how many are right, and which classes it confuses."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...base.messages import one_line
from ...data.lists import as_csv
from ...data.sources import Source
from ...recipe.sections import Recipe
from ...runs.data import evaluation_batches
from ...tasks.labels import logits_of

PAIRS = 3  # of classes that are confused, at most


class Guessed(NamedTuple):
    """What a model takes images for."""

    labels: Tensor  # (n,) int64
    guesses: Tensor  # (n,) int64, the likeliest class of each
    shares: Tensor  # (n,), its probability

    @property
    def errors(self) -> float:
        """The share that is wrong."""
        return (self.labels != self.guesses).float().mean().item()

    def confusions(self, classes: Sequence[str]) -> str:
        """Which classes are most often taken for which others, in words."""
        images = Counter(self.labels.tolist())
        pairs = Counter(zip(self.labels.tolist(), self.guesses.tolist()))
        wrong = [(pair, count) for pair, count in pairs.most_common() if pair[0] != pair[1]]
        if not wrong:
            return "nothing: no image is taken for one of another class"
        names = [*map(one_line, classes)]
        return "; ".join(
            f"{count} of {images[label]} {names[label]} taken for {names[guess]}"
            for (label, guess), count in wrong[:PAIRS]
        )

    def as_csv(self, source: Any) -> bytes:
        """A list of images with their classes, what they are taken for, and how surely."""
        names, rows = source.classes, [["path", "truth", "label", "probability"]]
        for path, label, guess, share in zip(source.paths, *map(Tensor.tolist, self)):
            rows.append([path, names[label], names[guess], f"{share:.6f}"])
        return as_csv(rows)


@torch.no_grad()
def all_logits(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], amp: str
) -> tuple[Tensor, Tensor]:
    """The model's logits (n, K) of all images of the batches, and their labels, on the CPU."""
    found, labels = [], []
    for images, of_images in batches:
        found.append(logits_of(model, images, amp, None).cpu())
        labels.append(of_images.cpu())
    return torch.cat(found), torch.cat(labels)


def guessed(model: nn.Module, recipe: Recipe, source: Source, device: torch.device) -> Guessed:
    """What a model on the device takes each image of the source for, as its recipe evaluates it."""
    batches = evaluation_batches(recipe, source, recipe.data.image_size, device)
    logits, labels = all_logits(model, batches, recipe.engine.amp)
    likeliest = recipe.loss.probabilities(logits).max(1)
    return Guessed(labels, likeliest.indices, likeliest.values)
