"""command_line.py, and the command line of train.py: its flags, their effects, one line per error."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from vitinit.command_line import Parser, complain
from vitinit.recipe.files import RecipeError, fresh_recipe, overrides
from vitinit.recipe.values import to_toml
from vitinit.runs import data
from vitinit.train.distributed import LostProcess, Processes

REPOSITORY = Path(__file__).resolve().parent.parent
FLAGS = ["--recipe", "--init", "--data-dir", "--out-dir", "--seed", "--resume", "--dry-run",
         "--set"]
MISSPELT = ["--recipe", "quickstart", "--set", "schedule.epoch=3"]
COMPLAINT = ("train.py: --set schedule.epoch=3: [schedule] has no key 'epoch'; "
             "did you mean 'epochs'?")


def saved(folder: Path, *, model: str = "vit_tiny", init: str = "default", **options: object) -> Path:
    """Write a recipe file like quickstart's with this model, init and init options; return its path."""
    text = (REPOSITORY / "recipes" / "quickstart.toml").read_text(encoding="utf-8")
    for title, body in (("model", f'name = "{model}"\n'),
                        ("init", f'name = "{init}"\ncheckpoint = ""\ncheckpoint_weights = "model"\n'
                                 f'options = {to_toml(options)}\n')):
        text = re.sub(rf"\[{title}\]\n.*?(\n\[(?!{title}\.))", lambda found: f"[{title}]\n{body}{found[1]}",
                      text, flags=re.DOTALL)
    path = folder / "trial.toml"
    path.write_text(text, encoding="utf-8")
    return path


def fresh(train_program, *arguments: object):
    """The recipe that train.py resolves for a new run, and the lines that it prints."""
    printed = []
    args = train_program.parse_arguments([str(argument) for argument in arguments])
    return fresh_recipe(args.recipe, say=printed.append,
                        init=args.init, seed=args.seed, data_dir=args.data_dir, sets=args.set), printed


def refusal(train_program, *arguments: object) -> str:
    """The one line of the error with which train.py refuses these arguments."""
    with pytest.raises(RecipeError) as caught:
        fresh(train_program, *arguments)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def environment(**more: str) -> dict[str, str]:
    """Environment for a subprocess: one thread, and no variables of a launcher around these tests."""
    kept = {key: value for key, value in os.environ.items()
            if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    return kept | {"OMP_NUM_THREADS": "1"} | more


# ---------------------------------------------------------------------------------------------
# Flags
# ---------------------------------------------------------------------------------------------


def test_train_py_takes_these_flags_and_no_others(train_program, monkeypatch):
    parsers = []
    monkeypatch.setattr(Parser, "parse_args", lambda self, arguments: parsers.append(self))
    train_program.parse_arguments([])
    actions = parsers[0]._actions
    assert [flag for action in actions for flag in action.option_strings] == [
        "-h", "--help", *FLAGS]
    assert all(action.option_strings for action in actions)      # there are no positional arguments


def test_no_flag_may_be_abbreviated(train_program):
    for flag in FLAGS:
        with pytest.raises(RecipeError, match="unrecognized arguments: " + flag[:-1]):
            train_program.parse_arguments([flag[:-1], "5"])


@pytest.mark.parametrize("arguments, words", [
    (["--epochs", "5"], "--epochs"), (["quickstart"], "quickstart"), (["--seed", "1.5"], "--seed"),
    (["--set"], "--set"), ([], "--recipe is missing; for example --recipe quickstart"),
    (["--recipe", "quikstart"], "did you mean 'quickstart'?")])
def test_a_wrong_flag_is_one_line_that_names_it_and_ends_with_2(train_program, monkeypatch, capsys,
                                                               arguments, words):
    monkeypatch.delenv("RANK", raising=False)
    assert train_program.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith("train.py: ") and words in printed.err


# ---------------------------------------------------------------------------------------------
# From flags to a recipe
# ---------------------------------------------------------------------------------------------


def test_flags_apply_before_set_and_an_empty_one_is_given(train_program):
    assert overrides(init="impulse", seed=0, data_dir="", sets=["run.seed=7"]) == [
        ("data.root", "", "--data-dir "), ("init.name", "impulse", "--init impulse"),
        ("run.seed", 0, "--seed 0"), ("run.seed", 7, "--set run.seed=7")]
    assert overrides(sets=[]) == []
    recipe, printed = fresh(train_program, "--recipe", "quickstart", "--seed", 5, "--data-dir", "a",
                            "--init", "mimetic", "--set", "run.seed=7", "--set", "data.name=cifar10")
    assert (recipe.name, recipe.run.seed, recipe.init.name) == ("quickstart", 7, "mimetic")
    assert (recipe.data.root, recipe.data.name, printed) == ("a", "cifar10", [])


@pytest.mark.parametrize("file, kept, said_of", [
    ({"base": "torch", "value_beta": 0.25}, {"base": "torch", "value_beta": 0.25}, None),
    ({"rank": 3, "base": "torch"}, {"base": "torch"}, "{rank = 3}"),
    ({"rank": 3, "qk_norm": 2.5}, {}, "{rank = 3, qk_norm = 2.5}"), ({}, {}, None)])
def test_init_keeps_the_options_that_it_has_and_names_those_that_it_sets_aside(
        train_program, tmp_path, file, kept, said_of):
    path = saved(tmp_path, init="impulse", **file)
    own, printed = fresh(train_program, "--recipe", path)
    assert own.init.options.items() >= file.items() and printed == []
    recipe, printed = fresh(train_program, "--recipe", path, "--init", "mimetic",
                            "--set", "init.checkpoint=runs/a")
    defaults, _ = fresh(train_program, "--recipe", saved(tmp_path, init="mimetic"))
    assert recipe.init.options == defaults.init.options | kept
    assert (recipe.init.name, recipe.init.checkpoint) == ("mimetic", "runs/a")
    assert printed == ([] if said_of is None else [
        f"--init mimetic has none of these options of the recipe, which are set aside: {said_of}"])


def test_options_set_beside_init_are_those_of_the_new_init_and_win(train_program, tmp_path):
    path = saved(tmp_path, init="impulse", rank=3, base="torch")
    for written in ("init.options.base=default", 'init.options={base = "default"}'):
        recipe, _ = fresh(train_program, "--recipe", path, "--init", "mimetic", "--set", written)
        assert recipe.init.options["base"] == "default"
    recipe, printed = fresh(train_program, "--recipe", path, "--init", "impulse",
                            "--set", "model.name=swin_tiny")
    assert recipe.init.options["base"] == "torch" and "rank" not in recipe.init.options
    line, = printed
    assert line.startswith("--init impulse ") and line.endswith(": {rank = 3}")


@pytest.mark.parametrize("arguments, line", [
    (["--init", "mimetic", "--set", "init.options.rank=5"],
     "--set init.options.rank=5: [init.options] of mimetic has no key 'rank'; valid: "),
    (["--init", "mimetc"], "--init mimetc: init.name is 'mimetc'; did you mean 'mimetic'?"),
    (["--set", "init.name=mimetic"], "{path}: [init.options] of mimetic has no key 'rank'; valid: "),
    (["--set", "model.name=mixer_s16", "--init", "mimetic"],
     "--init mimetic: init 'mimetic' is not defined for a MlpMixer; it has: default, torch, lecun, "),
    (["--set", "model.name=swin_tiny", "--set", "init.options={target_mas=1}"],
     "--set init.options={target_mas=1}: [init.options] of impulse has no key 'target_mas'; did you "
     "mean 'target_mass'?"),
    (["--set", "run.seed=-1"], "--set run.seed=-1: run.seed is -1, expected an integer ≥ 0 and < 2^63"),
    (["--set", "init.options.rank=x", "--set", "init.options.rank=y"],
     "--set init.options.rank=y: init.options.rank is 'y', expected an integer")])
def test_an_error_names_the_source_of_the_wrong_value(train_program, tmp_path, arguments, line):
    path = saved(tmp_path, init="impulse", rank=3)
    assert refusal(train_program, "--recipe", path, *arguments).startswith(line.replace("{path}", str(path)))


def test_every_key_of_the_augmentation_reaches_what_draws_or_applies_it(
        train_program, small_run, tmp_path, monkeypatch):
    """The values are all different within each type, and none of them is a default."""
    given = {}
    for name in ("Augmentation", "TrainSampler"):
        def recorded(*arguments, name=name, real=getattr(data, name), **options):
            given.update(options)
            if name == "Augmentation":
                given.update(zip(("augment", "rand_augment", "mix"), map(vars, arguments[2:])))
            return real(*arguments, **options)
        monkeypatch.setattr(data, name, recorded)
    written = {
        "augment": dict(repeats=3, crop_scale=(0.37, 0.97), crop_ratio=(0.71, 1.31), crop_padding=2,
                        flip=0.11, interpolation="bilinear", erase_probability=0.13,
                        erase_area=(0.17, 0.19), erase_ratio=(0.23, 0.29), erase_fill="const",
                        erase_after_mix=True),
        "rand_augment": dict(layers=1, probability=0.41, magnitude=0.43, magnitude_std=0.47,
                             fill=(101, 103, 107), interpolation="random",
                             operations=("Invert", "Rotate"), rotate_degrees=0.53,
                             shear_factor=0.59, translate_share=0.61, enhance_factor=0.67,
                             posterize_bits=5, solarize_levels=109, solarize_add_levels=113),
        "mix": dict(group=6, mixup_alpha=0.73, cutmix_alpha=0.79, probability=0.83,
                    switch_probability=0.89, label_smoothing=0.07)}
    sets = {f"{title}.{key}": to_toml(value) for title, body in written.items()
            for key, value in body.items()}
    assert train_program.main(small_run(tmp_path / "run", "--dry-run", **sets)) == 0

    assert given["repeats"] == 3
    assert {title: given[title] for title in written} == written


# ---------------------------------------------------------------------------------------------
# One line on standard error
# ---------------------------------------------------------------------------------------------


def test_the_main_process_complains_in_one_line_and_the_others_keep_silent(monkeypatch, capsys):
    for rank, printed in ((None, "eval.py: x.toml: run.seed is 'a'\n"), ("0", "eval.py: x.toml: "
                          "run.seed is 'a'\n"), ("1", "")):
        monkeypatch.delenv("RANK", raising=False)
        if rank is not None:
            monkeypatch.setenv("RANK", rank)
        complain("eval.py", RecipeError("x.toml: run.seed is 'a'"))
        assert capsys.readouterr() == ("", printed)


@pytest.mark.parametrize("error, left", [(RecipeError("no such recipe"), True),
                                         (LostProcess("another one has ended"), False)])
def test_torchrun_is_left_the_cause_and_not_its_consequence(monkeypatch, tmp_path, error, left):
    """ProcessFailure is what torchrun reads the file by, and what its report quotes."""
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    monkeypatch.setenv("RANK", "1")
    complain("train.py", error)
    assert report.exists() == left
    if left:
        failure = ProcessFailure(local_rank=1, pid=3, exitcode=2, error_file=str(report))
        assert failure.message["message"] == "train.py: no such recipe"
        assert 0 <= time.time() - failure.timestamp < 600


# ---------------------------------------------------------------------------------------------
# The program itself
# ---------------------------------------------------------------------------------------------


def test_under_torchrun_the_line_is_the_last_that_is_said_and_workers_exit_with_2(repository, tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         str(repository / "train.py"), *MISSPELT], cwd=tmp_path, env=environment(),
        capture_output=True, text=True, timeout=240)
    printed = result.stdout + result.stderr
    assert result.returncode != 0
    said = [line for line in printed.splitlines() if line.strip("=")]
    assert said[-1].strip() == f"traceback : {COMPLAINT}"        # in torchrun's report, the last line
    assert said.count(COMPLAINT) <= 1                # none if torchrun ended the main process before
    assert 'train.py", line' not in printed          # torchrun's report has a traceback of its own
    assert re.search(r"Root Cause.*exitcode\s*: 2 \(pid", printed, re.DOTALL)
    assert list(tmp_path.iterdir()) == []


def test_each_process_tells_the_others_its_settings_and_its_images(train_program, small_run,
                                                                   tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(Processes, "require_equal", lambda self, facts: told.append(dict(facts)))
    assert train_program.main(small_run(tmp_path / "run", "--seed", "5", "--dry-run")) == 0
    assert told[0]["run.seed"] == 5 and "data.root" not in told[0]
    assert told[1].keys() >= {"training images", "validation images", "files and labels"}


def test_processes_that_were_given_different_images_end_before_the_first_step(
        repository, tmp_path, small_run, image_tree):
    """Started on two machines, say, one of which has another copy of the data, in which one image
    is in another class. Both end with 2, and the main process alone prints the line."""
    other = Path(shutil.copytree(image_tree, tmp_path / "other"))
    (other / "train" / "red" / "03.png").rename(other / "train" / "green" / "99.png")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours = small_run(tmp_path / "run")
    workers = [subprocess.Popen(                     # as torchrun starts them
        [sys.executable, str(repository / "train.py"), *arguments], cwd=tmp_path, text=True,
        env=environment(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
                        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank, arguments in enumerate((ours, [*ours, "--set", f"data.root={other}"]))]
    try:
        printed = [worker.communicate(timeout=240)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [2, 2]
    assert re.fullmatch(r"train.py: process 1 has files and labels = [^\n]*; all processes of a run "
                        r"need the same\n", printed[0]) and printed[1] == ""
    assert not (tmp_path / "run").exists()
