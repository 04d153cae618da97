"""A task of one's own: labels, of which a class that is far ahead is not pushed further."""

from collections.abc import Callable
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor

from vitinit.base.values import Bounds
from vitinit.tasks import TASKS
from vitinit.tasks.labels import Labels


def options(*, gamma: Annotated[float, Bounds(minimum=0.0)] = 2.0) -> None:
    """gamma: how little sure images count, as in the focal loss (arXiv 1708.02002)."""


class Focal(Labels):
    takes = staticmethod(options)

    def loss(self, forward: Callable, images: Tensor, scales: tuple, targets: Tensor) -> Tensor:
        logs = F.log_softmax(forward(images, *scales).float(), dim=1)
        weights = (1.0 - logs.exp()) ** self.options["gamma"]
        return -(targets * weights * logs).sum(dim=1).mean()

    def notes(self) -> list[str]:
        return [f"task    focal loss with gamma {self.options['gamma']}"]


TASKS["focal"] = Focal
