"""Panels of lines, read back from matplotlib's own objects; and no figure stays in memory."""

from __future__ import annotations

import resource

import matplotlib.pyplot as plt
import pytest
import torch
from PIL import Image

from vitinit.figures.plot import (LOOKS, OTHER, Line, Row, draw_grid, draw_panels, looks_of)
from vitinit.init import INITS
from vitinit.train.checkpoint import CheckpointError


@pytest.fixture
def drawn(monkeypatch) -> list:
    """Collects the figures instead of saving them to files."""
    figures: list = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig",
                        lambda figure, *_, **__: figures.append(figure))
    monkeypatch.setattr("vitinit.figures.plot.Image.open", lambda _: Image.new("L", (2, 2)))
    return figures


def test_every_init_has_one_look_for_good():
    assert LOOKS.keys() == INITS.keys() and len(set(LOOKS.values())) == len(LOOKS)
    for init, look in LOOKS.items():
        assert looks_of(["mimetic", init, "mine"])[1] == look or init == "mimetic"
    again = looks_of(["impulse", "default", "impulse", "mine"])
    assert again[0] == LOOKS["impulse"] and again[1] == LOOKS["default"] and again[3] == OTHER
    assert again[2][0] == again[0][0] and again[2][1] != again[0][1]


def test_the_legend_names_the_lines_of_all_panels_once_each_in_their_colours(drawn, tmp_path):
    """Each of the two panels has a line that the other lacks, and they share one."""
    values = torch.tensor([0.5, torch.nan, 2.0])
    draw_panels(tmp_path / "x.png", {
        "left": [Line(values, "a", "red"), Line(values + 1, "b", "green", "--")],
        "right": [Line(values[:2], "b", "green", "--"), Line(values + 2, "c", "blue")],
    }, columns=2, across="after block", down="share", heading="Something",
        ticks=["input", "0", "1"])
    figure, = drawn
    legend, = figure.legends
    assert [(text.get_text(), handle.get_color(), handle.get_linestyle()) for text, handle in zip(
        legend.get_texts(), legend.legend_handles)] == [("a", "red", "-"), ("b", "green", "--"),
                                                        ("c", "blue", "-")]
    left, right = figure.axes
    assert [axis.get_title() for axis in (left, right)] == ["left", "right"]
    assert left.lines[0].get_xdata().tolist() == [0, 2]      # NaN is left out
    assert right.lines[1].get_ydata().tolist() == [2.5, 4.0]
    assert [text.get_text() for text in right.get_xticklabels()] == ["input", "0", "1"]
    assert left.get_xlabel() == "after block" and figure.get_supylabel() == "share"
    # One scale, from 0 up to the highest line of any panel.
    assert left.get_ylim() == right.get_ylim() and left.get_ylim()[0] == 0.0
    assert left.get_ylim()[1] >= 4.0


@pytest.mark.parametrize("length", [1, 11, 29, 47, 83])
def test_a_legend_of_any_labels_stays_within_the_figure(tmp_path, monkeypatch, length):
    close, drawn = plt.close, []
    monkeypatch.setattr(plt, "close", drawn.append)
    name = ("cifar10_10k-deep_impulse-s0, epoch 10 " * 3)[:length]
    lines = [Line(torch.ones(3), f"{number}{name}", "red") for number in range(7)]
    draw_panels(tmp_path / "x.png", {"only": lines}, columns=1, across="", down="", heading="",
                ticks="abc")
    figure, = drawn
    box = figure.legends[0].get_window_extent().transformed(figure.transFigure.inverted())
    assert box.x0 > 0.0 and box.x1 < 1.0
    close(figure)


def test_rows_of_one_unit_share_a_scale_and_a_bar(drawn, tmp_path):
    """Two of weights, up to 5 and 2, and one of shares, up to .5: six maps, and two bars."""
    rows = [Row("a", torch.full((2, 3, 5), value), unit, "down", "across",
                diverging=unit == "weight")
            for unit, value in (("weight", -5.0), ("weight", 2.0), ("share", 0.5))]
    draw_grid(tmp_path / "x.png", rows, ["left", "right"], "heading")
    *maps, weights, shares = drawn[0].axes
    assert [axis.images[0].get_clim() for axis in maps] == [(-5.0, 5.0)] * 4 + [(0.0, 0.5)] * 2
    assert [axis.get_ylabel() for axis in (weights, shares)] == ["weight", "share"]


def test_no_figure_is_left_in_memory(draw, sizes):
    before = plt.get_fignums()
    for name in ("mass", "equivariance", "spectrum", "kernels"):
        draw(name, "--recipe", "quickstart", *sizes, "--count", 2)
    draw("maps", "--recipe", "quickstart", *sizes)
    assert plt.get_fignums() == before


@pytest.mark.parametrize("grid", [False, True])
def test_a_full_disk_leaves_the_figure_that_was_there_and_names_it(tmp_path, grid):
    out = tmp_path / "x.png"
    out.write_bytes(b"good")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"x\.png: cannot be written: File too large"):
            if grid:
                row = Row("a", torch.rand(2, 5, 7), "unit", "down", "across", diverging=False)
                draw_grid(out, [row], ["b", "c"], "heading")
            else:
                draw_panels(out, {"p": [Line(torch.rand(4), "a", "red")]}, columns=1,
                            across="block", down="share", heading="Something", ticks="0123")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert out.read_bytes() == b"good" and [path.name for path in tmp_path.iterdir()] == ["x.png"]
