"""A lesson as a Jupyter notebook (nbformat 4.5), with the page's outputs and pictures in it."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from . import IMAGES
from .page import PICTURE, Code, Page

FOLD = re.compile(r"<details>\s*<summary>.*?</summary>|</details>")      # around an answer
FOLDED = "<details>\n<summary>Answer</summary>\n\n{}\n\n</details>"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)[^)]*\)")
HIDDEN = {"jupyter": {"source_hidden": True, "outputs_hidden": True}}


def notebook(page: Page) -> dict[str, Any]:
    """The notebook of a lesson, ready for json.dump.

    A picture is shown as an output of the code that draws it, not in the prose. An answer is in
    cells of its own, which are collapsed: its prose by a fold of HTML, its code by the cell's
    metadata. Links to files become plain text.
    """
    cells: list[dict[str, Any]] = []
    hidden = False
    for number, prose in enumerate(page.prose):
        for place, part in enumerate(FOLD.split(LINK.sub(r"\1", PICTURE.sub("", prose)))):
            hidden ^= place > 0                      # each fold's mark begins or ends an answer
            if text := part.strip():
                text = FOLDED.format(text) if hidden else text
                cells.append({"cell_type": "markdown", "metadata": {}, "source": text})
        if number < len(page.codes):
            cell = code_cell(page.codes[number], page.path.parent / IMAGES)
            cells.append(cell | {"metadata": HIDDEN if hidden else {}})
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    return {"nbformat": 4, "nbformat_minor": 5, "cells": cells, "metadata": {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"}}}


def code_cell(code: Code, images: Path) -> dict[str, Any]:
    """A block of code with what it prints and draws. images: the folder of the pictures."""
    outputs: list[dict[str, Any]] = []
    if code.output:
        outputs.append({"output_type": "stream", "name": "stdout", "text": code.output})
    for picture in code.pictures:
        data = base64.b64encode((images / picture).read_bytes()).decode("ascii")
        outputs.append({"output_type": "display_data", "metadata": {}, "data": {"image/png": data}})
    return {"cell_type": "code", "execution_count": None, "outputs": outputs,
            "source": code.source.rstrip("\n")}
