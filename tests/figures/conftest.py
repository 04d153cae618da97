"""What the tests of every figure share."""

from __future__ import annotations

import sys
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
def draw(monkeypatch, tmp_path) -> Callable[..., Path]:
    """Run one figure's command; what it wrote is an image."""
    def command(*arguments: object) -> Path:
        out = tmp_path / "figure.png"
        monkeypatch.setattr(sys, "argv", ["figures", *map(str, arguments), "--out", str(out)])
        figures.main()
        with Image.open(out) as picture:
            assert picture.format == "PNG" and min(picture.size) > 100
        return out
    return command


@pytest.fixture
def complains(draw) -> Callable[..., None]:
    """The command ends with one line that holds `text`, and writes nothing."""
    def command(text: str, *arguments: object) -> None:
        with pytest.raises(SystemExit) as caught:
            draw(*arguments)
        message = str(caught.value)
        assert text in message and message.startswith("vitinit.figures: ")
        assert "\n" not in message
    return command
