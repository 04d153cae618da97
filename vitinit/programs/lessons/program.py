"""Lessons: how a vision transformer is trained, and how its attention can be a convolution.

    vitinit lessons                            list them
    vitinit lessons 1                          run one's code, and compare with its page
    vitinit lessons 1 --train                  and train for as long as the page did
    vitinit lessons 1 --notebook lesson.ipynb  write one as a Jupyter notebook

The lessons are pages to read, in vitinit/programs/lessons. Their code needs matplotlib, the extra `figures`.
Without --train, blocks of code that train for minutes take two steps.
"""

import json
import shutil
import tempfile
import time
from argparse import Namespace
from pathlib import Path

from ...base.files import read_bytes
from ...base.messages import OneLineError
from ..shared.command_line import Output, Parser, integer, main_of
from ..shared.outputs import deliver
from . import PICTURES, lesson_paths
from .page import Page, check_page, notebook, read_page, updated_page


def parse_arguments(arguments: list[str]) -> Namespace:
    parser = Parser(prog="vitinit lessons", description=__doc__)
    parser.add_argument(
        "lesson",
        type=integer(1),
        nargs="?",
        metavar="NUMBER",
        help="number of a lesson; without one, the lessons are listed",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--train", action="store_true", help="train for as long as the page did")
    what.add_argument(
        "--notebook",
        type=Output(".ipynb"),
        metavar="FILE",
        help="write it as a Jupyter notebook, and run nothing",
    )
    what.add_argument(
        "--update",
        action="store_true",
        help="for authors: write what its code prints and draws now into the page",
    )
    options = parser.parse_args(arguments)
    if options.lesson is None and (options.train or options.notebook or options.update):
        parser.error("expected the number of a lesson")
    return options


def run_lesson(page: Page, *, train: bool) -> None:
    """Run a lesson's code and print what it prints, block by block."""
    start = time.perf_counter()
    compared = 0
    with tempfile.TemporaryDirectory() as folder:
        for code, printed in check_page(page, Path(folder), train=train):
            line = f"line {code.line}"
            if code.trains:
                line += " trains: not compared with the page"
                if not train:
                    line += ", two steps"
            else:
                compared += 1
            results = printed.splitlines() + list(code.pictures)
            print(line, *results, sep="\n    ", flush=True)
    seconds = time.perf_counter() - start
    print(f"{compared} blocks of code print what the page shows, in {seconds:.0f} s")


def lessons(options: Namespace) -> None:
    paths = lesson_paths()
    if options.lesson is None:
        for number, path in paths.items():
            page = read_page(path)
            print(f"{number}  {page.title}: {page.minutes} minutes, {path}")
        return
    if options.lesson not in paths:
        raise OneLineError(f"there is no lesson {options.lesson}; expected 1 to {max(paths)}")
    page = read_page(paths[options.lesson])
    if options.notebook:
        text = json.dumps(notebook(page), indent=1, ensure_ascii=False) + "\n"
        if read_bytes(options.notebook, default=text.encode()) != text.encode():
            raise OneLineError(
                f"{options.notebook}: is there already, perhaps with answers; "
                "move it away, or choose another name"
            )
        deliver(text, options.notebook)
    elif options.update:
        with tempfile.TemporaryDirectory() as folder:
            page = updated_page(page, Path(folder))
            for picture in Path(folder).glob("*.png"):
                shutil.copy(picture, page.path.parent / PICTURES)
        deliver(page.text(), page.path)
    else:
        run_lesson(page, train=options.train)


main = main_of("vitinit lessons", parse_arguments, lessons)
