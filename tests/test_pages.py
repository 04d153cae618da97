"""All Markdown pages: links, files, commands and keys exist, rooms list their files, nothing stands twice.

Each check is a function that lists a page's mistakes. The last tests plant one mistake of each kind
and require that it is found.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import os
import re
import shlex
import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from types import ModuleType

import pytest
from pages import PAGES, README, REPOSITORY, Page, program_of

from vitinit import sweep
from vitinit.command_line import Parser
from vitinit.data.datasets import DATA_SETS
from vitinit.data.eval_sets import EVAL_SETS
from vitinit.init import INITS
from vitinit.messages import OneLineError
from vitinit.models import MODELS
from vitinit.recipe.files import RecipeError, parse_override
from vitinit.recipe.resolve import fresh_recipe
from vitinit.recipe.sections import MACHINE_KEYS, SECTIONS

RECIPES = REPOSITORY / "recipes"
PACKAGE = REPOSITORY / "vitinit"
LARGEST_README = 12_000         # bytes
LONG_SENTENCE = 8               # words; a shorter one may stand twice
WRITTEN = {"recipe.toml", "report.md", "comparison.md"}      # files that programs write
names = [page.name for page in PAGES]
by_page = pytest.mark.parametrize("page", PAGES, ids=names)


# ---------------------------------------------------------------------------------------------
# Links and files
# ---------------------------------------------------------------------------------------------


def broken_links(page: Page) -> Iterator[str]:
    """Relative links to files, and to headings of pages, that do not exist."""
    for link in page.links():
        if re.match(r"[a-z]+:", link):               # https: and the like
            continue
        path, _, anchor = link.partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        if not target.is_relative_to(REPOSITORY) or not target.exists():
            yield f"{link}: no such file"
        elif anchor:
            other = page if target == page.path else next(
                (other for other in PAGES if other.path == target), None)
            if other is None or anchor not in other.anchors():
                yield f"{link}: no such heading"


def missing_files(page: Page) -> Iterator[str]:
    """Files of ours in backticks that do not exist.

    A name counts as a file of ours if it ends in .py, .md or .toml, or if it is a path that begins
    with a folder of the repository. It may be relative to the page, the package or the repository.
    """
    tops = {path.name for path in REPOSITORY.iterdir() if path.is_dir()} - {"runs", "data"}
    for code in page.code_spans():
        ours = code.endswith((".py", ".md", ".toml")) or code.split("/")[0] in tops and "/" in code
        if not ours or not re.fullmatch(r"[\w./-]+", code) or code in WRITTEN:
            continue
        if not any((folder / code).exists() for folder in (page.path.parent, PACKAGE, REPOSITORY)):
            yield f"{code}: no such file"


def unlisted_files(page: Page) -> Iterator[str]:
    """Python files of the page's folder that it does not name.

    A folder without a page of its own is listed on the page of the folder that contains it.
    """
    if page.path.name != "README.md" or not page.path.is_relative_to(PACKAGE):
        return
    listed = {code.rpartition("/")[2] for code in page.code_spans()}
    for path in page.path.parent.rglob("*.py"):
        room = next(folder for folder in path.parents if (folder / "README.md").is_file())
        if room == page.path.parent and path.name != "__init__.py" and path.name not in listed:
            yield f"{path.relative_to(page.path.parent)}: not listed"


@by_page
def test_every_link_leads_somewhere(page):
    assert list(broken_links(page)) == []


@by_page
def test_every_file_that_is_named_exists(page):
    assert list(missing_files(page)) == []


@by_page
def test_a_room_lists_its_files(page):
    assert list(unlisted_files(page)) == []


def test_every_room_has_a_page_and_every_page_can_be_reached():
    rooms = {path.parent for path in PACKAGE.glob("*/__init__.py")}
    assert {f"{room.relative_to(REPOSITORY)}/README.md" for room in rooms} <= set(names)
    reached, left = set(), [README.path]
    while left:
        path = left.pop()
        reached.add(path)
        for link in next(page for page in PAGES if page.path == path).links():
            target = (path.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target not in reached and target.exists():
                left.append(target)
    assert {page.path for page in PAGES} <= reached


# ---------------------------------------------------------------------------------------------
# Commands
# ---------------------------------------------------------------------------------------------


class Reached(BaseException):
    """Raised in place of parsing: which parser a program has. Nothing catches it by accident."""

    def __init__(self, parser: argparse.ArgumentParser, arguments: argparse.Namespace | None) -> None:
        self.parser, self.arguments = parser, arguments


@cache
def module_of(program: str) -> ModuleType:
    """The module of a program: "train.py", or "vitinit.figures", whose __main__ is meant."""
    if program.endswith(".py"):                      # it belongs to no package
        spec = importlib.util.spec_from_file_location(f"program_{program[:-3]}", REPOSITORY / program)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    if importlib.util.find_spec(program) is None:
        raise RecipeError(f"there is no program {program}")
    module = importlib.import_module(program)
    return importlib.import_module(f"{program}.__main__") if hasattr(module, "__path__") else module


def parse(program: str, arguments: list[str], *, only_parser: bool = False) -> Reached:
    """Parse arguments by the program's own parser, without starting it; its errors are OneLineError."""
    real = Parser.parse_args

    def stop(parser: Parser, given: list[str] | None = None, namespace: object = None) -> None:
        raise Reached(parser, None if only_parser else real(parser, given))
    module = module_of(program)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Parser, "parse_args", stop)
        # Programs print a parser's error and return a status; here it is to be seen.
        patched.setattr(module, "run_program", lambda name, body, **options: body())
        try:
            module.main(arguments)
        except Reached as reached:
            return reached
    raise AssertionError(f"{program} has no parser")


def refused(program: str, arguments: list[str]) -> str | None:
    """Why a command could not start as far as its arguments and recipe go; None: it could."""
    arguments = [*map(os.path.expandvars, arguments)]
    try:
        args = parse(program, arguments).arguments
        if program == "vitinit.sweep":
            data = [] if "--data-dir" in arguments else ["--data-dir", "data"]
            status = sweep.main([*arguments, *data, "--dry-run"])
            return None if status == 0 else f"vitinit.sweep ends with status {status}"
        recipe, sets = getattr(args, "recipe", None), getattr(args, "set", [])
        if recipe is None:                           # a run or a checkpoint, which brings its recipe
            kept = MACHINE_KEYS if program == "train.py" else module_of(program).EVALUATION_KEYS \
                if program == "eval.py" else ()
            wrong = [text for text in sets if parse_override(text).key not in kept]
            return f"--set {wrong[0]}" if wrong else None
        inits = args.init if isinstance(getattr(args, "init", None), list) else [getattr(args, "init", None)]
        for name in recipe if isinstance(recipe, list) else [recipe]:
            for init in inits:
                fresh_recipe(name, recipes=RECIPES, say=lambda line: None, init=init, sets=sets)
    except OneLineError as error:
        return str(error)
    return None


def bad_commands(page: Page) -> Iterator[str]:
    """Commands in bash blocks that start a program of ours and that it would refuse."""
    for words in page.commands():
        if found := program_of(words):
            if why := refused(*found):
                yield f"{' '.join(words)}: {why}"


def bad_mentions(page: Page) -> Iterator[str]:
    """Commands in backticks, often shortened, whose program, subcommand or options do not exist.

    A span that is an option of some program, such as `--jobs 2`, is checked against all of them.
    """
    for code in page.code_spans():
        if "'" in code and code.count("'") % 2 or not re.match(r"(python|torchrun|--\w)", code):
            continue
        words = shlex.split(code)
        options = {word.partition("=")[0] for word in words if re.match(r"--\w", word)}
        try:
            if found := program_of(words):
                help_text = help_of(found[0], found[1][:1])
                options = {word.partition("=")[0] for word in found[1] if re.match(r"--\w", word)}
            elif code.startswith("--"):
                help_text = all_help()
            else:
                continue
        except OneLineError as error:
            yield f"{code}: {error}"
            continue
        yield from (f"{code}: no option {option}" for option in sorted(options)
                    if not re.search(rf"{option}\b(?!-)", help_text))


def help_of(program: str, arguments: list[str]) -> str:
    """The help of a program, or of its subcommand if the first of `arguments` can be one."""
    commands = commands_of(program)
    if not commands or not arguments or not re.fullmatch(r"[a-z]+", arguments[0]):
        return parse(program, [], only_parser=True).parser.format_help()
    if arguments[0] not in commands:
        raise RecipeError(f"{program} has no command {arguments[0]}")
    return commands[arguments[0]].format_help()


def commands_of(program: str) -> dict[str, argparse.ArgumentParser]:
    """The subcommands of a program, such as the figures of vitinit.figures; {} if it has none."""
    parser = parse(program, [], only_parser=True).parser
    return next((action.choices for action in parser._actions
                 if isinstance(action, argparse._SubParsersAction)), {})


# Options of other programs that the pages name: torchrun's, and that of containers.
OTHERS = ("--standalone", "--node_rank", "--shutdown_timeout", "--signals_to_handle", "--shm-size")


@cache
def all_help() -> str:
    """The help of every program of ours, and others' options that the pages name."""
    programs = [f"vitinit.{path.stem if path.suffix else path.name}"
                for path in [*PACKAGE.glob("*.py"), *(path.parent for path in PACKAGE.glob("*/__main__.py"))]
                if path.is_dir() or "run_program(" in path.read_text("utf-8") and path.stem != "command_line"]
    texts = [" ".join(OTHERS)]
    for program in ["train.py", "eval.py", *programs]:
        texts += [help_of(program, [command]) for command in ["", *commands_of(program)]]
    return "\n".join(texts)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """Commands are tried in an empty folder, as a job of a SLURM array."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")


@by_page
def test_every_command_could_start(page):
    assert list(bad_commands(page)) == []


@by_page
def test_every_command_in_a_sentence_has_these_options(page):
    assert list(bad_mentions(page)) == []


def test_every_program_is_shown_in_a_command():
    shown = {found[0] for page in PAGES for words in page.commands() if (found := program_of(words))}
    assert shown >= {"train.py", "eval.py", "vitinit.sweep", "vitinit.compare", "vitinit.predict",
                     "vitinit.export", "vitinit.figures", "vitinit.bench"}


# ---------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, title, entries", [
    ("recipes/README.md", "All recipes", {path.stem for path in RECIPES.glob("*.toml")}),
    ("vitinit/init/README.md", "The inits", set(INITS)),
    ("vitinit/models/README.md", "The names", set(MODELS)),
    ("vitinit/data/README.md", "The data sets", {*DATA_SETS, *EVAL_SETS}),
    ("vitinit/figures/README.md", "The figures", set(commands_of("vitinit.figures"))),
])
def test_a_table_is_complete(name, title, entries):
    """Each row of the section's tables begins with what it is about; nothing is missing or invented."""
    section = next(page for page in PAGES if page.name == name).section(title)
    rows = [line.split("|") for line in section.text.splitlines() if line.startswith("|")]
    column = 2 if title == "The names" else 1
    found = {word for row in rows for word in re.findall(r"`(\w+)`", row[column])}
    assert found == entries


# ---------------------------------------------------------------------------------------------
# Keys
# ---------------------------------------------------------------------------------------------


def known_keys() -> set[str]:
    """All keys of recipes, tables included, with the options of every model and init."""
    def fields(kind: type, prefix: str) -> Iterator[str]:
        for name, kind in typing.get_type_hints(kind).items():
            yield f"{prefix}.{name}"
            if dataclasses.is_dataclass(kind):
                yield from fields(kind, f"{prefix}.{name}")
    keys = {key for section, kind in SECTIONS.items() for key in fields(kind, section)}
    for section, functions in (("model", [family for family, _ in MODELS.values()]),
                               ("init", [init for row in INITS.values() for init in row.values()])):
        for function in functions:
            keys |= {f"{section}.options.{name}" for name, parameter in
                     inspect.signature(function).parameters.items()
                     if parameter.kind is parameter.KEYWORD_ONLY}
    return keys


def bad_keys(page: Page) -> Iterator[str]:
    """Keys in backticks, with or without a value, that no recipe has, or whose value none accepts."""
    keys, sections = known_keys(), "|".join(SECTIONS)
    for code in page.code_spans():
        for word in re.findall(rf"(?:^|[\s\"'])((?:{sections})\.[a-z_.]+(?:=[^\s\"']+)?)(?=$|[\s\"'])", code):
            key, _, value = word.partition("=")
            if key.endswith((".py", ".toml", ".json", ".safetensors")):      # a file's name
                continue
            if key not in keys:
                yield f"{word}: no such key"
            elif value and not any(accepted(name, init, word) for name, init in RECIPES_AND_INITS):
                yield f"{word}: no recipe accepts this value"


# The recipes by which values in sentences are tried: one of each family, with every init it has.
RECIPES_AND_INITS = [(recipe, init)
                     for recipe in ("deit_small", "swin_tiny", "mixer_b16", "convmixer_768_32",
                                    "cifar10_simple_vit")
                     for init in (None, *INITS)]


def accepted(recipe: str, init: str | None, change: str) -> bool:
    if re.fullmatch(r".*=(…|NAME|N|K|X)", change):   # stands for a value
        return True
    try:
        fresh_recipe(recipe, recipes=RECIPES, say=lambda line: None, init=init, sets=[change])
    except OneLineError:
        return False
    return True


@by_page
def test_every_key_is_one(page):
    assert list(bad_keys(page)) == []


# ---------------------------------------------------------------------------------------------
# Length and repetition
# ---------------------------------------------------------------------------------------------


def said_twice(pages: Iterable[Page]) -> list[str]:
    """Sentences of at least LONG_SENTENCE words that stand twice, on one page or on two."""
    places = defaultdict(list)
    for page in pages:
        for sentence in page.sentences():
            words = re.findall(r"[\w.,%/+-]+", sentence.lower())
            if len(words) >= LONG_SENTENCE:
                places[" ".join(words)].append(page.name)
    return [f"{', '.join(found)}: {sentence}" for sentence, found in places.items() if len(found) > 1]


def too_long(page: Page) -> bool:
    return len(page.text.encode("utf-8")) > LARGEST_README


def test_the_readme_takes_three_minutes():
    assert not too_long(README)


def test_no_sentence_stands_twice():
    assert said_twice(PAGES) == []


# ---------------------------------------------------------------------------------------------
# The checks find mistakes
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check, text, found", [
    (broken_links, "[a](recipes/nowhere.md)", "recipes/nowhere.md: no such file"),
    (broken_links, "[a](recipes/README.md#nowhere)", "recipes/README.md#nowhere: no such heading"),
    (broken_links, "![a\nb](../outside.png)", "../outside.png: no such file"),
    (broken_links, "## A b, c!\n\n[a](#a-b-c) [d](#a-b)", "#a-b: no such heading"),
    (missing_files, "in `vitinit/nowhere.py`", "vitinit/nowhere.py: no such file"),
    (missing_files, "in `vitinit/nowhere`", "vitinit/nowhere: no such file"),
    (missing_files, "in `init/impulse.py`, `nowhere.py`", "nowhere.py: no such file"),
    (bad_commands, "```bash\ntorchrun train.py --recipe quickstrt\n```", "quickstrt"),
    (bad_commands, "```bash\ntorchrun train.py --recipe quickstart \\\n    --set optim.base=1\n```",
     "optim.base"),
    (bad_commands, "```bash\npython train.py --recipe quickstart --init default "
     "--set init.options.target_mass=0.3\n```", "target_mass"),
    (bad_commands, "```bash\npython eval.py runs/a --set optim.base_lr=1\n```", "optim.base_lr"),
    (bad_commands, "```bash\npython -m vitinit.nowhere a\n```", "no program vitinit.nowhere"),
    (bad_commands, "```bash\npython -m vitinit.compare --nowhere a\n```", "--nowhere"),
    (bad_commands, "```bash\npython -m vitinit.figures maps --recipe deit_tiny --init default "
     "--set optim.x=1 --out a.png\n```", "optim.x"),
    (bad_commands, "```bash\npython -m vitinit.sweep --recipe quickstart --init nowhere --seeds 0\n```",
     "status 2"),
    (bad_mentions, "`python -m vitinit.figures nowhere`", "no command nowhere"),
    (bad_mentions, "`python -m vitinit.export RUN --ot run`", "no option --ot"),
    (bad_mentions, "with `--job 2`", "no option --job"),
    (bad_keys, "with `optim.base_rl`", "optim.base_rl: no such key"),
    (bad_keys, "with\n`--set init.options.target_mas=1`", "init.options.target_mas=1: no such key"),
    (bad_keys, "with `optim.base_lr=fast`", "optim.base_lr=fast: no recipe accepts this value"),
])
def test_a_planted_mistake_is_found(check, text, found):
    mistakes = list(check(Page(README.path, text)))
    assert len(mistakes) == 1 and found in mistakes[0]


def test_an_unlisted_file_a_long_page_and_a_repetition_are_found():
    room = Page(PACKAGE / "runs" / "README.md", "`lock.py` and `folder.py`")
    found = list(unlisted_files(room))
    assert "resume.py: not listed" in found and "lock.py: not listed" not in found
    assert too_long(Page(README.path, "ä" * (LARGEST_README // 2 + 1)))
    assert not too_long(Page(README.path, "ä" * (LARGEST_README // 2)))
    said = "One two three four five `six` seven\neight."
    once = Page(README.path, f"{said} And so on.\n\n| {said} |\n\n```bash\n{said}\n```\n")
    again = Page(room.path, f"1. First of all. {' '.join(said.split())}")
    assert said_twice([once]) == [] and len(said_twice([once, again])) == 1
