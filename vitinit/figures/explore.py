"""The page `explore`: one HTML file in which one sees what every patch of an image attends to.

It holds the attention of every head of every block for a few images and models, and needs neither a
network nor a server. explore.html is its template; `page` fills in:

    meta     names, class probabilities and, for each model, image and block, a `BlockView`
    weights  all attention maps as one byte per weight, in the order model, image, block, head,
             query (prefix tokens first), key (patches alone), deflated, in base64
"""

from __future__ import annotations

import base64
import io
import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .. import __version__
from ..data.images import decode_image
from ..init.mass import has_targets, mass_on_images
from ..messages import one_line
from ..mixing import block_grids, mean_kernel, mixers, mixing_matrices
from ..models import SimpleViT, SwinTransformer, VisionTransformer
from ..runs.trained import as_input, evaluation_view
from ..train.checkpoint import written_atomically
from .plot import OVERLAY, FigureError
from .subjects import Subject, require_family

TEMPLATE = Path(__file__).with_name("explore.html")
RADIUS = 3                      # of the mean attention by offset, in patches
TOP = 5                         # classes shown
LARGEST = 6_000_000             # weights, of about a byte each in the page
LEVELS = 255                    # of a weight's byte
MAP_COLOURS = 64


def quantise(weights: Tensor) -> tuple[bytes, list[float]]:
    """Attention (h, Q, N) as bytes, and the largest weight of each head.

    A byte is 255 · √(weight / largest), rounded: small weights keep more of their digits.
    """
    largest = weights.amax(dim=(1, 2)).clamp(min=1e-12)                  # (h,)
    levels = (weights / largest[:, None, None]).sqrt().mul(LEVELS).round()
    return levels.to(torch.uint8).numpy().tobytes(), largest.tolist()


def distances(weights: Tensor, grid: tuple[int, int]) -> Tensor:
    """How far each head attends, (h,), in patches: the mean over all queries and keys.

    weights: (h, N, N) among the patches. The mean distance of arXiv 2010.11929, figure 7.
    """
    rows, columns = torch.meshgrid(*map(torch.arange, grid), indexing="ij")
    cells = torch.stack([rows.flatten(), columns.flatten()], dim=1).float()      # (N, 2)
    return (weights * torch.cdist(cells, cells)).sum(-1).mean(-1) / weights.sum(-1).mean(-1)


def block_view(weights: Tensor, grid: tuple[int, int]) -> tuple[bytes, dict[str, Any]]:
    """One block's attention on one image: its bytes, and what the page shows beside them.

    weights: (h, P + N, P + N), with the P prefix tokens first.
    """
    cells = grid[0] * grid[1]
    packed, largest = quantise(weights[:, :, -cells:])
    kernels = mean_kernel(weights, grid, RADIUS)                         # (h, 7, 7)
    return packed, {"grid": grid, "queries": weights.shape[1], "largest": rounded(largest),
                    "distance": rounded(distances(weights[:, -cells:, -cells:], grid).tolist()),
                    "kernels": rounded(kernels.flatten(1).tolist())}


@torch.no_grad()
def model_view(subject: Subject, views: Tensor) -> tuple[bytes, dict[str, Any]]:
    """A model on all images: the bytes of its attention maps, and its part of `meta`.

    views: (n, 3, H, W) uint8. Raises FigureError where the maps would make the page too large.
    """
    model, recipe = subject.model, subject.recipe
    inputs, grids = as_input(views, recipe), block_grids(model)
    heads = [attention.num_heads for attention, _ in mixers(model)]
    size = len(views) * sum(count * (model.num_prefix_tokens + rows * columns) * rows * columns
                            for count, (rows, columns) in zip(heads, grids))
    if size > LARGEST:
        raise FigureError(f"{subject.state}: its attention on {len(views)} image(s) has {size:,} "
                          f"weights, and a page holds {LARGEST:,}; show fewer images, or a smaller "
                          "model")
    packed, images = [], []
    for image in inputs.split(1):
        matrices = mixing_matrices(model, image)
        blocks = [block_view(matrices[block][0], grid) for block, grid in enumerate(grids)]
        packed += [part for part, _ in blocks]
        images.append({"blocks": [view for _, view in blocks],
                       "probabilities": rounded(model(image).softmax(1)[0].tolist())})
    masses = None
    if has_targets(model, recipe.init.name, recipe.init.options):
        mass = mass_on_images(model, recipe.init.name, recipe.init.options, inputs)
        masses = [rounded([own, other]) for own, other in zip(mass.centre, mass.others)]
    return b"".join(packed), {
        "name": subject.state, "recipe": recipe.name, "masses": masses, "images": images,
        "classes": list(subject.classes) or list(map(str, range(model.num_classes))),
        "prefix": prefix_tokens(model)}


def prefix_tokens(model: torch.nn.Module) -> list[str]:
    """The names of the tokens before the patches, in order."""
    names = [name for parameter, name in (("cls_token", "class token"), ("dist_token",
             "distillation token")) if hasattr(model, parameter)]
    registers = model.num_prefix_tokens - len(names)
    return names + [f"register {number}" for number in range(registers)]


def rounded(value: Any) -> Any:
    """Numbers with four digits, in lists of any depth; NaN becomes None, which JSON knows."""
    if isinstance(value, (list, tuple)):
        return [rounded(part) for part in value]
    return None if value != value else float(f"{value:.4g}")


def as_png(view: Tensor) -> str:
    """A view (3, H, W) uint8 as the address of an image inside a page."""
    file = io.BytesIO()
    Image.fromarray(view.permute(1, 2, 0).numpy()).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def page(meta: dict[str, Any], weights: bytes) -> str:
    """The template with its data. Its contents cannot end the script that they stand in."""
    text = json.dumps(meta, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    packed = base64.b64encode(zlib.compress(weights, 9)).decode("ascii")
    template = TEMPLATE.read_text(encoding="utf-8")
    return template.replace("{{meta}}", text).replace("{{weights}}", packed)


def write_page(out: Path, subjects: Iterable[Subject], photographs: Sequence[Path]) -> None:
    """Write the page of these models and photographs, and print its size.

    Raises FigureError for models of other families than ViT, SimpleViT and Swin, and for models
    whose images differ in size.
    """
    packed, models, views = [], [], None
    for subject in subjects:
        require_family(subject, "explore", VisionTransformer, SimpleViT, SwinTransformer)
        own = torch.stack([evaluation_view(decode_image(str(path)), subject.recipe)
                           for path in photographs])                     # (n, 3, H, W)
        if views is not None and own.shape != views.shape:
            sizes = [f"{part.shape[2]}×{part.shape[3]}" for part in (own, views)]
            raise FigureError(f"{subject.state}: takes images of {sizes[0]} pixels, and the model "
                              f"before it of {sizes[1]}; draw a page each")
        views = own
        part, view = model_view(subject, own)
        packed.append(part)
        models.append(view)
    import matplotlib                                # the caller has checked that it is there
    colours = matplotlib.colormaps[OVERLAY](np.linspace(0, 1, MAP_COLOURS), bytes=True)[:, :3]
    meta = {"made": f"vitinit {__version__}", "top": TOP, "radius": RADIUS,
            "colours": colours.tolist(), "models": models, "height": views.shape[2],
            "width": views.shape[3],
            "images": [{"name": one_line(path.name), "source": as_png(view)}
                       for path, view in zip(photographs, views)]}
    text = page(meta, b"".join(packed))
    with written_atomically(out) as file:
        file.write(text.encode())
    print(f"{len(text.encode()) / 1e6:.1f} MB: {len(models)} model(s), {len(photographs)} image(s)")
