"""The heat over a photograph is the query's row of the attention matrix, reshaped to the grid."""

from __future__ import annotations

import pytest
import torch

from vitinit.data.images import decode_image
from vitinit.figures import attention
from vitinit.figures.subjects import fresh
from vitinit.mixing import mixing_matrices
from vitinit.runs.data import as_input, evaluation_view


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_heat_is_the_querys_row_without_prefix_tokens(prefix):
    """Entry (query, key) of the matrix is 100 · query + key, so the result shows its origin."""
    tokens = torch.arange(-prefix, 35)
    weights = (100 * tokens[:, None] + tokens).expand(3, -1, -1).float()
    heat = attention.heat_maps(weights, (5, 7), (2, 4))
    expected = 100 * 18 + torch.arange(35.0).view(5, 7)                  # query 2 · 7 + 4
    assert torch.equal(heat, expected.expand(3, -1, -1))


def test_rows_are_models_blocks_and_queries(draw, sizes, image_tree, monkeypatch):
    seen = []
    real = attention.heat_maps

    def remember(weights, grid, query):
        seen.append((query, real(weights, grid, query)))
        return seen[-1][1]
    monkeypatch.setattr(attention, "heat_maps", remember)
    photograph = image_tree / "val" / "red" / "03.png"
    draw("attention", photograph, "--recipe", "quickstart", "--init", "impulse", *sizes,
         "--blocks", 1, 0, "--heads", 2, 1, "--queries", "4,6", "0,1")
    assert [query for query, _ in seen] == [(4, 6), (0, 1)] * 2
    subject, = fresh(["quickstart"], ["impulse"], seed=None, sets=sizes[1::2])
    view = evaluation_view(decode_image(str(photograph)), subject.recipe)
    image = as_input(view[None], subject.recipe)
    rows = mixing_matrices(subject.model, image)[1][0][[2, 1], 34]       # the last token of 35
    assert torch.equal(seen[0][1], rows.view(2, 5, 7))


def test_a_swins_later_stages_have_their_own_grid(draw, image_tree, monkeypatch):
    grids = []
    real = attention.heat_maps
    monkeypatch.setattr(attention, "heat_maps",
                        lambda *arguments: grids.append(arguments[1]) or real(*arguments))
    draw("attention", image_tree / "val" / "red" / "03.png", "--recipe", "cifar10_swin_tiny",
         "--blocks", 0, 2)
    assert grids[0] == (2 * grids[1][0], 2 * grids[1][1])
