"""Every number of a page or card that a record has is that of the record: see held_numbers.py."""

import pytest
from held_numbers import (
    ACCURACY,
    PAGES_AND_CARDS,
    TABLES,
    Held,
    free_numbers,
    held_on,
    wrong_numbers,
)
from pages import README


def mistakes(held: Held) -> list[str]:
    return [*wrong_numbers(held), *free_numbers(held)]


@pytest.mark.parametrize("page", PAGES_AND_CARDS, ids=[page.name for page in PAGES_AND_CARDS])
def test_the_numbers_of_a_page_are_those_of_the_records_or_have_a_source(page):
    assert mistakes(held_on(page)) == [], (
        f"add the sentence to records or others of [{page.name!r}] in tests/held_numbers.toml, or "
        "mend the number"
    )


def test_each_table_is_of_a_page():
    assert TABLES.keys() <= {page.name for page in PAGES_AND_CARDS}


def test_a_number_that_is_changed_or_added_is_found():
    held = held_on(README)
    found = list(ACCURACY.finditer(held.text))
    assert len(found) >= 8
    for number in found:
        first = number.start()
        other = str((int(held.text[first]) + 1) % 10)
        text = held.text[:first] + other + held.text[first + 1 :]
        assert mistakes(held._replace(text=text)), number[0]
    more = mistakes(held._replace(text=held.text + " and 74.7 ± .1 again"))
    assert any(mistake.startswith("74.7 ± .1: in ") for mistake in more)
