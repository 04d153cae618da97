"""A lesson: a Markdown page, taken apart into prose and code, run, compared, and as a notebook.

The format is Markdown as GitHub shows it, with four conventions:

- A fence ```python is code. All code of a page runs in order, as one program.
- A fence ```python train is code that trains for minutes, in as many steps and measured on as many
  images as its `steps=1200` and `images=1000` say. It draws nothing, and no other code reads what
  it has trained.
- A fence ```text directly after it is what that code prints. Code without one prints nothing.
- A picture ![…](images/NAME.png) in the prose that follows is one that the code draws, by
  `figure.savefig("NAME.png")`.

Fences of other languages are prose.
"""

import base64
import io
import math
import re
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import zip_longest
from pathlib import Path

from ...base.messages import OneLineError, in_brief
from ..shared.plot import pyplot
from ..shared.records import Json
from . import PICTURES

CODE = re.compile(
    r"^```python(?P<trains> train)?\n(?P<source>.*?)^```\n"
    r"(?:\n```text\n(?P<output>.*?)^```\n)?",
    flags=re.DOTALL | re.MULTILINE,
)
PICTURE = re.compile(rf"!\[[^\]]*\]\({PICTURES}/(?P<name>[^)/]+\.png)\)")
NUMBER = re.compile(r"(?<![\w.])[-−+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?", flags=re.IGNORECASE)
WORDS_PER_MINUTE = 150  # of prose with formulas; a line of code counts as LINE words
LINE = 6
LONG = re.compile(r"\b(steps|images)=\d+")
SHORT = r"\1=2"  # in its place where nobody wants to wait
ANSWER = re.compile(r"<details>.*?</details>", flags=re.DOTALL)
FOLD = re.compile(r"<details>\s*<summary>.*?</summary>|</details>")  # around an answer
FOLDED = "<details>\n<summary>Answer</summary>\n\n{}\n\n</details>"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)[^)]*\)")
HIDDEN = {"jupyter": {"source_hidden": True, "outputs_hidden": True}}


class LessonError(OneLineError):
    """A lesson's code does not do what its page says; the message is one line."""

    status = 1


@dataclass(frozen=True)
class Code:
    """A block of code: its source, its line on the page, and what it prints and draws."""

    source: str
    trains: bool  # for minutes
    line: int  # of the source's first line, counted from 1
    output: str  # "" if it prints nothing
    pictures: tuple[str, ...]  # names of files


@dataclass(frozen=True)
class Page:
    """A lesson: prose and code in turn, beginning and ending with prose, which may be empty."""

    path: Path
    prose: tuple[str, ...]  # one more than blocks of code
    codes: tuple[Code, ...]

    @property
    def title(self) -> str:
        """The text of the first heading, without the number."""
        return self.prose[0].partition("\n")[0].partition(". ")[2]

    @property
    def minutes(self) -> int:
        """About how many minutes it takes to read without the answers, rounded up."""
        text = ANSWER.sub("", self.text())
        lines = sum(match["source"].count("\n") for match in CODE.finditer(text))
        words = len(CODE.sub("", text).split()) + LINE * lines
        return math.ceil(words / WORDS_PER_MINUTE)

    def text(self) -> str:
        """The page as Markdown; the inverse of `read_page`."""
        text = self.prose[0]
        for code, prose in zip(self.codes, self.prose[1:]):
            text += f"```python{' train' * code.trains}\n{code.source}```\n"
            text += f"\n```text\n{code.output}```\n{prose}" if code.output else prose
        return text


def read_page(path: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    prose = tuple(CODE.split(text)[::4])  # between two of them are the three groups of CODE
    codes = []
    for match, after in zip(CODE.finditer(text), prose[1:]):
        line = text.count("\n", 0, match.start("source")) + 1
        pictures = tuple(PICTURE.findall(after))
        trains, source, output = match.groups()
        codes.append(Code(source, bool(trains), line, output or "", pictures))
    return Page(path, prose, tuple(codes))


def run_page(page: Page, folder: Path, *, train: bool) -> Iterator[tuple[Code, str]]:
    """Run a lesson's blocks in order, as one program; yield each with what it prints.

    folder: in which the blocks run, so that it receives their pictures, which need no display.
    train: whether blocks that train do so for minutes; otherwise they take two steps and images.

    Raises LessonError, with the page's line, if a block fails.
    """
    plt = pyplot()
    names = {"__name__": "__main__"}
    for code in page.codes:
        printed = io.StringIO()
        source = LONG.sub(SHORT, code.source) if code.trains and not train else code.source
        try:
            # Empty lines before the source make the line numbers of a traceback those of the page.
            program = compile("\n" * (code.line - 1) + source, str(page.path), "exec")
            with chdir(folder), redirect_stdout(printed):
                exec(program, names)
        except Exception as error:
            raise LessonError(
                f"{page.path.name}:{code.line}: the code fails: "
                f"{type(error).__name__}: {in_brief(error)}"
            ) from error
        plt.close("all")  # pyplot would keep them in memory
        yield code, printed.getvalue()


def check_page(page: Page, folder: Path, *, train: bool = False) -> Iterator[tuple[Code, str]]:
    """`run_page`; raises LessonError if a block prints something else than the page shows."""
    for code, printed in run_page(page, folder, train=train):
        yield code, printed
        # Not where it trains, which makes differences of rounding large.
        if not code.trains and (wrong := difference(code.output, printed)):
            raise LessonError(f"{page.path.name}:{code.line}: {wrong}")


def updated_page(page: Page, folder: Path) -> Page:
    """The page with what its blocks print now, after all training; pictures go to `folder`."""
    codes = [replace(code, output=printed) for code, printed in run_page(page, folder, train=True)]
    return replace(page, codes=tuple(codes))


def difference(expected: str, printed: str) -> str | None:
    """What the first line in which two outputs differ is, in words; None if they agree.

    Text must be equal, up to blanks. Integers must be equal. Other numbers may differ by one unit
    of the last digit that `expected` shows, since the last digits depend on the processor.
    """
    lines = zip_longest(expected.splitlines(), printed.splitlines())
    for number, (wanted, line) in enumerate(lines, 1):
        if wanted is None:
            return f"the output goes on with '{line}', where the page's ends"
        if line is None or not _agree(wanted, line):
            what = "nothing" if line is None else f"'{line}'"
            return f"line {number} of the output is {what}, where the page has '{wanted}'"
    return None


def _agree(wanted: str, line: str) -> bool:
    if NUMBER.sub("#", wanted).split() != NUMBER.sub("#", line).split():
        return False
    for shown, printed in zip(NUMBER.findall(wanted), NUMBER.findall(line)):
        shown, printed = shown.replace("−", "-"), printed.replace("−", "-")
        if abs(float(shown) - float(printed)) > _unit(shown) * (1 + 1e-9):
            return False
    return True


def _unit(number: str) -> float:
    """One unit of the last digit of a number, of "2.5e-3" 1e-4; 0 for an integer."""
    if re.fullmatch(r"[-+]?\d+\.?", number):  # such as "1.", as torch prints whole numbers
        return 0.0
    return 10.0 ** int(Decimal(number).as_tuple().exponent)


def notebook(page: Page) -> Json:
    """The notebook of a lesson (nbformat 4.5), ready for json.dump.

    A picture is shown as an output of the code that draws it, not in the prose. An answer is in
    cells of its own, which are collapsed: its prose by a fold of HTML, its code by the cell's
    metadata. Links to files become plain text.
    """
    cells: list[Json] = []
    hidden = False
    for prose, code in zip_longest(page.prose, page.codes):
        for place, part in enumerate(FOLD.split(LINK.sub(r"\1", PICTURE.sub("", prose)))):
            if place:  # a fold's mark begins or ends an answer
                hidden = not hidden
            if text := part.strip():
                text = FOLDED.format(text) if hidden else text
                cells.append({"cell_type": "markdown", "metadata": {}, "source": text})
        if code is not None:
            outputs = []
            if code.output:
                outputs.append({"output_type": "stream", "name": "stdout", "text": code.output})
            for picture in code.pictures:
                content = base64.b64encode((page.path.parent / PICTURES / picture).read_bytes())
                data = {"image/png": content.decode("ascii")}
                outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
            cells.append(
                {
                    "cell_type": "code",
                    "execution_count": None,
                    "outputs": outputs,
                    "source": code.source.rstrip("\n"),
                    "metadata": HIDDEN if hidden else {},
                }
            )
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    return {
        "nbformat": 4,
        "nbformat_minor": 5,
        "cells": cells,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
    }
