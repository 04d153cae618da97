"""What the tests of every figure share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from vitinit.figures import __main__ as figures

# A ViT of 5×7 patches, 3 heads and 2 blocks, as overrides of `quickstart`.
SIZES = {"data.image_size": "[10,14]", "model.options.patch_size": "2", "model.options.depth": "2",
         "model.options.embed_dim": "39"}


@pytest.fixture
def sizes() -> list[str]:
    return [word for key, value in SIZES.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture
def draw(tmp_path) -> Callable[..., Path]:
    """Run one figure's command; what it wrote is an image."""
    def command(*arguments: object) -> Path:
        out = tmp_path / "figure.png"
        assert figures.main([*map(str, arguments), "--out", str(out)]) == 0
        with Image.open(out) as image:
            assert image.format == "PNG" and min(image.size) > 100
        return out
    return command


@pytest.fixture
def complains(tmp_path, capsys) -> Callable[..., None]:
    """The command ends with one line that holds `text`, and writes nothing."""
    def command(text: str, *arguments: object) -> None:
        out = tmp_path / "figure.png"
        capsys.readouterr()
        assert figures.main([*map(str, arguments), "--out", str(out)]) == 2
        line, = capsys.readouterr().err.splitlines()
        assert text in line and line.startswith("vitinit.figures: ") and not out.exists()
    return command
