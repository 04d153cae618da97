"""The repository's Markdown pages as tests read them: prose, code, commands, links, headings, sentences."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", flags=re.DOTALL | re.MULTILINE)


class Page(NamedTuple):
    """A Markdown page."""

    path: Path
    text: str

    @property
    def name(self) -> str:
        """Its path in the repository, for the names of tests."""
        return str(self.path.relative_to(REPOSITORY))

    @property
    def prose(self) -> str:
        """The text without blocks of code."""
        return FENCED.sub("", self.text)

    def blocks(self, language: str) -> list[str]:
        """The blocks of code in one language, such as "bash"; "" for blocks that name none."""
        return [code for found, code in FENCED.findall(self.text) if found == language]

    def section(self, title: str) -> Page:
        """The part of the page under one heading of the second level."""
        _, found, rest = self.text.partition(f"\n## {title}\n")
        assert found, f"{self.name} has no section {title!r}"
        return Page(self.path, rest.partition("\n## ")[0])

    def commands(self) -> list[list[str]]:
        """The words of every line of the bash blocks; continued lines are joined, comments left out."""
        lines = "\n".join(self.blocks("bash")).replace("\\\n", " ").splitlines()
        return [words for words in (shlex.split(line, comments=True) for line in lines) if words]

    def code_spans(self) -> list[str]:
        """What stands in single backticks, with line breaks as spaces."""
        return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", self.prose)]

    def links(self) -> list[str]:
        """The targets of links and pictures."""
        return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]+`", "", self.prose))

    def anchors(self) -> set[str]:
        """What GitHub makes of each heading: lower case, no punctuation, hyphens for spaces."""
        titles = re.findall(r"^#+ (.+)$", self.prose, flags=re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}

    def sentences(self) -> list[str]:
        """Every sentence of the prose; tables, headings and pictures' descriptions are left out."""
        text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", self.prose)
        text = re.sub(r"\]\([^)]*\)", "]", text)                         # links' targets
        text = re.sub(r"^ *(\||#|<).*$", "", text, flags=re.MULTILINE)
        paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
        return [sentence for paragraph in paragraphs
                for sentence in re.split(r"(?<=[.!?:])[*)\]]*\s+", " ".join(paragraph.split()))]


def program_of(words: list[str]) -> tuple[str, list[str]] | None:
    """Which of our programs a command starts, with which arguments: ("train.py", ["--recipe", …])."""
    for place, word in enumerate(words):
        module = re.fullmatch(r"vitinit(\.\w+)+", word)
        if word in ("train.py", "eval.py") or module and words[place - 1:place] == ["-m"]:
            return word, words[place + 1:]
    return None


def read_page(path: Path) -> Page:
    return Page(path, path.read_text(encoding="utf-8"))


PAGES = [read_page(path) for pattern in ("*.md", "recipes/**/*.md", "vitinit/**/*.md", "tests/**/*.md")
         for path in sorted(REPOSITORY.glob(pattern))]
README = next(page for page in PAGES if page.name == "README.md")
