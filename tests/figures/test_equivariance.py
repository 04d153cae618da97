"""Equivariance: exact without a position embedding, and otherwise equal to a loop over tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import vitinit
from vitinit.figures import equivariance


def built(init: str = "default", **sizes):
    model = vitinit.build_model("vit_tiny", num_classes=3, **dict(
        image_size=(22, 26), patch_size=2, embed_dim=39, depth=3, num_heads=3) | sizes).double()
    vitinit.init_weights(model, init, generator=torch.Generator().manual_seed(0))
    return model.eval()


def images(count: int = equivariance.BATCH + 3) -> Tensor:
    return torch.randn(count, 3, 22, 26, dtype=torch.float64,
                       generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", [{}, dict(pool="mean"), dict(distilled=True)])
def test_without_a_position_embedding_tokens_move_exactly_in_every_block(kind):
    model = built("torch", **kind)
    with torch.no_grad():
        model.pos_embed.zero_()
    errors = equivariance.shift_errors(model, images(), (1, -2))
    assert errors.shape == (4,) and errors.max() < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("step", [(1, 0), (-2, 3)])
def test_errors_are_those_of_a_loop_over_tokens(step):
    """Image by image; a quarter of an 11×13 grid at each border is two rows and three columns."""
    model, batch = built("impulse"), images()
    states = {}
    for name, shown in (("here", batch),
                        ("moved", batch.roll((2 * step[0], 2 * step[1]), (2, 3)))):
        rows = []
        for image in shown:
            x = model.embed(image[None])
            rows.append([x[0, 1:]])
            for block in model.blocks:
                x = block(x)
                rows[-1].append(x[0, 1:])
        states[name] = [torch.stack(level) for level in zip(*rows)]      # (B, N, C) each
    errors = []
    for here, moved in zip(states["here"], states["moved"]):
        here, moved = here - here.mean(0), moved - moved.mean(0)
        difference = square = 0.0
        for row in range(2, 9):
            for column in range(3, 10):
                source = (row - step[0]) % 11 * 13 + (column - step[1]) % 13
                difference += (moved[:, row * 13 + column] - here[:, source]).square().sum()
                square += here[:, source].square().sum()
        errors.append((difference / square).sqrt())
    found = equivariance.shift_errors(model, batch, step)
    torch.testing.assert_close(found, torch.stack(errors))
    assert found[0] < 1e-12 and found[1:].min() > 0.05


def test_the_numbers_are_printed_by_model_and_init(draw, sizes, image_tree, capsys):
    draw("equivariance", "--recipe", "quickstart", "--init", "default", "impulse", *sizes,
         "--data-dir", image_tree / "val", "--count", 5, "--step=0,-1")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["quickstart, default",
                                                          "quickstart, impulse"]
    assert float(lines[0].split()[2]) == 0.0 < float(lines[1].split()[-1])
