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
from .plot import add_legend, looks_of, pyplot, save
from .subjects import VITS, Subject, photographs, unfit

PARTS = {"centre": "centre heads", "others": "other heads"}      # of a Mass


def mass_of(subject: Subject, folder: Path | None, count: int) -> Mass:
    """The mass on the targets of the subject's init, on `count` images (see `photographs`).

    An init that aims at no neighbours is measured on the targets that `impulse` would have.
    """
    name, options = subject.recipe.init.name, subject.recipe.init.options
    if name == "mimetic" or not has_targets(subject.model, name, options):
        name, options = "impulse", {}
    return mass_on_images(subject.model, name, options, photographs(folder, count, subject.recipe))


def draw_mass(out: Path, subjects: Iterable[Subject], *, folder: Path | None, count: int) -> None:
    """Draw two panels per recipe with one line per init, or per run and epoch; print the numbers.

    The upper panels show the heads whose target is the query token itself, the lower ones all
    others; blocks without such heads are left out. folder, count: see `photographs`.
    """
    by_recipe: dict[str, list[tuple[Subject, Mass]]] = defaultdict(list)
    for subject in subjects:
        if not isinstance(subject.model, VITS):
            raise unfit(subject, "mass", VITS)
        subject = subject._replace(state=subject.state.removeprefix(f"{subject.recipe.name}, "))
        mass = mass_of(subject, folder, count)
        for part in PARTS:
            print(f"{subject.recipe.name}, {subject.state}: {part}",
                  *(f"{value:.3f}" for value in getattr(mass, part)))
        by_recipe[subject.recipe.name].append((subject, mass))

    figure, axes = pyplot().subplots(2, len(by_recipe), squeeze=False, sharey=True,
                                     layout="constrained",
                                     figsize=(max(7.6, 2.4 * len(by_recipe) + 0.8), 6.0))
    legend = {}
    for column, (name, masses) in zip(axes.T, by_recipe.items()):
        looks = looks_of([subject.recipe.init.name for subject, _ in masses])
        for axis, (part, words) in zip(column, PARTS.items()):
            legend["uniform attention"], = axis.plot(masses[0][1].uniform, color="0.8", linewidth=6)
            for (subject, mass), (colour, line) in zip(masses, looks):
                values = torch.tensor(getattr(mass, part))
                known = ~values.isnan()
                legend[subject.state], = axis.plot(
                    known.nonzero()[:, 0], values[known], color=colour, linestyle=line, marker="o",
                    markersize=3)
            axis.set_title(f"{name}, {words}", fontsize=10)
            axis.set_xticks(range(len(mass.uniform)))
            axis.tick_params(labelsize=7)
            axis.grid(alpha=0.3)
        axis.set_xlabel("block")
    axis.set(yscale="log", ylim=(None, 1.2))         # of all panels; with room for markers at 1
    axis.yaxis.set_major_formatter("{x:g}")
    add_legend(figure, legend)
    figure.supylabel("share of attention on the head's target", fontsize=10)
    save(figure, out, f"Attention on the heads' targets by depth, mean over {count} images")
