"""The records of the study in recipes/deep_impulse.md: complete, small, and what the page says."""

from __future__ import annotations

import json

import pytest

from vitinit.runs.archive import opened
from vitinit.runs.groups import read_run


@pytest.fixture
def records(repository):
    archive = repository / "recipes" / "remaining_gap.tar.xz"
    assert archive.stat().st_size <= 1_000_000
    with opened([archive]) as places:
        yield places


def test_every_run_is_finished_and_made_on_held_out_images(records):
    for place in records:
        run = read_run(place.folder)
        assert run.finished and run.epochs == 10, place.path
        assert (run.keys["data.held_out_per_class"], run.keys["data.images_per_class"]) == (1000, 1000)


def test_no_record_names_a_folder_of_the_machine_it_was_made_on(records):
    for place in records:
        for start in json.loads((place.folder / "run.json").read_text(encoding="utf-8")):
            assert start["command"][0] == "train.py"
            assert not [word for word in start["command"] if word.startswith("/")], place.path


def test_the_page_has_the_numbers_of_the_records(records, repository):
    page = (repository / "recipes" / "deep_impulse.md").read_text(encoding="utf-8")
    section = page[page.index("## The remaining gap: first results"):page.index("## The remaining gap: plan")]
    assert f"the first {len(records)} runs say" in section
    for place in records:
        row = read_run(place.folder).rows[-1]
        assert f"| {row['val_top1']:.2f} |" in section and f"| {row['train_loss']:.3f} |" in section, place.path
