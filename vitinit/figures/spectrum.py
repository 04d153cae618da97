"""The figure `spectrum`: singular values and ranks of images' patch embeddings.

If X, the N×D patch embeddings of an image, has rank k, then fixed filters can replace learned f×f
filters as soon as D ≥ k f² (arXiv 2401.12511, §3).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .plot import FigureError, add_legend, looks_of, pyplot, save
from .subjects import Subject, photographs

SMALL = 0.01                    # singular values below this share of the largest hardly matter


class Ranks(NamedTuple):
    """Three measures of the rank of X for each photograph, (B,) each."""

    stable: Tensor              # ‖X‖_F² / ‖X‖₂²
    above_share: Tensor         # number of singular values above SMALL · the largest
    numerical: Tensor           # number above max(N, D) · float32's eps · the largest


@torch.no_grad()
def patch_embeddings(model: nn.Module, images: Tensor) -> Tensor:
    """X, (B, N, D): the output of `patch_embed`, before any position embedding is added.

    images: (B, 3, H, W). The embedding of a ViT and a Mixer is linear; that of SimpleViT and Swin
    ends in a LayerNorm. Raises FigureError for a model without `patch_embed`.
    """
    if not hasattr(model, "patch_embed"):
        raise FigureError(f"figure 'spectrum' needs patch embeddings; a {type(model).__name__} "
                          "has none")
    return model.patch_embed(images).flatten(1, -2)


def ranks(values: Tensor, shape: tuple[int, int]) -> Ranks:
    """Compute the ranks from singular values.

    values: (B, min(N, D)), in descending order. shape: (N, D).
    """
    largest = values[:, :1]
    limit = max(shape) * torch.finfo(torch.float32).eps
    return Ranks((values / largest).square().sum(1), (values > SMALL * largest).sum(1).double(),
                 (values > limit * largest).sum(1).double())


def draw_spectrum(out: Path, subjects: Iterable[Subject], *, folder: Path | None, count: int
                  ) -> None:
    """Draw each model's singular values divided by the largest one; print the ranks.

    A line is the mean over images. folder, count: see `photographs`.
    """
    found = []
    for subject in subjects:
        images = photographs(folder, count, subject.recipe)
        tokens = patch_embeddings(subject.model, images)                 # (B, N, D)
        # In float64, so that small singular values are not rounding errors of the SVD.
        values = torch.linalg.svdvals(tokens.double())
        rank, label = ranks(values, tokens.shape[1:]), f"{subject.recipe.name}, {subject.state}"
        print(f"{label}: X is {tokens.shape[1]}×{tokens.shape[2]}; mean over {count} images: "
              f"stable rank {rank.stable.mean():.2f}, {rank.above_share.mean():.1f} singular "
              f"values above {SMALL:.0%} of the largest, {rank.numerical.mean():.1f} above "
              "float32's limit")
        found.append((f"{label}: N×D = {tokens.shape[1]}×{tokens.shape[2]}",
                      subject.recipe.init.name, values / values[:, :1]))

    figure, axis = pyplot().subplots(figsize=(6.6, 4.6), layout="constrained")
    for (label, _, shares), (colour, line) in zip(found, looks_of([init for _, init, _ in found])):
        axis.plot(range(1, shares.shape[1] + 1), shares.mean(0), color=colour, linestyle=line,
                  label=label)
    axis.axhline(SMALL, color="0.4", linestyle=":", label=f"{SMALL:.0%} of the largest")
    axis.set(yscale="log", ylim=(1e-5, 1.5), xlabel="number of the singular value",
             ylabel="singular value / the largest")
    axis.grid(alpha=0.3)
    add_legend(figure, {line.get_label(): line for line in axis.lines})
    figure.suptitle(f"Patch embeddings X of {count} images: singular values, mean",
                    fontsize=11)
    save(figure, out)
