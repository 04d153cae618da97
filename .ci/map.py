"""Write the map of the package into vitinit/README.md: a phrase for each file, and what to read.

    python .ci/map.py

The phrase is the beginning of a module's docstring, and lengths are of lines, rounded to 50. A test
compares the page with what this writes.
"""

import ast
import re
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGE = CHECKOUT / "vitinit"
PAGE = PACKAGE / "README.md"
# The way of an init and of an image, in the order in which they are best read.
READING = (
    "base/keys",
    "mixing/filters",
    "models/attention",
    "models/layers",
    "models/rotary",
    "models/vit",
    "init/impulse",
    "init/impulse_rotary",
    "init/mimetic",
    "init/baseline",
    "data/draw",
    "data/augment",
    "data/sampler",
    "train/optim",
    "train/loop",
    "run",
)
LONGEST = 120  # characters of a line


def phrase(file: Path) -> str:
    """The first sentence of a module's docstring, without its full stop."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    first = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[^.])\. |\.$", first)[0]


def tree(folder: Path, indent: str = "") -> list[str]:
    """A line for each module and each folder of modules."""
    lines = []
    for file in sorted(folder.glob("*.py")):
        if file.name != "__init__.py":
            lines.append(f"{indent}{file.name:<{27 - len(indent)}} {phrase(file)}")
    for below in sorted(path for path in folder.iterdir() if (path / "__init__.py").exists()):
        title = phrase(below / "__init__.py")
        lines.append(f"{indent}{below.name + '/':<{27 - len(indent)}} {title}".rstrip())
        lines += tree(below, indent + "    ")
    return [shortened(line) for line in lines]


def shortened(line: str) -> str:
    """The line up to the last comma, colon or semicolon before it is too long."""
    if len(line) <= LONGEST:
        return line
    return re.split(r"[,;:] [^,;:]*$", line[: LONGEST + 1])[0]


def reading() -> list[str]:
    """A row of a table for each file to read, with its length."""
    rows = ["| file | lines | |", "|---|---|---|"]
    for name in READING:
        file = PACKAGE / f"{name}.py"
        lines = file.read_text(encoding="utf-8").count("\n")
        rounded = max(50, 50 * round(lines / 50))
        rows.append(f"| [{name}]({name}.py) | {rounded} | {phrase(file)} |")
    return rows


def with_part(page: str, title: str, lines: list[str]) -> str:
    """The page with these lines as the body of the section that has the title."""
    head, found, rest = page.partition(f"## {title}\n")
    assert found, f"{PAGE}: has no section '{title}'"
    intro = rest.lstrip("\n").split("\n\n")[0]
    following = rest.find("\n## ")
    tail = rest[following:] if following >= 0 else ""
    return f"{head}{found}\n{intro}\n\n" + "\n".join(lines) + "\n" + tail


def mapped(page: str) -> str:
    page = with_part(page, "What to read", reading())
    return with_part(page, "Every file", ["```text", *tree(PACKAGE), "```"])


if __name__ == "__main__":
    PAGE.write_text(mapped(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
