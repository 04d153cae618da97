"""HTML pages that need neither a network nor a server, for `explore` and `report`.

A template names in double braces what it is filled with: the look of all pages (page.css), `meta`,
which is JSON, and `weights`, bytes that are deflated and written in base64.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from .. import __version__
from ..files import written_atomically

HERE = Path(__file__).parent
COLOURS = 64                    # of a colour map; even, since a page looks them up from the middle


def write_page(out: Path, template: str, meta: dict[str, Any], weights: str = "") -> None:
    """Write the template with its data beside `out`, rename it, and print its size.

    Nothing in `meta` can end the script that it stands in, or is taken for a part of the template.
    weights: as `packed` returns them.
    """
    text = json.dumps(meta | {"made": f"vitinit {__version__}"}, separators=(",", ":"),
                      allow_nan=False, ensure_ascii=False)
    parts = {"style": (HERE / "page.css").read_text(encoding="utf-8"), "weights": weights,
             "meta": text.replace("<", "\\u003c")}
    page = re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]],
                  (HERE / template).read_text(encoding="utf-8")).encode("utf-8", "replace")
    with written_atomically(out) as file:
        file.write(page)
    print(f"{len(page) / 1e6:.1f} MB, a page without a network")


def packed(levels: bytes) -> str:
    """Bytes as a page reads them back: deflated, in base64."""
    return base64.b64encode(zlib.compress(levels, 9)).decode("ascii")


def rounded(value: Any) -> Any:
    """Numbers with four digits, in lists of any depth; None for those that JSON does not know."""
    if isinstance(value, (list, tuple)):
        return [rounded(part) for part in value]
    return float(f"{value:.4g}") if math.isfinite(value) else None


def as_png(view: Tensor, side: int = 2**16) -> str:
    """A view (3, H, W) uint8, made smaller if over `side` pixels, as an address inside a page."""
    file, image = io.BytesIO(), Image.fromarray(view.permute(1, 2, 0).numpy())
    image.thumbnail((side, side))
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def colours(name: str) -> list[list[int]]:
    """A colour map of matplotlib as COLOURS triples of red, green and blue from 0 to 255."""
    import matplotlib  # the caller has checked that it is there
    return matplotlib.colormaps[name](np.linspace(0, 1, COLOURS), bytes=True)[:, :3].tolist()
