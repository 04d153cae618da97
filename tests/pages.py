"""A linter for the repository's Markdown pages: each check yields what a page says that is not so.

`python tests/pages.py` prints the mistakes of all pages.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

from vitinit import sweep
from vitinit.command_line import Parser
from vitinit.init import INITS
from vitinit.messages import OneLineError
from vitinit.models import MODELS
from vitinit.recipe.files import fresh_recipe

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPES, PACKAGE = REPOSITORY / "recipes", REPOSITORY / "vitinit"
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", flags=re.DOTALL | re.MULTILINE)
WRITTEN = {"recipe.toml", "report.md", "comparison.md"}      # files that programs write
# Options of torchrun and of containers that pages name.
OTHERS = {"--standalone", "--nproc_per_node", "--node_rank", "--shutdown_timeout",
          "--signals_to_handle", "--shm-size"}


class Page(NamedTuple):
    """A Markdown page."""

    path: Path
    text: str

    @property
    def name(self) -> str:
        """Its path in the repository."""
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
        """The targets of links and pictures within the repository."""
        targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]+`", "", self.prose))
        return [target for target in targets if not re.match(r"[a-z]+:", target)]

    def anchors(self) -> set[str]:
        """What GitHub makes of each heading: lower case, no punctuation, hyphens for spaces."""
        titles = re.findall(r"^#+ (.+)$", self.prose, flags=re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def read_page(path: Path) -> Page:
    return Page(path, path.read_text(encoding="utf-8"))


PAGES = [read_page(path) for pattern in ("*.md", "recipes/**/*.md", "vitinit/**/*.md", "tests/**/*.md")
         for path in sorted(REPOSITORY.glob(pattern))]
README = next(page for page in PAGES if page.name == "README.md")


def broken_links(page: Page) -> Iterator[str]:
    """Links to files, and to headings of pages, that do not exist."""
    for link in page.links():
        path, _, anchor = link.partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        if not target.is_relative_to(REPOSITORY) or not target.exists():
            yield f"{link}: no such file"
        elif anchor and anchor not in (page if target == page.path else read_page(target)).anchors():
            yield f"{link}: no such heading"


def missing_files(page: Page) -> Iterator[str]:
    """Files of ours in backticks that do not exist beside the page, in the package or the repository."""
    tops = {path.name for path in REPOSITORY.iterdir() if path.is_dir()} - {"runs", "data"}
    for code in page.code_spans():
        ours = code.endswith((".py", ".md", ".toml")) or code.split("/")[0] in tops and "/" in code
        if ours and re.fullmatch(r"[\w./-]+", code) and code not in WRITTEN and not any(
                (folder / code).exists() for folder in (page.path.parent, PACKAGE, REPOSITORY)):
            yield f"{code}: no such file"


def unlisted_files(page: Page) -> Iterator[str]:
    """Python files of a room that its page does not name; folders without a page belong to the room."""
    if page.path.name == "README.md" and page.path.is_relative_to(PACKAGE):
        listed = {code.rpartition("/")[2] for code in page.code_spans()} | {"__init__.py"}
        for path in page.path.parent.rglob("*.py"):
            room = next(folder for folder in path.parents if (folder / "README.md").is_file())
            if room == page.path.parent and path.name not in listed:
                yield f"{path.relative_to(room)}: not listed"


def missing_commits(page: Page) -> Iterator[str]:
    """Commits that the history lacks; nothing where there is no whole history."""
    if not (REPOSITORY / ".git").exists() or (REPOSITORY / ".git" / "shallow").exists():
        return
    for commit in re.findall(r"\bcommit `?([0-9a-f]{7,40})\b", " ".join(page.prose.split())):
        found = subprocess.run(["git", "-C", REPOSITORY, "cat-file", "-e", f"{commit}^{{commit}}"],
                               capture_output=True)
        if found.returncode:
            yield f"{commit}: no such commit"


@cache
def known_options() -> set[str]:
    """The options of all our programs, as their sources name them, and others'."""
    sources = [*PACKAGE.rglob("*.py"), *REPOSITORY.glob("*.py")]
    return OTHERS | {option for path in sources
                     for option in re.findall(r"[\"'](--[a-z][a-z-]*)[\"']", path.read_text("utf-8"))}


@cache
def known_keys() -> set[str]:
    """All keys of recipes, each of which states all, with the options of every model and init."""
    def flat(table: dict, prefix: str) -> Iterator[str]:
        for key, value in table.items():
            yield f"{prefix}{key}"
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{key}.")
    keys = {key for path in RECIPES.glob("*.toml") for key in flat(tomllib.loads(path.read_text()), "")}
    functions = [("model", family) for family, _ in MODELS.values()]
    functions += [("init", init) for families in INITS.values() for init in families.values()]
    return keys | {f"{section}.options.{name}" for section, function in functions
                   for name in inspect.signature(function).parameters}


def bad_words(page: Page) -> Iterator[str]:
    """Options in backticks that no program has, keys that no recipe has, and programs that do not exist."""
    sections = "|".join(sorted({key.partition(".")[0] for key in known_keys()}))
    for code in page.code_spans():
        options = re.findall(r"(?:^|\s)(--[a-z][a-z_-]*)(?==|$|\s)", code)
        yield from (f"{code}: no option {option}" for option in options
                    if re.match("python|torchrun|--", code) and option not in known_options())
        keys = re.findall(rf"(?:^|[\s\"'])((?:{sections})\.[a-z_.]+)(?=$|[\s\"'=])", code)
        yield from (f"{key}: no such key" for key in keys
                    if key not in known_keys() and not key.endswith((".py", ".toml", ".json", ".safetensors")))
        found = re.match(r"python -m (vitinit\.[\w.]+)", code)
        if found and importlib.util.find_spec(found[1]) is None:
            yield f"{code}: no program {found[1]}"


def program_of(words: list[str]) -> tuple[str, list[str]] | None:
    """Which of our programs a command starts, with which arguments: ("train.py", ["--recipe", …])."""
    for place, word in enumerate(words):
        if word in ("train.py", "eval.py") or (re.fullmatch(r"vitinit(\.\w+)+", word)
                                               and words[place - 1:place] == ["-m"]):
            return word, words[place + 1:]
    return None


@cache
def module_of(program: str) -> ModuleType:
    """The module of a program: "train.py", or "vitinit.figures", whose __main__ is meant."""
    if program.endswith(".py"):                      # it belongs to no package
        spec = importlib.util.spec_from_file_location(f"program_{program[:-3]}", REPOSITORY / program)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    if importlib.util.find_spec(program) is None:
        raise OneLineError(f"there is no program {program}")
    module = importlib.import_module(program)
    return importlib.import_module(f"{program}.__main__") if hasattr(module, "__path__") else module


class Parsed(BaseException):
    """Raised with the arguments of a program in place of starting it."""


def require_startable(program: str, arguments: list[str]) -> None:
    """Raise OneLineError if a program would not start with these arguments, as far as its recipe goes."""
    real, module = Parser.parse_args, module_of(program)

    def parse_only(parser: Parser, given: list[str] | None = None, namespace: object = None) -> None:
        raise Parsed(real(parser, given))
    if program == "vitinit.sweep":
        data = [] if "--data-dir" in arguments else ["--data-dir", "data"]
        if sweep.main([*arguments, *data, "--dry-run"]) != 0:
            raise OneLineError("the sweep does not start")
        return
    with (mock.patch.object(Parser, "parse_args", parse_only),
          mock.patch.object(module, "run_program", lambda name, body, **options: body())):
        try:
            module.main(arguments)
        except Parsed as parsed:
            args, = parsed.args
    recipes, inits = ([value] if value is None or isinstance(value, str) else value
                      for value in (getattr(args, "recipe", None), getattr(args, "init", None)))
    sets = getattr(args, "set", None) or []
    wrong = [text for text in sets if text.partition("=")[0] not in known_keys()]
    if wrong:
        raise OneLineError(f"--set {wrong[0]}: no such key")
    for recipe in recipes if recipes != [None] else []:
        for init in inits:
            fresh_recipe(recipe, recipes=RECIPES, say=lambda line: None, init=init, sets=sets)


def bad_commands(page: Page) -> Iterator[str]:
    """Commands in bash blocks that start a program of ours and that it would refuse."""
    for words in page.commands():
        program, arguments = program_of(words) or ("", [])
        try:
            if program:
                require_startable(program, [*map(os.path.expandvars, arguments)])
        except OneLineError as error:
            yield f"{' '.join(words)}: {error}"


CHECKS = (broken_links, missing_files, unlisted_files, missing_commits, bad_words, bad_commands)

if __name__ == "__main__":
    for page in PAGES:
        for mistake in (mistake for check in CHECKS for mistake in check(page)):
            print(f"{page.name}: {mistake}")
