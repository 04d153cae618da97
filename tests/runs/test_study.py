"""The records of the studies of inits and of teachers: complete, small, and of the stated keys."""

import pytest
from held_numbers import TABLES, Piece
from pages import PAGES, RECIPES

from vitinit.base.values import plain
from vitinit.programs.compare import main
from vitinit.programs.shared.groups import FREE_KEYS
from vitinit.programs.shared.records import RunRecord, read_archive
from vitinit.recipe.absent import MEANT
from vitinit.recipe.files import load_recipe, overrides

SEEDS_OF_THE_TEST = range(3, 8)  # no choice was made on these
PAGE = next(page for page in PAGES if page.name == "recipes/what_an_init_is_worth.md")
SPECIAL = {
    "`default`, no position embedding": ("model.options.pos_embed=none",),
    "`default`, class token": ("model.options.pool=class",),
    "`deep_impulse`, constants .5": ("init.options.constant_variance=0.5",),
}
FREE = {
    *FREE_KEYS,
    "data.name",
    "data.held_out_per_class",
    "init.checkpoint_head",  # no run has a checkpoint
    "optim.muon_dtype",  # younger than the runs, which have float32
}


@pytest.fixture(scope="module")
def records() -> dict[str, RunRecord]:
    """The name of a run's folder → the run."""
    archive = RECIPES / "remaining_gap.tar.xz"
    assert archive.stat().st_size <= 1_000_000
    return {run.path.name: run for run in read_archive(archive)}


@pytest.fixture(scope="module")
def of_muon() -> list[RunRecord]:
    return [*read_archive(RECIPES / "muon.tar.xz"), *read_archive(RECIPES / "rotary.tar.xz")]


def test_no_record_says_where_on_a_disk_it_was_made():
    for archive in (*RECIPES.glob("*.tar.xz"), *RECIPES.glob("board/*")):
        for run in read_archive(archive):
            assert not any(b'"/' in text for text in run.files.values()), (archive, run.path)


def test_the_runs_of_cifar10_10k_were_made_in_bf16_as_its_card_says():
    for run in read_archive(RECIPES / "cifar10_10k.tar.xz"):
        assert run.keys["data.root"] == "data/cifar10" and run.keys["engine.amp"] == "bf16"


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


def test_the_grid_of_inits_and_optimisers_names_the_runs_with_these_keys(records, of_muon):
    """Each row's init with each column's optimiser; the numbers are held as those of all pages."""
    every = [*records.values(), *of_muon]
    muon = "optim.name=muon", "optim.muon_factor=2.5", "optim.base_lr=2e-3"
    columns = (), ("optim.base_lr=2e-3",), muon, (*muon, "optim.weight_decay=1")
    pieces = [Piece.of(line) for line in TABLES[PAGE.name]["records"].splitlines()]
    rows = [piece for piece in pieces if len(piece.sources) == 4 and piece.words[0][0] == "|"]
    assert len(rows) == 9
    for piece in rows:
        what = piece.words[0].strip(" |")
        init = what.split("`")[1]
        for column, source in zip(columns, piece.sources, strict=True):
            adamw = "optim.name=muon" not in column
            lecun = ["init.options.base=lecun"] * ("base" in what and adamw)
            keys = load_recipe(
                "cifar10_10k", overrides(init=init, sets=[*column, *lecun, *SPECIAL.get(what, ())])
            ).keys
            found = [
                run.path.name
                for run in every
                if run.seed == 0
                and all(
                    key in FREE or (MEANT | run.keys).get(key, value) == plain(value)
                    for key, value in keys.items()
                )
            ]
            name = source.removesuffix(" s0")
            assert found == [f"cifar10_10k{name}-s0"], (what, column)


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
