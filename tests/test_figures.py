"""Pictures are written, of the right size, and say what is wrong when they cannot be."""

from __future__ import annotations

import builtins
import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from vitinit import figures


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
