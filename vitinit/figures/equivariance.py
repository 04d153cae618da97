"""The figure `equivariance`: whether a ViT's patch tokens move when the image moves, by depth.

A model is equivariant to translation if moving its input by some patches moves its tokens likewise.
The figure shows how far the tokens after each block are from that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from .plot import FigureError, draw_panels, lines_of
from .subjects import Subject, photographs, require_family

BATCH = 8                       # images per forward pass


@torch.no_grad()
def streams(model: nn.Module, images: Tensor) -> Tensor:
    """The patch tokens before the first block and after every block, (depth + 1, B, H, W, C)."""
    found = []
    for batch in images.split(BATCH):
        after_blocks = model.features(batch, blocks=range(len(model.blocks))).blocks
        maps = [model.tokens(model.embed(batch)).map, *(tokens.map for tokens in after_blocks)]
        found.append(torch.stack(maps))                                  # (depth + 1, B, H, W, C)
    return torch.cat(found, dim=1)


def shift_errors(model: nn.Module, images: Tensor, step: tuple[int, int]) -> Tensor:
    """Relative error of equivariance at each depth, (depth + 1,): 0 if tokens move with the image.

    For each depth, the tokens of the moved images, T′, are compared with the moved tokens of the
    images, T: the error is rms(T′ - T) / rms(T). First, each token's mean over the images is
    subtracted, since the position embedding adds a part that is the same for all images. A quarter
    of the grid at each border is left out, because images are moved cyclically and a convolution
    over patches sees the seam there.

    images: (B, 3, H, W), normalised, with B ≥ 2. step: patches down and right.
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


def draw_equivariance(out: Path, subjects: Iterable[Subject], *, folder: Path | None, count: int,
                      step: tuple[int, int]) -> None:
    """Draw one panel per recipe with one line per init, or per run and epoch; print the numbers.

    folder, count: see `photographs`. Raises FigureError if `count` is less than 2.
    """
    if count < 2:
        raise FigureError(f"--count {count}: what differs between images takes two at least")
    found: dict[str, list[tuple[Subject, Tensor]]] = defaultdict(list)
    for subject in subjects:
        require_family(subject, "equivariance", "vit")
        errors = shift_errors(subject.model, photographs(folder, count, subject.recipe), step)
        found[subject.recipe.name].append((subject, errors))
        print(f"{subject.recipe.name}, {subject.state}:", *(f"{error:.3f}" for error in errors))

    panels = {name: lines_of(states) for name, states in found.items()}
    depth = max(len(errors) for states in found.values() for _, errors in states) - 1
    draw_panels(out, panels, columns=len(panels), across="after block",
                ticks=["input", *map(str, range(depth))],
                down="error of tokens, share of their rms",
                heading=f"Tokens of images moved by {step[0]} and {step[1]} patches, against moved "
                        f"tokens, {count} images")
