"""A linter for the Markdown pages: each check yields what a page says that is not so."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import re
import runpy
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from vitinit import sweep
from vitinit.init import INITS, init_function
from vitinit.messages import OneLineError
from vitinit.models import FAMILIES, model_class
from vitinit.recipe.files import fresh_recipe

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPES, PACKAGE = REPOSITORY / "recipes", REPOSITORY / "vitinit"
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", flags=re.DOTALL | re.MULTILINE)
WRITTEN = {"recipe.toml", "report.md", "comparison.md"}      # files that programs write
OTHERS = {"--standalone", "--nproc_per_node", "--node_rank", "--shutdown_timeout",
          "--signals_to_handle", "--shm-size"}               # options of torchrun and of containers


class Page(NamedTuple):
    """A Markdown page."""

    path: Path
    text: str

    @property
    def name(self) -> str:
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

    def commands(self, language: str = "bash") -> list[list[str]]:
        """The words of each line of these blocks; continued lines are joined, no comments."""
        lines = "\n".join(self.blocks(language)).replace("\\\n", " ").splitlines()
        return [words for words in (shlex.split(line, comments=True) for line in lines) if words]

    def code_spans(self) -> list[str]:
        """What stands in single backticks, with line breaks as spaces."""
        return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", self.prose)]

    def links(self) -> list[str]:
        """The targets of links and pictures within the repository."""
        targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]+`", "", self.prose))
        return [target for target in targets if not re.match(r"[a-z]+:", target)]

    def anchors(self) -> set[str]:
        """What GitHub makes of each heading: lower case, no punctuation, hyphens for spaces."""
        titles = re.findall(r"^#+ (.+)$", self.prose, flags=re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def read_page(path: Path) -> Page:
    return Page(path, path.read_text(encoding="utf-8"))


PAGES = [read_page(path) for pattern in ("*.md", "recipes/**/*.md", "vitinit/**/*.md")
         for path in sorted(REPOSITORY.glob(pattern))]
README = next(page for page in PAGES if page.name == "README.md")


def broken_links(page: Page) -> Iterator[str]:
    """Links to files, and to headings of pages, that do not exist."""
    for link in page.links():
        path, _, anchor = link.partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        if not target.is_relative_to(REPOSITORY) or not target.exists():
            yield f"{link}: no such file"
        elif anchor and anchor not in (page if not path else read_page(target)).anchors():
            yield f"{link}: no such heading"


def missing_files(page: Page) -> Iterator[str]:
    """Files of ours in backticks that are not beside the page, in the package or at the top."""
    tops = {path.name for path in REPOSITORY.iterdir() if path.is_dir()} - {"runs", "data"}
    for code in page.code_spans():
        ours = code.endswith((".py", ".md", ".toml")) or code.split("/")[0] in tops and "/" in code
        if ours and re.fullmatch(r"[\w./-]+", code) and code not in WRITTEN and not any(
                (folder / code).exists() for folder in (page.path.parent, PACKAGE, REPOSITORY)):
            yield f"{code}: no such file"


def unlisted_files(page: Page) -> Iterator[str]:
    """Python files beside a page of the package that it does not name."""
    if page.path.name == "README.md" and page.path.is_relative_to(PACKAGE):
        listed = {code.rpartition("/")[2] for code in page.code_spans()} | {"__init__.py"}
        yield from (f"{path.name}: not listed" for path in page.path.parent.glob("*.py")
                    if path.name not in listed)


def missing_commits(page: Page) -> Iterator[str]:
    """Commits that the history lacks; nothing where there is no whole history."""
    if (REPOSITORY / ".git").exists() and not (REPOSITORY / ".git" / "shallow").exists():
        words = " ".join(page.prose.split())
        for commit in re.findall(r"\bcommit `?([0-9a-f]{7,40})\b", words, flags=re.IGNORECASE):
            if subprocess.run(["git", "-C", REPOSITORY, "cat-file", "-e", f"{commit}^{{commit}}"],
                              capture_output=True).returncode:
                yield f"{commit}: no such commit"


@cache
def known_options() -> set[str]:
    """The options of all our programs, as their sources name them, and others'."""
    paths = [*PACKAGE.rglob("*.py"), *REPOSITORY.glob("*.py")]
    sources = "".join(path.read_text("utf-8") for path in paths)
    return OTHERS | set(re.findall(r"[\"'](--[a-z][a-z-]*)[\"']", sources))


@cache
def known_keys() -> set[str]:
    """All keys of recipes, each of which states all, with the options of every model and init."""
    tables = [tomllib.loads(path.read_text("utf-8")) for path in RECIPES.glob("*.toml")]
    functions = {"model": list(map(model_class, FAMILIES)),
                 "init": [init_function(init, family) for init, families in INITS.items()
                          for family in families]}
    return {f"{section}.{key}" for table in tables for section in table
            for key in (table[section] if isinstance(table[section], dict) else ())} | {
        f"{section}.options.{name}" for section in functions for function in functions[section]
        for name in inspect.signature(function).parameters}


def bad_words(page: Page) -> Iterator[str]:
    """In backticks: options that no program has, keys that no recipe has, unknown programs."""
    sections = "|".join(sorted({key.partition(".")[0] for key in known_keys()}))
    for code in page.code_spans():
        if re.match("python|torchrun|--", code):
            options = re.findall(r"(?:^|\s)(--[a-z][a-z_-]*)(?==|$|\s)", code)
            yield from (f"{code}: no option {option}" for option in options
                        if option not in known_options())
        for key in re.findall(rf"(?:^|[\s\"'])((?:{sections})\.[a-z_.]+)(?=$|[\s\"'=])", code):
            if key not in known_keys() and not key.endswith((".py", ".toml", ".json", "tensors")):
                yield f"{key}: no such key"
        found = re.match(r"python -m (vitinit\.[\w.]+)", code)
        if found and importlib.util.find_spec(found[1]) is None:
            yield f"{code}: no program {found[1]}"


def program_of(words: list[str]) -> tuple[str, list[str]] | None:
    """Which of our programs a command starts, and its arguments: ("train.py", ["--recipe", …])."""
    return next(((word, words[place + 1:]) for place, word in enumerate(words)
                 if word in ("train.py", "eval.py")
                 or word.startswith("vitinit.") and words[place - 1] == "-m"), None)


@cache
def parser_of(program: str) -> Callable[[list[str]], argparse.Namespace]:
    """The function `parse_arguments` of a program such as "train.py" or "vitinit.figures"."""
    if program.endswith(".py"):                      # it belongs to no package
        return runpy.run_path(str(REPOSITORY / program))["parse_arguments"]
    module = importlib.import_module(program)
    return (importlib.import_module(f"{program}.__main__") if hasattr(module, "__path__") else
            module).parse_arguments


def require_startable(program: str, arguments: list[str]) -> None:
    """Raise OneLineError, or ImportError, if a program would not start with these arguments.

    predict and export, which tests start as the pages do, are asked for their options alone.
    """
    if program == "vitinit.sweep":
        data = [] if "--data-dir" in arguments else ["--data-dir", "data"]
        if sweep.main([*arguments, *data, "--dry-run"]) != 0:
            raise OneLineError("the sweep does not start")
    elif program in ("vitinit.predict", "vitinit.export"):
        if unknown := {word for word in arguments if word.startswith("--")} - known_options():
            raise OneLineError(f"no option {unknown}")
    else:
        args = parser_of(program)(arguments)
        recipes, inits = ([value] if value is None or isinstance(value, str) else value
                          for value in (getattr(args, name, None) for name in ("recipe", "init")))
        for recipe in filter(None, recipes):
            for init in inits:
                fresh_recipe(recipe, say=lambda line: None, init=init,
                             sets=getattr(args, "set", None) or [])


def bad_commands(page: Page) -> Iterator[str]:
    """Commands in bash blocks that start a program of ours and that it would refuse."""
    for words in page.commands():
        program, arguments = program_of(words) or ("", [])
        try:
            if program:
                require_startable(program, [*map(os.path.expandvars, arguments)])
        except (OneLineError, ImportError) as error:
            yield f"{' '.join(words)}: {error}"


CHECKS = (broken_links, missing_files, unlisted_files, missing_commits, bad_words, bad_commands)
