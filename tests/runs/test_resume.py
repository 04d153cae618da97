"""Which run train.py resumes: from its last checkpoint, after any interruption, in any version."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

import vitinit
from vitinit import export, predict
from vitinit.figures.subjects import of_runs
from vitinit.runs.groups import read_run

PAST = Path(__file__).resolve().parent / "data"
COMMITS = ["0c0940f", "6bde95e", "e89ec2a", "004f0a5", "75c8dd7", "55cb85f", "644a0fb",
           "1579675", "54ef552", "c96dca1", "09cb91f", "bb39c50"]


@pytest.fixture
def past_run(tmp_path):
    """A copy of a run folder that an earlier commit of this repository wrote."""
    def copied(commit: str) -> Path:
        return Path(shutil.copytree(PAST / commit, tmp_path / commit))
    return copied


@pytest.fixture
def stopped(train_program, small_run, tmp_path, monkeypatch, capsys, stop_before):
    """A run stopped after its third step, and the command line that began it."""
    def run(*more: str, **changes: str) -> tuple[Path, list[str]]:
        folder = tmp_path / "run"
        arguments = small_run(folder, "--resume", "auto", *more, **changes)
        with monkeypatch.context() as patch:
            patch.setattr(train_program, "StopRequest", stop_before(3))
            assert train_program.main(arguments) == 128 + signal.SIGTERM
        capsys.readouterr()
        return folder, arguments
    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "run.lock"}


# ---------------------------------------------------------------------------------------------
# Runs of earlier versions
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("commit", COMMITS)
def test_a_run_of_a_past_commit_goes_on_and_is_evaluated(train_program, eval_program, past_run,
                                                         image_tree, capsys, commit):
    folder = past_run(commit)
    before = read_run(folder)
    assert not before.finished
    there = ["--data-dir", str(image_tree)]
    assert train_program.main(["--resume", str(folder), *there]) == 0
    printed = capsys.readouterr().out
    step = torch.load(PAST / commit / "last.pt")["step"]
    assert f"resumed at step {step}" in printed
    assert printed.count("note    this run began when images were mixed by micro-batches") == (
        commit not in ("0c0940f", "55cb85f", "644a0fb", "1579675", "54ef552", "c96dca1",
                       "09cb91f", "bb39c50"))
    after = read_run(folder)
    assert after.finished and after.rows[:len(before.rows)] == before.rows
    assert len(after.starts) == 2 and after.experiment == before.experiment
    assert train_program.main(["--resume", str(folder), *there]) == 0    # now of the current version
    capsys.readouterr()
    assert eval_program.main([str(folder), str(PAST / commit / "last.pt"), *there]) == 0
    assert capsys.readouterr().out.count(" | ema | ") == 2


def test_the_command_line_of_a_past_run_resumes_it(train_program, past_run, image_tree, capsys):
    folder = past_run("75c8dd7")
    start, = json.loads((folder / "run.json").read_text())
    arguments = [{"pictures": str(image_tree), "v4_75c8dd7": str(folder)}.get(word, word)
                 for word in start["command"][1:]]
    assert train_program.main([*arguments, "--resume", "auto"]) == 0
    assert "resumed at step 11" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------
# The same command line, and others
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [
    ["--set", "optim.eps=2e-4", "--set", "optim.eps=3e-4"],
    ["--seed", "1", "--set", "run.seed=2"],
    ["--set", "init.name=impulse", "--set", "init.options={kernel_size=1}"],
    ["--set", "init.options={value_init='base'}", "--set", "init.options.qk_init=base"],
    ["--set", "data.image_size=12", "--set", "data.image_size=8"],
    ["--set", "optim.max_batch_per_process=2", "--set", "optim.max_batch_per_process=12"],
], ids=["key", "seed", "init", "table", "pair", "machine"])
def test_the_command_that_began_a_run_goes_on_with_it(train_program, stopped, capsys, more):
    """Even if it sets a key twice, or in another form."""
    folder, arguments = stopped(*more, schedule__epochs="1",
                                schedule__warmup_epochs="0")
    assert train_program.main(arguments) == 0
    assert "resumed at step 3" in capsys.readouterr().out


def test_what_belongs_to_the_machine_may_change_and_stays_changed(train_program, stopped, capsys,
                                                                  image_tree):
    folder, _ = stopped(schedule__epochs="1", schedule__warmup_epochs="0")
    moved = image_tree.rename(image_tree.with_name("elsewhere"))
    sets = ["data.workers=1", "optim.max_batch_per_process=2", "eval.batch_size=5",
            "eval.cache_gib=0.5", "checkpoint.every_steps=1", "data.on_device_gib=0.25",
            "engine.compile=false"]
    assert train_program.main(["--resume", str(folder), "--data-dir", str(moved),
                               *(word for text in sets for word in ("--set", text))]) == 0
    assert "12 = 1 process(es) × 6 micro-batch(es) × 2 images" in capsys.readouterr().out
    recipe = torch.load(folder / "last.pt")["recipe"]
    assert (recipe["data"]["workers"], recipe["data"]["on_device_gib"]) == (1, 0.25)
    assert (recipe["optim"]["max_batch_per_process"], recipe["eval"]["batch_size"]) == (2, 5)
    assert recipe["eval"]["cache_gib"] == 0.5
    assert recipe["checkpoint"]["every_steps"] == 1 and recipe["data"]["root"] == str(moved)


@pytest.mark.parametrize("sets, words", [
    (["init.options={}"], "init.options={} differs from the run's init.options.value_init = \"base\""),
    (["optim.global_batch=6"], "optim.global_batch=6 differs from the run's optim.global_batch = 12"),
    (["optim.eps=1e-4", "optim.eps=1e-5"], "optim.eps=1e-5 differs from the run's optim.eps = 0.0001"),
    (["init.options.value_int=base"], "there is no 'value_int'; did you mean 'value_init'?"),
    (["init.name=impulse"], "init.name=impulse differs from the run's init.name = \"mimetic\""),
])
def test_what_belongs_to_the_experiment_may_not_change(train_program, stopped, capsys, sets, words):
    folder, _ = stopped(init__options__value_init="base")
    before = contents(folder)
    assert train_program.main(["--resume", str(folder),
                               *(word for text in sets for word in ("--set", text))]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and contents(folder) == before


@pytest.mark.parametrize("change, words", [
    (lambda tree: (tree / "val" / "red" / "00.png").unlink(), "has validation images 20, and it was 21"),
    (lambda tree: (tree / "train" / "red" / "00.png").rename(tree / "train" / "green" / "99.png"),
     "has files and labels "),
    (lambda tree: [(tree / split / "red").rename(tree / split / "yellow") for split in ("train", "val")],
     "class 2 is 'yellow', and was 'red' when")], ids=["image", "label", "class"])
def test_other_images_are_not_gone_on_with(train_program, stopped, image_tree, capsys, change, words):
    folder, arguments = stopped()
    before = contents(folder)
    change(image_tree)
    for command in (arguments, ["--resume", str(folder)]):
        assert train_program.main(command) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1 and contents(folder) == before


def test_a_relative_folder_of_data_is_that_of_the_first_start(train_program, eval_program, stopped,
                                                              image_tree, tmp_path, monkeypatch, capsys):
    """From another folder the run goes on with its data, and eval.py finds it; recipe.toml and
    last.pt keep the path as it was written. Data that moved is said by --data-dir."""
    monkeypatch.chdir(image_tree.parent)
    folder, _ = stopped("--data-dir", image_tree.name, schedule__epochs="1", schedule__warmup_epochs="0")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert train_program.main(["--resume", str(folder)]) == 0
    assert eval_program.main([str(folder)]) == 0
    moved = image_tree.rename(image_tree.with_name("moved"))
    capsys.readouterr()
    assert eval_program.main([str(folder)]) == 2
    assert str(image_tree) in capsys.readouterr().err
    assert eval_program.main([str(folder), "--data-dir", str(moved)]) == 0
    assert predict.main([str(folder), str(moved / "val"), "--workers", "0"]) == 0    # needs none
    assert export.main([str(folder), "--to", "torch", "--out", "run.pt2"]) == 0
    assert 'root = "images"' in (folder / "recipe.toml").read_text()
    assert torch.load(folder / "last.pt")["recipe"]["data"]["root"] == "images"
    assert [start["data"]["root"] for start in json.loads((folder / "run.json").read_text())] == [
        str(image_tree)] * 2


def test_batch_norm_goes_on_with_its_micro_batch_alone(train_program, tmp_path, image_tree,
                                                       monkeypatch, capsys, stop_before):
    sets = ["data.name=image_folder", "data.num_classes=3", "data.image_size=8",
            "optim.global_batch=12", "optim.max_batch_per_process=4", "schedule.epochs=2",
            "model.name=convmixer_256_8", "init.options={}",
            "model.options={embed_dim=5, depth=1, kernel_size=3, patch_size=2}", "mix.group=4"]
    folder = tmp_path / "run"
    arguments = ["--recipe", "quickstart", "--data-dir", str(image_tree), "--out-dir", str(folder),
                 *(word for text in sets for word in ("--set", text))]
    with monkeypatch.context() as patch:
        patch.setattr(train_program, "StopRequest", stop_before(1))
        assert train_program.main(arguments) == 128 + signal.SIGTERM
    capsys.readouterr()
    assert train_program.main(["--resume", str(folder), "--set",
                               "optim.max_batch_per_process=6"]) == 2
    assert "micro-batches of 4 images, and they would have 6 now" in capsys.readouterr().err
    # Earlier versions did not record it; each of two processes used micro-batches of 3 images.
    state, info = torch.load(folder / "last.pt"), json.loads((folder / "run.json").read_text())
    torch.save({key: value for key, value in state.items() if key != "micro_batch"},
               folder / "last.pt")
    (folder / "run.json").write_text(json.dumps([info[0] | {"processes": 2}]))
    assert train_program.main(["--resume", str(folder)]) == 2
    assert "micro-batches of 3 images, and they would have 4 now" in capsys.readouterr().err
    (folder / "run.json").write_text(json.dumps(info))
    assert train_program.main(["--resume", str(folder), "--set",
                               "optim.max_batch_per_process=5"]) == 0      # 4 are the most that fit


# ---------------------------------------------------------------------------------------------
# Folders that lost something
# ---------------------------------------------------------------------------------------------


def test_a_run_killed_before_its_first_step_goes_on_from_step_0(train_program, small_run, tmp_path,
                                                                monkeypatch, capsys):
    """The first checkpoint is written before the first step; missing files are written on resume."""
    folder = tmp_path / "run"
    arguments = small_run(folder, "--resume", "auto", schedule__epochs="1",
                          schedule__warmup_epochs="0", checkpoint__keep_epochs="[0]")

    class Killed(BaseException):
        pass

    def kill(*_, **__):
        raise Killed
    with monkeypatch.context() as patch:
        patch.setattr(train_program, "train_epochs", kill)
        with pytest.raises(Killed):
            train_program.main(arguments)
    first = torch.load(folder / "last.pt")
    assert first["step"] == 0 and first["optimizer"]["state"] == {}
    (folder / "epoch_0000.pt").unlink()              # killed before that one
    capsys.readouterr()
    for again in (["--resume", str(folder)], arguments):
        assert train_program.main(again) == 0
    assert "resumed at step 0" in capsys.readouterr().out
    kept = torch.load(folder / "epoch_0000.pt")
    assert all(torch.equal(value, first["model"][name]) for name, value in kept["model"].items())


def test_a_finished_run_without_its_checkpoints_is_done(train_program, small_run, tmp_path, capsys):
    folder = tmp_path / "run"
    arguments = small_run(folder, "--resume", "auto", schedule__epochs="2")
    assert train_program.main(arguments) == 0
    for name in ("last.pt", "previous.pt", "best.pt"):
        (folder / name).unlink()
    before = contents(folder)
    capsys.readouterr()
    for again in (arguments, ["--resume", str(folder)]):
        assert train_program.main(again) == 0
        assert capsys.readouterr().out == (f"done    {folder}: all 2 epochs, by its metrics.jsonl; "
                                           "no last.pt is left\n")
    assert contents(folder) == before
    assert train_program.main([*arguments, "--set", "optim.eps=1e-3"]) == 2
    error = capsys.readouterr().err
    assert "holds another run, its optim.eps is 0.0001 and not 0.001" in error


@pytest.mark.parametrize("left", [["metrics.jsonl"], ["best.pt"], ["epoch_0001.pt"]])
def test_what_an_unfinished_run_left_is_never_started_over(train_program, small_run, tmp_path,
                                                           written_run, capsys, left):
    folder = written_run("run", [10.0], epochs=2)
    arguments = ["--recipe", "quickstart", "--init", "default", "--set", "schedule.epochs=2",
                 "--out-dir", str(folder), "--resume"]
    if left != ["metrics.jsonl"]:
        (folder / "metrics.jsonl").unlink()
        (folder / left[0]).write_bytes(b"weights")
    before = contents(folder)
    for how in ("auto", str(folder)):
        assert train_program.main([*arguments, how]) == 2
        error = capsys.readouterr().err
        assert (f"holds {left[0]} of {int('metrics' in left[0])} of 2 epochs but no last.pt to go on "
                "from; start anew in another --out-dir") in error and error.count("\n") == 1
        assert contents(folder) == before


def test_a_recipe_without_a_checkpoint_is_started_and_another_ones_kept(
        train_program, small_run, tmp_path, capsys):
    """Killed before its first checkpoint: there are no results, but the recipe identifies the run."""
    folder = tmp_path / "run"
    arguments = small_run(folder, schedule__epochs="1", schedule__warmup_epochs="0")
    assert train_program.main(arguments) == 0
    for name in ("last.pt", "best.pt", "metrics.jsonl"):
        (folder / name).unlink()
    (folder / "previous.pt").unlink(missing_ok=True)
    before = contents(folder)
    for command, words in (
            (arguments, "already holds recipe.toml, run.json, of a run without a checkpoint"),
            (["--resume", str(folder)], "holds no checkpoint to go on from yet; the command that"),
            ([*arguments, "--resume", "auto", "--seed", "1"], "its run.seed is 0 and not 1")):
        assert train_program.main(command) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1 and contents(folder) == before
    assert train_program.main([*arguments, "--resume", "auto"]) == 0
    assert read_run(folder).finished and len(read_run(folder).starts) == 2


@pytest.mark.parametrize("name, content, words", [
    ("metrics.jsonl", b"garbage\n", "metrics.jsonl: line 1 is no JSON object"),
    ("metrics.jsonl", b'{"epoch": 1}\n\xff\xfe\n', "metrics.jsonl: line 2 is no JSON object"),
    ("metrics.jsonl", b'{"epoch": 1}\n{"epoch": 1}\n', "line 2 is epoch 1 after epoch 1; two runs"),
    ("metrics.jsonl", b"null\n", "metrics.jsonl: line 1 is None, expected a JSON object"),
    ("run.json", b"", "run.json: not what a run writes"),
    ("run.json", b"null", "run.json: not what a run writes"),
    ("run.json", b'[{"command": ', "run.json: not what a run writes"),
    ("last.pt", b"", "last.pt: not a readable checkpoint (empty file); going on with"),
])
def test_a_broken_file_is_one_line_and_nothing_is_lost(train_program, stopped, capsys, name, content,
                                                       words):
    folder, arguments = stopped(schedule__epochs="1", schedule__warmup_epochs="0")
    (folder / name).write_bytes(content)
    before = contents(folder)
    if name == "last.pt":
        assert train_program.main(arguments) == 0
        assert words in capsys.readouterr().out
        assert (folder / "damaged.pt").read_bytes() == content
        return
    assert train_program.main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and contents(folder) == before


def test_lines_that_were_lost_are_named_and_a_recipe_is_written_again(train_program, small_run,
                                                                      tmp_path, capsys):
    """Stopped at the end of the last epoch, in its evaluation: no step is left to do."""
    folder = tmp_path / "run"
    assert train_program.main(small_run(folder, checkpoint__every_steps="4")) == 0
    written = (folder / "recipe.toml").read_text()
    state = torch.load(folder / "last.pt")
    rates = [group["lr"] for group in state["optimizer"]["param_groups"]]
    state["progress"] |= {"epochs": 2, "epoch_steps": 4, "loss_sum": 4.0, "seconds": 1.0}
    torch.save(state, folder / "last.pt")
    (folder / "metrics.jsonl").unlink()
    (folder / "steps.jsonl").write_text("")
    (folder / "recipe.toml").unlink()
    capsys.readouterr()
    assert train_program.main(["--resume", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert f"warning {folder / 'metrics.jsonl'}: lacks epoch 1, 2; without these, compar" in printed
    assert f"warning {folder / 'steps.jsonl'}: lacks step 10; its curves by step have" in printed
    assert (folder / "recipe.toml").read_text() == written
    run = read_run(folder)
    assert [row["epoch"] for row in run.rows] == [3] and not run.finished
    groups = torch.load(folder / "last.pt")["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == rates and min(rates) > 0


def test_every_program_reads_the_previous_checkpoint_if_the_last_is_damaged(
        train_program, eval_program, past_run, small_run, image_tree, tmp_path, capsys):
    folder = past_run("09cb91f")
    (folder / "last.pt").rename(folder / "previous.pt")
    for content in (None, b"torn"):
        if content:
            (folder / "last.pt").write_bytes(content)
        for use in (lambda: eval_program.main([str(folder), "--data-dir", str(image_tree)]),
                    lambda: vitinit.load(folder), lambda: list(of_runs([folder], [], "model")),
                    lambda: train_program.main(small_run(tmp_path / "new", "--dry-run",
                                                         init__checkpoint=str(folder)))):
            assert use() not in (1, 2)
            error = capsys.readouterr().err
            assert error.startswith(f"warning {folder / 'last.pt'}: no") and error.count("\n") == 1
            assert error.endswith(f"; going on with {folder / 'previous.pt'}\n")


def test_blank_lines_among_the_metrics_count_for_nothing(train_program, small_run, tmp_path):
    folder = tmp_path / "run"
    assert train_program.main(small_run(folder, schedule__epochs="2")) == 0
    lines = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text("\n" + lines.replace("\n", "\n \n"))
    assert read_run(folder).epochs_done == 2
    assert train_program.main(["--resume", str(folder)]) == 0
    assert (folder / "metrics.jsonl").read_text() == lines


def test_a_disk_that_refuses_ends_the_run_in_one_line_with_its_checkpoint(
        train_program, small_run, tmp_path, monkeypatch, capsys):
    """The disk is full when the second epoch's checkpoint is written: no partial file remains."""
    folder = tmp_path / "run"
    real, saved = os.fsync, []

    def fsync(handle):
        saved.append(handle)
        if len(saved) > 20 and os.readlink(f"/proc/self/fd/{handle}").endswith("last.pt.partial"):
            raise OSError(28, "No space left on device")
        real(handle)
    monkeypatch.setattr(os, "fsync", fsync)
    arguments = small_run(folder, "--resume", "auto", checkpoint__every_steps="1")
    assert train_program.main(arguments) == 2
    error = capsys.readouterr().err
    assert error == f"train.py: {folder / 'last.pt'}: cannot be written: No space left on device\n"
    assert not list(folder.glob("*.partial"))
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    assert train_program.main(arguments) == 0 and read_run(folder).finished
