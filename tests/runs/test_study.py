"""The records of the studies of inits and of teachers: complete, small, and what the pages say."""

import json
import re

import pytest
from pages import PAGES, RECIPES

from vitinit.base.values import plain
from vitinit.programs.compare import main
from vitinit.programs.shared.groups import FREE_KEYS
from vitinit.programs.shared.records import RunRecord, read_archive
from vitinit.programs.shared.results import mean_and_std, t_interval
from vitinit.recipe.absent import MEANT
from vitinit.recipe.files import load_recipe, overrides

SEEDS_OF_THE_TEST = range(3, 8)  # no choice was made on these
PAGE = next(page for page in PAGES if page.name == "recipes/what_an_init_is_worth.md")
SPECIAL = {
    "no position embedding": ("model.options.pos_embed=none",),
    "class token": ("model.options.pool=class",),
    "`deep_impulse`, constants .5": ("init.options.constant_variance=0.5",),
}
FREE = {
    *FREE_KEYS,
    "data.name",
    "data.held_out_per_class",
    "init.checkpoint_head",
}  # no run has a checkpoint
TABLES = [
    [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines()[2:]]
    for page in PAGES
    for block in re.findall(r"^\| what \| runs .*\n(?:\|.*\n)+", page.text, re.MULTILINE)
]


@pytest.fixture(scope="module")
def records() -> dict[str, RunRecord]:
    """The name of a run's folder → the run."""
    archive = RECIPES / "remaining_gap.tar.xz"
    assert archive.stat().st_size <= 1_000_000
    return {run.path.name: run for run in read_archive(archive)}


@pytest.fixture(scope="module")
def of_muon() -> list[RunRecord]:
    return [*read_archive(RECIPES / "muon.tar.xz"), *read_archive(RECIPES / "rotary.tar.xz")]


@pytest.fixture(scope="module")
def top1(records, of_muon) -> dict[str, dict[int, float]]:
    """An experiment as the page names it → seed → top-1 of the last epoch."""
    found: dict[str, dict[int, float]] = {}
    lines = (RECIPES / "resnet18_on_photographs.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, lines):  # the last one of a run is at its end
        name = f"r18-{row['data']}-e{row['epochs']}-lr{row['lr']:g}"
        found.setdefault(name, {})[row["seed"]] = row["val_top1"]
    others = (
        run
        for name in ("photographs", "own_images")
        for run in read_archive(RECIPES / f"{name}.tar.xz")
        if "val_top1" in run.rows[-1]
    )
    for run in (*records.values(), *of_muon, *others):
        name = run.path.name.rpartition("-s")[0].removeprefix("cifar10_10k")
        found.setdefault(name, {})[run.seed] = run.rows[-1]["val_top1"]
    return found


def test_no_record_says_where_on_a_disk_it_was_made():
    for archive in (*RECIPES.glob("*.tar.xz"), *RECIPES.glob("board/*")):
        for run in read_archive(archive):
            assert not any(b'"/' in text for text in run.files.values()), (archive, run.path)


def test_every_choice_was_made_on_held_out_images(records):
    for name, run in records.items():
        assert run.finished, name
        images = run.keys["data.images_per_class"]
        if held_out := run.keys["data.held_out_per_class"]:
            assert (held_out, images, run.epochs) == (1000, 1000, 10)
            assert run.seed not in SEEDS_OF_THE_TEST, name
        else:
            assert run.seed in SEEDS_OF_THE_TEST and len(run.measured("val_top1")) == 1, name
            assert run.epochs == {500: 10, 1000: 10, 0: 6}[images], name


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table[0][0])
def test_every_row_of_the_page_is_what_the_records_say(table, top1):
    runs = [top1[row[1].strip("`")] for row in table]
    for number, ((what, _, count, shown, difference), values) in enumerate(zip(table, runs)):
        assert (count, shown) == (str(len(values)), mean_and_std(list(values.values()))), what
        if difference:
            to, _, words = difference.removeprefix("to ").partition(": ")
            base = next(
                values
                for (before, *_), values in reversed(list(zip(table[:number], runs)))
                if before.startswith(to)
            )
            paired = [values[seed] - base[seed] for seed in values if seed in base]
            expected = (
                f"{paired[0]:+.2f}"
                if len(paired) == 1
                else "{:+.2f} ± {:.2f}".format(*t_interval(paired))
            )
            assert words == expected.replace("-", "−"), what


def test_the_grid_of_inits_and_optimisers_is_what_the_records_say(records, of_muon):
    every = [*records.values(), *of_muon]
    muon = "optim.name=muon", "optim.muon_factor=2.5", "optim.base_lr=2e-3"
    columns = (), ("optim.base_lr=2e-3",), muon, (*muon, "optim.weight_decay=1")
    rows = re.search(r"^\| init \| AdamW.*\n.*\n((?:\|.*\n)+)", PAGE.text, re.MULTILINE)[1]
    for row in rows.splitlines():
        what, *shown = (cell.strip() for cell in row.split("|")[1:-1])
        init = what.split("`")[1] if "`" in what else "default"
        for column, number in zip(columns, shown, strict=True):
            adamw = "optim.name=muon" not in column
            lecun = ["init.options.base=lecun"] * ("base" in what and adamw)
            keys = load_recipe(
                "cifar10_10k", overrides(init=init, sets=[*column, *lecun, *SPECIAL.get(what, ())])
            ).keys
            found = [
                run
                for run in every
                if run.seed == 0
                and all(
                    key in FREE or (MEANT | run.keys).get(key, value) == plain(value)
                    for key, value in keys.items()
                )
            ]
            assert [f"{run.rows[-1]['val_top1']:.2f}" for run in found] == (
                [number] if number != "–" else []
            ), (what, column)


def test_the_commands_of_the_page_compare_the_records(monkeypatch, capsys, repository):
    monkeypatch.chdir(repository)
    rotary, muon = "recipes/rotary.tar.xz/cifar10_10k-rotary", "recipes/muon.tar.xz/cifar10_10k"
    commands = [words[2:] for words in PAGE.commands() if words[:2] == ["vitinit", "compare"]]
    commands += [
        [f"{rotary}-m.*", f"{rotary}-s*"],
        [f"{muon}-d*-f2.5-n2500-[cs]*"],
        ["recipes/remaining_gap.tar.xz"],
    ]  # the last one is all 93 runs at once
    rows = (
        "| 5 | 60.56 ± 0.60 |",
        "| 5 | 69.30 ± 0.31 |",
        "| impulse, init.options.target_mass = 0.997 | 3 | 74.69 ± 0.10 |",
        "| deep_impulse, init.options.constant_variance = 0.5 | 3 | 53.21 ± 0.33 |",
        "| 3 | 51.35 ± 0.40 |",
    )
    for command, row in zip(commands, rows, strict=True):
        assert main(command) == 0
        assert row in capsys.readouterr().out


@pytest.mark.parametrize(
    "recipe, name, count",
    [
        ("distilled", "cifar10_10k-default-muon-f2.5-soft", 3),
        ("deep_impulse", "cifar10_10k-deep_impulse-muon-f2.5-wd1-cv.5-white-m.9", 8),
        ("rotary", "cifar10_10k-rotary", 8),
        ("ahead", "cifar10_10k-rotary-pad2-ls.1-b64", 8),
        ("convmixer", "cifar10_10k_convmixer-whitened-muon-f2.5-lr8-wd1-m.9", 8),
    ],
)
def test_a_recipe_is_that_of_its_records(recipe, name, count, of_muon):
    runs = [run for run in of_muon if run.path.name.rpartition("-s")[0] in (name, f"{name}-test")]
    assert [run.path.name for run in runs] == [
        f"{name}{'-test' * (seed in SEEDS_OF_THE_TEST)}-s{seed}" for seed in range(count)
    ]
    for run in runs:
        assert {
            key
            for key, value in load_recipe(f"cifar10_10k_{recipe}").keys.items()
            if (MEANT | run.keys)[key] != plain(value)
        } <= {*FREE, "data.subset_seed", "distill.teacher"}
