"""Write how far our code is from what tests hold it against, and put that on its page.

    python .ci/equalities.py

Runs the tests that take the fixture `held_against`, of which tests/equality.py tells, and writes
tests/equalities.json: the versions that they ran with, and of each test how many cases it compared
and a bound of the largest difference. From it the columns "cases" and "largest difference" of
recipes/we_equal_deit.md are filled. A test compares both, and each of those tests its own numbers.
"""

import json
import math
import re
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
TESTS = CHECKOUT / "tests"
RECORD = TESTS / "equalities.json"
PAGE = CHECKOUT / "recipes" / "we_equal_deit.md"
LIBRARIES = {
    "torch": "torch",
    "torchvision": "torchvision",
    "Pillow": "pillow",
    "NumPy": "numpy",
    "scikit-learn": "scikit-learn",
}
ROW = re.compile(
    r"^(\| .* \| .* \|) [^|]*? \| [^|]*? (\| \[`(\w+)`\]\(\.\./tests/(.*)\) \|)$", re.MULTILINE
)


class Recorder:
    """A plugin of pytest: runs those tests alone, and keeps what each of them recorded."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, float]] = {}
        self.skipped: set[str] = set()
        self.failed: set[str] = set()  # before they had anything to record

    def pytest_collection_modifyitems(self, items) -> None:
        items[:] = [item for item in items if "held_against" in item.fixturenames]

    def pytest_runtest_logreport(self, report) -> None:
        test = report.nodeid.removeprefix("tests/")
        properties = dict(report.user_properties)
        if "held_against" in properties:
            self.found[test] = properties["held_against"]
        elif report.skipped:
            self.skipped.add(test)
        elif report.failed:
            self.failed.add(test)


def measured() -> dict[str, dict]:
    """What equalities.json is to hold; of a test that is skipped here, what it holds already."""
    import pytest

    recorder = Recorder()
    files = [path for path in TESTS.rglob("test_*.py") if "held_against" in path.read_text("utf-8")]
    pytest.main(["-p", "no:cacheprovider", *map(str, sorted(files))], plugins=[recorder])
    if recorder.failed:
        sys.exit(f"nothing is written, as these failed: {sorted(recorder.failed)}")
    before = json.loads(RECORD.read_text("utf-8"))["tests"]
    kept = {test: value for test, value in before.items() if test in recorder.skipped}
    versions = {name: version(package) for name, package in LIBRARIES.items()}
    return {"versions": versions, "tests": dict(sorted((recorder.found | kept).items()))}


def as_json(record: dict[str, dict]) -> str:
    """One line per test."""
    lines = [
        f"    {json.dumps(test, ensure_ascii=False)}: {json.dumps(value)}"
        for test, value in record["tests"].items()
    ]
    versions = json.dumps(record["versions"])
    return f'{{\n"versions": {versions},\n"tests": {{\n' + ",\n".join(lines) + "\n}\n}\n"


def of_functions(record: dict[str, dict]) -> dict[tuple[str, str], tuple[int, float]]:
    """(file, function) → the cases of all its parameters, and the largest bound."""
    found: dict[tuple[str, str], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for test, (cases, bound) in record["tests"].items():
        file, _, function = test.partition("[")[0].partition("::")
        before = found[file, function]
        found[file, function] = before[0] + cases, max(before[1], bound)
    return dict(found)


def shown(bound: float) -> str:
    """Such as 0, 1.95 and 1e-6."""
    return f"1e{round(math.log10(bound))}" if 0 < bound < 1 else f"{bound:g}"


def rows(page: str) -> set[tuple[str, str]]:
    """(file, function) of each row of the page's tables."""
    return {(found[4], f"test_{found[3]}") for found in ROW.finditer(page)}


def filled(page: str, record: dict[str, dict]) -> str:
    """The page with the numbers of the record in its rows, and its versions."""
    functions = of_functions(record)

    def row(found: re.Match[str]) -> str:
        cases, bound = functions.get((found[4], f"test_{found[3]}"), (0, 0.0))
        return f"{found[1]} {cases:,} | {shown(bound)} {found[2]}"

    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    page = re.sub(r"(?<=\nRecorded with )[^;]*", versions, page)
    return ROW.sub(row, page)


if __name__ == "__main__":
    record = measured()
    RECORD.write_text(as_json(record), encoding="utf-8")
    PAGE.write_text(filled(PAGE.read_text("utf-8"), record), encoding="utf-8")
    missing = rows(PAGE.read_text("utf-8")) ^ of_functions(record).keys()
    if missing:
        sys.exit(f"on the page or recorded, and not both: {sorted(missing)}")
