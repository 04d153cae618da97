"""Training with a teacher: DeiT's distillation (arXiv 2012.12877, §4, and its code's losses.py)."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..base.messages import times
from ..base.values import Size
from ..train.distributed import Processes
from ..train.optim import Distill
from . import TensorFunction
from .labels import Labels


@dataclass(frozen=True)
class Teacher:
    """A frozen model, and what it expects of its input."""

    model: nn.Module  # images (B, 3, *size), normalised by mean and std → (B, K)
    mean: Sequence[float]  # per channel
    std: Sequence[float]
    size: Size | None  # (height, width) of its images; None: any
    digest: str = ""  # of its weights
    name: str = ""  # in words, with how its classes were matched


def distillation_loss(student: Tensor, teacher: Tensor, distill: Distill) -> Tensor:
    """How far the student's logits (B, K) are from the teacher's (B, K): a scalar.

    hard: cross-entropy with the teacher's decision. soft: the divergence KL(teacher ‖ student) of
    the probabilities at temperature τ, times τ², over B · K as in DeiT's code (more usual: over B).
    """
    if distill.kind == "hard":
        return F.cross_entropy(student, teacher.argmax(dim=1))
    learned, taught = ((logits / distill.tau).log_softmax(dim=1) for logits in (student, teacher))
    total = F.kl_div(learned, taught, reduction="sum", log_target=True)
    return total * distill.tau**2 / student.numel()


class Distillation(Labels):
    """The objective (1 − α) · cross-entropy with the targets + α · `distillation_loss`.

    The teacher reads the student's views: normalised anew for another mean and std, and resized,
    bicubic with antialiasing, for another size. Nothing waits for the device: if the teacher's
    logits are infinite or NaN the loss becomes NaN, which ends training, and `fault` says why.
    """

    def __init__(
        self,
        classes: Sequence[str],
        teacher: Teacher,
        distill: Distill,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        size: Size,
        two_heads: bool,
        device: torch.device,
        compile: bool = False,
    ) -> None:
        """mean, std, size: of the student's images. two_heads: it is called with apart=True."""
        super().__init__(classes)
        self.digest = teacher.digest
        self.forward = torch.compile(teacher.model) if compile else teacher.model
        self.teacher, self.distill, self.two_heads = teacher, distill, two_heads
        self.size = None if teacher.size in (None, size) else teacher.size
        # (x · std + mean − teacher's mean) / teacher's std, as x · scale + shift
        values = torch.tensor([mean, teacher.mean, std, teacher.std], device=device)
        own_mean, its_mean, own_std, its_std = values[..., None, None]  # each (3, 1, 1)
        self.scale, self.shift = own_std / its_std, (own_mean - its_mean) / its_std
        self.normalised_alike = [*mean, *std] == [*teacher.mean, *teacher.std]
        self.faulty = torch.tensor(False, device=device)  # whether there were bad logits

    def inputs(self, images: Tensor) -> Tensor:
        """The student's images (B, 3, H, W) as the teacher was trained to read them."""
        if not self.normalised_alike:
            images = images * self.scale + self.shift
        if self.size is not None:
            images = F.interpolate(images, self.size, mode="bicubic", antialias=True)
        return images

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """The teacher's logits (B, K) float32 for the student's images (B, 3, H, W)."""
        return self.forward(self.inputs(images)).float()

    def loss(
        self,
        forward: TensorFunction,
        images: Tensor,
        scales: Sequence[Tensor],
        targets: Tensor,
    ) -> Tensor:
        teaching = self.logits(images)  # (B, K)
        if self.two_heads:
            of_labels, of_teacher = forward(images, *scales, apart=True).float().unbind(1)
        else:
            of_labels = of_teacher = forward(images, *scales).float()  # (B, K)
        bad = ~teaching.isfinite().all()
        self.faulty |= bad
        alpha = self.distill.alpha
        learned = F.cross_entropy(of_labels, targets)
        taught = distillation_loss(of_teacher, teaching, self.distill)
        loss = (1.0 - alpha) * learned + alpha * taught
        return torch.where(bad, torch.nan, loss)  # argmax would hide it

    def notes(self) -> list[str]:
        weights = sum(value.numel() for value in self.teacher.model.state_dict().values())
        views = ""
        if not self.normalised_alike:
            views += "; views normalised by its own mean and std"
        if self.size is not None:
            views += f"; views resized to {times(self.size)}"
        head = "the second" if self.two_heads else "the one"
        taught = f"probabilities at temperature {self.distill.tau:g}"
        if self.distill.kind == "hard":
            taught = "decisions"
        return [
            f"teacher {self.teacher.name}, {weights:,} weights ({self.digest}){views}; "
            f"{head} head learns its {taught}, alpha {self.distill.alpha:g}"
        ]

    @torch.no_grad()
    def cost(self, images: Tensor) -> str:
        """See `Task.cost`: of the teacher's pass over the student's images (B, 3, H, W)."""
        with FlopCounterMode(display=False) as counter:
            self.teacher.model(self.inputs(images))
        self.logits(images)  # compiles and warms up
        began = time.perf_counter()
        self.logits(images).sum().item()  # waits for the device
        milliseconds = 1e3 * (time.perf_counter() - began) / len(images)
        gflop = counter.get_total_flops() / len(images) / 1e9
        weights = sum(value.nbytes for value in self.teacher.model.state_dict().values())
        return (
            f"cost    the teacher adds {gflop:,.3f} GFLOP and {milliseconds:,.2f} ms per image, "
            f"and {weights / 1e6:,.1f} MB of weights\n"
        )

    def fault(self, processes: Processes) -> str:
        """Words for bad logits of the teacher, the same on all processes; "" for none."""
        bad = processes.maximum(int(self.faulty))
        return ": the teacher's logits are infinite or NaN" if bad else ""
