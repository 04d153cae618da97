"""Fixtures that the tests of all figures share."""

import base64
import json
import queue
import re
import shutil
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from PIL import Image

from vitinit.programs.figures import program as figures

BROWSERS = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
BROWSER = next(filter(None, BROWSERS), None)
# Overrides of `quickstart`: a ViT with 5×7 patches, 3 heads and 2 blocks.
SIZES = {
    "data.image_size": "[10,14]",
    "model.options.patch_size": "2",
    "model.options.depth": "2",
    "model.options.embed_dim": "39",
}


@pytest.fixture
def sizes() -> list[str]:
    return [word for key, value in SIZES.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture
def panels(monkeypatch) -> list:
    """Collects the axes of the figures instead of saving them to files."""
    found: list = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig",
        lambda figure, file, **_: (
            found.extend(figure.axes),
            Image.new("L", (2, 2)).save(file, "PNG"),
        ),
    )
    return found


@pytest.fixture
def draw(tmp_path) -> Callable[..., Path]:
    """Run a figure's command, check that it wrote an image and kept none, and return its path."""

    def command(*arguments: object) -> Path:
        out = tmp_path / "figure.png"
        assert figures.main([*map(str, arguments), "--out", str(out)]) == 0
        with Image.open(out) as image:
            assert image.format == "PNG" and min(image.size) > 100
        assert plt.get_fignums() == []
        return out

    return command


@pytest.fixture
def complains(tmp_path, capsys) -> Callable[..., None]:
    """Check that a command ends with one line on stderr that holds `text`, and writes nothing."""

    def command(text: str, *arguments: object) -> None:
        out = tmp_path / "figure.png"
        capsys.readouterr()
        assert figures.main([*map(str, arguments), "--out", str(out)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert text in line and line.startswith("vitinit figures: ") and not out.exists()

    return command


@pytest.fixture(scope="session")
def contents() -> Callable[[Path], tuple[dict[str, Any], np.ndarray]]:
    """What a page holds: its names and numbers, and the bytes of its weights, if there are any."""

    def read(page: Path) -> tuple[dict[str, Any], np.ndarray]:
        scripts = r'<script id="\w+" type="[^"]+">(.*?)</script>'
        meta, *packed = re.findall(scripts, page.read_text())
        levels = zlib.decompress(base64.b64decode(packed[0])) if packed else b""
        return json.loads(meta), np.frombuffer(levels, np.uint8)

    return read


@pytest.fixture
def in_browser(tmp_path) -> Iterator[Callable[[Path, str, str], Any]]:
    """Opens a page at an address and returns what the body of an async function in it returns. The
    function runs once the page has drawn itself, and its page may not write to the console. The
    page is served by the test, which also waits for the answer. Skips the test without a
    browser."""
    if BROWSER is None:
        pytest.skip("needs a browser (chromium)")
    answers: queue.Queue[bytes] = queue.Queue()
    pages = {}

    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path, b"")
            self.send_response(200 if page else 204)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def do_POST(self) -> None:
            answers.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    def call(page: Path, address: str, body: str) -> Any:
        script = f"""<script>
        addEventListener("load", async () => {{
          while (!document.querySelector("#made").textContent || document.hidden)
            await new Promise((resolve) => setTimeout(resolve, 20));
          for (const frame of [1, 2])
            await new Promise((resolve) => requestAnimationFrame(resolve));
          const found = await (async () => {{ {body} }})().catch((error) => String(error.stack));
          fetch("/", {{method: "POST", body: JSON.stringify(found)}});
        }});
        </script>"""
        pages["/"] = page.read_text().replace("</body>", script + "</body>").encode()
        with open(tmp_path / "browser.log", "w+") as log:
            browser = subprocess.Popen(
                [
                    BROWSER,
                    "--headless",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--no-proxy-server",
                    "--disable-background-networking",
                    f"--user-data-dir={tmp_path / 'profile'}",
                    "--window-size=1280,900",
                    "--enable-logging=stderr",
                    f"http://127.0.0.1:{server.server_port}/#{address}",
                ],
                stdout=log,
                stderr=log,
            )
            try:
                answer = answers.get(timeout=120)
            except queue.Empty:
                answer = b"null"  # the console says why
            finally:
                browser.terminate()
                browser.wait(60)
            log.seek(0)
            assert [line for line in log if "CONSOLE" in line] == []
        return json.loads(answer)

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield call
        server.shutdown()
