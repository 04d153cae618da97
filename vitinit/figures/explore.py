"""The page `explore`: one HTML file in which one sees what every patch of an image attends to.

It holds the mixing matrices of every head of every block, for a few images and models. explore.html
is its template (see page.py); it is filled with

    meta     names, class probabilities and, for each model, image and block, what `block_view` says
    weights  all matrices as one byte per weight, in the order model, image, block, head,
             query (prefix tokens first), key (patches alone)

A Mixer has no heads: its token MLP is one for all channels, and what a channel's matrix is depends
on the image. The page shows the mean over channels, whose weights have both signs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.images import decode_image
from ..init.mass import has_targets, mass_on_images
from ..messages import one_line
from ..mixing import among_patches, block_grids, by_offset, mixing_matrices, shares_of_patches
from ..models import ConvMixer, MlpMixer
from ..runs.data import as_input, evaluation_view
from .page import as_png, colours, packed, rounded, write_page
from .plot import DIVERGING, OVERLAY, FigureError
from .subjects import Subject

RADIUS = 3                      # of the mean attention by offset, in patches
TOP = 5                         # classes shown
LARGEST = 80_000_000            # weights, each of which takes a byte of the browser's memory
MOST = 4_700_000                # letters of them in a page, which is then of at most 5 MB
LEVELS = (254, 62, 14)          # how finely weights are told apart: even, so that 0 has a level


def quantise(weights: Tensor, signed: bool) -> tuple[np.ndarray, list[float]]:
    """Matrices (h, Q, N) as levels from 0 to LEVELS[0], and the largest weight of each head.

    Levels rise with the square root of a weight, so that small ones keep more of their digits. They
    begin at 0, or for signed weights at minus the largest.
    """
    largest = weights.abs().amax(dim=(1, 2)).clamp(min=1e-12)            # (h,)
    shares = weights / largest[:, None, None]
    roots = shares.abs().sqrt() * shares.sign()
    levels = (roots + 1) / 2 if signed else roots
    return (levels * LEVELS[0]).round().to(torch.uint8).numpy(), largest.tolist()


def distances(patches: Tensor, grid: tuple[int, int]) -> Tensor:
    """How far each head attends, (h,), in patches: the mean over all queries and keys.

    patches: (h, N, N), not negative. The mean distance of arXiv 2010.11929, figure 7.
    """
    rows, columns = torch.meshgrid(*map(torch.arange, grid), indexing="ij")
    cells = torch.stack([rows.flatten(), columns.flatten()], dim=1).float()      # (N, 2)
    return (patches * torch.cdist(cells, cells)).sum(-1).mean(-1) / patches.sum(-1).mean(-1)


def block_view(weights: Tensor, grid: tuple[int, int], signed: bool
               ) -> tuple[np.ndarray, dict[str, Any]]:
    """One block on one image: the levels of its weights, and what the page shows beside them.

    weights: (h, P + N, P + N), with the P prefix tokens first.
    """
    levels, largest = quantise(weights[:, :, -grid[0] * grid[1]:], signed)
    patches = among_patches(weights, grid)
    kernels = by_offset(patches if signed else shares_of_patches(weights, grid), grid, RADIUS)
    return levels, {"largest": rounded(largest), "kernels": rounded(kernels.flatten(1).tolist()),
                    "distance": rounded(distances(patches.abs(), grid).tolist())}


@torch.no_grad()
def model_view(subject: Subject, views: Tensor) -> tuple[list[np.ndarray], dict[str, Any]]:
    """A model on all images: the levels of its matrices, and its part of `meta`.

    views: (n, 3, H, W) uint8. Raises FigureError for a ConvMixer.
    """
    model, recipe = subject.model, subject.recipe
    if isinstance(model, ConvMixer):
        raise FigureError(f"recipe {recipe.name} makes a ConvMixer, whose kernels are the same for "
                          "every patch of every image")
    signed = isinstance(model, MlpMixer)
    inputs, grids, levels, images = as_input(views, recipe), block_grids(model), [], []
    # Over channels: (B, C, N, N) → (B, 1, N, N).
    summarise = partial(torch.mean, dim=1, keepdim=True) if signed else None
    for image in inputs.split(1):
        matrices = mixing_matrices(model, image, summarise=summarise)
        blocks = [block_view(matrices[block][0], grid, signed) for block, grid in enumerate(grids)]
        levels += [part for part, _ in blocks]
        images.append({"blocks": [view for _, view in blocks],
                       "probabilities": rounded(model(image).softmax(1)[0].tolist())})
    masses = None
    if has_targets(model, recipe.init.name, recipe.init.options):
        mass = mass_on_images(model, recipe.init.name, recipe.init.options, inputs)
        masses = [rounded(kinds) for kinds in zip(mass.centre, mass.others, mass.uniform)]
    return levels, {
        "name": subject.state, "recipe": recipe.name, "signed": signed, "masses": masses,
        "grids": grids, "prefix": prefix_tokens(model), "images": images,
        "classes": list(subject.classes or (f"class {n}" for n in range(model.num_classes)))}


def prefix_tokens(model: nn.Module) -> list[str]:
    """The names of the tokens before the patches, in order."""
    names = [name for parameter, name in (("cls_token", "class token"), ("dist_token",
             "distillation token")) if hasattr(model, parameter)]
    registers = model.num_prefix_tokens - len(names)
    return names + [f"register {number}" for number in range(registers)]


def write_explorer(out: Path, subjects: Iterable[Subject], photographs: Sequence[Path]) -> None:
    """Write the page of these models and photographs.

    Raises FigureError for a ConvMixer, for models whose images differ in size, and where the
    weights would make the page larger than 5 MB even if they are told apart coarsely.
    """
    levels, models, views = [], [], None
    for subject in subjects:
        own = torch.stack([evaluation_view(decode_image(str(path)), subject.recipe)
                           for path in photographs])                     # (n, 3, H, W)
        if views is not None and own.shape != views.shape:
            sizes = [f"{part.shape[2]}×{part.shape[3]}" for part in (own, views)]
            raise FigureError(f"{subject.state}: takes images of {sizes[0]} pixels, and the model "
                              f"before it of {sizes[1]}; draw a page each")
        views = own
        parts, view = model_view(subject, own)
        levels += parts
        models.append(view)
        if sum(part.size for part in levels) > LARGEST:
            break
    steps, weights = coarse_enough(levels)
    write_page(out, "explore.html", {
        "levels": steps, "top": TOP, "radius": RADIUS, "colours": colours(OVERLAY),
        "signed_colours": colours(DIVERGING), "models": models, "height": views.shape[2],
        "width": views.shape[3], "images": [{"name": one_line(path.name), "source": as_png(view)}
                                            for path, view in zip(photographs, views)]}, weights)


def coarse_enough(levels: Sequence[np.ndarray]) -> tuple[int, str]:
    """The weights as text of at most MOST letters, and how many steps their levels have."""
    count = sum(part.size for part in levels)
    for steps in LEVELS if count <= LARGEST else ():
        text = packed(b"".join(np.rint(part * (steps / LEVELS[0])).astype(np.uint8).tobytes()
                               for part in levels))
        if len(text) <= MOST:
            return steps, text
    raise FigureError(f"{count:,} weights do not fit into a page of 5 MB; show fewer images, fewer "
                      "models, or a smaller one")
