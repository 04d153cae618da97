"""Pictures are written, of the right size, and say what is wrong when they cannot be."""

from __future__ import annotations

import builtins
import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from vitinit.figures import __main__ as figures


def run(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["figures", *map(str, arguments)])
    figures.main()


def fake_run(folder, name: str, init: str, tops: list[float]) -> None:
    folder.mkdir()
    torch.save({"recipe": {"name": name, "init": {"name": init}}}, folder / "last.pt")
    rows = [{"epoch": epoch, "val_top1": top} for epoch, top in enumerate(tops, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_kernels_show_impulses_and_only_them(monkeypatch, tmp_path):
    out = tmp_path / "kernels.png"
    run(monkeypatch, "kernels", "--inits", "default", "impulse", "--num-heads", 3, "--embed-dim",
        96, "--out", out)
    pixels = np.asarray(Image.open(out).convert("RGB")).astype(int)
    assert pixels.shape[1] > pixels.shape[0] > 300
    # cividis' bright end is yellow; nothing but an impulse's cell (and the colour bar) reaches it.
    yellow = pixels[..., 0] - pixels[..., 2] > 50
    upper, lower = np.split(yellow[:, :int(pixels.shape[1] * 0.75)], [pixels.shape[0] // 2])
    assert upper.sum() == 0 and lower.sum() > 100


def test_curves_group_seeds_of_a_recipe_and_init(monkeypatch, tmp_path):
    for name, init, tops in (("a-0", "impulse", [10.0, 50.0, None]), ("a-1", "impulse", [20., 60.]),
                             ("b-0", "default", [15.0, 30.0])):
        fake_run(tmp_path / name, "trial", init, tops)
    out = tmp_path / "curves.png"
    run(monkeypatch, "curves", *(tmp_path / name for name in ("a-0", "a-1", "b-0")), "--out", out)
    assert Image.open(out).size[0] > 600


def test_a_folder_that_is_no_run_is_one_line(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="last.pt: not a finished run's file"):
        run(monkeypatch, "curves", tmp_path, "--out", tmp_path / "x.png")


def test_sizes_that_do_not_fit_are_one_line(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="vitinit.figures: patches of 5×5 pixels do not tile"):
        run(monkeypatch, "kernels", "--patch-size", 5, "--out", tmp_path / "x.png")


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *arguments, **keywords):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **keywords)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SystemExit, match=r"needs matplotlib: pip install 'vitinit\[figures\]'"):
        run(monkeypatch, "kernels", "--out", tmp_path / "x.png")


def test_operations_show_the_photograph_and_what_each_makes_of_it(monkeypatch, tmp_path):
    """A picture of one colour: what a tile's centre looks like is the operation's formula."""
    picture, out = tmp_path / "plain.png", tmp_path / "operations.png"
    Image.new("RGB", (37, 31), (200, 100, 40)).save(picture)
    run(monkeypatch, "operations", picture, "--out", out)
    sheet = np.asarray(Image.open(out).convert("RGB")).astype(int)
    assert sheet.shape[0] > sheet.shape[1] > 500
    colours = {tuple(colour) for colour in sheet.reshape(-1, 3).tolist()}
    assert {(200, 100, 40),                          # the original
            (55, 155, 215),                          # inverted; solarised above 26, too
            (128, 0, 0),                             # posterised to one bit
            (200, 199, 139),                         # 99 added below 128
            (255, 181, 72),                          # 1.81 times as bright
            (124, 116, 104)} <= colours              # what comes in from outside


def test_batches_are_shown_in_shares_and_repeat_by_seed(monkeypatch, tmp_path, picture_tree):
    files = [tmp_path / f"{name}.png" for name in ("a", "b", "c")]
    for out, seed in zip(files, (0, 0, 1)):
        run(monkeypatch, "batch", "--data-dir", picture_tree, "--seed", seed, "--out", out)
    one, two, three = (np.asarray(Image.open(path)) for path in files)
    assert np.array_equal(one, two) and not np.array_equal(one, three)
    assert one.shape[1] > 2 * one.shape[0]


def test_a_folder_without_pictures_is_one_line(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="no pictures in it"):
        run(monkeypatch, "batch", "--data-dir", tmp_path, "--out", tmp_path / "a.png")
