"""What the program prints and writes, with numbers computed by hand; t quantiles are scipy's."""

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from same_run import IN_SECONDS, assert_same_run, rows_of

import vitinit
from vitinit.programs import compare
from vitinit.programs.shared.records import read_run
from vitinit.programs.shared.replay import against_record, other_machine, warn_of_other_images
from vitinit.programs.shared.results import RECORDED, SHOWN, mean_and_std, t_quantile
from vitinit.recipe.files import load_recipe


@pytest.fixture
def printed(capsys) -> Callable[..., str]:
    """What the program prints when it is given these arguments."""

    def run(*arguments: object) -> str:
        assert compare.main(list(map(str, arguments))) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def six_runs(written_run):
    """Two inits, seeds 1, 2, 5; last epochs 50, 54, 58 and 61, 63, 71; one run's best is 62."""
    runs = []
    for init, lasts in (("default", (50.0, 54.0, 58.0)), ("impulse", (61.0, 63.0, 71.0))):
        for seed, last in zip((1, 2, 5), lasts):
            best = 62.0 if last == 58.0 else 5.0
            runs.append(
                written_run(
                    f"{init}-{seed}",
                    [best, last],
                    seed=seed,
                    init=init,
                    emas=[1.0, last - seed],
                    seconds=10.0 + seed,
                )
            )
    return runs


def test_a_comparison_as_a_whole(printed, six_runs):
    """Last: 54 ± 4 and 65 ± √28; best: 50, 54, 62 and 61, 63, 71; EMA: lower by the seed."""
    assert (
        printed(*six_runs)
        == """\
# quickstart

Validation top-1 in %, mean ± standard deviation over seeds. The best epoch is chosen \
on the images it is reported on. Seconds are those of training, without evaluation.

| group | seeds | last | best | EMA last | EMA best | seconds per run |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| default | 3 | 54.00 ± 4.00 | 55.33 ± 6.11 | 51.33 ± 2.08 | 51.33 ± 2.08 | 25 ± 4 |
| impulse | 3 | 65.00 ± 5.29 | 65.00 ± 5.29 | 62.33 ± 3.21 | 62.33 ± 3.21 | 25 ± 4 |

| last epoch | of | seed 1 | seed 2 | seed 5 |
| --- | ---: | ---: | ---: | ---: |
| default | model | 50.00 | 54.00 | 58.00 |
| default | EMA | 49.00 | 52.00 | 53.00 |
| impulse | model | 61.00 | 63.00 | 71.00 |
| impulse | EMA | 60.00 | 61.00 | 66.00 |

| minus default | of | seeds | mean, 95 % t interval | least that shows | seed by seed |
| --- | ---: | ---: | ---: | ---: | ---: |
| impulse | model | 3 | +11.00 ± 4.97 | 6.46 | 1: +11.00, 2: +9.00, 5: +13.00 |
| impulse | EMA | 3 | +11.00 ± 4.97 | 6.46 | 1: +11.00, 2: +9.00, 5: +13.00 |

All runs: commit c0ffee; torch 2.7; Python 3.11; device CPU; processes 1.
"""
    )


def test_only_seeds_that_both_have_are_paired_and_fewer_than_two_have_no_interval(
    printed, six_runs, written_run
):
    """−6 and 0 on seeds 2 and 5: mean −3, standard deviation √18, 12.706 · √18 / √2 = 38.12."""
    runs = [
        written_run("m-2", [48.0], seed=2, init="mimetic", epochs=1),
        written_run("m-5", [58.0], seed=5, init="mimetic", epochs=1),
        written_run("m-7", [99.0], seed=7, init="mimetic", epochs=1),
    ]
    text, label = printed(*six_runs[:3], *runs), "mimetic, schedule.epochs = 1"
    assert (f"| {label} | model | 2 | -3.00 ± 38.12 | 49.55 | 2: -6.00, 5: +0.00 |") in text
    assert f"| {label} | model | – | 48.00 | 58.00 | 99.00 |" in text
    assert f"| {label} | EMA" not in text  # this run has no EMA
    assert f"| {label} | 3 | 68.33 ± 27.02 | 68.33 ± 27.02 | – | – | 3 ± 0 |" in text
    untimed = written_run("m-9", [9.0], seed=9, init="mimetic", epochs=1, seconds=None)
    assert "| mimetic | 4 | 53.50 ± 36.97 | 53.50 ± 36.97 | – | – | – |" in printed(*runs, untimed)
    text = printed(*six_runs[:2], *six_runs[4:])  # 1, 2 and 2, 5
    line = (
        "No interval of the difference from `default`: `impulse` (fewer than two shared seeds).\n"
    )
    assert line in text
    assert "t interval" not in text and "minus" not in printed(*six_runs[:3])
    blind = [written_run(f"blind-{seed}", [None, None], seed=seed, init="torch") for seed in (1, 2)]
    assert "from `default`: `torch` (fewer than two shared scores).\n" in printed(
        *six_runs[:3], *blind
    )


def test_words_of_a_record_from_elsewhere_move_no_terminal(printed, written_run):
    words = {"recipe": "\x1b[31mred", "git_commit": "\x1b]0;", "device": "\x1b[2J", "torch": "\r"}
    run = written_run("run-0", [1.0], start=words)
    text = printed(run)
    assert "device \\x1b[2J" in text and text.replace("\n", "").isprintable()
    assert other_machine(read_run(run), [dict.fromkeys(RECORDED, "now")]).isprintable()


def test_runs_of_other_code_and_hardware_are_counted(printed, written_run):
    runs = [
        written_run(f"run-{seed}", [1.0], seed=seed, start=start)
        for seed, start in enumerate(
            [{}, {"git_commit": "beef", "device": "NVIDIA H100"}, {"device": "NVIDIA H100"}]
        )
    ]
    (start,) = json.loads((runs[0] / "run.json").read_text())
    (runs[0] / "run.json").write_text(json.dumps([start, start | {"git_commit": "f00d"}, start]))
    text = printed(*runs)
    assert "All runs: torch 2.7; Python 3.11; processes 1.\n" in text
    assert (
        "Runs differ (number of runs): commit c0ffee (2), f00d (1), beef (1); "
        "device CPU (1), NVIDIA H100 (2).\n"
    ) in text
    on = [
        written_run(
            f"on-{seed}",
            [1.0],
            seed=seed,
            start={"data": {"files and labels": f"{seed}" * 16 + validation}},
        )
        for seed, validation in enumerate(("beef", "beef", "cafe"))
    ]
    assert "validation images beef (2), cafe (1).\n" in printed(*on)
    assert "validation images" not in printed(*on[:2])
    (runs[1] / "run.json").unlink()
    assert "Runs differ (number of runs): commit c0ffee (1), unknown (1); torch 2.7 (1), un" in (
        printed(*runs[1:2], written_run("known", [1.0]))
    )


def test_runs_that_were_trained_on_other_images_are_told_apart(printed, capsys, written_run):
    """Where each seed draws its own, by their number."""

    def run(name: str, digest: str, number: int, seed: int, subset_seed: str) -> object:
        data = {"files and labels": digest * 16 + "beef", "training images": number}
        sets = (f"data.subset_seed={subset_seed}",)
        return written_run(name, [1.0], seed=seed, start={"data": data}, sets=sets)

    for drawn, words in (
        ("0", f"{'a' * 16} (1), {'b' * 16} (2)"),
        ("run", "51 (1), 53 (2)"),
    ):
        runs = [
            run(f"{drawn}-{seed}", digest, number, seed, drawn)
            for seed, (digest, number) in enumerate((("a", 51), ("b", 53), ("b", 53)))
        ]
        assert f"Runs differ (number of runs): training images {words}.\n" in printed(*runs)
        assert "training images" not in printed(*runs[1:])
        twin = run(f"{drawn}-twin", "b", 53, 0, drawn)
        assert compare.main([str(runs[0]), str(twin)]) == 2
        assert f"seed 0 as {runs[0]}, though trained on other images; expected one run per" in (
            capsys.readouterr().err
        )


def test_an_archive_prints_the_same_as_folders_and_unfinished_runs_are_named_and_not_packed(
    printed, six_runs, tmp_path, written_run
):
    expected = printed(*six_runs)
    reversed_groups = printed(*six_runs[3:], *six_runs[:3])
    assert "| default | model | 3 | -11.00 ± 4.97 | 6.46 | 1: -11.00, 2: -9.00," in reversed_groups
    out = tmp_path / "six.tar.xz"
    assert printed(*reversed(six_runs), "--pack", out) == (
        f"wrote {out}: 6 runs, {out.stat().st_size:,} bytes\n"
    )
    assert printed(out) == expected
    assert printed(out / "impulse-*", out / "default-*") == reversed_groups
    grown = tmp_path / "grown.tar.xz"  # it may be read and written at once
    printed(*six_runs[:2], "--pack", grown)
    printed(*six_runs[2:], grown, "--pack", grown)
    assert grown.read_bytes() == out.read_bytes()
    assert printed(*six_runs[:2], out / "default-5", *six_runs[3:]) == expected
    cut = written_run("cut", [99.0], epochs=2, seed=9)
    line = f"left out, not finished: {cut}, 1 of 2 epochs\n"
    assert printed(cut, *six_runs) == f"{expected}\n{line}"
    assert printed(cut, *six_runs, "--pack", out) == (
        f"{line}wrote {out}: 6 runs, {out.stat().st_size:,} bytes\n"
    )
    assert printed(out) == expected


def test_a_folder_gets_the_report_and_the_curves(printed, six_runs, tmp_path):
    out = tmp_path / "new" / "comparison"
    report, last_line = printed(*six_runs, "--out", out).rsplit("\n\n", 1)
    assert (out / "comparison.md").read_text() == report + "\n"
    with Image.open(out / "curves.png") as image:
        assert image.size[0] > 600
    assert last_line == f"wrote {out / 'comparison.md'} and {out / 'curves.png'}\n"


def test_curves_are_of_what_all_seeds_of_a_group_have_at_one_epoch(
    printed, written_run, tmp_path, capsys
):
    runs = [
        written_run(f"run-{seed}", tops, seed=seed)
        for seed, tops in enumerate(([7.0, None], [None, 9.0]))
    ]
    words = [*map(str, runs), "--out", str(tmp_path / "out")]
    assert compare.main(words) == 2
    assert capsys.readouterr().err == (
        "vitinit compare: default: no epoch on record, of all its seeds, to draw\n"
    )
    for run in runs:
        lines = (run / "metrics.jsonl").read_text()
        (run / "metrics.jsonl").write_text(lines.replace('"train_loss": null', '"train_loss": 2.5'))
    printed(*words)
    assert (tmp_path / "out" / "curves.png").exists()


def test_without_matplotlib_a_report_and_the_extra_stand(without_matplotlib, six_runs, tmp_path):
    with pytest.raises(SystemExit, match=r"needs matplotlib: pip install 'vitinit\[figures\]'"):
        compare.main([*map(str, six_runs), "--out", str(tmp_path / "out")])
    assert (tmp_path / "out" / "comparison.md").exists()


def test_a_replay_is_the_recorded_run_to_the_bit_or_its_first_epochs(printed, tmp_path, capsys):
    """With a learning rate that goes by all epochs; what is unlike at the start is said."""
    run = vitinit.Run(
        "quickstart",
        seed=7,
        out_dir=tmp_path / "mine",
        overrides=IN_SECONDS | {"schedule.epochs": 3, "eval.every_epochs": 3},
    ).train()
    archive, again, first = (tmp_path / name for name in ("mine.tar.xz", "again", "first"))
    printed(run.folder.path, "--pack", archive)
    text = printed(archive, "--replay", "mine", "--out", again)
    assert text.endswith(
        "the same kind of machine and the same code\n"
        "equal to the bit: all results of epochs 1 to 3\n"
    )
    assert_same_run(run.folder.path, again)
    assert compare.main([str(archive), "--replay", "mine", "--out", str(again)]) == 2
    assert "again: is such a replay already" in capsys.readouterr().err
    (start,) = json.loads(run.folder.info.read_text())
    start["torch"], start["data"]["files and labels"] = "2.0", "beef"
    run.folder.info.write_text(json.dumps([start]))
    assert (
        compare.main(
            [
                str(run.folder.path),
                "--replay",
                "mine",
                "--epochs",
                "2",
                "--set",
                "data.on_device_gib=0",
                "--out",
                str(first),
            ]
        )
        == 0
    )
    text, errors = capsys.readouterr()
    assert text.endswith("equal to the bit: all results of epochs 1 to 2\n")
    assert f"\ntorch 2.0 then, {torch.__version__} now\n" in text
    assert [row["lr"] for row in rows_of(first)] == [row["lr"] for row in run.rows[:2]]
    assert "warning mine was trained and measured on other images" in errors
    assert "on_device_gib = 0.0\n" in (first / "recipe.toml").read_text(encoding="utf-8")
    del start["data"]["files and labels"]  # as older records
    run.folder.info.write_text(json.dumps([start]))
    warn_of_other_images(read_run(run.folder.path), load_recipe(str(run.folder.recipe)))
    assert capsys.readouterr().err == ""


def test_a_replay_elsewhere_is_held_to_the_seeds_on_record(six_runs, written_run):
    """50, 54, 58: another seed within 4.302653 · 4 · √(1 + 1 / 3) = 19.87 of 54, in 95 of 100."""
    seeds = [*map(read_run, six_runs[:3])]
    for top1, holds in ((54 + 19.8, True), (54 - 19.9, False)):
        again = read_run(written_run(f"again-{top1}", [5.0, top1]))
        text, held = against_record(seeds[0], again.rows, again.starts, seeds)
        assert held is holds and "expected within 54.0000 ± 19.8731 (3 seeds, 95 %)" in text
    text, held = against_record(seeds[0], again.rows, again.starts, seeds[:1])
    assert not held and text.endswith("one seed is on record, so no interval\n")


def test_a_replays_table_has_what_was_then_and_what_is_now_where_both_have_it(written_run):
    then = read_run(written_run("then", [50.0, None, 61.125]))
    losses = (2.5, 2.25), (1.75, None), (1.0, 0.1234567)
    rows = [
        dict(row, train_loss=now, val_top1=top1)
        for row, (_, now), top1 in zip(then.rows, losses, (51.0, 52.0, None))
    ]
    then.columns["train_loss"][:] = [loss for loss, _ in losses]
    text, held = against_record(then, rows, then.starts, [then])
    assert not held and text.startswith("""\
| epoch | loss then | now | top-1 then | now |
| --- | ---: | ---: | ---: | ---: |
| 1 | 2.500000 | 2.250000 | 50.00 | 51.00 |
| 2 | – | – | – | – |
| 3 | 1.000000 | 0.123457 | – | – |

the same kind of machine and the same code
apart: train_loss 1.0000 then, 0.1235 now, after epoch 3; one seed""")


def test_what_is_wrong_is_one_line(capsys, six_runs, written_run, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "other").mkdir()
    twin = written_run(f"other/{six_runs[0].name}", [1.0])
    for folders, message in (
        ([tmp_path / "nowhere"], "nowhere: not a run's folder"),
        ([tmp_path / "logs"], "logs: neither a run's folder nor an archive"),
        ([*six_runs, six_runs[0]], "the same experiment and seed 1 as"),
        ([written_run("cut", [1.0], epochs=2)], "none of the runs is fin"),
        ([six_runs[0], "--out", "a", "--pack", "b.tar.xz"], "not allowed with argu"),
        ([six_runs[0], "--replay", "x"], "--replay x: no such run is on rec"),
        (
            [six_runs[0], twin, "--replay", twin.name],
            f"--replay {twin.name}: which of {six_runs[0]}, {twin}? Give one of them",
        ),
        (
            [written_run("none", [], epochs=1), "--replay", "none"],
            "--replay none: no epoch of it is on record",
        ),
        ([six_runs[0], "--epochs", "1"], "are for --replay NAME"),
        (
            [six_runs[0], "--replay", "x", "--set", "run.seed=1"],
            "--set run.seed=1: a replay has all from the record but where",
        ),
        (
            [six_runs[0], "--replay", "x", "--set", "data.image_size=64"],
            "--set data.image_size=64: a replay has all from the record but wh",
        ),
        ([six_runs[0] / "run.json"], "run.json: neither a run's folder no"),
    ):
        assert compare.main(list(map(str, folders))) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("vitinit compare: ") and message in line


def test_t_quantiles_are_those_of_tables_and_scipy_and_one_value_has_no_deviation():
    for degrees, quantile in ((1, 12.706205), (2, 4.302653), (3, 3.182446), (120, 1.979930)):
        assert t_quantile(degrees) == pytest.approx(quantile, abs=5e-7)
    stats = pytest.importorskip("scipy.stats")
    for degrees in (1, 2, 3, 4, 7, 16, 53):
        for confidence in (0.5, 0.9, 0.99):
            expected = stats.t.ppf((1 + confidence) / 2, degrees)
            assert t_quantile(degrees, confidence) == pytest.approx(expected, rel=1e-9)
    assert mean_and_std([50.0, 54.0, 58.0]) == "54.00 ± 4.00"
    assert mean_and_std([50.0]) == "50.00"
    assert mean_and_std([11.0, 12.0], places=0) == "12 ± 1"  # 11.5, .71


def test_the_least_difference_that_shows_does_so_in_four_of_five_comparisons():
    """Of normal noise, by drawn ones; the factor is one for all numbers of seeds."""
    rng = np.random.default_rng(0)
    for seeds, share in ((2, 0.81), (3, 0.80), (5, 0.77), (10, 0.73)):
        noise = rng.normal(size=(4_001, seeds))
        quantile = t_quantile(seeds - 1)
        expected = SHOWN * quantile / math.sqrt(seeds)  # half an interval, of a deviation of 1
        halves = quantile * noise.std(axis=1, ddof=1) / math.sqrt(seeds)
        assert abs(np.mean(noise.mean(axis=1) + expected > halves) - share) < 0.03
