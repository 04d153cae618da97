"""Of how low a rank the patch embeddings of a photograph are (arXiv 2401.12511, §3).

If X, (N, D), has rank k, then fixed filters can do what learned f×f filters do once D ≥ k f².
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .plot import COLOURS, LINES, FigureError, pyplot, save
from .subjects import Subject, photographs

SMALL = 0.01                    # of the largest singular value: directions below it hardly matter


class Ranks(NamedTuple):
    """Of each photograph, (B,) each."""

    stable: Tensor              # ‖X‖_F² / ‖X‖₂²
    above_share: Tensor         # singular values above SMALL · the largest
    numerical: Tensor           # above max(N, D) · float32's eps · the largest


@torch.no_grad()
def patch_embeddings(model: nn.Module, images: Tensor) -> Tensor:
    """(B, 3, H, W) → X, (B, N, D): what comes out of `patch_embed`, before any position embedding.

    A ViT's and a Mixer's is linear; SimpleViT's and Swin's end in their LayerNorm.
    """
    if not hasattr(model, "patch_embed"):
        raise FigureError(f"figure 'spectrum' needs patch embeddings; a {type(model).__name__} "
                          "has none")
    return model.patch_embed(images).flatten(1, -2)


def ranks(values: Tensor, shape: tuple[int, int]) -> Ranks:
    """values: (B, min(N, D)), singular values in falling order; shape: (N, D)."""
    largest = values[:, :1]
    limit = max(shape) * torch.finfo(torch.float32).eps
    return Ranks((values / largest).square().sum(1), (values > SMALL * largest).sum(1).double(),
                 (values > limit * largest).sum(1).double())


def draw_spectrum(out: Path, subjects: Iterable[Subject], *, folder: Path, count: int) -> None:
    """Singular values over the largest: mean over photographs, band from lowest to highest."""
    figure, axis = pyplot().subplots(figsize=(6.6, 4.2), layout="constrained")
    for subject, colour, line in zip(subjects, cycle(COLOURS), cycle(LINES)):
        images = photographs(folder, count, subject.recipe)
        tokens = patch_embeddings(subject.model, images)                 # (B, N, D)
        # In float64, so that what is small is the embeddings' own and not the SVD's rounding.
        values = torch.linalg.svdvals(tokens.double())
        found = ranks(values, tokens.shape[1:])
        label = f"{subject.recipe.name}, {subject.state}"
        print(f"{label}: X is {tokens.shape[1]}×{tokens.shape[2]}; mean over {count} photographs: "
              f"stable rank {found.stable.mean():.2f}, {found.above_share.mean():.1f} singular "
              f"values above {SMALL:.0%} of the largest, {found.numerical.mean():.1f} above "
              "float32's limit")
        shares = values / values[:, :1]
        places = range(1, shares.shape[1] + 1)
        axis.plot(places, shares.mean(0), color=colour, linestyle=line,
                  label=f"{label}: N×D = {tokens.shape[1]}×{tokens.shape[2]}")
        axis.fill_between(places, shares.amin(0), shares.amax(0), color=colour, alpha=0.2,
                          linewidth=0)
    axis.axhline(SMALL, color="0.4", linestyle=":", label=f"{SMALL:.0%} of the largest")
    axis.set(yscale="log", ylim=(1e-5, 1.5), xlabel="number of the singular value",
             ylabel="singular value / the largest")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.suptitle(f"Patch embeddings X of {count} photographs: singular values, mean and range",
                    fontsize=11)
    save(figure, out)
