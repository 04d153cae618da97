"""The explorer: the page holds the attention that the model computes, and a browser shows it."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitinit import figures
from vitinit.data.images import decode_image
from vitinit.figures.__main__ import main
from vitinit.figures.subjects import fresh
from vitinit.mixing import mixing_matrices
from vitinit.runs.trained import as_input, evaluation_view

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SETS = ["model.options.embed_dim=48", "model.options.depth=2", "model.options.num_heads=3",
        "model.options.pool=class", "data.num_classes=7"]
INITS = ["default", "impulse"]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("explorer")
    rng = np.random.default_rng(0)
    for name in ("first", "</script>"):              # a name that would end the script
        file = folder / name.replace("/", "∕")
        Image.fromarray(rng.integers(0, 256, (41, 47, 3), dtype=np.uint8)).save(file, "PNG")
    paths = [str(path) for path in sorted(folder.iterdir())]
    out = folder / "page.html"
    words = [word for text in SETS for word in ("--set", text)]
    assert main(["explore", *paths, "--recipe", "quickstart", "--init", *INITS, *words, "--out",
                 str(out)]) == 0
    return out


def contents(page: Path) -> tuple[dict, np.ndarray]:
    """The page's names and numbers, and the bytes of its weights."""
    meta, packed = re.findall(r'<script id="\w+" type="[^"]+">(.*?)</script>', page.read_text())
    return json.loads(meta), np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.uint8)


def attention(page: Path, init: str, image: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the init's model itself computes: attention per block (2, h, N, N), and probabilities."""
    subject, = fresh(["quickstart"], [init], seed=None, sets=SETS)
    path = sorted(path for path in page.parent.iterdir() if path != page)[image]
    inputs = as_input(evaluation_view(decode_image(str(path)), subject.recipe)[None], subject.recipe)
    matrices = mixing_matrices(subject.model, inputs)
    with torch.no_grad():
        return torch.cat([matrices[0], matrices[1]]), subject.model(inputs).softmax(1)[0]


def test_the_page_holds_the_models_attention(page):
    meta, levels = contents(page)
    assert [model["name"] for model in meta["models"]] == INITS and len(meta["images"]) == 2
    start = 0
    for model in meta["models"]:
        assert model["prefix"] == ["class token"] and len(model["classes"]) == 7
        for number, image in enumerate(model["images"]):
            expected, probabilities = attention(page, model["name"], number)
            assert image["probabilities"] == pytest.approx(probabilities.tolist(), rel=1e-3)
            for block, theirs in zip(image["blocks"], expected):         # (h, 1 + N, 1 + N)
                shape = (3, block["queries"], block["grid"][0] * block["grid"][1])
                part = levels[start:start + np.prod(shape)].reshape(shape)
                start += part.size
                found = np.array(block["largest"])[:, None, None] * (part / 255.0)**2
                # Half a level of 255, at the steepest, is a share of 1/255 of the largest.
                np.testing.assert_allclose(found, theirs[:, :, 1:].numpy(),
                                           atol=max(block["largest"]) / 200)
    assert start == levels.size
    impulse = meta["models"][1]["images"][0]["blocks"][0]
    assert impulse["distance"][0] < 1.0 < impulse["distance"][1] + 0.5   # head 0 stays, head 1 moves
    assert np.argmax(impulse["kernels"][0]) == 24                        # the middle of 7 × 7


@pytest.mark.skipif(BROWSER is None, reason="needs a browser (chromium)")
def test_a_browser_shows_what_python_computed(page, tmp_path):
    """The page is opened at a view, and a script appended to it writes what it shows into its title."""
    script = """<script>
    const wait = setInterval(() => {
      if (!window.explorer) return;
      clearInterval(wait);
      const photo = document.getElementById("photo"), box = photo.getBoundingClientRect();
      photo.dispatchEvent(new PointerEvent("pointermove", {bubbles: true,
        clientX: box.left + .7 * box.width, clientY: box.top + .3 * box.height}));
      document.body.textContent = "FOUND" + JSON.stringify({...explorer.view, map: explorer.map()}) + "END";
    }, 10);
    </script>"""
    probe = tmp_path / "probe.html"
    probe.write_text(page.read_text().replace("</body>", script + "</body>"))
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000", "--dump-dom",
         "--enable-logging=stderr", f"file://{probe}#model=1&image=1&block=1&head=2"],
        capture_output=True, text=True, timeout=240)
    assert "CONSOLE" not in done.stderr, done.stderr
    found = json.loads(re.search("FOUND(.*)END", done.stdout)[1])
    assert (found["model"], found["image"], found["block"], found["head"]) == (1, 1, 1, 2)
    expected, _ = attention(page, "impulse", 1)
    rows = int(len(found["map"])**0.5)
    query = 1 + int(0.3 * rows) * rows + int(0.7 * rows)
    np.testing.assert_allclose(found["map"], expected[1, 2, query, 1:].numpy(),
                               atol=expected[1, 2].max().item() / 200)


def test_models_without_attention_and_too_many_weights_are_refused(tmp_path, capsys, monkeypatch):
    photograph = tmp_path / "photograph.png"
    Image.new("RGB", (37, 31)).save(photograph)
    command = ["explore", str(photograph), "--out", str(tmp_path / "page.html"), "--recipe"]
    assert main([*command, "cifar10_convmixer"]) == 2
    assert "figure 'explore' is defined for VisionTransformer" in capsys.readouterr().err
    monkeypatch.setattr(figures.explore, "LARGEST", 1000)
    assert main([*command, "quickstart"]) == 2
    error = capsys.readouterr().err
    assert "and a page holds 1,000; show fewer images" in error and error.count("\n") == 1
    assert not (tmp_path / "page.html").exists()
