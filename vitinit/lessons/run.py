"""Run the code of a lesson, and compare what it prints with the page."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..figures.plot import pyplot
from ..messages import OneLineError, in_brief
from .page import Code, Page, difference


class LessonError(OneLineError):
    """A lesson's code does not do what its page says; the message is one line."""

    status = 1


def run_page(page: Page, folder: Path) -> Iterator[tuple[Code, str]]:
    """Run a lesson's blocks in order, as one program; yield each with what it prints.

    folder: in which the blocks run, so that it receives their pictures, which need no display.

    Raises LessonError, with the page's line, if a block fails or does not draw its pictures.
    """
    plt = pyplot()
    names: dict[str, Any] = {"__name__": "__main__"}
    for code in page.codes:
        place = f"{page.path.name}:{code.line}"
        printed = io.StringIO()
        try:
            # Empty lines before the source make the line numbers of a traceback those of the page.
            program = compile("\n" * (code.line - 1) + code.source, str(page.path), "exec")
            with chdir(folder), redirect_stdout(printed):
                exec(program, names)
        except Exception as error:
            raise LessonError(f"{place}: the code fails: {type(error).__name__}: "
                              f"{in_brief(error)}") from error
        plt.close("all")                             # pyplot would keep them in memory
        for picture in code.pictures:
            if not (folder / picture).is_file():
                raise LessonError(f"{place}: the code does not draw {picture}, which the page "
                                  f"shows after it; expected figure.savefig(\"{picture}\")")
        yield code, printed.getvalue()


def check_page(page: Page, folder: Path) -> Iterator[tuple[Code, str]]:
    """`run_page`; raises LessonError if a block prints something else than the page shows."""
    for code, printed in run_page(page, folder):
        yield code, printed
        wrong = difference(code.output, printed)
        if wrong:
            raise LessonError(f"{page.path.name}:{code.line}: {wrong}")


def updated_page(page: Page, folder: Path) -> Page:
    """The page with what its blocks print now; their pictures go to `folder`."""
    codes = tuple(replace(code, output=printed) for code, printed in run_page(page, folder))
    return replace(page, codes=codes)
