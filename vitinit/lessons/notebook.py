"""A lesson as a Jupyter notebook (nbformat 4.5), with the page's outputs and pictures in it."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from . import IMAGES
from .page import PICTURE, Code, Page

FOLDED = re.compile(r"<details>\s*<summary>(.*?)</summary>|</details>", flags=re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)[^)]*\)")


def notebook(page: Page) -> dict[str, Any]:
    """The notebook of a lesson, ready for json.dump.

    A picture is shown as an output of the code that draws it, not in the prose. Answers that the
    page folds away stand open, since a fold cannot contain cells; links to files become plain text.
    """
    cells = []
    for number, prose in enumerate(page.prose):
        text = LINK.sub(r"\1", PICTURE.sub("", prose))
        text = FOLDED.sub(lambda fold: f"**{fold[1]}**" if fold[1] else "", text).strip()
        if text:
            cells.append({"cell_type": "markdown", "metadata": {}, "source": lines_of(text)})
        if number < len(page.codes):
            cells.append(code_cell(page.codes[number], page.path.parent / IMAGES))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    return {"nbformat": 4, "nbformat_minor": 5, "cells": cells, "metadata": {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"}}}


def code_cell(code: Code, images: Path) -> dict[str, Any]:
    """A block of code with what it prints and draws. images: the folder of the pictures."""
    outputs: list[dict[str, Any]] = []
    if code.output:
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines_of(code.output)})
    for picture in code.pictures:
        data = base64.b64encode((images / picture).read_bytes()).decode("ascii")
        outputs.append({"output_type": "display_data", "metadata": {}, "data": {"image/png": data}})
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": outputs,
            "source": lines_of(code.source.rstrip("\n"))}


def lines_of(text: str) -> list[str]:
    """A text as the list of lines, with their ends, that the format asks for."""
    return text.splitlines(keepends=True)
