"""Panels of lines, read back from matplotlib's own objects; and no figure stays in memory."""

from __future__ import annotations

import resource

import matplotlib.pyplot as plt
import pytest
import torch

from vitinit.figures.plot import COLOURS, Line, Row, colours_of, draw_grid, draw_panels
from vitinit.train.checkpoint import CheckpointError


@pytest.fixture
def drawn(monkeypatch) -> list:
    """Collects the figures instead of saving them to files."""
    figures: list = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig",
                        lambda figure, *_, **__: figures.append(figure))
    return figures


def test_a_repeated_name_has_the_same_colour():
    names = [str(number) for number in range(7)]
    found = colours_of([names[2], names[0], names[2], *names])
    assert [found[name] for name in ("2", "0", "1", "3", "4", "5")] == list(COLOURS)
    assert found["6"] == COLOURS[0]


def test_the_legend_names_the_lines_of_all_panels_once_each_in_their_colours(drawn, tmp_path):
    """Each of the two panels has a line that the other lacks, and they share one."""
    values = torch.tensor([0.5, torch.nan, 2.0])
    draw_panels(tmp_path / "x.png", {
        "left": [Line(values, "a", "red"), Line(values + 1, "b", "green", "--", "s")],
        "right": [Line(values[:2], "b", "green", "--", "s"), Line(values + 2, "c", "blue")],
    }, across="block", down="share", heading="Something")
    figure, = drawn
    legend, = figure.legends
    assert [(text.get_text(), handle.get_color(), handle.get_linestyle()) for text, handle in zip(
        legend.get_texts(), legend.legend_handles)] == [("a", "red", "-"), ("b", "green", "--"),
                                                        ("c", "blue", "-")]
    left, right = figure.axes
    assert [axis.get_title() for axis in (left, right)] == ["left", "right"]
    assert left.lines[0].get_xdata().tolist() == [0, 1, 2]
    assert right.lines[1].get_ydata()[[0, 2]].tolist() == [2.5, 4.0]
    assert right.get_xticks().tolist() == [0, 1, 2] and left.get_xlabel() == "block"
    assert left.get_ylabel() == "share" and right.get_ylabel() == ""
    # One scale, from 0 up to the highest line of any panel.
    assert left.get_ylim() == right.get_ylim() and left.get_ylim()[0] == 0.0
    assert left.get_ylim()[1] >= 4.0


@pytest.mark.parametrize("length", [1, 11, 29, 47, 83])
def test_a_legend_of_any_labels_stays_within_the_figure(tmp_path, monkeypatch, length):
    close, drawn = plt.close, []
    monkeypatch.setattr(plt, "close", drawn.append)
    name = ("cifar10_10k-deep_impulse-s0, epoch 10 " * 3)[:length]
    draw_panels(tmp_path / "x.png", {"only": [Line(torch.ones(3), f"{number}{name}", "red")
                                              for number in range(7)]},
                across="", down="", heading="")
    figure, = drawn
    box = figure.legends[0].get_window_extent().transformed(figure.transFigure.inverted())
    assert box.x0 > 0.0 and box.x1 < 1.0
    close(figure)


def test_a_top_bounds_the_scale_of_all_panels(drawn, tmp_path):
    lines = [Line(torch.tensor([0.0, 0.3]), "a", "red")]
    draw_panels(tmp_path / "x.png", {"left": lines, "right": lines}, across="", down="", heading="",
                top=5.0)
    for axis in drawn[0].axes:
        low, high = axis.get_ylim()
        assert -0.5 < low < 0.0 and 5.0 < high < 5.5


def test_no_figure_is_left_in_memory(draw, sizes, image_tree):
    before = plt.get_fignums()
    images = ("--data-dir", image_tree / "val", "--count", 2)
    for name in ("mass", "equivariance", "spectrum"):
        draw(name, "--recipe", "quickstart", *sizes, *images)
    draw("maps", "--recipe", "quickstart", *sizes)
    draw("kernels", "--init", "impulse", "--embed-dim", 96, "--num-heads", 3)
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
                draw_panels(out, {"p": [Line(torch.rand(4), "a", "red")]}, across="block",
                            down="share", heading="Something")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert out.read_bytes() == b"good" and [path.name for path in tmp_path.iterdir()] == ["x.png"]
