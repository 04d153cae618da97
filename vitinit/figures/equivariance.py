"""Do a ViT's tokens move when the image moves? How far they are from it, by depth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from ..models import VisionTransformer
from .plot import FigureError, Line, colours_of, draw_panels
from .subjects import Subject, photographs, require_family

BATCH = 8                       # images a forward pass


@torch.no_grad()
def streams(model: VisionTransformer, images: Tensor) -> Tensor:
    """The patch tokens of the embedding and after every block, (depth + 1, B, H, W, C)."""
    found = []
    for batch in images.split(BATCH):
        behind = model.features(batch, blocks=range(len(model.blocks))).blocks
        maps = [model.tokens(model.embed(batch)).map, *(tokens.map for tokens in behind)]
        found.append(torch.stack(maps))                                  # (depth + 1, B, H, W, C)
    return torch.cat(found, dim=1)


def shift_errors(model: VisionTransformer, images: Tensor, step: tuple[int, int]) -> Tensor:
    """How much of what tokens say of an image does not move with it, (depth + 1,): 0 is all moves.

    images: (B, 3, H, W), normalised, B ≥ 2. They move by `step` patches, (down, right), round the
    borders. Of every token its mean over the images is taken off, which the position embedding makes; of
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
    """One panel a recipe, one line an init or run and epoch; the numbers are printed, too."""
    if count < 2:
        raise FigureError(f"--count {count}: what differs between images takes two at least")
    found: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for subject in subjects:
        require_family(subject, "equivariance", VisionTransformer)
        name = subject.recipe.name
        errors = shift_errors(subject.model, photographs(folder, count, subject.recipe), step)
        found[name][subject.state] = errors
        print(f"{name}, {subject.state}:", *(f"{error:.3f}" for error in errors))

    colours = colours_of(state for states in found.values() for state in states)
    panels = {name: [Line(errors, state, colours[state]) for state, errors in states.items()]
              for name, states in found.items()}
    draw_panels(out, panels, across="blocks behind", down="error of tokens, share of their rms",
                heading=f"Tokens of images moved by {step[0]} and {step[1]} patches, against moved "
                        f"tokens, {count} photographs")
