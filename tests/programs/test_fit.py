"""fit: what it chooses by the images and the time, what it finds, and one run from end to end."""

from __future__ import annotations

import csv
import re
import shutil
from math import inf
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import vitinit
from vitinit.base.files import CheckpointError
from vitinit.base.messages import OneLineError
from vitinit.data.sources import ImageFolder
from vitinit.programs.fit import choice, measure, program
from vitinit.programs.fit.choice import Images, choose
from vitinit.programs.fit.findings import Learned
from vitinit.programs.fit.unreadable import unreadable_in
from vitinit.programs.shared.guesses import Guessed
from vitinit.programs.shared.plan import Plan, Rates
from vitinit.recipe.files import load_recipe, overrides
from vitinit.runs.folder import RunFolder
from vitinit.train.interruption import Interrupted

PHOTOGRAPHS = Images(train=2_003, val=307, classes=5, side=167.0, opened_by=[], stated=[])
TINY = """init.name=default model.options.embed_dim=12 model.options.depth=2 data.image_size=8
    model.options.shift_blocks=1 model.options.patch_size=4 model.options.num_heads=3 optim.global_batch=17
    optim.max_batch_per_process=17 eval.batch_size=7""".split()


def plan_for(seconds: float, epoch_images: int = 2_003) -> Plan:
    """A plan whose epoch takes so many seconds, all of them training."""
    rates = Rates(step=epoch_images / seconds, core=inf, prepare=inf)
    return Plan(epoch_images, 0, epochs=1, gpus=1, cores=1, rates=rates)


def chosen(
    minutes: float,
    seconds: float,
    images: Images = PHOTOGRAPHS,
    weights: str = "",
    stated: str | None = None,
    measuring: float = 0.0,
):
    """What is chosen where every choice's epoch takes so many seconds, and measuring one so many
    minutes; and how many were planned."""
    planned = []

    def plan(one: choice.Choice) -> Plan:
        planned.append(one)
        return plan_for(seconds)

    def left() -> float:
        return minutes - measuring * len(planned)

    return choose(images, left, weights, plan, stated)[0], len(planned)


def test_as_many_epochs_are_chosen_as_fit_beside_what_a_run_does_besides():
    for minutes, seconds in ((5, 7.0), (20, 37.0), (61, 29.0)):
        found, planned = chosen(minutes, seconds, measuring=0.5)
        epochs = found.changes["schedule.epochs"]
        looked_at = choice.INIT_AND_FINDINGS + 3 * PHOTOGRAPHS.val
        beside = choice.OTHER_SECONDS + looked_at / 3 / (2_003 / seconds) + 30 * planned
        assert epochs * seconds + beside <= 60 * minutes < (epochs + 1) * seconds + beside
        assert 0 < found.changes["schedule.warmup_epochs"] <= epochs / 5


def test_many_epochs_have_images_that_vary_and_their_time_is_measured_anew():
    few, planned = chosen(30, 37.0)
    assert (few.recipe, planned) == ("photos_ahead", 1) and not few.changes.keys() & choice.VARIED
    many, planned = chosen(60, 37.0)
    assert planned == 2 and choice.VARIED.items() <= many.changes.items()


def test_few_epochs_have_larger_patches_and_their_time_is_measured_anew():
    few, planned = chosen(4, 60.0)
    assert (few.recipe, few.changes["model.options.patch_size"], planned) == ("photos", 16, 2)
    assert "3 epochs with patches of half the side, fewer than 4: larger patches" in " ".join(
        few.reasons
    )
    enough, planned = chosen(5, 60.0)
    assert (enough.recipe, enough.changes["model.options.patch_size"], planned) == (
        "photos_ahead",
        8,
        1,
    )


def test_a_recipe_that_a_user_states_is_taken_whatever_the_size_and_time():
    for stated, side, patch in (
        ("photos_ahead", 167.0, 8),
        ("photos_ahead", 7.0, 1),
        ("photos", 31.0, 3),
    ):
        found, planned = chosen(5, 60.0, PHOTOGRAPHS._replace(side=side), stated=stated)
        assert (found.recipe, found.changes["model.options.patch_size"]) == (stated, patch)
        assert planned == 1


def test_small_images_have_the_recipe_of_32_pixels_and_photographs_are_not_enlarged():
    small, _ = chosen(5, 7.0, PHOTOGRAPHS._replace(side=28.0))
    assert small.recipe == "cifar10_10k_ahead"
    assert small.changes["model.options.shift_blocks"] == 5
    sides = [
        chosen(5, 7.0, PHOTOGRAPHS._replace(side=side))[0].changes["data.image_size"]
        for side in (47.0, 101.0, 128.0, 1021.0)
    ]
    assert sides == [40, 96, 128, 128]


def test_fewer_images_than_the_recipe_has_in_a_step_make_smaller_steps():
    few, _ = chosen(5, 7.0, PHOTOGRAPHS._replace(train=47))
    assert few.changes["optim.global_batch"] == 32
    assert "optim.global_batch" not in chosen(5, 7.0)[0].changes


def test_weights_are_fine_tuned_and_where_time_is_short_their_classifier_alone(tmp_path):
    mine = tmp_path / "mine.pt"
    torch.save({"model": {"head.weight": torch.zeros(5, 7)}}, mine)
    whole, _ = chosen(60, 100.0, weights="deit_small")
    assert whole.recipe == "photos_finetune" and whole.changes["model.name"] == "vit_small"
    assert "optim.train" not in whole.changes
    head, planned = chosen(5, 100.0, weights=str(mine))
    assert head.changes["optim.train"] == "head" and planned == 2
    assert "model.name" not in head.changes  # the file's own, which the user states
    recipe = load_recipe("photos_ahead", overrides(sets=TINY))
    torch.save({"model": {}, "recipe": recipe.as_dict()}, mine)
    again = chosen(60, 100.0, weights=str(mine))[0].changes
    assert (again["model.options.depth"], again["data.image_size"]) == (2, [8, 8])
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        chosen(60, 100.0, weights="absent.pt")


def test_without_time_for_an_epoch_a_share_of_the_images_has_three():
    found, _ = chosen(7, 600.0)
    share, epochs = found.changes["data.subset"], found.changes["schedule.epochs"]
    assert epochs == found.changes["eval.every_epochs"] == 3
    step = 600.0 / 2_003  # seconds of an image
    images_once = choice.INIT_AND_FINDINGS + 3 * 307  # and 307 after the third epoch
    besides = choice.OTHER_SECONDS + (images_once + 307) * step / 3
    assert 600 * 3 * share + besides <= 420 < 600 * 3 * (share + 0.01) + besides
    with pytest.raises(
        OneLineError, match=r"takes .* minutes here, .* of 0\.5 that are left; expected more"
    ):
        chosen(0.5, 600.0)


def test_what_the_user_sets_counts_most():
    stated = ["optim.base_lr=7e-4", "schedule.epochs=2"]
    images = PHOTOGRAPHS._replace(opened_by=["data.workers=0"], stated=stated)
    found, _ = chosen(20, 37.0, images)
    sets = found.sets()
    assert sets[0] == "data.workers=0" and sets[-2:] == stated
    # What goes by the number of epochs goes by theirs.
    assert (found.changes["schedule.epochs"], found.changes["schedule.warmup_epochs"]) == (2, 0)
    assert found.reasons[-1] == "2 epochs as --set says"
    assert found.recipe == "photos"  # as few epochs want larger patches
    for asked, fitting in ((70, 30.0), (10, 3_000.0)):
        stated = PHOTOGRAPHS._replace(stated=[f"schedule.epochs={asked}"])
        varied = chosen(fitting, 37.0, stated)[0].changes.keys() & choice.VARIED.keys()
        assert bool(varied) == (asked == 70)
    assert "data.subset" not in chosen(1, 600.0, images)[0].changes


def test_more_images_mend_all_errors_and_more_minutes_those_on_seen_ones():
    learned = Learned(on_trained=0.13, on_others=0.41)
    assert learned.with_images(1) == learned.with_minutes(1) == 0.41
    assert learned.with_images(4) == pytest.approx(0.41 * 4**-0.2)
    assert learned.with_minutes(16) == pytest.approx(0.28 + 0.13 * 16**-0.2)
    assert "more images would help most" in learned.advice()
    assert "more minutes would help most" in Learned(0.40, 0.41).advice()
    assert "help" not in Learned(0.13, 0.0).advice()


@pytest.mark.parametrize("on_trained", [0.0, 0.13, 0.41, 0.5])  # seen ones may vary more: be worse
def test_images_and_minutes_are_never_worth_less_than_minutes_alone(on_trained):
    learned = Learned(on_trained, on_others=0.41)
    for times in (1, 2, 17):
        assert learned.with_images(times) <= learned.with_minutes(times) <= 0.41


def test_confusions_are_counted_of_the_true_class():
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    guesses = torch.tensor([0, 1, 1, 1, 0, 2, 0, 0, 0])
    found = Guessed(labels, guesses, torch.ones(9))
    assert found.errors == pytest.approx(6 / 9)
    words = found.confusions(["oak", "el\nm", "ash"])  # in one line, whatever a folder is called
    expected = r"3 of 4 ash taken for oak; 2 of 3 oak taken for el\nm; 1 of 2 el\nm taken for oak"
    assert words == expected
    assert "no image" in Guessed(labels, labels, torch.ones(9)).confusions(["oak", "elm", "ash"])


def test_fit_looks_chooses_trains_and_says_how_good_it_is(
    image_tree, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(program, "plan_of", lambda one, **how: plan_for(5.0, one.images.train))
    out = tmp_path / "run"
    words = [str(image_tree), "--minutes", "1", "--out-dir", str(out)]
    for one in TINY:
        words += ["--set", one]
    assert program.main([*words, "--weights", "none", "--dry-run"]) == 0
    assert "why     " in capsys.readouterr().out and not out.exists()
    assert program.main([*words, "--weights", "none"]) == 0
    printed, complaints = capsys.readouterr()
    recipe = RunFolder(out).keys()
    assert recipe["model.options.depth"] == 2 and recipe["data.root"] == str(image_tree)
    assert len(list(RunFolder(out).metrics.rows())) == recipe["schedule.epochs"] > 1
    with open(out / "predictions.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    right = sum(row["truth"] == row["label"] for row in rows)
    assert len(rows) == 21 and f"good    {100 * right / 21:.1f} ± " in printed
    assert all(Path(row["path"]).parent.name == row["truth"] for row in rows)
    best = re.search(r"by the weights after epoch (\d+)", printed)[1]
    judged = f'"top-1, judged here",{100 * right / 21:.2f}'.rstrip("0").rstrip(".")
    report = (out / "report.html").read_text()
    assert f'"epoch":{best}' in report and judged in report
    assert re.search(r"(?s)\nmeasure .* 2 to 5 seconds .*\nchoice .*\nshown .*EMA", printed)
    assert "is for vitinit alone" in printed and not complaints  # as timm has no such
    handed_on = vitinit.load(out / "model")
    for row in rows:
        share = dict(handed_on.predict(row["path"]))[row["label"]]
        assert share == pytest.approx(float(row["probability"]), abs=1e-3)
    shown = [line[:8].strip() for line in printed.splitlines()]
    assert shown[-4:] == ["good", "mixed", "more", "took"]
    assert program.main(words) == 0  # the run that is there, whatever is measured
    assert "goes on with the run that is there" in capsys.readouterr().out
    shutil.copytree(image_tree, tmp_path / "others")
    assert program.main([str(tmp_path / "others"), *words[1:]]) == 2
    assert f"holds a run on the images in {image_tree}" in capsys.readouterr().err


def test_images_that_cannot_be_read_are_named_and_left_out_of_the_run_and_its_record(
    image_tree, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(program, "plan_of", lambda one, **how: plan_for(5.0, one.images.train))
    broken = sorted(image_tree.glob("train/*/05.png")) + sorted(image_tree.glob("val/*/03.png"))
    for path in broken:
        path.write_bytes(path.read_bytes()[:70])  # its header is whole
    out = tmp_path / "run"
    words = [str(image_tree), "--minutes", "1", "--weights", "none", "--out-dir", str(out)]
    for one in TINY:
        words += ["--set", one]
    assert program.main([*words, "--dry-run"]) == 0 and not out.exists()
    assert f"6 images of 72 left out, as unreadable: {broken[0]}, " in capsys.readouterr().out
    assert program.main(words) == 0
    facts = RunFolder(out).data_of(0)
    assert (facts["training images"], facts["validation images"]) == (48, 18)
    with open(out / "predictions.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 18
    assert program.main(words) == 0 and "goes on with" in capsys.readouterr().out
    others = shutil.copytree(image_tree, tmp_path / "others")
    assert program.main([str(others), *words[1:]]) == 2
    for path in (others / "train" / "blue").iterdir():
        path.write_bytes(b"no image")
    words[5:7] = ["--out-dir", str(tmp_path / "another")]
    assert program.main([str(others), *words[1:]]) == 2
    assert "class 'blue': none of its images can be read" in capsys.readouterr().err


def test_images_are_read_as_long_as_there_is_time(image_tree, capsys):
    source = ImageFolder(image_tree / "train")
    left = iter([True] * 12 + [False])
    assert unreadable_in([source], lambda: next(left)) == set()
    assert "13 of 51 images were read" in capsys.readouterr().out


def test_a_run_that_is_stopped_says_that_the_same_command_goes_on(capsys):
    def stopped() -> None:
        raise Interrupted(2)

    with pytest.raises(Interrupted):
        program.train(SimpleNamespace(train=stopped))
    assert "the same command of fit goes on" in capsys.readouterr().out


def test_images_are_held_out_where_none_are_there_to_validate_on(image_tree, tmp_path, capsys):
    device = torch.device("cpu")

    def opened(*words: str) -> Images:
        args = program.parse_arguments([*words, "--minutes", "1"])
        return program.look(args, device, tmp_path, lambda: True)

    split = opened(str(image_tree))
    assert (split.train, split.val, split.side) == (51, 21, 10)
    whole = opened(str(image_tree / "train"))
    assert (whole.train, whole.val) == (39, 12)  # a quarter of each 17
    own = opened(str(image_tree / "train"), "--set", "data.held_out_per_class=5")
    assert (own.train, own.val) == (36, 15)
    assert "held out" in capsys.readouterr().out
    odd = tmp_path / '"2024" = '  # as a value of --set, TOML and spaces to strip
    shutil.copytree(image_tree, odd)
    assert opened(str(odd)).val == 21
    with pytest.raises(OneLineError, match="expected 1 at least"):
        opened(str(odd), "--set", "eval.every_epochs=0")
    # Which recipe is chosen is not known yet, and so neither what it has.
    assert opened(str(odd), "--set", "init.options.constant_variance=0.7").val == 21


def test_an_epoch_is_planned_by_steps_on_the_images(image_tree, monkeypatch):
    data = [f"data.root={image_tree}", "data.name=image_folder", "data.num_classes=0"]
    stated = [*TINY, "data.workers=0", "engine.amp=off", "schedule.epochs=1"]
    images = Images(51, 21, 3, 10.0, data, stated)
    now = iter(range(10**6))
    monkeypatch.setattr(measure, "clock_of", lambda device: lambda: float(next(now)))
    plan = measure.plan_of(choice.from_scratch(images, "photos_ahead"), torch.device("cpu"), 0.0)
    # A clock that ticks once whenever it is read: a second to load 17 images, and one to train.
    assert plan.rates == Rates(step=17.0, core=inf, prepare=17.0)
    assert (plan.images, plan.validation) == (51, 21)


def test_arrays_are_as_large_as_they_say(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for label in "ab":
        (tmp_path / label).mkdir()
        for number in range(8):
            side = {"a": 7, "b": 17}[label]  # the median of both classes lies between
            image = rng.integers(0, 256, (side, 19, 3), dtype=np.uint8)
            np.save(tmp_path / label / f"{number}.npy", image)
    args = program.parse_arguments([str(tmp_path), "--minutes", "1"])
    assert program.look(args, torch.device("cpu"), tmp_path, lambda: True).side == 12
