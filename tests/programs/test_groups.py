"""Runs are read back as they were written, and grouped by everything but the seed."""

import dataclasses
import itertools
from pathlib import Path

import pytest

from vitinit.programs.shared.groups import group_runs
from vitinit.programs.shared.records import METRICS, OF_SEVERAL, read_run


def test_a_run_is_known_by_its_command_and_ends_with_its_cool_down(written_run):
    for words, name in (
        (["--recipe", "deit_base"], "deit_base"),
        ([], "recipe"),
        (["--recipe=runs/a.b/trial.toml"], "trial"),
    ):
        assert (
            read_run(written_run(name, [1.0], start={"command": ["train.py", *words]})).recipe
            == name
        )
    sets = ("schedule.cooldown_epochs=2",)
    assert not read_run(written_run("a", [1.0, 2.0, 3.0], sets=sets)).finished
    assert read_run(written_run("b", [1.0, 2.0, 3.0], epochs=1, sets=sets)).finished


def test_a_record_of_another_version_lacks_what_was_not_measured_then(written_run):
    folder = written_run("a", [10.0, None])
    (folder / "metrics.jsonl").write_text('{"epoch": 1, "val_top1": 10.0}\n{"epoch": 2}\n')
    found = read_run(folder)
    assert found.finished and found.measured("val_top1") == [10.0]
    assert found.rows[1] == dict.fromkeys([*METRICS, *OF_SEVERAL]) | {"epoch": 2}
    (folder / "metrics.jsonl").unlink()
    (folder / "run.json").unlink()
    run = read_run(folder)
    assert (run.rows, run.starts, run.finished, run.recipe) == ([], [], False, "recipe")


def labelled(*folders: Path) -> dict[str, list[int]]:
    """Label → seeds."""
    return {group.label: list(group.runs) for group in group_runs([read_run(f) for f in folders])}


@pytest.fixture
def grouped(written_run):
    """The same of runs with these arguments of `written_run`."""
    names = map(str, itertools.count())
    return lambda *runs: labelled(*(written_run(next(names), [1.0], **run) for run in runs))


def test_a_group_is_one_experiment_with_all_its_seeds(grouped):
    assert grouped(
        dict(seed=5, init="impulse"),
        dict(seed=2),
        dict(init="impulse"),
        dict(seed=9),
        dict(seed=2, init="impulse"),
    ) == {"impulse": [0, 2, 5], "default": [2, 9]}


def test_where_and_how_images_are_read_and_the_recipes_name_do_not_set_runs_apart(grouped):
    sets = [
        (),
        ("data.root=x",),
        ("eval.every_epochs=3",),
        ("data.on_device_gib=0.5",),
        ("data.workers=3", "optim.max_batch_per_process=10", "engine.compile=true"),
    ]
    assert grouped(
        *(dict(seed=seed, sets=texts) for seed, texts in enumerate(sets)),
        dict(seed=5, recipe="runs/a/recipe.toml"),
    ) == {"default": [0, 1, 2, 3, 4, 5]}


def test_a_record_from_before_a_key_is_of_the_experiment_that_was_meant_then(written_run):
    """How a classifier is fitted matters with a checkpoint alone."""
    for sets, expected in (
        ((), {"default": [0, 1]}),
        (
            ("init.checkpoint=a",),
            {
                'default, init.checkpoint_head = "match"': [0],
                'default, init.checkpoint_head = "keep"': [1],
            },
        ),
    ):
        new, old = (
            written_run(f"{len(sets)}{name}", [1.0], seed=seed, sets=sets)
            for seed, name in enumerate("ab")
        )
        lines = (old / "recipe.toml").read_text().splitlines(keepends=True)
        (old / "recipe.toml").write_text(
            "".join(
                line
                for line in lines
                if not line.startswith(
                    (
                        "checkpoint_head",
                        "cosine_after_warmup",
                        "rope_",
                        "qk_norm",
                        "layer_s",
                        "mlp =",
                    )
                )
            )
        )
        assert labelled(new, old) == expected


def test_a_model_with_batch_norm_is_told_apart_by_its_micro_batch(grouped):
    model = ("model.name=convmixer_256_8", "model.options={}")
    assert grouped(
        dict(sets=model), dict(seed=1, sets=(*model, "optim.max_batch_per_process=10"))
    ) == {
        "default, optim.max_batch_per_process = 50": [0],
        "default, optim.max_batch_per_process = 10": [1],
    }


@pytest.mark.parametrize(
    "runs, labels",
    [
        (
            [
                {},
                dict(init="impulse"),
                dict(init="impulse", sets=('init.options.value_init="base"',)),
            ],
            [
                "default",
                'impulse, init.options.value_init = "mimetic"',
                'impulse, init.options.value_init = "base"',
            ],
        ),
        (
            [
                dict(sets=("optim.eps=1e-6", "mix.cutmix_alpha=1")),
                dict(sets=("optim.eps=1e-6",)),
                dict(init="mimetic"),
            ],
            [
                "default, mix.cutmix_alpha = 1.0, optim.eps = 1e-06",
                "default, mix.cutmix_alpha = 0.0, optim.eps = 1e-06",
                "mimetic, mix.cutmix_alpha = 0.0, optim.eps = 1e-08",
            ],
        ),
        # An init's options for a rotary model are others.
        (
            [dict(init="impulse"), dict(init="impulse", sets=("model.options.pos_embed=rope",))],
            [
                'impulse, init.options.value_init = "mimetic", model.options.pos_embed = "learned", '
                'init.options.base = "default"',
                'impulse, init.options.value_init = "base", model.options.pos_embed = "rope", '
                'init.options.base = "torch"',
            ],
        ),
        # Different recipes are not compared key by key.
        ([dict(recipe="one"), dict(recipe="two", epochs=2)], ["one, default", "two, default"]),
    ],
)
def test_a_label_names_only_the_keys_that_differ(grouped, runs, labels):
    """Groups of one init are not compared in options that only another init has."""
    assert list(grouped(*runs)) == labels


def test_a_key_that_only_newer_runs_have_is_said_to_be_missing(written_run):
    """Except for those that came while the study's runs were made, whose earlier value is known."""
    old, new = written_run("a", [1.0]), written_run("b", [1.0], seed=1)
    text = (old / "recipe.toml").read_text()
    assert "tf32 = true\n" in text
    older = text.replace("tf32 = true\n", "").replace("version = ", "version = -")
    (old / "recipe.toml").write_text(older)
    assert list(labelled(old, new)) == [
        "default, without engine.tf32",
        "default, engine.tf32 = true",
    ]
    teacher = text[text.index("[distill]") : text.index("[eval]")]
    (old / "recipe.toml").write_text(text.replace(teacher, ""))
    assert list(labelled(old, new)) == ["default"]
    for value, count in (("after", 1), ("before", 2)):
        keys = read_run(new).keys | {"model.options.norm_place": value}
        runs = [read_run(old), dataclasses.replace(read_run(new), keys=keys)]
        assert len(group_runs(runs)) == count


def test_one_seed_by_two_commits_is_two_experiments(grouped):
    """Other code may do something else by the same recipe, as two of the study's trials did."""
    later = dict(start={"git_commit": "beef" * 10})
    assert grouped(dict(seed=3), dict(seed=3, **later), dict(seed=4, **later)) == {
        "default, commit c0ffee": [3],
        "default, commit beefbee": [3, 4],
    }
    assert grouped(dict(seed=5), dict(seed=6, **later)) == {"default": [5, 6]}
