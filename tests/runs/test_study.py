"""The records of the study in recipes/deep_impulse.md: complete, small, and what the page says."""

from __future__ import annotations

import pytest

from vitinit.compare import mean_and_std, t_interval
from vitinit.runs.archive import read_archive
from vitinit.runs.groups import group_runs
from vitinit.runs.records import Run

SEEDS_OF_THE_TEST = range(3, 8)         # no choice was made on these


@pytest.fixture
def records(repository) -> dict[str, Run]:
    """The name of a run's folder → the run."""
    archive = repository / "recipes" / "remaining_gap.tar.xz"
    assert archive.stat().st_size <= 1_000_000
    return {run.path.name: run for run in read_archive(archive)}


@pytest.fixture
def page(repository) -> str:
    text = (repository / "recipes" / "deep_impulse.md").read_text(encoding="utf-8")
    return text[:text.index("## The first study")]


def test_the_records_can_be_compared(records):
    groups = group_runs(list(records.values()))
    assert sum(len(group.runs) for group in groups) == len(records)
    assert len({group.label for group in groups}) == len(groups)


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


def top1(records: dict[str, Run], experiment: str) -> dict[int, float]:
    """Seed → top-1 of the last epoch, of the runs in the folders cifar10_10k<experiment>-s<seed>."""
    return {run.seed: run.rows[-1]["val_top1"] for name, run in sorted(records.items())
            if name.rpartition("-s")[0] == f"cifar10_10k{experiment}"}


@pytest.mark.parametrize("part, seeds", [("test", 5), ("half", 3)])
def test_the_first_table_has_means_and_paired_intervals(records, page, part, seeds):
    table = page[:page.index("![")]
    best, impulse, default = (top1(records, experiment) for experiment in (
        f"-deep_impulse-{part}-images95-nobias-code12-lr2", f"-impulse-{part}-lecun-lr2",
        f"-default-{part}"))
    assert len(best) == len(impulse) == len(default) == seeds
    for values in (best, impulse, default):
        assert f"| {seeds} | {mean_and_std(list(values.values()))} |" in table
    for more, less in ((best, impulse), (best, default), (impulse, default)):
        mean, half = t_interval([more[seed] - less[seed] for seed in more])
        assert f"{mean:+.2f} ± {half:.2f}".replace("-", "−") in table


@pytest.mark.parametrize("experiment, less", [
    ("-deep_impulse-code12-nobias", "-deep_impulse-falling-lecun"),
    ("-deep_impulse-images95-nobias-code12-lr2", "-deep_impulse-falling-lecun"),
    ("_convmixer-impulse-frozen-k3-f3-res", "_convmixer-impulse-frozen-k3-f3")])
def test_the_first_table_has_the_means_on_held_out_images(records, page, experiment, less):
    table = page[:page.index("![")]
    more, less = top1(records, experiment), top1(records, less)
    assert list(more) == list(less) == [0, 1, 2]
    for values in (more, less):
        assert f"| held out | 3 | {mean_and_std(list(values.values()))} |" in table
    mean, half = t_interval([more[seed] - less[seed] for seed in more])
    assert f"{mean:+.2f} ± {half:.2f}".replace("-", "−") in table
