"""Fixtures that the tests of all figures share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from vitinit.figures import __main__ as figures

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
