"""The figure `mass`: the share of attention that lies on each head's impulse target, by depth.

The target of a query token is the token at the head's offset, which a convolution with the head's
impulse filter would pick. The attention is measured on photographs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..filters import Offset, head_offsets, offsets_on_grid
from ..mixing import logit_peak, mixing_matrices, target_mass
from ..models import SimpleViT, VisionTransformer
from .plot import FigureError, Line, colours_of, draw_panels
from .subjects import Subject, photographs, require_family

BATCH = 8                       # images per forward pass; all of its attention matrices are kept
SATURATED = 30.0                # logits this far above the mean leave softmax almost no gradient


class Masses(NamedTuple):
    """Target mass of each block: mean over images, query tokens and some of the heads.

    Each is (blocks,), with NaN for a block that has no such head.
    """

    heads: Tensor               # over all heads
    centre: Tensor              # over the heads whose target is the query token itself
    others: Tensor              # over all other heads


def block_targets(subject: Subject, kernel_size: int) -> list[list[Offset]]:
    """The target offset of every head of every block, [block][head].

    These are the offsets that the init assigned. For an init without offsets they are assigned in
    order, so that its attention can be compared with that of the others.
    kernel_size: width of the kernels, whose cells are the offsets.
    Raises FigureError if the init drew its offsets at random or has another kernel size.
    """
    options, blocks = subject.recipe.init.options, subject.model.blocks
    assignment = options.get("offsets", "ordered")
    if assignment == "random":
        raise FigureError('init.options.offsets = "random" drew the targets of recipe '
                          f"{subject.recipe.name}; 'mass' knows those of \"ordered\" and \"rotating\"")
    if options.get("kernel_size", kernel_size) != kernel_size:
        raise FigureError(f"the init of recipe {subject.recipe.name} has kernel_size = "
                          f"{options['kernel_size']}; give --kernel-size {options['kernel_size']}")
    cells, heads = offsets_on_grid(kernel_size, subject.model.grid), blocks[0].attn.num_heads
    return [head_offsets(heads, cells, assignment, torch.Generator(), first=number * heads)
            for number in range(len(blocks))]


def masses_by_block(model: VisionTransformer | SimpleViT, images: Tensor,
                    targets: list[list[Offset]]) -> tuple[Tensor, Tensor]:
    """Target mass and peak logit of every head, (blocks, h) each, as means over the images.

    images: (B, 3, H, W), normalised. targets: an offset for each head, [block][head].
    See `mixing.target_mass` and `mixing.logit_peak` for the definitions.
    """
    masses, peaks = torch.zeros(2, len(targets), len(targets[0]))
    for batch in images.split(BATCH):
        share = len(batch) / len(images)
        for block, weights in mixing_matrices(model, batch).items():
            masses[block] += share * target_mass(weights, targets[block], model.grid)
            peaks[block] += share * logit_peak(weights, model.grid)
    return masses, peaks


def summarised(masses: Tensor, targets: list[list[Offset]]) -> Masses:
    """Average target masses over the heads of each block.

    masses: (blocks, h). targets: the offsets for which they were measured, [block][head].
    Raises FigureError if every target is the query token itself.
    """
    centre = torch.tensor([[offset == (0, 0) for offset in heads] for heads in targets])
    if centre.all():
        raise FigureError("every head's target is its own token; 'mass' compares it with other "
                          "offsets")
    hidden = torch.tensor(torch.nan)
    return Masses(masses.mean(1), torch.where(centre, masses, hidden).nanmean(1),
                  torch.where(centre, hidden, masses).nanmean(1))


def draw_mass(out: Path, subjects: Iterable[Subject], *, folder: Path, count: int,
              kernel_size: int) -> None:
    """Draw one panel per recipe with one colour per init, or per run and epoch; print the numbers.

    folder, count: the first `count` photographs in `folder` are used.
    kernel_size: width of the kernels whose cells are the heads' offsets.
    """
    found: dict[str, dict[str, Masses]] = defaultdict(dict)
    cells: dict[str, int] = {}
    for subject in subjects:
        require_family(subject, "mass")
        targets = block_targets(subject, kernel_size)
        name, grid = subject.recipe.name, subject.model.grid
        images = photographs(folder, count, subject.recipe)
        masses, peaks = masses_by_block(subject.model, images, targets)
        found[name][subject.state] = summarised(masses, targets)
        cells[name] = grid[0] * grid[1]
        for part, values in zip(("all heads", "centre", "others"), found[name][subject.state]):
            print(f"{name}, {subject.state}: {part:9}", *(f"{value:.3f}" for value in values))
        saturated = ", saturated" if peaks.mean(1).max() > SATURATED else ""
        print(f"{name}, {subject.state}: logits   ", *(f"{value:5.1f}" for value in peaks.mean(1)),
              f"(largest above the mean, all heads{saturated})")

    colours = colours_of(state for states in found.values() for state in states)
    panels = {}
    for name, states in found.items():
        panels[name] = []
        for state, mass in states.items():
            panels[name] += [Line(mass.others, f"{state}, other heads", colours[state]),
                             Line(mass.centre, f"{state}, centre heads", colours[state], "--", "s")]
        uniform = torch.full_like(mass.heads, 1 / cells[name])
        panels[name].append(Line(uniform, "uniform attention", "0.5", ":", ""))
    draw_panels(out, panels, across="block", down="share of attention on the head's target", top=1.0,
                heading=f"Attention on the impulse's target by depth, mean over {count} photographs")
