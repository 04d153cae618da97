"""Imports have one direction: the rooms of the house, in the order in which one can build them."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import vitinit
from vitinit.base.table import find

PACKAGE = Path(vitinit.__file__).parent
# Room → the rooms that it may import, all of which stand above it. A room is a folder of the
# package, or a file beside these; "vitinit" is the package's own __init__.py. The core:
BELOW = {
    "base": "",  # which everything may import
    "vitinit": "base",
    "__main__": "base",
    "models": "base",
    "mixing": "base models",
    "init": "base mixing models",  # but not data, train or recipe
    "data": "base",  # but not models
    "train": "base",  # but not models, data or init
    "tasks": "base init models train",
    "recipe": "base data init models tasks train",  # puts the sections together
    "runs": "base data init mixing models recipe tasks train",
    "run": "base data init models recipe runs tasks train",
}
CORE = " ".join(BELOW)
BELOW["watch"] = CORE  # what surrounds the core, and what nothing in it imports
BELOW["interop"] = f"{CORE} watch"
BELOW["programs"] = f"{CORE} watch interop"
# Where a string may name a module: tables of what is chosen by name, see base/table.py.
TABLES = {
    "vitinit": "HOMES",
    "vitinit.__main__": "PROGRAMS",
    "vitinit.init": "INITS IN_PLACE",
    "vitinit.models": "FAMILIES",
    "vitinit.runs.checkpoint": "READERS",
    "vitinit.runs.watching": "WATCHERS",
    "vitinit.tasks": "TASKS",
    "vitinit.programs.fit.findings": "PROGRAMS",
}


def named(path: Path) -> str:
    """The name of a module of the package, such as vitinit.data.draw."""
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


TREES = {named(path): ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}
PACKAGES = {named(path) for path in PACKAGE.rglob("__init__.py")}


def imported(name: str, nodes: Iterable[ast.AST]) -> set[str]:
    """The modules of the package that these parts of a module import."""
    modules = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = name.split(".") + [""] * (name in PACKAGES)  # of a package, itself
            base = (
                ".".join([*parents[: -node.level], *filter(None, [node.module])])
                if node.level
                else node.module
            )
            modules |= {
                inside if (inside := f"{base}.{alias.name}") in TREES else base
                for alias in node.names
            }
    return {module for module in modules if module in TREES} - {name}


IMPORTS = {name: imported(name, ast.walk(tree)) for name, tree in TREES.items()}


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else name


def test_every_room_imports_only_the_rooms_above_it():
    """No circle either: a room that stands below another is not in that one's list."""
    above: set[str] = set()
    for title, names in BELOW.items():
        assert set(names.split()) <= above, title
        above.add(title)
    for name in TREES:
        allowed = {room(name), *BELOW[room(name)].split()}
        wrong = [module for module in IMPORTS[name] if room(module) not in allowed]
        assert not wrong, f"{name} imports {', '.join(wrong)}"


def test_the_ways_in_begin_before_they_import_torch():
    """And only where they are run, which they are not in a worker that imports them again."""
    begin = [
        node
        for node in ast.walk(TREES["vitinit.base.begin"])
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    needed = ("codecs", "ctypes", "os", "signal", "sys")
    assert [*map(ast.unparse, begin)] == [f"import {name}" for name in needed]
    for name in ("train.py", "eval.py"):
        tree = ast.parse((PACKAGE.parent / name).read_text("utf-8"))
        first = next(node for node in tree.body if not isinstance(node, ast.Expr))
        assert ast.unparse(first) == (
            "if __name__ == '__main__':\n    from vitinit.base.begin import begin\n    begin()"
        )


def test_no_program_imports_another():
    """A program is a file or a folder in programs/; what several use is in programs/shared."""
    for name, modules in IMPORTS.items():
        own = name.split(".")[:3]
        wrong = [
            module
            for module in modules
            if room(module) == "programs"
            and module.split(".")[:3] not in (own, ["vitinit", "programs", "shared"])
        ]
        assert not wrong, f"{name} imports {', '.join(wrong)}"


def test_a_plain_start_imports_only_what_it_needs():
    """torchvision imports the compiler, and takes as long as torch; others are extras, or large."""
    code = "import vitinit.run, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert "vitinit.run" in loaded
    assert not loaded & {
        "torchvision",
        "torch._dynamo",
        "triton",
        "sympy",
        "matplotlib",
        "scipy",
        "safetensors",
    }


def test_no_modules_import_each_other_in_a_circle():
    """Also not by what a function imports when it is called."""
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def modules_in_strings(tree: ast.AST) -> Iterator[ast.Constant]:
    """The strings that name a module of the package, as a whole or as ".module:name"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            module, _, name = node.value.partition(":")
            if (
                re.fullmatch(r"(vitinit)?(\.\w+)+", module)
                and (name or module in TREES)
                and (f"vitinit{module.removeprefix('vitinit')}" in TREES)
            ):
                yield node


def test_modules_are_imported_by_statements_or_by_tables_and_by_nothing_else():
    for name, tree in TREES.items():
        rows = [
            part
            for node in tree.body
            if isinstance(node, (ast.Assign, ast.AnnAssign))
            for target in getattr(node, "targets", [getattr(node, "target", None)])
            if getattr(target, "id", "") in TABLES.get(name, "").split()
            for part in ast.walk(node)
        ]
        for node in modules_in_strings(tree):
            assert node in rows, f"{name}:{node.lineno} names {node.value}"
        calls = [
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")
        ]
        assert not calls or name == "vitinit.base.table", f"{name}:{calls} imports by a call"


def test_each_row_of_a_table_is_there():
    for name, tables in TABLES.items():
        for table in tables.split():
            rows = getattr(importlib.import_module(name), table)
            for row in rows.values():
                for place in row.values() if isinstance(row, dict) else [row]:
                    place = getattr(place, "main", place)
                    assert callable(find(place)), f"{name}.{table}: {place}"
