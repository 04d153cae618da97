"""Learning from a teacher: DeiT's losses in float64, which head learns what, and the very views."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import interpolate

import vitinit
from vitinit.tasks.distillation import Distillation, Teacher
from vitinit.train.distributed import Processes
from vitinit.train.optim import Distill

CPU, MEAN, STD = torch.device("cpu"), (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)
ALONE = Processes(rank=0, local_rank=0, world_size=1, device=CPU)


def settings(kind: str = "hard", alpha: float = 0.3, tau: float = 1.7) -> Distill:
    return Distill(teacher="given", weights="", classes="", kind=kind, alpha=alpha, tau=tau)


def seeded(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def log_softmax(rows: np.ndarray) -> np.ndarray:
    return rows - np.log(np.exp(rows).sum(1, keepdims=True))


def written_out(ours: np.ndarray, theirs: np.ndarray, kind: str, tau: float) -> float:
    """The two losses as DeiT's losses.py defines them, in float64."""
    if kind == "hard":
        return -log_softmax(ours)[np.arange(len(ours)), theirs.argmax(1)].mean()
    student, teacher = log_softmax(ours / tau), log_softmax(theirs / tau)
    return (np.exp(teacher) * (teacher - student)).sum() * tau**2 / ours.size


class Linear(nn.Module):
    """A teacher: images (B, 3, H, W) → (B, 5), which remembers what it saw."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded(5, 3 * pixels, seed=2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen = images
        return images.flatten(1) @ self.weight.mT


def learning(
    distill: Distill,
    *,
    two_heads: bool = False,
    mean=MEAN,
    std=STD,
    size: tuple[int, int] | None = (8, 12),
) -> Distillation:
    teacher = Teacher(Linear(int(np.prod(size or (8, 12)))), mean, std, size, "digest", "given")
    return Distillation(
        (), teacher, distill, mean=MEAN, std=STD, size=(8, 12), two_heads=two_heads, device=CPU
    )


@pytest.mark.parametrize("two_heads", [False, True])
@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_losses_are_deits_and_each_head_of_a_distilled_student_has_its_own_teacher(
    kind, two_heads, held_against
):
    student = vitinit.build_model(
        f"vit_tiny{'_distilled' * two_heads}",
        num_classes=5,
        image_size=(8, 12),
        patch_size=4,
        embed_dim=6,
        depth=1,
        num_heads=2,
    ).double()
    vitinit.init_weights(student, "torch", generator=torch.Generator().manual_seed(0))
    objective, images = learning(settings(kind), two_heads=two_heads), seeded(7, 3, 8, 12).double()
    objective.teacher.model.double()
    targets = seeded(7, 5, seed=3).double().softmax(1)
    loss = objective.loss(student, images, (), targets)
    heads = student(images, apart=True).unbind(1) if two_heads else [student(images)] * 2
    of_labels, of_teacher = (head.detach().numpy() for head in heads)
    base = -(targets.numpy() * log_softmax(of_labels)).sum(1).mean()
    theirs = objective.teacher.model(images).detach().numpy()
    expected = 0.7 * base + 0.3 * written_out(of_teacher, theirs, kind, 1.7)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    held_against(loss, expected, cases=len(images))
    loss.backward()
    assert objective.teacher.model.weight.grad is None


def test_the_teacher_reads_the_very_views_as_it_was_trained_to():
    images, same = seeded(7, 3, 8, 12), learning(settings())
    same.logits(images)
    assert same.teacher.model.seen is images  # not even copied
    mean, std = (0.1, 0.2, 0.3), (0.7, 0.6, 0.5)
    other = learning(settings(), mean=mean, std=std, size=(16, 20))
    other.logits(images)
    m, s, mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD, mean, std))
    expected = interpolate((images * s + m - mean) / std, (16, 20), mode="bicubic", antialias=True)
    torch.testing.assert_close(other.teacher.model.seen, expected, rtol=1e-5, atol=1e-5)


def test_logits_that_are_not_finite_end_training_and_are_named():
    objective, images = learning(settings("hard")), seeded(7, 3, 8, 12)
    student = nn.Sequential(nn.Flatten(), nn.Linear(3 * 96, 5))
    targets = torch.eye(5)[torch.arange(7) % 5]
    assert objective.loss(student, images, (), targets).isfinite()
    assert objective.fault(ALONE) == ""
    broken = images.clone()
    broken[4, 0, 0, 0] = torch.inf
    objective.teacher.model.forward = lambda seen: seen.flatten(1)[:, :5]
    assert objective.loss(lambda seen: torch.zeros(7, 5), broken, (), targets).isnan()
    assert objective.loss(lambda seen: torch.zeros(7, 5), images, (), targets).isfinite()
    assert "the teacher's logits are infinite or NaN" in objective.fault(ALONE)  # once is enough
