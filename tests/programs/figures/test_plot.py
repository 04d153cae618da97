"""Looks, legends and grids of maps, by matplotlib's own objects, and what cannot be drawn."""

import warnings

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager

from vitinit.init import INITS
from vitinit.programs.shared import plot
from vitinit.programs.shared.plot import (
    FONT,
    LOOKS,
    OTHER,
    RowOfMaps,
    add_legend,
    draw_grid,
    draw_heat,
    families_for,
    looks_of,
    pyplot,
    save,
)


def test_every_init_has_one_look_for_good():
    assert LOOKS.keys() == INITS.keys() and len(set(LOOKS.values())) == len(LOOKS)
    assert [colour for colour, _ in LOOKS.values()].count(LOOKS["default"][0]) == 1
    again = looks_of(["impulse", "default", "impulse", "mine", "whitened", "whitened"])
    assert again[:2] == [LOOKS["impulse"], LOOKS["default"]] and again[3] == OTHER
    assert again[2][0] == again[0][0] and len({*again}) == len(again)  # as after other epochs
    assert len({*looks_of(["impulse"] * 19)}) == 19


def test_a_notebook_goes_on_showing_what_it_draws(monkeypatch):
    asked = []
    monkeypatch.setattr("matplotlib.use", asked.append)
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    pyplot()
    assert not asked
    monkeypatch.delenv("MPLBACKEND")
    pyplot()
    assert asked == ["Agg"]


def test_a_legend_of_any_labels_stays_within_the_figure():
    for length in (1, 11, 29, 83, 241):
        figure, axis = plt.subplots(figsize=(7.6, 4.2), layout="constrained")
        label = ("cifar10_10k-deep_impulse-s0, epoch 10 " * 7)[:length]
        add_legend(figure, {f"{number}{label}": axis.plot([1, 2])[0] for number in range(17)})
        figure.draw_without_rendering()
        box = figure.legends[0].get_window_extent().transformed(figure.transFigure.inverted())
        assert box.x0 > 0.0 and box.x1 < 1.0 and box.y0 > 0.0, length
        assert box.y1 < axis.get_position().y0, length  # it hides nothing
        plt.close(figure)


def test_rows_of_one_unit_share_a_scale_and_a_bar(panels, tmp_path):
    """Two of weights, up to 5 and 2, and one of shares, up to .5: six maps, and two bars."""
    rows = [
        RowOfMaps("a", torch.full((2, 3, 5), value), unit, "down", "across", unit == "weight")
        for unit, value in (("weight", -5.0), ("weight", 2.0), ("share", 0.5))
    ]
    draw_grid(tmp_path / "x.png", rows, None, "heading")
    *maps, weights, shares = panels
    assert [axis.images[0].get_clim() for axis in maps] == [(-5.0, 5.0)] * 4 + [(0.0, 0.5)] * 2
    assert [axis.get_ylabel() for axis in (weights, shares)] == ["weight", "share"]


def test_heat_lies_on_the_grey_of_its_image_each_by_its_own_scale():
    """The image keeps its darkness: white is 255, and not its lightest pixel."""
    _, axis = plt.subplots()
    colour = torch.tensor([100, 50, 25], dtype=torch.uint8).view(3, 1, 1)
    scale = plt.Normalize(0.0, 0.5)
    heat = torch.arange(6.0).view(2, 3) / 6
    layer = draw_heat(axis, colour.expand(3, 8, 12), heat, scale)
    grey, over = axis.images
    assert over is layer and over.norm is scale and 0.0 < over.get_alpha() < 1.0
    np.testing.assert_array_equal(over.get_array(), heat)
    assert (grey.get_array() == round(0.299 * 100 + 0.587 * 50 + 0.114 * 25)).all()
    assert grey.get_clim() == (0, 255) and grey.get_cmap().name == "gray"
    assert grey.get_extent() == over.get_extent() == [0, 12, 8, 0]
    assert over.get_interpolation() == "nearest"  # a patch has one colour
    plt.close()


def test_a_name_that_is_not_utf_8_or_would_be_a_formula_is_drawn(tmp_path):
    figure, axis = plt.subplots(figsize=(2.0, 2.0))
    axis.set_title("ant\udce8")
    save(figure, tmp_path / "x.png", "heading \udce9, price_$5_$.jpg")
    assert (tmp_path / "x.png").exists()


def test_letters_are_of_a_font_that_has_them_or_a_line_says_that_none_has(
    tmp_path, monkeypatch, capsys
):
    """U+1F9F1 and U+732B are in no font of matplotlib; then a font with the latter is installed."""
    figure, axis = plt.subplots(figsize=(2.0, 2.0))
    axis.set_title("\U0001f9f1 or \u732b")
    fonts = font_manager.fontManager
    own = [font for font in fonts.ttflist if font.name.startswith((FONT, "Last Resort"))]
    monkeypatch.setattr(fonts, "ttflist", own)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(figure, tmp_path / "x.png", "\u732b")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning no installed font has \u732b, \U0001f9f1: boxes are drawn")
    builder = FontBuilder(1000)
    builder.setupGlyphOrder([".notdef", "cat"])
    builder.setupCharacterMap({0x732B: "cat"})
    pen = TTGlyphPen(None)
    pen.moveTo((0, 0))
    pen.lineTo((500, 0))
    pen.lineTo((250, 700))
    pen.closePath()
    builder.setupGlyf({".notdef": TTGlyphPen(None).glyph(), "cat": pen.glyph()})
    builder.setupHorizontalMetrics({".notdef": (500, 0), "cat": (500, 0)})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": "Cats", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(tmp_path / "cats.ttf")
    fonts.addfont(tmp_path / "cats.ttf")
    figure, axis = plt.subplots(figsize=(2.0, 2.0))
    axis.set_title("a \u732b")
    save(figure, tmp_path / "x.png", "a")
    assert axis.title.get_fontfamily() == [FONT, "Cats"] and families_for("a") == [FONT]
    assert capsys.readouterr().err == ""


def test_letters_are_of_as_few_fonts_as_have_them(monkeypatch):
    """A font with some of them, though it is found first, is left out where a later one has all."""
    letters = {"some": {"\u732b"}, "all": {"\u732b", "\u72ac"}}
    fonts = [font_manager.FontEntry(fname=name, name=name) for name in letters]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", fonts)
    monkeypatch.setattr(plot, "letters_in", lambda font: letters.get(font, set()))
    assert families_for("\u732b\u72ac") == [FONT, "all"]


QUICK = "--recipe quickstart --set model.options.depth=2 "


@pytest.mark.parametrize(
    "arguments, text",
    [
        (f"maps {QUICK} --blocks 2", "block 2 is asked for, but the model has blocks 0…1"),
        (f"kernels {QUICK} --heads -1", "head -1 is asked for, but the model has heads 0…2"),
        (f"attention {{tmp}}/absent.jpg {QUICK}", "absent.jpg: cannot be read"),
        (
            f"maps {QUICK} --init filters",
            "init 'filters' is for conv_mixer, the keys of its row in INITS, and not defined for",
        ),
        (f"maps {QUICK} --epochs 3", "--epochs goes with --run"),
        ("maps --run {tmp} --seed 0", "--seed goes with --recipe"),
        (
            "maps --run {tmp} --epochs 1",
            "keeps no epoch 1; it has none, which checkpoint.keep_epochs would have kept",
        ),
        ("maps --run {tmp}/a.pth", "holds no recipe"),
        (
            f"maps {QUICK} --set init.checkpoint=other.pt",
            "starts from init.checkpoint = other.pt; show a run of it",
        ),
        (
            "maps --recipe cifar10_convmixer",
            "makes a ConvMixer; figure 'maps' is defined for VisionTransformer and SimpleViT",
        ),
        ("mass --recipe deit_tiny", "deit_tiny has no images of its own: --data-dir names"),
        (
            f"mass {QUICK} --data-dir {{images}}/val --count 22",
            "holds 21 images, and 22 are asked for",
        ),
        (
            f"mass {QUICK} --set model.options.shift_blocks=2 --set model.options.pool=mean",
            "has no attention, and so no mass on targets",
        ),
        ("batch --data-dir {tmp}/empty", "no images in it"),
        ("curves {tmp}/empty", "neither a run's folder nor an archive of runs"),
        (f"kernels {QUICK} --set model.options.patch_size=5", "patches of 5×5 pixels do not tile"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(complains, image_tree, tmp_path, arguments, text):
    torch.save({"model": {"w": torch.ones(1)}}, tmp_path / "a.pth")
    (tmp_path / "empty").mkdir()
    photo = image_tree / "val" / "red" / "03.png"
    complains(text, *arguments.format(photo=photo, tmp=tmp_path, images=image_tree).split())
