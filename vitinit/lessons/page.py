"""A lesson as text: a Markdown page, taken apart into prose and code, and put together again.

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

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from . import IMAGES

CODE = re.compile(r"^```python(?P<trains> train)?\n(?P<source>.*?)^```\n"
                  r"(?:\n```text\n(?P<output>.*?)^```\n)?", flags=re.DOTALL | re.MULTILINE)
PICTURE = re.compile(rf"!\[[^\]]*\]\({IMAGES}/(?P<name>[^)/]+\.png)\)")
NUMBER = re.compile(r"(?<![\w.])[-−+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?", flags=re.IGNORECASE)
WORDS_PER_MINUTE = 150          # of prose with formulas; a line of code counts as LINE words
LINE = 6


@dataclass(frozen=True)
class Code:
    """A block of code: its source, its line on the page, and what it prints and draws."""

    source: str
    trains: bool                # for minutes
    line: int                   # of the source's first line, counted from 1
    output: str                 # "" if it prints nothing
    pictures: tuple[str, ...]   # names of files


@dataclass(frozen=True)
class Page:
    """A lesson: prose and code in turn, beginning and ending with prose, which may be empty."""

    path: Path
    prose: tuple[str, ...]      # one more than blocks of code
    codes: tuple[Code, ...]

    @property
    def title(self) -> str:
        """The text of the first heading, without the number."""
        return self.prose[0].partition("\n")[0].partition(". ")[2]

    @property
    def minutes(self) -> int:
        """About how many minutes it takes to read, rounded up."""
        words = sum(len(text.split()) for text in self.prose)
        lines = sum(code.source.count("\n") for code in self.codes)
        return -(-(words + LINE * lines) // WORDS_PER_MINUTE)

    def text(self) -> str:
        """The page as Markdown; the inverse of `read_page`."""
        text = self.prose[0]
        for code, prose in zip(self.codes, self.prose[1:]):
            text += f"```python{' train' * code.trains}\n{code.source}```\n"
            text += f"\n```text\n{code.output}```\n{prose}" if code.output else prose
        return text


def read_page(path: Path) -> Page:
    """Take a lesson apart."""
    text = path.read_text(encoding="utf-8")
    matches = list(CODE.finditer(text))
    ends = [0, *(match.end() for match in matches)]
    starts = [*(match.start() for match in matches), len(text)]
    prose = tuple(text[end:start] for end, start in zip(ends, starts))
    codes = tuple(Code(source=match["source"], trains=match["trains"] is not None,
                       line=text.count("\n", 0, match.start("source")) + 1,
                       output=match["output"] or "",
                       pictures=tuple(picture["name"] for picture in PICTURE.finditer(after)))
                  for match, after in zip(matches, prose[1:]))
    return Page(path, prose, codes)


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
    """Whether two lines agree, as `difference` describes."""
    if NUMBER.sub("#", wanted).split() != NUMBER.sub("#", line).split():
        return False
    pairs = zip(NUMBER.findall(wanted.replace("−", "-")), NUMBER.findall(line.replace("−", "-")))
    return all(abs(float(a) - float(b)) <= _unit(a) * (1 + 1e-9) for a, b in pairs)


def _unit(number: str) -> float:
    """One unit of the last digit of a number, of "2.5e-3" 1e-4; 0 for an integer."""
    mantissa, _, exponent = number.lower().partition("e")
    if not exponent and "." not in mantissa:
        return 0.0
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
