"""Do a ViT's tokens move when the picture moves? How far they are from it, by depth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from ..models import VisionTransformer
from .plot import COLOURS, DPI, pyplot
from .subjects import Subject, photographs, require_family

BATCH = 8                       # images a forward pass


@torch.no_grad()
def streams(model: VisionTransformer, images: Tensor) -> Tensor:
    """The patch tokens of the embedding and after every block, (depth + 1, B, H, W, C)."""
    found = []
    for batch in images.split(BATCH):
        x = model.embed(batch)
        states = [x] + [x := block(x) for block in model.blocks]
        found.append(torch.stack(states)[:, :, model.num_prefix_tokens:])
    return torch.cat(found, dim=1).unflatten(2, model.grid)


def shift_errors(model: VisionTransformer, images: Tensor, step: tuple[int, int]) -> Tensor:
    """How much of what tokens say of a picture does not move with it, (depth + 1,): 0 is all moves.

    images: (B, 3, H, W), normalised, B ≥ 2. They move by `step` patches, (down, right), round the
    borders. Of every token its mean over the images is taken off, which the position code makes; of
    the rest it is the rms difference between moving before and moving after, divided by the rms. A
    quarter of the grid at each border is left out, since a convolution of patches sees the seam there.
    """
    size = model.patch_embed.proj.kernel_size
    moved = images.roll((step[0] * size[0], step[1] * size[1]), dims=(2, 3))
    tokens, found = (states - states.mean(1, keepdim=True)
                     for states in (streams(model, images), streams(model, moved)))
    expected = tokens.roll(step, dims=(2, 3))
    rows, columns = (slice(side // 4, side - side // 4) for side in model.grid)
    expected, found = expected[:, :, rows, columns], found[:, :, rows, columns]
    return ((found - expected).square().mean((1, 2, 3, 4)) /
            expected.square().mean((1, 2, 3, 4))).sqrt()


def draw_equivariance(out: Path, subjects: Iterable[Subject], *, folder: Path, count: int,
                      step: tuple[int, int]) -> None:
    """One panel a recipe, one line an init or epoch; the numbers are printed, too."""
    if count < 2:
        raise ValueError(f"--count {count}: what differs between pictures takes two at least")
    panels: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for subject in subjects:
        require_family(subject, "equivariance", VisionTransformer)
        name = subject.recipe.name
        errors = shift_errors(subject.model, photographs(folder, count, subject.recipe), step)
        panels[name][subject.state] = errors
        print(f"{name}, {subject.state}:", *(f"{error:.3f}" for error in errors))

    figure, axes = pyplot().subplots(1, len(panels), squeeze=False, sharey=True,
                                     figsize=(max(7.6, 3.1 * len(panels) + 1.2), 4.2),
                                     layout="constrained")
    for axis, (name, lines) in zip(axes[0], panels.items()):
        for (state, errors), colour in zip(lines.items(), COLOURS * len(lines)):
            axis.plot(range(len(errors)), errors, color=colour, marker="o", markersize=3,
                      label=state)
        axis.set(title=name, xlabel="blocks behind", xticks=range(len(errors)))
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylim(bottom=0.0)                  # of all panels, which share it
    axes[0, 0].set_ylabel("error of tokens, share of their rms")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", fontsize=8,
                  ncols=4)
    figure.suptitle(f"Tokens of pictures moved by {step[0]} and {step[1]} patches, against moved "
                    f"tokens, {count} photographs", fontsize=11)
    figure.savefig(out, dpi=DPI, format="png")
