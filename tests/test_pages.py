"""All Markdown pages pass the linter of pages.py, which finds a planted mistake of each kind."""

import importlib
import inspect
import re
import runpy

import pytest
from pages import (
    CHECKS,
    COMPARED,
    PACKAGE,
    PAGES,
    README,
    RECIPES,
    REPOSITORY,
    Page,
    bad_commands,
    bad_commits,
    bad_files,
    bad_formulas,
    bad_lines,
    bad_links,
    bad_outputs,
    bad_words,
    program_of,
)

from vitinit.__main__ import PROGRAMS
from vitinit.data.datasets import DATA_SETS, EVAL_SETS
from vitinit.init import INITS
from vitinit.models import MODELS


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """Commands are tried in an empty folder, as a job of a SLURM array."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_what_a_page_says_is_so(page):
    assert [mistake for check in CHECKS for mistake in check(page)] == []


def test_every_folder_has_a_page_that_can_be_reached_and_every_program_is_shown():
    own = {path.parent / "README.md" for path in PACKAGE.glob("*/__init__.py")}
    assert own <= {page.path for page in PAGES}
    linked = {
        (page.path.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in page.links()
    }
    assert {page.path for page in PAGES} - {README.path} <= linked
    shown = {
        found[0] for page in PAGES for words in page.commands() if (found := program_of(words))
    }
    assert shown >= {"train.py", "eval.py"} | {f"vitinit {name}" for name in PROGRAMS} - {
        "vitinit train",
        "vitinit eval",
    }


@pytest.mark.parametrize(
    "name, title, entries",
    [
        ("recipes/README.md", "All recipes", {path.stem for path in RECIPES.glob("*.toml")}),
        ("vitinit/init/README.md", "The inits", set(INITS)),
        ("vitinit/models/README.md", "The names", set(MODELS)),
        ("vitinit/data/README.md", "The data sets", {*DATA_SETS, *EVAL_SETS}),
    ],
)
def test_a_table_is_complete(name, title, entries):
    section = next(page for page in PAGES if page.name == name).section(title)
    rows = [line.split("|") for line in section.text.splitlines() if line.startswith("|")]
    column = 2 if title == "The names" else 1
    assert {word for row in rows for word in re.findall(r"`(\w+)`", row[column])} == entries


def test_each_output_that_is_compared_is_on_its_page_and_its_test_is_there():
    for (name, output), (file, test) in COMPARED.items():
        assert output in next(page for page in PAGES if page.name == name).text
        assert f"\ndef {test}(" in (REPOSITORY / "tests" / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "check, text, found",
    [
        (bad_links, "[a](recipes/nowhere.md)", "recipes/nowhere.md: no such file"),
        (bad_links, "[a](recipes/README.md#nowhere)", "recipes/README.md#nowhere: no such heading"),
        (bad_links, "![a\nb](../outside.png)", "../outside.png: no such file"),
        (bad_links, "## A b, c!\n\n[a](#a-b-c) [d](#a-b)", "#a-b: no such heading"),
        (bad_files, "in `vitinit/nowhere`", "vitinit/nowhere: no such file"),
        (bad_files, "in `init/impulse.py`, `nowhere.py`", "nowhere.py: no such file"),
        pytest.param(
            bad_commits,
            "as of commit\n`0123456`",
            "0123456: no such commit",
            marks=pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="no history"),
        ),
        (
            bad_commands,
            "```bash\ntorchrun train.py --recipe quickstart \\\n    --set optim.base=1\n```",
            "optim.base",
        ),
        (bad_commands, "```bash\nvitinit nowhere a\n```", "No program"),
        (bad_commands, "```bash\nvitinit compare --nowhere a\n```", "--nowhere"),
        (
            bad_commands,
            "```bash\nvitinit sweep --recipe quickstart --init nowhere --seeds 0\n```",
            "nowhere",
        ),
        (bad_outputs, "Its output:\n\n```text\nloss 1.5\n```", "loss 1.5: compared by no test"),
        (bad_outputs, "Shortened:\n\n```py\nf()\n```\n\n```\nloss 1.5\n```", "loss 1.5: compared"),
        (
            bad_outputs,
            "```py\nf(x)    # such as [1, 2]\ng(x)    # pairs: [(1, 2)]\n```",
            "[(1, 2)]: ",
        ),
        (bad_outputs, "and `left out: 2 .heic`", "left out: 2 .heic: compared by no test"),
        (bad_formulas, "of $x$, and of $ y$", "of $ y$: a formula that is none"),
        (bad_words, "with `--job 2`", "no option --job"),
        (
            bad_words,
            "with\n`--set init.options.target_mas=1`",
            "init.options.target_mas: no such key",
        ),
        (bad_lines, f"| {120 * 'a'} |\n{121 * 'b'}\n```\n{121 * 'c'}\n```", "bbb: 121 columns"),
    ],
)
def test_a_planted_mistake_is_found(check, text, found):
    (mistake,) = check(Page(README.path, text))
    assert found in mistake


def test_an_unlisted_file_is_found():
    found = list(bad_files(Page(PACKAGE / "runs" / "README.md", "`lock.py` and `folder.py`")))
    assert "trained.py: not listed" in found and "lock.py: not listed" not in found


API = runpy.run_path(str(REPOSITORY / ".ci" / "api.py"))


def test_the_page_of_public_names_is_what_its_command_writes():
    page = (PACKAGE / "API.md").read_text(encoding="utf-8")
    assert API["written"]() == page, "python .ci/api.py writes it"
    assert {"vitinit", "vitinit.init", "vitinit.models"} <= {name for name, _ in API["modules"]()}


def test_a_public_function_says_what_it_takes_and_raises():
    """Its docstring, or that of the function that it sends the reader to."""
    for module, _ in API["modules"]():
        space = importlib.import_module(module)
        for name in space.__all__:
            function = getattr(space, name)
            if not inspect.isfunction(function) or ": see `" in function.__doc__:
                continue
            takes = set(inspect.signature(function).parameters)
            assert takes <= set(re.findall(r"\w+", function.__doc__)), f"{module}.{name}"
            if re.search(r"^\s+raise ", inspect.getsource(function), re.MULTILINE):
                assert re.search(r"[Rr]aises|Error", function.__doc__), f"{module}.{name}"


def test_the_map_of_the_package_is_what_its_command_writes(repository):
    command = runpy.run_path(str(repository / ".ci" / "map.py"))
    page = (repository / "vitinit" / "README.md").read_text(encoding="utf-8")
    assert command["mapped"](page) == page, "python .ci/map.py writes it"
    assert command["mapped"](page.replace("base/keys.py) | 50", "base/keys.py) | 350")) == page
