"""Run the code of a lesson, and compare what it prints with the page."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..figures.plot import pyplot
from ..messages import OneLineError, in_brief
from .page import Code, Page, difference

LONG = re.compile(r"\b(steps|images)=\d+")
SHORT = r"\1=2"                 # in its place where nobody wants to wait


class LessonError(OneLineError):
    """A lesson's code does not do what its page says; the message is one line."""

    status = 1


def run_page(page: Page, folder: Path, *, train: bool) -> Iterator[tuple[Code, str]]:
    """Run a lesson's blocks in order, as one program; yield each with what it prints.

    folder: in which the blocks run, so that it receives their pictures, which need no display.
    train: whether blocks that train do so for minutes; otherwise they take two steps and images.

    Raises LessonError, with the page's line, if a block fails.
    """
    plt = pyplot()
    names: dict[str, Any] = {"__name__": "__main__"}
    for code in page.codes:
        printed = io.StringIO()
        source = LONG.sub(SHORT, code.source) if code.trains and not train else code.source
        try:
            # Empty lines before the source make the line numbers of a traceback those of the page.
            program = compile("\n" * (code.line - 1) + source, str(page.path), "exec")
            with chdir(folder), redirect_stdout(printed):
                exec(program, names)
        except Exception as error:
            raise LessonError(f"{page.path.name}:{code.line}: the code fails: "
                              f"{type(error).__name__}: {in_brief(error)}") from error
        plt.close("all")                             # pyplot would keep them in memory
        yield code, printed.getvalue()


def check_page(page: Page, folder: Path, *, train: bool = False) -> Iterator[tuple[Code, str]]:
    """`run_page`; raises LessonError if a block prints something else than the page shows.

    What a block that trains prints is not compared, since training makes differences of rounding
    large.
    """
    for code, printed in run_page(page, folder, train=train):
        yield code, printed
        wrong = None if code.trains else difference(code.output, printed)
        if wrong:
            raise LessonError(f"{page.path.name}:{code.line}: {wrong}")


def updated_page(page: Page, folder: Path) -> Page:
    """The page with what its blocks print now, after all training; pictures go to `folder`."""
    codes = tuple(replace(code, output=printed)
                  for code, printed in run_page(page, folder, train=True))
    return replace(page, codes=codes)
