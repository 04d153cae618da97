"""Where a program may write, asked before it works for minutes, and how it hands over a text."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from ...base.files import FileError, in_one_line, is_of_a_run, open_handle, write_text_atomically

STDOUT = Path("-")  # the name of the standard output among files

# The files that programs write, by the end of their names: what each begins with.
KINDS = {
    ".json": rb"\s*[\[{]",
    ".jsonl": rb"\s*\{",
    ".ipynb": rb"\s*\{",
    ".html": rb"\s*<",
    ".md": rb"#",
    ".png": rb"\x89PNG\r\n",
    ".tar.xz": rb"\xfd7zXZ\0",
    ".pt2": rb"PK",
    ".safetensors": rb"(?s:.{8})\{",
    ".npz": rb"PK",
    ".csv": rb"path,labels?,(probability|0,)",
}


def require_replaceable(path: Path, *suffixes: str) -> None:
    """Raise FileError unless a program may write a file whose name ends so, in place of any there:
    one of the same kind and none of a run's own; or a pipe, a terminal, a device.
    """
    problem = _problem_at(path, suffixes)
    if problem:
        raise FileError(f"{path}: {problem}")


def _problem_at(path: Path, suffixes: Iterable[str]) -> str:
    """Why a program may not write a file whose name ends so; "" if it may."""
    if path.is_dir():
        return "is a folder; expected a file"
    if not path.parent.is_dir():
        return "expected a file in a folder that exists"
    handle = open_handle(path)
    if handle is not None:
        with in_one_line(path):
            os.fstat(handle)  # an error now, and not after the work
        return ""
    is_there = path.exists()
    if is_there and not path.is_file():
        return ""
    target = Path(os.path.realpath(path))
    if is_of_a_run(target) and (is_there or (target.parent / "recipe.toml").exists()):
        return "is one of a run's own files, which only its training writes"
    suffix = next(filter(target.name.lower().endswith, suffixes), None)
    if suffix is None:
        return f"expected a name that ends in {' or '.join(suffixes)}"
    if is_there:
        with in_one_line(path, "read"), open(target, "rb") as file:
            start = file.read(64)
        if start and not re.match(KINDS[suffix], start):
            kind = f"{suffix} file as this program writes"
            return f"is there already and no {kind}, so it stays as it is"
    return ""


def require_no_input(path: Path, inputs: Iterable[str]) -> None:
    """Raise FileError if there is a file at `path` that is an input, or that an input folder holds:
    pictures, weights, .json and lists; a run's own files `require_replaceable` refuses.
    """
    target = Path(os.path.realpath(path))
    if not target.is_file():
        return
    for place in map(Path, inputs):
        if _reads(place, target):
            raise FileError(f"{path}: this command reads {place}, so that file stays as it is")


def _reads(place: Path, target: Path) -> bool:
    """Whether a command that reads what is at `place` may read the file `target`."""
    for file in (place, place.parent):  # the second: of runs.tar.xz/pattern
        if file.is_file() and file.samefile(target):
            return True
    if not place.is_dir() or (place / "recipe.toml").exists():
        return False
    is_read = target.suffix.lower() in (".png", ".json", ".csv", ".safetensors")
    return is_read and target.is_relative_to(os.path.realpath(place))


def deliver(text: str, path: Path | None) -> None:
    """Print a text, or write it to the file of an `Output` and print that; None: neither."""
    if path == STDOUT:
        print(text, end="", flush=True)
    elif path is not None:
        write_text_atomically(text, path)
        print(f"wrote {path}", flush=True)
