"""Lessons: how attention can be a convolution, and how a vision transformer is trained.

    python -m vitinit.lessons                            list them
    python -m vitinit.lessons 1                          run one's code, and compare with its page
    python -m vitinit.lessons 1 --notebook lesson.ipynb  write one as a Jupyter notebook

The lessons are pages to read, in vitinit/lessons. Their code needs matplotlib, the extra `figures`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from ..command_line import Parser, integer, run_program
from ..messages import OneLineError
from ..train.checkpoint import write_text_atomically
from . import IMAGES, lesson_paths
from .notebook import notebook
from .page import Page, read_page
from .run import check_page, updated_page


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="python -m vitinit.lessons", description=__doc__)
    parser.add_argument("lesson", type=integer(1), nargs="?", metavar="NUMBER",
                        help="number of a lesson; without one, the lessons are listed")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--notebook", type=Path, metavar="FILE",
                      help="write it as a Jupyter notebook")
    what.add_argument("--update", action="store_true",
                      help="for authors: write what its code prints and draws now into the page")
    options = parser.parse_args(arguments)
    if options.lesson is None and (options.notebook or options.update):
        parser.error(f"{'--notebook' if options.notebook else '--update'} needs the number of a "
                     "lesson")
    return options


def list_lessons(paths: dict[int, Path]) -> None:
    for number, path in paths.items():
        page = read_page(path)
        print(f"{number}  {page.title}: {page.minutes} minutes, {_shown(path)}")


def run_lesson(page: Page) -> None:
    """Run a lesson's code and print what it prints, block by block."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for code, printed in check_page(page, Path(folder)):
            print(f"line {code.line}", flush=True)
            print("".join(f"    {line}\n" for line in (printed.splitlines() + list(code.pictures))),
                  end="", flush=True)
    print(f"{len(page.codes)} blocks of code print what the page shows, "
          f"in {time.perf_counter() - start:.0f} s")


def main(arguments: list[str] | None = None) -> int:
    def program() -> None:
        options = parse_arguments(arguments)
        paths = lesson_paths()
        if options.lesson is None:
            return list_lessons(paths)
        if options.lesson not in paths:
            raise OneLineError(f"there is no lesson {options.lesson}; expected 1 to {max(paths)}")
        page = read_page(paths[options.lesson])
        if options.notebook:
            write_text_atomically(json.dumps(notebook(page), indent=1, ensure_ascii=False) + "\n",
                                  options.notebook)
            print(options.notebook)
        elif options.update:
            page = updated_page(page, page.path.parent / IMAGES)
            write_text_atomically(page.text(), page.path)
            print(_shown(page.path))
        else:
            run_lesson(page)
    return run_program("vitinit.lessons", program)


def _shown(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


if __name__ == "__main__":
    sys.exit(main())
