"""The board: each record keeps the rules; its numbers are held as those of all pages are."""

import re
from statistics import fmean, stdev

import pytest
from pages import PAGES, RECIPES

from vitinit.programs.shared.groups import experiment
from vitinit.programs.shared.records import read_archive

PAGE = next(page for page in PAGES if page.name == "recipes/board.md")
ROWS = [
    [cell.strip() for cell in row.split("|")[1:-1]]
    for row in re.findall(r"^\| \([a-z]\) .*$", PAGE.text, re.MULTILINE)
]
RECORDS = [row for row in ROWS if row[-1]]
ARCHIVES = sorted((RECIPES / "board").iterdir())


def test_archives_are_small_and_each_is_a_row():
    sizes = [archive.stat().st_size for archive in ARCHIVES]
    assert max(sizes) <= 3e6 and sum(sizes) <= 12e6
    assert [row[0][:3] for row in ROWS] == ["(a)", "(b)", "(c)", "(d)", "(e)"]
    names = [re.search(r"\(board/(.+)\)", row[-1])[1] for row in RECORDS]
    assert sorted(names) == [archive.name for archive in ARCHIVES]


@pytest.mark.parametrize("row", RECORDS, ids=lambda row: row[0][:3])
def test_a_record_keeps_the_rules(row):
    target, _, epochs, _, interval, *_, link = row
    runs = read_archive(RECIPES / "board" / re.search(r"\(board/(.+)\)", link)[1])
    assert [run.seed for run in runs] == [*range(len(runs))] and len(runs) >= 3
    assert all(experiment(run) == experiment(runs[0]) for run in runs)
    assert len({start["git_commit"] for run in runs for start in run.starts}) == 1
    reached = fmean([run.rows[-1]["val_top1"] for run in runs])
    if "steps" in target:  # rule 9
        reached -= float(interval.partition(" ± ")[2])
    if "six views" in interval:  # rule 5; records have one view, and the page says the others
        stated = re.search(
            r"six views .*? have ([^%]*) %, with one ([^%]*)\n", PAGE.text, re.DOTALL
        )
        six, one = (
            [float(word) for word in re.findall(r"\d\d\.\d\d", part)] for part in stated.groups()
        )
        assert one == [run.rows[-1]["val_top1"] for run in runs] and len(six) == len(runs)
        reached = fmean(six)
        half = 4.303 * stdev(six) / len(six) ** 0.5  # of Student's t with two degrees of freedom
        assert interval.startswith(f"{reached:.1f} ± {half:.1f} with six views")
    assert reached >= float(re.search(r"([\d.]+) %", target)[1])
    for run in runs:
        assert run.finished and len(run.rows) == run.epochs == int(epochs)
        assert run.measured("val_top1") == [run.rows[-1]["val_top1"]]  # looked at once
        assert "convmixer" not in run.keys["model.name"] and not run.keys["init.checkpoint"]
        assert run.keys["data.workers"] == 0
        assert {start["device"][:14] for start in run.starts} == {"CPU, 1 threads"}
