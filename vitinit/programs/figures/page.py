"""Pages of HTML that need neither a network nor a server."""

import json
from pathlib import Path

from ... import __version__
from ...base.files import written_atomically
from ..shared.records import Json

HERE = Path(__file__).parent


def write_page(out: Path, template: str, meta: Json, weights: str = "") -> None:
    """Write an HTML page that needs neither a network nor a server, and print its size.

    The template names in double braces what it is filled with: the look of all pages (page.css),
    `meta`, which is JSON, and `weights`, as `packed` returns them. Nothing in `meta` can end the
    script that it stands in, or is taken for a part of the template.
    """
    meta = meta | {"made": f"vitinit {__version__}"}
    text = json.dumps(meta, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    page = (HERE / template).read_text(encoding="utf-8")
    page = page.replace("{{style}}", (HERE / "page.css").read_text(encoding="utf-8"))
    page = page.replace("{{weights}}", weights)
    page = page.replace("{{meta}}", text.replace("<", "\\u003c"))  # the last, as it may have braces
    content = page.encode("utf-8", "replace")
    with written_atomically(out) as file:
        file.write(content)
    print(f"{len(content) / 1e6:.1f} MB, a page that needs no network")
