"""The records of the study in recipes/deep_impulse.md: complete, small, and what the page says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vitinit.runs.archive import opened
from vitinit.runs.groups import Run, read_run

SEEDS_OF_THE_TEST = range(3, 8)         # no choice was made on these


@pytest.fixture
def records(repository) -> Iterator[dict[str, Run]]:
    """The name of a run's folder → the run."""
    archive = repository / "recipes" / "remaining_gap.tar.xz"
    assert archive.stat().st_size <= 1_000_000
    with opened([archive]) as places:
        yield {place.path.name: read_run(place.folder) for place in places}


@pytest.fixture
def page(repository) -> str:
    text = (repository / "recipes" / "deep_impulse.md").read_text(encoding="utf-8")
    return text[:text.index("## The first study")]


def held_out(run: Run) -> bool:
    return run.keys["data.held_out_per_class"] > 0


def test_every_choice_was_made_on_held_out_images(records):
    """And the test images were used on other seeds alone, once: after the last epoch."""
    for name, run in records.items():
        assert run.finished, name
        images = run.keys["data.images_per_class"]
        if held_out(run):
            assert (run.keys["data.held_out_per_class"], images, run.epochs) == (1000, 1000, 10), name
            assert run.seed not in SEEDS_OF_THE_TEST, name
        else:
            assert run.seed in SEEDS_OF_THE_TEST and len(run.measured("val_top1")) == 1, name
            assert run.epochs == {500: 10, 1000: 10, 0: 6}[images], name


def test_no_record_names_a_folder_of_the_machine_it_was_made_on(records):
    for name, run in records.items():
        for start in run.starts:
            assert start["command"][0] == "train.py"
            assert not [word for word in start["command"] if word.startswith("/")], name


def test_the_page_has_the_numbers_of_the_records(records, page):
    assert f"\n{len(records)} runs of the recipes" in page
    for name, run in records.items():
        row = run.rows[-1]
        assert f"| {row['val_top1']:.2f} |" in page, name
        assert f"| {row['train_loss']:.3f} |" in page or not held_out(run), name
