"""Looks, legends and grids of maps, read back from matplotlib's own objects; and a full disk."""

from __future__ import annotations

import resource

import matplotlib.pyplot as plt
import pytest
import torch

from vitinit.figures.plot import LOOKS, OTHER, Row, add_legend, draw_grid, looks_of
from vitinit.files import FileError
from vitinit.init import INITS


def row(label: str, maps: torch.Tensor, unit: str = "share") -> Row:
    return Row(label, maps, unit, "down", "across", diverging=unit == "weight")


def test_every_init_has_one_look_for_good():
    assert LOOKS.keys() == INITS.keys() and len(set(LOOKS.values())) == len(LOOKS)
    again = looks_of(["impulse", "default", "impulse", "mine", "whitened", "whitened"])
    assert again[:2] == [LOOKS["impulse"], LOOKS["default"]] and again[3] == OTHER
    assert again[2][0] == again[0][0] and len({*again}) == len(again)    # as after other epochs


def test_a_legend_of_any_labels_stays_within_the_figure():
    for length in (1, 11, 29, 83, 241):
        figure, axis = plt.subplots(figsize=(7.6, 4.2), layout="constrained")
        label = ("cifar10_10k-deep_impulse-s0, epoch 10 " * 7)[:length]
        add_legend(figure, {f"{number}{label}": axis.plot([1, 2])[0] for number in range(7)})
        figure.draw_without_rendering()
        box = figure.legends[0].get_window_extent().transformed(figure.transFigure.inverted())
        assert box.x0 > 0.0 and box.x1 < 1.0, length
        plt.close(figure)


def test_rows_of_one_unit_share_a_scale_and_a_bar(panels, tmp_path):
    """Two of weights, up to 5 and 2, and one of shares, up to .5: six maps, and two bars."""
    rows = [row("a", torch.full((2, 3, 5), value), unit)
            for unit, value in (("weight", -5.0), ("weight", 2.0), ("share", 0.5))]
    draw_grid(tmp_path / "x.png", rows, None, "heading")
    *maps, weights, shares = panels
    assert [axis.images[0].get_clim() for axis in maps] == [(-5.0, 5.0)] * 4 + [(0.0, 0.5)] * 2
    assert [axis.get_ylabel() for axis in (weights, shares)] == ["weight", "share"]


def test_a_full_disk_leaves_the_figure_that_was_there_and_names_it(tmp_path):
    out = tmp_path / "x.png"
    out.write_bytes(b"good")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
    try:
        with pytest.raises(FileError, match=r"x\.png: cannot be written: File too large"):
            draw_grid(out, [row("a", torch.rand(2, 5, 7))], None, "heading")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert out.read_bytes() == b"good" and [path.name for path in tmp_path.iterdir()] == ["x.png"]
