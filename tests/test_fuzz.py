"""Random recipes and command lines are accepted or refused in one line; other ends are detected."""

from __future__ import annotations

import sys
import time

import pytest

from vitinit.bench import fuzz
from vitinit.bench.fuzz import Case, cases, outcome


def test_random_recipes_and_command_lines_end_in_one_line(capsys):
    wrong = fuzz.bench_fuzz(300, seed=1)
    assert wrong == 0, capsys.readouterr().out


def test_cases_are_determined_by_their_seed():
    one, again, other = (list(cases(60, seed)) for seed in (0, 0, 1))
    assert one == again != other
    assert {case.program for case in one} == set(fuzz.FLAGS)
    assert len({case.recipe for case in one if case.recipe}) > 25


@pytest.mark.parametrize("status, message, kind", [
    (0, "", "accepted"), (0, "warning: odd\n", "several lines"),
    (2, "train.py: a is 3, expected 4\n", "refused"), (1, "train.py: a\n", "several lines"),
    (2, "train.py: a\ntrain.py: b\n", "several lines"), (2, "usage: train.py\n", "several lines"),
    (2, "train.py: \x1b[2J\n", "several lines"), (2, "", "several lines"),
    (2, "train.py: " + "so " * 400 + "\n", "wordy")])
def test_the_outcome_depends_on_status_and_message(tmp_path, status, message, kind):
    def run(arguments: list[str]) -> int:
        sys.stderr.write(message)
        return status
    assert outcome(Case("train.py", ["--set", "a=3"]), run, tmp_path).kind == kind


def test_exceptions_and_hanging_are_detected(tmp_path, monkeypatch):
    def raises(arguments: list[str]) -> int:
        raise KeyError("a")
    found = outcome(Case("train.py", []), raises, tmp_path)
    assert found.kind == "traceback" and found.words == "KeyError: 'a'"
    monkeypatch.setattr(fuzz, "PATIENCE", 1)
    assert outcome(Case("train.py", []), lambda arguments: time.sleep(60), tmp_path).kind == "hung"
