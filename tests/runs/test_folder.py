"""The run folder: created once, never overwritten, and a record of how the run was started."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from vitinit.runs.folder import RunFolder, disk_space, git_commit
from vitinit.train.optim import adamw, muon
from vitinit.train import checkpoint
from vitinit.train.checkpoint import CheckpointError, load
from vitinit.train.device import describe_device, peak_memory


STATE = {"model": {}, "optimizer": {}, "recipe": {}}


def training_state(step: int) -> dict:
    return STATE | {"step": step, "progress": {"step": step},
                    "weights": torch.full((501,), float(step))}


def flip_a_bit(path: Path) -> None:
    """Flip a bit in the middle of the file's largest tensor."""
    content = bytearray(path.read_bytes())
    place = content.index(torch.full((501,), 1.0).numpy().tobytes()[:64]) + 1001
    content[place] ^= 4
    path.write_bytes(content)


def test_a_new_folder_holds_the_recipe_and_every_start(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "runs" / "a")
    folder.make()
    folder.record_recipe("[run]\nseed = 0\n")
    assert folder.recipe.read_text() == "[run]\nseed = 0\n"
    for count in (1, 2):
        monkeypatch.setattr(sys, "argv", ["train.py", f"--start={count}"])
        folder.record_start(tmp_path, processes=3, device="CPU", data={"training images": 7})
        starts = json.loads(folder.info.read_text())
        assert len(starts) == count == len(folder.starts())
        assert starts[-1]["command"] == ["train.py", f"--start={count}"]
        assert starts[-1]["processes"] == 3 and starts[-1]["torch"] == torch.__version__


def test_a_recipe_that_is_there_stays(tmp_path):
    folder = RunFolder(tmp_path)
    folder.recipe.write_text("# mine\n")
    folder.record_recipe("[run]\nseed = 0\n")
    assert folder.recipe.read_text() == "# mine\n"


# ---------------------------------------------------------------------------------------------
# What is there
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, words, again", [
    ("last.pt", "already holds a run; continue it with --resume", False),
    ("previous.pt", "already holds a run; continue it with --resume", False),
    ("metrics.jsonl", "already holds metrics.jsonl; choose another --out-dir", False),
    ("steps.jsonl", "already holds steps.jsonl; choose another --out-dir", False),
    ("best.pt", "already holds best.pt; choose another --out-dir", False),
    ("profile_000010.json.gz", "already holds profile_000010.json.gz; choose another", False),
    ("epoch_0003.pt", "already holds epoch_0003.pt; choose another --out-dir", False),
    ("recipe.toml", "already holds recipe.toml, of a run without a checkpoint", True),
    ("run.json", "already holds run.json, of a run without a checkpoint", True)])
def test_a_file_of_a_run_keeps_a_new_one_out(tmp_path, name, words, again):
    """A recipe and a recorded start are not results: such a run may start again."""
    folder = RunFolder(tmp_path)
    folder.require_unused()
    (tmp_path / name).write_text("x")
    with pytest.raises(CheckpointError, match=words):
        folder.require_unused()
    assert folder.results() == ([] if again else [name])
    if again:
        folder.require_unused(starts_again=True)
    else:
        with pytest.raises(CheckpointError, match="already holds"):
            folder.require_unused(starts_again=True)
    assert os.listdir(tmp_path) == [name] and (tmp_path / name).read_text() == "x"


def test_an_empty_file_of_lines_is_no_result(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "steps.jsonl").touch()
    (tmp_path / "run.lock").write_text("process 1")
    (tmp_path / "notes.txt").write_text("mine")
    assert RunFolder(tmp_path).results() == []
    RunFolder(tmp_path).require_unused()


@pytest.mark.parametrize("content", [b"", b"[", b"null", b"{}", b"[null]", b"[[]]", b"\xff[]",
                                     b"[" * 10**5])
def test_a_record_of_starts_that_is_none_is_one_line_and_stays(tmp_path, content):
    folder = RunFolder(tmp_path)
    folder.info.write_bytes(content)
    for action in (folder.starts, lambda: folder.record_start(tmp_path, processes=1, device="", data={})):
        with pytest.raises(CheckpointError, match=r"run\.json: not what a run writes") as caught:
            action()
        assert "\n" not in str(caught.value) and "move it away" in str(caught.value)
    assert folder.info.read_bytes() == content


# ---------------------------------------------------------------------------------------------
# The last checkpoint, and the one before it
# ---------------------------------------------------------------------------------------------


def test_each_last_checkpoint_becomes_the_previous_one(tmp_path):
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3):
        folder.save(training_state(step), folder.last)
        folder.save({"step": step}, folder.best)
    assert load(folder.last)["progress"]["step"] == 3
    assert load(folder.previous)["progress"]["step"] == 2
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "last.pt", "previous.pt"]


def test_a_step_that_is_saved_again_leaves_the_previous_one(tmp_path):
    """As before and after the evaluation of an epoch; also by a process that resumed the run."""
    folder = RunFolder(tmp_path)
    for step in (1, 2, 2):
        folder.save(training_state(step), folder.last)
    folder = RunFolder(tmp_path)
    folder.load_last()
    folder.save(training_state(2) | {"again": True}, folder.last)
    assert load(folder.last)["again"] and load(folder.previous)["progress"]["step"] == 1


def test_without_hard_links_the_previous_checkpoint_is_a_copy(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")
    monkeypatch.setattr(os, "link", refuse)
    test_each_last_checkpoint_becomes_the_previous_one(tmp_path)


def test_a_folder_that_cannot_be_synchronised_is_written_nevertheless(tmp_path, monkeypatch):
    real = os.fsync

    def fsync(handle):
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(handle)
    monkeypatch.setattr(os, "fsync", fsync)
    folder = RunFolder(tmp_path / "new")
    folder.make()
    folder.save(training_state(1), folder.last)
    assert folder.load_last()["step"] == 1


@pytest.mark.parametrize("fails_at", range(4))
def test_wherever_saving_is_cut_off_a_whole_checkpoint_is_found(tmp_path, monkeypatch, fails_at):
    """As if the process were killed at the file's sync, at either rename, or at the folder's sync."""
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        folder.save(training_state(step), folder.last)

    class Killed(BaseException):
        pass

    calls = []

    def counted(real):
        def call(*arguments):
            if len(calls) == fails_at:
                raise Killed
            calls.append(real)
            return real(*arguments)
        return call
    for name in ("fsync", "replace"):
        monkeypatch.setattr(checkpoint.os, name, counted(getattr(os, name)))
    monkeypatch.setattr(Path, "unlink", lambda path: None)       # a killed process cleans up nothing
    with pytest.raises(Killed):
        folder.save(training_state(3), folder.last)
    monkeypatch.undo()
    said = []
    state = folder.load_last(say=said.append)
    assert state["progress"]["step"] == [2, 2, 2, 3][fails_at]
    assert folder.read_from == folder.last and said == []
    before = state["step"]                           # and the next checkpoint is written as ever
    folder.save(training_state(4), folder.last)
    assert (load(folder.last)["step"], load(folder.previous)["step"]) == (4, before)
    assert sorted(os.listdir(tmp_path)) == ["last.pt", "previous.pt"]


def test_a_flipped_bit_is_noticed_and_the_run_goes_on_from_the_checkpoint_before(tmp_path):
    folder = RunFolder(tmp_path)
    folder.save(training_state(0), folder.last)
    folder.save(training_state(1), folder.last)
    flip_a_bit(folder.last)
    assert torch.load(folder.last)["weights"].unique().numel() == 2      # torch does not notice
    said = []
    assert folder.load_last(say=said.append)["progress"]["step"] == 0
    line, = said
    assert "last.pt: damaged after it was written, the checksum of" in line
    assert line.endswith(f"; going on with {folder.previous}")

    # The next save does not replace the good checkpoint by the damaged one either.
    (tmp_path / "best.pt.partial").write_bytes(b"cut short")
    folder.tidy(epochs=0, steps=0, say=said.append)
    folder.save(training_state(5), folder.last)
    assert sorted(os.listdir(tmp_path)) == ["damaged.pt", "last.pt", "metrics.jsonl", "previous.pt",
                                            "steps.jsonl"]
    assert load(folder.previous)["progress"]["step"] == 0
    assert RunFolder(tmp_path).load_last()["progress"]["step"] == 5


def test_two_damaged_checkpoints_are_one_line(tmp_path):
    folder = RunFolder(tmp_path)
    for step in (0, 1):
        folder.save(training_state(step), folder.last)
    flip_a_bit(folder.last)
    folder.previous.write_bytes(folder.previous.read_bytes()[:-100])
    with pytest.raises(CheckpointError) as caught:
        folder.load_last()
    message = str(caught.value)
    assert "last.pt: damaged" in message and "previous.pt: not a readable" in message
    assert "\n" not in message and folder.read_from == folder.last


def test_a_last_checkpoint_that_may_not_be_read_is_not_passed_over(tmp_path):
    """An error of the disk, not of the file, may be temporary: the run must not repeat any steps."""
    folder = RunFolder(tmp_path)
    folder.save(training_state(0), folder.previous)
    folder.last.mkdir()
    with pytest.raises(CheckpointError, match=r"last\.pt: cannot be read: Is a directory"):
        folder.load_last()


def test_a_checkpoint_that_is_no_runs_cannot_be_resumed(tmp_path):
    folder = RunFolder(tmp_path)
    folder.save({"model": {}}, folder.last)
    with pytest.raises(CheckpointError, match="not a training checkpoint, it cannot be resumed"):
        folder.load_last()


@pytest.mark.parametrize("part", ["model", "optimizer", "progress", "recipe"])
def test_a_part_of_another_kind_is_one_line(tmp_path, part):
    folder = RunFolder(tmp_path)
    folder.save(training_state(1) | {part: [1]}, folder.last)
    with pytest.raises(CheckpointError, match=f"cannot be resumed; expected a dictionary '{part}'"):
        folder.load_last()


# ---------------------------------------------------------------------------------------------
# Disks that refuse
# ---------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written: Not a directory"):
        RunFolder(tmp_path / "file" / "run").make()


def test_a_folder_that_vanished_is_one_line_for_whatever_is_written(tmp_path):
    folder = RunFolder(tmp_path / "gone")
    for action in (lambda: folder.save({}, folder.last), lambda: folder.record_recipe(""),
                   lambda: folder.record_start(tmp_path, processes=1, device="", data={}),
                   lambda: folder.metrics.append({"epoch": 1}),
                   lambda: folder.tidy(epochs=1, steps=1, say=print)):
        with pytest.raises(CheckpointError, match="cannot be written: No such file or directory"):
            action()


def test_what_a_run_takes_on_disk_is_what_its_files_have(tmp_path):
    """Up to what the archive format adds to the tensors."""
    model = nn.ModuleDict({"blocks": nn.Sequential(nn.Linear(301, 293))})
    optimizer = adamw(model, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8)
    model.blocks(torch.ones(1, 301)).sum().backward()
    optimizer.step()
    weights = {"model": model.state_dict(), "ema": model.state_dict()}
    torch.save(weights, tmp_path / "best.pt")
    torch.save(weights | {"optimizer": optimizer.state_dict()}, tmp_path / "last.pt")
    whole, best = 4 * 293 * 302 * 4, 2 * 293 * 302 * 4
    assert disk_space(model, optimizer, ema=True, kept=2) == (
        "last.pt and previous.pt 1.42 MB each, best.pt 708 kB, 2 kept epochs 708 kB each; 6.37 MB "
        "at most")
    # An archive stores tensors that share memory once, as those of the model and its EMA do here.
    assert (tmp_path / "last.pt").stat().st_size == pytest.approx(whole - best / 2, rel=0.02)
    assert 3 * whole + 3 * best == pytest.approx(6.37e6, rel=1e-3)
    assert disk_space(model, optimizer, ema=False, kept=0).startswith(
        "last.pt and previous.pt 1.06 MB each, best.pt 354 kB; ")
    optimizer = muon(model, factor=1.0, momentum=0.9, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8)
    assert disk_space(model, optimizer, ema=False, kept=0).startswith(
        "last.pt and previous.pt 709 kB each, best.pt 354 kB; ")


def test_the_commit_is_the_repositorys_and_unknown_elsewhere(tmp_path, repository):
    assert git_commit(tmp_path) == "unknown"
    if (repository / ".git").exists():
        assert len(git_commit(repository).removesuffix("+changes")) == 40


def test_only_tracked_files_count_as_changes_of_the_code(tmp_path, monkeypatch):
    """A picture that a figure has left in the repository changes no result."""
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "ada")
    code = tmp_path / "code.py"
    code.write_text("1")
    for words in (["init"], ["add", "code.py"], ["commit", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)
    (tmp_path / "attention.png").write_bytes(b"")
    commit = git_commit(tmp_path)
    assert len(commit) == 40 and "+" not in commit
    code.write_text("2")
    assert git_commit(tmp_path) == f"{commit}+changes"


def test_hardware_is_said_in_words():
    cpu = torch.device("cpu")
    assert "threads" in describe_device(cpu) and peak_memory(cpu).endswith("GiB")
