"""The figure `mass`: the share of attention that lies on each head's target, by depth.

The target of a query token is the token at the head's offset, which a convolution with the head's
impulse filter would pick. The attention is measured on images.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch

from ..init.mass import Mass, has_targets, mass_on_images
from .plot import Line, draw_panels, lines_of
from .subjects import Subject, photographs, require_family


def mass_of(subject: Subject, folder: Path | None, count: int) -> Mass:
    """The mass on the targets of the subject's init, on `count` images (see `photographs`).

    An init that aims at no neighbours is measured on the targets that `impulse` would have.
    """
    init = subject.recipe.init
    name, options = init.name, init.options
    if name == "mimetic" or not has_targets(subject.model, name, options):
        name, options = "impulse", {}
    return mass_on_images(subject.model, name, options,
                          photographs(folder, count, subject.recipe))


def draw_mass(out: Path, subjects: Iterable[Subject], *, folder: Path | None, count: int) -> None:
    """Draw two panels per recipe with one line per init, or per run and epoch; print the numbers.

    The upper panels show the heads whose target is the query token itself, the lower ones all
    others. folder, count: see `photographs`.
    """
    found: dict[str, list[tuple[Subject, Mass]]] = defaultdict(list)
    for subject in subjects:
        require_family(subject, "mass")
        mass = mass_of(subject, folder, count)
        for part, values in (("centre", mass.centre), ("others", mass.others)):
            print(f"{subject.recipe.name}, {subject.state}: {part}",
                  *(f"{value:.3f}" for value in values))
        found[subject.recipe.name].append((subject, mass))

    panels = {}
    for part, words in (("centre", "centre heads"), ("others", "other heads")):
        for name, masses in found.items():
            uniform = Line(torch.tensor(masses[0][1].uniform), "uniform attention", "0.8",
                           width=6, marker="")
            panels[f"{name}, {words}"] = [uniform, *lines_of([
                (subject, torch.tensor(getattr(mass, part))) for subject, mass in masses])]
    blocks = max(len(mass.centre) for masses in found.values() for _, mass in masses)
    draw_panels(out, panels, columns=len(found), across="block", shares=True,
                ticks=list(map(str, range(blocks))), down="share of attention on the head's target",
                heading=f"Attention on the heads' targets by depth, mean over {count} images")
