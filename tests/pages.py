"""A linter for the Markdown pages: each check yields what a page says that is not so."""

import importlib
import inspect
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from vitinit.__main__ import PROGRAMS
from vitinit.base.messages import OneLineError
from vitinit.base.table import find
from vitinit.init import INITS, init_function
from vitinit.models import FAMILIES, model_class
from vitinit.recipe.files import load_recipe, overrides
from vitinit.tasks import TASKS

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPES, PACKAGE = REPOSITORY / "recipes", REPOSITORY / "vitinit"
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", flags=re.DOTALL | re.MULTILINE)
CODE = ("bash", "sh", "python", "py")
# Where each output that a page shows is compared, by how it begins: (page, output) → (file, test).
# fmt: off
COMPARED = {
    ("README.md", "tests/data/cifar10/airplane/0000.jpg"): (
        "test_readme.py", "test_the_model_in_the_box_predicts_what_the_readme_shows"),
    ("README.md", '[("cat", 0.76)'): (
        "test_readme.py", "test_the_model_in_the_box_predicts_what_the_readme_shows"),
    ("README.md", "impulse: VisionTransformer"): (
        "interop/test_page.py", "test_the_readme_shows_a_part_of_that_page"),
    ("vitinit/interop/in_place/your_own_code.md", "VisionTransformer: 12 blocks"): (
        "interop/test_page.py", "test_the_examples_for_ones_own_code_print_what_the_page_shows"),
    ("vitinit/init/README.md", "(2, 3, 65, 65)"): (
        "test_readme.py", "test_the_code_of_a_page_gives_the_shape_that_it_states"),
    ("vitinit/models/README.md", "(2, 10)"): (
        "test_readme.py", "test_the_code_of_a_page_gives_the_shape_that_it_states"),
    ("recipes/exact_convolution.md", "linear     100"): (
        "test_readme.py", "test_the_logits_of_the_note_are_what_its_code_finds"),
    ("vitinit/README.md", "__main__.py"): (
        "test_pages.py", "test_the_map_of_the_package_is_what_its_command_writes"),
    ("vitinit/data/README.md", "left out: "): (
        "data/test_sources.py", "test_the_lines_that_the_page_quotes_are_said")}
# fmt: on
WRITTEN = {"recipe.toml", "report.md", "comparison.md"}  # files that programs write
READERS = {"mine.py"}  # a file of the reader's own
OTHERS = {
    "--standalone",
    "--nproc_per_node",
    "--node_rank",
    "--shutdown_timeout",
    "--shm-size",
    "--signals_to_handle",
    "--max-restarts",
    "--master_addr",
    "--rdzv_backend",
    "--rdzv_endpoint",
}  # options of torchrun and of containers


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

    def section(self, title: str) -> "Page":
        """The part of the page under one heading of the second level."""
        _, found, rest = self.text.partition(f"\n## {title}\n")
        assert found, f"{self.name} has no section {title!r}"
        return Page(self.path, rest.partition("\n## ")[0])

    def commands(self) -> list[list[str]]:
        """The words of each line of the bash blocks; continued lines are joined, no comments."""
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


def card(path: Path) -> str:
    """The card of a recipe: the comments at its head, up to the first empty line."""
    return path.read_text(encoding="utf-8").partition("\n\n")[0]


def read_page(path: Path) -> Page:
    return Page(path, path.read_text(encoding="utf-8"))


PAGES = [
    read_page(path)
    for pattern in ("*.md", "recipes/**/*.md", "vitinit/**/*.md")
    for path in sorted(REPOSITORY.glob(pattern))
]
README = next(page for page in PAGES if page.name == "README.md")


def bad_links(page: Page) -> Iterator[str]:
    """Links to files, and to headings of pages, that do not exist."""
    for link in page.links():
        path, _, anchor = link.partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        if not target.is_relative_to(REPOSITORY) or not target.exists():
            yield f"{link}: no such file"
        elif anchor and anchor not in (page if not path else read_page(target)).anchors():
            yield f"{link}: no such heading"


def bad_files(page: Page) -> Iterator[str]:
    """Files in backticks that do not exist, and Python files beside the page that it omits."""
    tops = {path.name for path in REPOSITORY.iterdir() if path.is_dir()} - {"runs", "data"}
    spans = page.code_spans()
    for code in spans:
        ours = code.endswith((".py", ".md", ".toml")) or code.split("/")[0] in tops and "/" in code
        if (
            ours
            and re.fullmatch(r"[\w./-]+", code)
            and code not in WRITTEN | READERS
            and not any(
                (folder / code).exists() for folder in (page.path.parent, PACKAGE, REPOSITORY)
            )
        ):
            yield f"{code}: no such file"
    if page.path.name == "README.md" and page.path.is_relative_to(PACKAGE):
        listed = {code.rpartition("/")[2] for code in spans} | {"__init__.py"}
        yield from (
            f"{path.name}: not listed"
            for path in page.path.parent.glob("*.py")
            if path.name not in listed
        )


def bad_commits(page: Page) -> Iterator[str]:
    """Commits that the history lacks; nothing where there is no whole history."""
    if (REPOSITORY / ".git").exists() and not (REPOSITORY / ".git" / "shallow").exists():
        for commit in re.findall(r"\bcommit\s+`?([0-9a-f]{7,40})\b", page.prose, re.IGNORECASE):
            if subprocess.run(
                ["git", "-C", REPOSITORY, "cat-file", "-e", f"{commit}^{{commit}}"],
                capture_output=True,
            ).returncode:
                yield f"{commit}: no such commit"


def bad_outputs(page: Page) -> Iterator[str]:
    """Outputs of blocks, of comments that give a value, and of the line `left out`, which no test
    compares, and before which neither "shortened" nor "such as" stands. Lessons are run as wholes.
    """
    if not page.path.is_relative_to(PACKAGE / "programs" / "lessons"):
        values = r"^(.*#.*?) ([\[(][\[(\"\d].*)$"
        outputs = [
            (page.text[: block.start()].rstrip().rpartition("\n\n")[2], block[2])
            for block in FENCED.finditer(page.text)
            if block[1] not in CODE
        ]
        outputs += [
            found
            for language in CODE
            for code in page.blocks(language)
            for found in re.findall(values, code, flags=re.MULTILINE)
        ]
        outputs += [("", code) for code in page.code_spans() if code.startswith("left out: ")]
        for before, output in outputs:
            if not any(
                name == page.name and output.startswith(begin) for name, begin in COMPARED
            ) and not re.search(r"\bshortened\b|\bsuch as$", before):
                yield f"{output.splitlines()[0]}: compared by no test of COMPARED"


def bad_formulas(page: Page) -> Iterator[str]:
    """Formulas that GitHub shows as text: a `$` beside a letter or digit, or a blank within."""
    for paragraph in re.sub(r"`[^`]+`", "", page.prose).split("\n\n"):
        if "$" in re.sub(r"(?<![\w$])(\$\$?)(?=\S)[^$]+(?<=\S)\1(?![\w$])", "", paragraph):
            yield f"{' '.join(paragraph.split())}: a formula that is none"


@cache
def known_options() -> set[str]:
    """The options of all our programs, as their sources name them, and others'."""
    sources = [*PACKAGE.rglob("*.py"), *REPOSITORY.glob("*.py")]
    return OTHERS | {
        word
        for path in sources
        for word in re.findall(r"[\"'](--[a-z][a-z-]*)[\"']", path.read_text("utf-8"))
    }


@cache
def known_keys() -> set[str]:
    """All keys of recipes, with the options of every model, init and task."""
    functions = {
        "model": list(map(model_class, FAMILIES)),
        "init": [
            init_function(init, family) for init, families in INITS.items() for family in families
        ],
        "task": [find(task).takes for task in TASKS.values()],
    }
    tables = {"model.options", "init.options", "task.options"}
    return (
        tables
        | {key for path in RECIPES.glob("*.toml") for key in load_recipe(path).keys}
        | {
            f"{section}.options.{name}"
            for section in functions
            for function in functions[section]
            for name in inspect.signature(function).parameters
        }
    )


def bad_words(page: Page) -> Iterator[str]:
    """In backticks: options that no program has, and keys that no recipe has."""
    sections = "|".join(sorted({key.partition(".")[0] for key in known_keys()}))
    for code in page.code_spans():
        if re.match("python|torchrun|--", code):
            options = re.findall(r"(?:^|\s)(--[a-z][a-z_-]*)(?==|$|\s)", code)
            yield from (
                f"{code}: no option {option}" for option in options if option not in known_options()
            )
        for key in re.findall(rf"(?:^|[\s\"'])((?:{sections})\.[a-z_.]+)(?=$|[\s\"'=])", code):
            if key not in known_keys() and not key.endswith((".py", ".toml", ".json", "tensors")):
                yield f"{key}: no such key"


def bad_lines(page: Page) -> Iterator[str]:
    """Lines of prose that are longer than 120 columns, and no row of a table."""
    for line in page.prose.splitlines():
        if len(line) > 120 and not line.startswith("|"):
            yield f"{line}: {len(line)} columns"


def program_of(words: list[str]) -> tuple[str, list[str]] | None:
    """Which of our programs a command starts, and its arguments: ("train.py", ["--recipe", …])."""
    for place, word in enumerate(words):
        if word in ("train.py", "eval.py"):
            return word, words[place + 1 :]
        if word == "vitinit" and words[place + 1 :]:
            return f"vitinit {words[place + 1]}", words[place + 2 :]
    return None


def bad_commands(page: Page) -> Iterator[str]:
    """Commands in bash blocks whose arguments, recipe, init or overrides a program of ours refuses."""
    for words in page.commands():
        program, arguments = program_of(words) or ("", [])
        try:
            if program:
                args = vars(parser_of(program)([*map(os.path.expandvars, arguments)]))
                lists = {
                    name: value.split(",") if isinstance(value, str) else value or []
                    for name, value in args.items()
                    if name in ("recipe", "init")
                }
                sets = (args.get("set") or []) + [
                    text for _, *sets in args.get("variant") or [] for text in sets
                ]
                for recipe in lists.get("recipe", []):
                    for init in lists.get("init") or [None]:
                        load_recipe(
                            recipe, overrides(init=init, sets=sets, data_dir=args.get("data_dir"))
                        )
        except (OneLineError, ImportError) as error:
            yield f"{' '.join(words)}: {error}"


@cache
def parser_of(program: str):
    """The function `parse_arguments` of a program such as "train.py" or "vitinit figures"."""
    name = program.removesuffix(".py").removeprefix("vitinit ")
    if name not in PROGRAMS:
        raise OneLineError(f"No program {program}")
    return importlib.import_module(find(PROGRAMS[name].main).__module__).parse_arguments


CHECKS = (
    bad_links,
    bad_files,
    bad_commits,
    bad_outputs,
    bad_formulas,
    bad_words,
    bad_lines,
    bad_commands,
)
