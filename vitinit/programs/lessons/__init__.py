"""Lessons: Markdown pages whose Python blocks run. README.md in this folder lists them."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# Fifty test images of CIFAR-10, five of each class; in the repository the tests have them.
PHOTOGRAPHS = FOLDER / "cifar10"
if not PHOTOGRAPHS.is_dir():
    PHOTOGRAPHS = FOLDER.parents[2] / "tests" / "data" / "cifar10"
PICTURES = "images"  # folder of the pictures, relative to the pages


def lesson_paths() -> dict[int, Path]:
    """The page of each lesson by its number, in order: pages are called <number>_<name>.md."""
    pages = {int(path.name.partition("_")[0]): path for path in FOLDER.glob("[0-9]*_*.md")}
    return dict(sorted(pages.items()))
