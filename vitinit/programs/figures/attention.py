"""The figures `maps`, `kernels`, `mass` and `attention`: what the heads of a model attend to.

`maps` shows Q Kᵀ, P Q Kᵀ Pᵀ and its softmax, as arXiv 2305.09828 (mimetic initialisation) and
2505.19985 (structured initialisation) do. Q and K are a head's query and key weights, P is the
position embedding. `kernels` shows the mean attention by the offset from query to key, which is the
convolution kernel that the head starts as; `mass` the share of attention that lies on each head's
target, by depth: on the token at the head's offset, which a convolution with the head's impulse
filter would pick. `attention` shows what a query token of a photograph attends to.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...mixing import among_patches, block_grids, mean_kernel, mixing_matrices
from ...mixing.filters import Grid
from ...models.attention import attention_weights
from ...models.shift import Shift
from ...models.simple_vit import SimpleViT
from ...models.swin import SwinTransformer
from ...runs.data import as_input
from ...watch.mass import Mass, has_targets, mass_on_images
from ..shared.plot import (
    FigureError,
    RowOfMaps,
    add_legend,
    draw_grid,
    draw_heat,
    looks_of,
    pixels,
    pyplot,
    save,
    subplots,
)
from .subjects import VITS, Subject, Vit, fitting, indices, photographs, view_of

# kind: label of the colour bar, vertical axis, horizontal axis, whether colours are centred at 0
FIGURE_KINDS = {
    "qk": ("Q Kᵀ", "channel of Q", "channel of K", True),
    "logits": ("P Q Kᵀ Pᵀ", "query token", "key token", True),
    "softmax": ("attention on P alone", "query token", "key token", False),
}
OFFSETS = ("mean attention", "patches down", "patches right", False)  # the same of `kernels`
RADIUS = 3  # largest offset of a kernel, in patches
SHOWN = 0.995  # share of Q Kᵀ's entries within the colour scale
FIRST = (0, 1, 2)  # heads of which `attention` shows as many as there are
PARTS = {"centre": "centre heads", "others": "other heads"}  # of a Mass


@torch.no_grad()
def position_maps(model: Vit, block: int, kind: str) -> Tensor:
    """One kind of map for every head of a block.

    kind: one of KINDS. Returns (h, D, D) for "qk", else (h, N, N) with N patch tokens. P, (N, D),
    is the position embedding as it reaches queries and keys where the content is 0: after the
    block's own first norm, in a SimpleViT also weighted and read as the model does. Biases of
    queries and keys are left out, as in the papers. But a model that turns (RoPE) or normalises
    queries and keys is shown as it computes, with biases, except in "qk". "softmax" includes the
    model's factor on the logits. Raises FigureError for a "qk" of a SimpleViT with free Q and K.
    """
    norm = model.blocks[block].norm1
    if isinstance(model, SimpleViT):
        simple = model.blocks[block].attn
        if kind == "qk":
            if simple.reads == "free":
                raise FigureError(
                    'Q and K of this model (reads = "free") are no weights of '
                    "channels; expected --kinds logits softmax"
                )
            query, key = simple.factors
            return query @ key.mT  # (h, D, d) @ (h, d, D)
        share = 1.0 - model.alpha if model.input_pos_embed else 0.0  # of P in the input
        x = norm(share * model.pos_embed)[None]  # (1, N, D)
        if kind == "softmax":
            return simple.mixing_weights(x, model.pos_embed)[0]
        query, key = simple.queries_keys(x, model.pos_embed)  # (1, h, N, d) each
        return (query @ key.mT)[0]
    attention = model.blocks[block].attn
    if isinstance(attention, Shift):
        raise FigureError(f"block {block} of this model shifts tokens, and has no queries and keys")
    if kind == "qk":
        return attention.q_weight.mT @ attention.k_weight  # (h, D, d) @ (h, d, D)
    prefix = model.num_prefix_tokens
    positions = model.pos_embed
    if positions is None:
        positions = norm.weight.new_zeros(1, 0, len(norm.weight))
    missing = prefix + math.prod(model.grid) - positions.shape[1]  # tokens without positions
    x = norm(F.pad(positions, (0, 0, missing, 0)))  # (1, prefix + N, D)
    if model.rotary or isinstance(attention.q_norm, torch.nn.LayerNorm):
        (query,), (key,), _ = attention.queries_keys_values(x)
    else:
        query, key = x @ attention.q_weight.mT, x @ attention.k_weight.mT
    query, key = query[:, prefix:], key[:, prefix:]  # (h, N, d)
    return query @ key.mT if kind == "logits" else attention_weights(query, key)


def draw_maps(
    out: Path,
    subjects: Iterable[Subject],
    *,
    kinds: Sequence[str],
    blocks: Sequence[int],
    heads: Sequence[int] | None,
) -> None:
    """Draw a row per kind, model and block; a kind has one colour scale. heads: None for all."""
    rows = []
    for subject in fitting(subjects, "maps"):
        model = cast(Vit, subject.model)
        for block in indices("block", blocks, len(model.blocks)):
            for kind in kinds:
                maps = position_maps(model, block, kind)
                maps = maps[indices("head", heads, len(maps))]
                # If colours reached the few largest entries of Q Kᵀ, such as a diagonal's, all
                # other entries would be pale.
                peak = np.quantile(maps.abs().numpy(), SHOWN) if kind == "qk" else 0.0
                rows.append(
                    RowOfMaps(
                        f"{subject.state}\nblock {block}", maps, *FIGURE_KINDS[kind], peak=peak
                    )
                )
    units = [FIGURE_KINDS[kind][0] for kind in kinds]
    rows.sort(key=lambda row: units.index(row.unit))
    what = "positions alone" if subject.model.rotary else "the position embedding P"
    draw_grid(out, rows, heads, subject.heading(f"each head on {what}"))


def draw_kernels(
    out: Path,
    subjects: Iterable[Subject],
    *,
    folder: Path | None,
    count: int,
    blocks: Sequence[int],
    heads: Sequence[int] | None,
) -> None:
    """Draw mean attention by offset, with one row per model and block and one column per head.

    The mean is over `count` images (`photographs`) and all query tokens. heads: None for all.
    """
    rows = []
    for subject in fitting(subjects, "kernels"):
        model = subject.model
        images = photographs(folder, count, subject.recipe)
        numbers = indices("block", blocks, len(block_grids(model)))
        for block, weights in mixing_matrices(model, images, blocks=numbers).items():
            weights = weights[:, indices("head", heads, weights.shape[1])]  # (B, h, N, N)
            kernel = mean_kernel(weights, model.grid, RADIUS).mean(0)
            rows.append(
                RowOfMaps(f"{subject.state}\nblock {block}", kernel, *OFFSETS, centred=True)
            )
    heading = subject.heading(f"what each head attends to, mean over {count} images")
    draw_grid(out, rows, heads, heading)


def mass_of(subject: Subject, folder: Path | None, count: int) -> Mass:
    """Mass on the init's targets, or `impulse`'s if it aims at no neighbours; see `photographs`."""
    name, options = subject.recipe.init.name, subject.recipe.init.options
    if name == "mimetic" or not has_targets(subject.model, name, options):
        name, options = "impulse", {}
    if not has_targets(subject.model, name, options):
        raise FigureError(f"{subject.state}: has no attention, and so no mass on targets")
    return mass_on_images(subject.model, name, options, photographs(folder, count, subject.recipe))


def draw_mass(out: Path, subjects: Iterable[Subject], *, folder: Path | None, count: int) -> None:
    """Draw two panels per recipe with one line per init, or per run and epoch; print the numbers.

    The upper panels show the heads whose target is the query token itself, the lower ones all
    others; blocks without such heads are left out. folder, count: see `photographs`.
    """
    by_recipe = defaultdict(list)
    for subject in fitting(subjects, "mass"):
        recipe = subject.recipe.name
        state = subject.state.removeprefix(f"{recipe}, ")
        mass = mass_of(subject, folder, count)
        for part in PARTS:
            shares = [f"{value:.3f}" for value in getattr(mass, part)]
            print(f"{recipe}, {state}: {part}", *shares)
        by_recipe[recipe].append((state, subject.recipe.init.name, mass))

    columns = len(by_recipe)
    figure, axes = subplots(2, columns, max(6.4, 2.2 * columns + 0.8), 5.6, sharey=True)
    legend = {}
    for column, (name, masses) in zip(axes.T, by_recipe.items()):
        looks = looks_of([init for _, init, _ in masses])
        for axis, (part, words) in zip(column, PARTS.items()):
            uniform = masses[0][2].uniform
            (legend["uniform attention"],) = axis.plot(uniform, color="0.8", linewidth=6)
            for (state, _, mass), (colour, line) in zip(masses, looks):
                values = torch.tensor(getattr(mass, part))
                known = ~values.isnan()
                (legend[state],) = axis.plot(
                    known.nonzero()[:, 0],
                    values[known],
                    color=colour,
                    linestyle=line,
                    marker="o",
                    markersize=3,
                )
            axis.set_title(f"{name}, {words}", fontsize=10)
            axis.locator_params(axis="x", nbins=7, integer=True)
            axis.tick_params(labelsize=8)
            axis.grid(alpha=0.3)
        axis.set_xlabel("block")
    axis.set(yscale="log", ylim=(None, 1.2))  # of all panels; with room for markers at 1
    axis.yaxis.set_major_formatter("{x:g}")
    add_legend(figure, legend)
    figure.supylabel("share of attention on the head's target", fontsize=10)
    save(figure, out, f"Attention on the heads' targets by depth, mean over {count} images")


def heat_maps(weights: Tensor, grid: Grid, query: tuple[int, int]) -> Tensor:
    """The attention of the patch token at `query` on every patch token, (h, rows, columns).

    weights: (h, N, N), attention of one image with prefix tokens (class token, registers) first,
    which are left out, so a map may sum to less than 1. grid: rows and columns of patches. query:
    row and column, counted from 0.
    """
    row, column = query
    return among_patches(weights, grid)[:, row * grid[1] + column].unflatten(-1, grid)


def draw_attention(
    out: Path,
    subjects: Iterable[Subject],
    photograph: Path,
    *,
    blocks: Sequence[int],
    heads: Sequence[int] | None,
) -> None:
    """Draw one row per model and block: the photograph, then one heat map per head.

    The query, the patch in the middle, is framed in each. All maps have one scale, which rises with
    the square root of attention, since that may spread over all patches or lie on one. heads: None
    for the first three, as far as there are.
    """
    rows = []
    for subject in fitting(subjects, "attention", (*VITS, SwinTransformer)):
        grids = block_grids(subject.model)
        blocks = indices("block", blocks, len(grids))
        image = view_of(photograph, subject.recipe)
        inputs = as_input(image[None], subject.recipe)
        matrices = mixing_matrices(subject.model, inputs, blocks=blocks)
        for block in blocks:
            weights, grid = matrices[block][0], grids[block]  # (h, N, N)
            weights = weights[indices("head", heads, len(weights))][: len(heads or FIRST)]
            label = f"{subject.state}\nblock {block}"
            query = grid[0] // 2, grid[1] // 2
            rows.append((label, image, query, heat_maps(weights, grid, query)))

    plt = pyplot()
    largest = max(maps.max().item() for *_, maps in rows)
    scale = plt.matplotlib.colors.PowerNorm(0.5, 0.0, largest)
    heads = heads or FIRST[: max(len(maps) for *_, maps in rows)]
    columns = len(heads) + 1
    figure, axes = subplots(len(rows), columns, 1.5 * columns + 1.0, 1.55 * len(rows) + 0.5)
    for (photo, *others), (label, image, query, maps) in zip(axes, rows):
        height, width = image.shape[1:]
        down, across = height / maps.shape[1], width / maps.shape[2]  # a patch in pixels
        photo.imshow(pixels(image), extent=(0, width, height, 0))
        photo.set_ylabel(label, fontsize=9)
        for axis in others[len(maps) :]:  # the block has fewer heads than another one
            axis.set_axis_off()
        others = others[: len(maps)]
        for axis, heat in zip(others, maps):
            layer = draw_heat(axis, image, heat, scale)
        corner = (query[1] * across, query[0] * down)
        for axis in (photo, *others):
            axis.set(xticks=[], yticks=[])
            for colour, linewidth in (("black", 2.0), ("white", 0.9)):  # visible on any background
                axis.add_patch(
                    plt.Rectangle(corner, across, down, fill=False, ec=colour, lw=linewidth)
                )
    bar = figure.colorbar(layer, ax=list(axes.flat), label="attention", shrink=0.9, pad=0.01)
    bar.ax.tick_params(labelsize=7)
    for axis, title in zip(axes[0], ("photograph", *(f"head {h}" for h in heads))):
        axis.set_title(title, fontsize=9)
    save(figure, out, subject.heading("what the framed patch attends to"))
