"""What tests found of equality with DeiT and others is written down, and is what its page says."""

import ast
import json
import re
import runpy

import numpy as np
import pytest
import torch
from equality import RECORD, HeldAgainst, require_recorded
from pages import RECIPES, REPOSITORY

COMMAND = runpy.run_path(str(REPOSITORY / ".ci" / "equalities.py"))
PAGE = (RECIPES / "we_equal_deit.md").read_text(encoding="utf-8")
RECORDED = json.loads(RECORD.read_text(encoding="utf-8"))


def test_the_page_has_the_numbers_of_the_record_and_a_row_for_each_test_that_takes_part():
    assert COMMAND["filled"](PAGE, RECORDED) == PAGE, "python .ci/equalities.py writes them"
    taking_part = {
        (str(path.relative_to(REPOSITORY / "tests")), node.name)
        for path in (REPOSITORY / "tests").glob("*/test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and "held_against" in [argument.arg for argument in node.args.args]
    }
    assert COMMAND["rows"](PAGE) == COMMAND["of_functions"](RECORDED).keys() == taking_part
    rows = re.findall(r"^\|.*\]\(\.\./tests/.*\|$", PAGE, flags=re.MULTILINE)
    assert len(rows) == len(taking_part) >= 50  # each is read as a row


@pytest.mark.parametrize("old, new", [(r"\| [\d,]+ \| 0 \|", "| 1 | 0 |"), ("torch 2", "torch 1")])
def test_a_number_that_is_changed_on_the_page_is_found(old, new):
    text = re.sub(old, new, PAGE, count=1)
    assert text != PAGE == COMMAND["filled"](text, RECORDED)


def test_a_difference_is_of_whole_numbers_itself_and_else_relative_and_its_bound_above_it():
    held = HeldAgainst()
    held([torch.tensor([3, 250]), 7], [np.array([4, 250], np.uint8), 7.0], cases=5)
    assert (held.cases, held.largest, held.bound) == (5, 1.0, 1.0)
    for found, largest, bound in (
        (torch.tensor([0.5, 200.0003], dtype=torch.float64), 1.5e-6, 1e-5),
        (torch.tensor([0.5, 200.0]).double(), 0.0, 1e-15),
        (torch.tensor([0.5, 200.0]), 0.0, 1e-6),
    ):
        held = HeldAgainst()
        held(found, [0.5, 200.0])
        assert (held.largest, held.bound) == (pytest.approx(largest, rel=1e-6), bound)
    held(0.4, 0.0, cases=2, within=1.95)
    assert (held.cases, held.largest, held.bound) == (3, 0.4, 1.95)


@pytest.mark.parametrize("cases, apart", [(6, 0.0), (7, 1e-3), (6, 1e-3)])
def test_another_number_of_cases_or_a_larger_difference_than_recorded_fails(cases, apart):
    """And none does that is within the bound."""
    test = "train/test_state.py::test_an_update_is_its_formula_in_one_call_for_each_kind_of_tensor"
    held = HeldAgainst()
    held(1.5, 1.5 + 1.5e-7, cases=7)
    require_recorded(f"{test}[None]", held)
    other = HeldAgainst()
    other(1.5 + 1.5 * apart, 1.5, cases=cases)
    with pytest.raises(AssertionError, match="python .ci/equalities.py"):
        require_recorded(f"{test}[None]", other)
