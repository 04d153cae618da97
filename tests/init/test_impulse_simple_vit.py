"""Impulse initialisation of a SimpleViT: its logits written out, and what its heads attend to."""

import math
from functools import partial

import pytest
import torch
from small_models import written
from torch import Tensor

import vitinit
from vitinit.init.impulse_simple_vit import sharpest_axis
from vitinit.mixing.filters import Offset, neighbours, ordered_offsets
from vitinit.models import SimpleViT
from vitinit.models.layers import sincos_frequencies

initialised = partial(written, "impulse")
DIM = 76  # 19 frequencies, of which heads take ≤ 4
READINGS = {
    "position": dict(reads="position"),
    "mixed": dict(reads="mixed", alpha=0.3),
    "mixed, positions alone": dict(reads="mixed", alpha=0.0),
    "mixed, faint positions": dict(reads="mixed", alpha=0.97),
    "free": dict(reads="free"),
    "content": dict(reads="content", alpha=0.3),
}


def built(reading: str, grid: tuple[int, int] = (5, 7), **sizes) -> SimpleViT:
    sizes = dict(embed_dim=DIM, depth=2, num_heads=11, head_dim=17) | READINGS[reading] | sizes
    return vitinit.build_model(
        "simple_vit",
        num_classes=3,
        image_size=(2 * grid[0], 3 * grid[1]),
        patch_size=(2, 3),
        **dict(input_pos_embed=reading == "content") | sizes,
    ).double()


@torch.no_grad()
def maps_on_positions(model: SimpleViT, number: int) -> Tensor:
    """(h, N, N): of a block, if patches have no content."""
    block, positions = model.blocks[number], model.pos_embed
    seen = (
        block.norm1((1 - model.alpha) * positions)
        if block.attn.reads == "content"
        else torch.zeros_like(positions)
    )
    return block.attn.mixing_weights(seen[None], positions)[0]


def masses(maps: Tensor, offsets: list[Offset], grid: tuple[int, int]) -> Tensor:
    """For each row of each head, the attention on its target, where there is one."""
    return torch.cat([weights[neighbours(offset, grid)] for weights, offset in zip(maps, offsets)])


def in_order(kernel_size: int, count: int) -> list[Offset]:
    cells = ordered_offsets(kernel_size)
    return [cells[head % len(cells)] for head in range(count)]


@pytest.mark.parametrize(
    "reading, grid, kernel_size, target_mass",
    [
        ("position", (5, 7), 3, 0.2),
        ("mixed", (11, 3), 5, 0.999),
        ("free", (1, 1), 1, 0.999),
        ("mixed, positions alone", (2, 13), 3, 0.9),
        ("mixed, faint positions", (5, 7), 5, 0.999),
        ("free", (5, 7), 5, 0.2),
    ],
)
def test_every_row_with_a_target_gives_it_the_wanted_mass(reading, grid, kernel_size, target_mass):
    model = initialised(
        built(reading, grid, num_heads=29), kernel_size=kernel_size, target_mass=target_mass
    )
    for block in range(2):  # alike in every block
        found = masses(maps_on_positions(model, block), in_order(kernel_size, 29), grid)
        assert len(found) >= 29 * grid[0] * grid[1] / 4
        assert found.min() >= target_mass - 1e-6  # the embedding is rounded to float32


def test_a_query_whose_target_is_off_the_grid_attends_to_the_border_near_it():
    model = initialised(built("mixed", num_heads=9))
    for rows, offset in zip(maps_on_positions(model, 0), in_order(3, 9)):
        for token in {*range(35)} - {*neighbours(offset, (5, 7))[0].tolist()}:
            down = min(max(token // 7 + offset[0], 0), 4)
            right = min(max(token % 7 + offset[1], 0), 6)
            assert rows[token].argmax() == 7 * down + right


def test_content_reaches_the_mass_on_average_and_nearly_in_the_worst_row():
    """LayerNorm scales each key by its own norm, which costs no row more than .02 of .9."""
    model = initialised(
        built("content", (16, 16), embed_dim=512, num_heads=9, head_dim=64, depth=1, alpha=0.5)
    )
    found = masses(maps_on_positions(model, 0), in_order(3, 9), (16, 16))
    assert found.mean() >= 0.93 and found.min() >= 0.88


def mass_on_an_axis(logit: float, frequencies: list[float], size: int) -> float:
    """The mass of the target among all displacements from it, up to size − 1 either way."""
    shape = [
        sum(math.cos(frequency * away) for frequency in frequencies) / len(frequencies)
        for away in range(1 - size, size)
    ]
    return 1 / sum(math.exp(logit * (value - 1)) for value in shape)


SPECTRA = {  # the best prefix is neither the first frequency alone nor, in some, all
    "few tokens": (sincos_frequencies(44)[:7], 3),
    "embedding": (sincos_frequencies(76)[:5], 11),
    "wide embedding": (sincos_frequencies(508)[:23], 17),
    "many tokens": (sincos_frequencies(76)[:7], 47),  # one frequency cannot tell them apart
    "free": (torch.arange(1, 13).double() * math.pi / 13, 13),
}


@pytest.mark.parametrize("spectrum, mass", [*zip(SPECTRA, (0.3, 0.95, 0.3, 0.95, 0.95))])
def test_an_axis_has_the_smallest_logit_that_reaches_the_mass_with_any_prefix(spectrum, mass):
    frequencies, size = SPECTRA[spectrum]
    axis = sharpest_axis(frequencies, size, mass)
    count = len(axis.frequencies)
    assert torch.equal(axis.frequencies, frequencies[:count])
    masses = [
        mass_on_an_axis(axis.logit, frequencies[:end].tolist(), size)
        for end in range(1, len(frequencies) + 1)
    ]
    assert masses[count - 1] == pytest.approx(mass, rel=1e-9)
    assert all(other < mass for other in masses[: count - 1] + masses[count:])
