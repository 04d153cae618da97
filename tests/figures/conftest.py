"""Fixtures that the tests of all figures share."""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitinit.figures import __main__ as figures

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Overrides of `quickstart`: a ViT with 5×7 patches, 3 heads and 2 blocks.
SIZES = {"data.image_size": "[10,14]", "model.options.patch_size": "2", "model.options.depth": "2",
         "model.options.embed_dim": "39"}


@pytest.fixture
def sizes() -> list[str]:
    return [word for key, value in SIZES.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture
def draw(tmp_path) -> Callable[..., Path]:
    """Run a figure's command, check that it wrote an image, and return its path."""
    def command(*arguments: object) -> Path:
        out = tmp_path / "figure.png"
        assert figures.main([*map(str, arguments), "--out", str(out)]) == 0
        with Image.open(out) as image:
            assert image.format == "PNG" and min(image.size) > 100
        return out
    return command


@pytest.fixture
def complains(tmp_path, capsys) -> Callable[..., None]:
    """Check that a command ends with one line on stderr that holds `text`, and writes nothing."""
    def command(text: str, *arguments: object) -> None:
        out = tmp_path / "figure.png"
        capsys.readouterr()
        assert figures.main([*map(str, arguments), "--out", str(out)]) == 2
        line, = capsys.readouterr().err.splitlines()
        assert text in line and line.startswith("vitinit.figures: ") and not out.exists()
    return command


@pytest.fixture(scope="session")
def contents() -> Callable[[Path], tuple[dict[str, Any], np.ndarray]]:
    """What a page holds: its names and numbers, and the bytes of its weights, if there are any."""
    def read(page: Path) -> tuple[dict[str, Any], np.ndarray]:
        meta, *packed = re.findall(r'<script id="\w+" type="[^"]+">(.*?)</script>', page.read_text())
        levels = zlib.decompress(base64.b64decode(packed[0])) if packed else b""
        return json.loads(meta), np.frombuffer(levels, np.uint8)
    return read


@pytest.fixture
def in_browser(tmp_path) -> Callable[[Path, str, str], dict[str, Any]]:
    """Opens a page at an address and returns what the body of an async function in it returns.

    The page may not write to the console. The function runs once the page has drawn itself. Skips
    the test without a browser.
    """
    if BROWSER is None:
        pytest.skip("needs a browser (chromium)")

    def call(page: Path, address: str, body: str) -> dict[str, Any]:
        script = f"""<script>
        addEventListener("load", async () => {{
          for (let waits = 0; !document.querySelector("#made").textContent || waits < 2; waits++)
            await new Promise((resolve) => setTimeout(resolve, 100));
          const found = await (async () => {{ {body} }})();
          document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
        }});
        </script>"""
        probe = tmp_path / "probe.html"
        probe.write_text(page.read_text().replace("</body>", script + "</body>"))
        done = subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
             f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000", "--dump-dom",
             "--window-size=1280,900", "--enable-logging=stderr", f"file://{probe}#{address}"],
            capture_output=True, text=True, timeout=240)
        assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
        return json.loads(html.unescape(re.search("FOUND(.*)END", done.stdout, re.DOTALL)[1]))
    return call
