"""Write the page of all public names, vitinit/API.md: what each is, and where it says more.

    python .ci/api.py

Public is what a module names in `__all__`, with the methods that a class there defines and says
what they do; those of a model are its parts. A line is the first sentence of a docstring, or of the
comment above a table. A test compares the page with what this writes.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

PACKAGE = Path(__file__).resolve().parents[1] / "vitinit"
PAGE = PACKAGE / "API.md"
INTRO = """\
# The public names

What is here stays as it is for a release, and goes with a warning ([the rule](../CONTRIBUTING.md#releases)); what is
not may change in any commit. Each line is the beginning of a docstring, which has shapes, units and errors; `python
.ci/api.py` writes this page.
"""


def first_sentence(text: str) -> str:
    """Without its full stop, and with marks of Markdown as they are."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.sub(r"([|<*])", r"\\\1", re.split(r"(?<=[^.])\. |\.$", paragraph)[0])


def modules() -> Iterator[tuple[str, ast.Module]]:
    """The modules that have public names, the package itself first."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any("__all__" in names_of(statement) for statement in tree.body):
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            yield ".".join(parts).removesuffix(".__init__"), tree


def names_of(statement: ast.stmt) -> list[str]:
    """The names that a statement gives a value."""
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    return [target.id for target in targets if isinstance(target, ast.Name)]


def comment_above(file: Path, name: str) -> str:
    """The comment above the statement that gives a name its value, as a text."""
    source = file.read_text(encoding="utf-8")
    statement = next(each for each in ast.parse(source).body if name in names_of(each))
    lines: list[str] = []
    for line in reversed(source.splitlines()[: statement.lineno - 1]):
        if line.startswith("# fmt:"):
            continue
        if not line.startswith("#"):
            break
        lines.insert(0, line.removeprefix("#").strip())
    return " ".join(lines)


def row(name: str, text: str, file: Path) -> str:
    place = file.relative_to(PACKAGE).as_posix()
    assert text, f"{name} in {place} has neither a docstring nor a comment above it"
    return f"| `{name}` | {first_sentence(text)} | [{place}]({place}) |"


def rows(module: str) -> Iterator[str]:
    """A row for each public name of a module, followed by those of its methods."""
    space = importlib.import_module(module)
    for name in space.__all__:
        value: Any = getattr(space, name)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            file = Path(inspect.getfile(space))
            yield row(name, comment_above(file, name), file)
            continue
        file = Path(inspect.getfile(inspect.unwrap(value)))  # of a decorator of torch
        yield row(name, inspect.getdoc(value) or "", file)
        methods = {} if inspect.isclass(value) and issubclass(value, nn.Module) else vars(value)
        for method, function in methods.items():
            if inspect.isfunction(function) and not method.startswith("_") and function.__doc__:
                yield row(f"{name}.{method}", function.__doc__, file)


def written() -> str:
    parts = [INTRO]
    for module, tree in modules():
        title = first_sentence(ast.get_docstring(tree) or "")
        parts.append(f"## {module}\n\n{title}\n\n| name | what it is | file |\n|---|---|---|")
        parts[-1] += "".join(f"\n{line}" for line in rows(module)) + "\n"
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
