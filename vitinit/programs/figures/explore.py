"""The page `explore`: one HTML file in which one sees what every patch of an image attends to.

It holds the mixing matrices of every head of every block, for a few images and models. explore.html
is its template (see `write_page`); it is filled with

    meta     names, class probabilities and, for each model, image and block, what `block_view` says
    weights  all matrices as one byte per weight, in the order model, image, block, head,
             query (prefix tokens first), key (patches alone)

Of a Mixer, which has no heads, it shows the mean over channels, whose weights have both signs.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...base.messages import one_line
from ...mixing import among_patches, block_grids, by_offset, mixing_matrices, shares_of_patches
from ...mixing.filters import Grid
from ...models import ConvMixer, MlpMixer
from ...runs.data import as_input
from ...watch.mass import has_targets, mass_on_images
from ..shared.plot import DIVERGING, OVERLAY, FigureError, as_png, colours, packed, rounded
from ..shared.records import Json
from .page import write_page
from .subjects import Subject, view_of

RADIUS = 3  # of the mean attention by offset, in patches
TOP = 5  # classes shown
MOST_WEIGHTS = 80_000_000  # weights, each of which takes a byte of the browser's memory
MOST = 4_700_000  # letters of them in a page, which is then of at most 5 MB
LEVELS = (254, 62, 14)  # the highest level of a weight: even, so that 0 has a level


def block_view(weights: Tensor, grid: Grid, signed: bool) -> tuple[np.ndarray, Json]:
    """One block on one image: the levels of its weights, and what the page shows beside them.

    weights: (h, P + N, P + N), with the P prefix tokens first. The levels, (h, P + N, N), rise from
    0 to LEVELS[0] with the square root of a weight, so that small ones keep more of their digits.
    They begin at 0, or for signed weights at minus the largest of the head.
    """
    keys = weights[:, :, -math.prod(grid) :]
    largest = keys.abs().amax(dim=(1, 2)).clamp(min=1e-12)  # (h,)
    shares = keys / largest[:, None, None]
    roots = shares.abs().sqrt() * shares.sign()
    patches = among_patches(weights, grid)  # (h, N, N)
    if signed:
        roots = (roots + 1) / 2
        kernels = by_offset(patches, grid, RADIUS)
    else:
        kernels = by_offset(shares_of_patches(weights, grid), grid, RADIUS)
    levels = roots * LEVELS[0]
    # How far a head attends, in patches, over all queries and keys: arXiv 2010.11929, figure 7.
    cells = torch.cartesian_prod(*map(torch.arange, grid)).float()  # (N, 2)
    sizes = patches.abs()
    far = (sizes * torch.cdist(cells, cells)).sum((1, 2)) / sizes.sum((1, 2))
    # Sharpness: a query's largest weight minus the 1/N of uniform attention; the mean over queries.
    peaks = sizes.amax(2) / (sizes.sum(2) if signed else 1.0)  # (h, N)
    return levels.round().to(torch.uint8).numpy(), {
        "largest": rounded(largest),
        "kernels": rounded(kernels.flatten(1)),
        "distance": rounded(far),
        "sharpness": rounded(peaks.mean(1) - 1 / len(cells)),
    }


@torch.no_grad()
def model_view(subject: Subject, views: Tensor) -> tuple[list[np.ndarray], Json]:
    """A model's levels and `meta` on views (n, 3, H, W) uint8; FigureError for a ConvMixer."""
    model, recipe = subject.model, subject.recipe
    if isinstance(model, ConvMixer):
        raise FigureError(
            f"recipe {recipe.name} makes a ConvMixer, whose kernels are the same for "
            "every patch of every image"
        )
    signed = isinstance(model, MlpMixer)
    inputs = as_input(views, recipe)
    grids = block_grids(model)
    levels, images = [], []
    # Over channels: (B, C, N, N) → (B, 1, N, N).
    summarise = partial(torch.mean, dim=1, keepdim=True) if signed else None
    for image in inputs.split(1):
        matrices = mixing_matrices(model, image, summarise=summarise)
        blocks = []
        for block, grid in enumerate(grids):
            part, view = block_view(matrices[block][0], grid, signed)
            levels.append(part)
            blocks.append(view)
        # A model without classes has no logits, and so no probabilities.
        probabilities: Any = []
        if model.num_classes:
            probabilities = recipe.loss.probabilities(model(image))[0]
        images.append({"blocks": blocks, "probabilities": rounded(probabilities)})
    masses = None
    init = recipe.init
    if has_targets(model, init.name, init.options):
        mass = mass_on_images(model, init.name, init.options, inputs)
        masses = rounded([*zip(mass.centre, mass.others, mass.uniform)])
    tokens = {"class": "cls_token", "distillation": "dist_token"}
    prefix = [f"{kind} token" for kind, token in tokens.items() if hasattr(model, token)]
    prefix += [f"register {number}" for number in range(model.num_prefix_tokens - len(prefix))]
    classes = subject.classes or [f"class {number}" for number in range(model.num_classes)]
    return levels, {
        "name": subject.state,
        "recipe": recipe.name,
        "signed": signed,
        "masses": masses,
        "grids": grids,
        "prefix": prefix,
        "images": images,
        "classes": classes,
    }


def write_explorer(out: Path, subjects: Iterable[Subject], photographs: Sequence[Path]) -> None:
    """Write the page of these models and photographs.

    Raises FigureError for a ConvMixer, for models that do not see the same of an image, and where the
    weights would make the page larger than 5 MB even if they are told apart coarsely.
    """

    levels, models, sizes = [], [], []
    shown: Tensor | None = None  # what all models see of the images
    for subject in subjects:
        height, width = subject.recipe.data.image_size
        sizes.append(f"{height}×{width}")
        if sizes[-1] != sizes[0]:
            raise FigureError(
                f"{subject.state}: takes images of {sizes[-1]} pixels, and the model "
                f"before it of {sizes[0]}; draw a page each"
            )
        views = torch.stack([view_of(path, subject.recipe) for path in photographs])
        shown = views if shown is None else shown
        if not torch.equal(views, shown):
            raise FigureError(
                f"{subject.state}: does not see the images as the model before it does, by its "
                "eval.crop_pct, eval.interpolation, augment.fit or data.mean; draw a page each"
            )
        parts, view = model_view(subject, views)
        levels += parts
        models.append(view)
        if sum(part.size for part in levels) > MOST_WEIGHTS:
            break
    steps, weights = coarse_enough(levels)
    names = [one_line(path.name) for path in photographs]
    if len({*names}) < len(names):  # then the names of their folders say more
        names = [one_line("/".join(path.absolute().parts[-2:])) for path in photographs]
    meta = {
        "levels": steps,
        "top": TOP,
        "radius": RADIUS,
        "colours": colours(OVERLAY),
        "signed_colours": colours(DIVERGING),
        "models": models,
        "height": height,
        "width": width,
        "images": [{"name": name, "source": as_png(view)} for name, view in zip(names, views)],
    }
    write_page(out, "explore.html", meta, weights)


def coarse_enough(levels: Sequence[np.ndarray]) -> tuple[int, str]:
    """The highest of LEVELS whose text of all weights has at most MOST letters, and that text."""
    count = sum(part.size for part in levels)
    if count <= MOST_WEIGHTS:
        for steps in LEVELS:
            coarse = [np.rint(part * (steps / LEVELS[0])).astype(np.uint8) for part in levels]
            text = packed(b"".join(part.tobytes() for part in coarse))
            if len(text) <= MOST:
                return steps, text
    raise FigureError(
        f"{count:,} weights do not fit into a page of 5 MB; show fewer images, fewer "
        "models, or a smaller one"
    )
