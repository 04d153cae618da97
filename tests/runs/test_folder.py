"""The run folder: created once, never overwritten, says how it came about."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from vitinit.train.checkpoint import CheckpointError
from vitinit.runs.folder import RunFolder, git_commit
from vitinit.train.device import describe_device, peak_memory


def test_a_new_folder_holds_the_recipe_and_every_start(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "runs" / "a")
    folder.create("[run]\nseed = 0\n")
    assert folder.recipe.read_text() == "[run]\nseed = 0\n"
    for count in (1, 2):
        monkeypatch.setattr(sys, "argv", ["train.py", f"--start={count}"])
        folder.record_start(tmp_path, processes=3, device="CPU")
        starts = json.loads(folder.info.read_text())
        assert len(starts) == count
        assert starts[-1]["command"] == ["train.py", f"--start={count}"]
        assert starts[-1]["processes"] == 3 and starts[-1]["torch"] == torch.__version__


@pytest.mark.parametrize("name", ["last.pt", "metrics.jsonl"])
def test_a_folder_that_holds_a_run_is_refused(tmp_path, name):
    (tmp_path / name).write_text("x")
    with pytest.raises(CheckpointError, match="already holds a run; continue it with --resume"):
        RunFolder(tmp_path).create("")
    assert (tmp_path / name).read_text() == "x"


def test_a_folder_whose_run_never_reached_a_checkpoint_can_be_used_again(tmp_path):
    for _ in range(2):
        RunFolder(tmp_path / "a").create("")


def test_metrics_without_a_checkpoint_go_where_the_run_starts_again(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.append({"epoch": 1})
    folder.create("", again=True)
    assert folder.metrics.rows() == []
    folder.metrics.append({"epoch": 1})
    folder.save({}, folder.last)
    with pytest.raises(CheckpointError, match="already holds a run"):
        folder.create("", again=True)
    assert folder.metrics.rows() == [{"epoch": 1}]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written: Not a directory"):
        RunFolder(tmp_path / "file" / "run").create("")


def test_a_checkpoint_that_is_no_runs_cannot_be_resumed(tmp_path):
    folder = RunFolder(tmp_path)
    folder.save({"model": {}}, folder.last)
    with pytest.raises(CheckpointError, match="not a training checkpoint, it cannot be resumed"):
        folder.load_last()


def test_the_commit_is_the_repositorys_and_unknown_elsewhere(tmp_path, repository):
    assert git_commit(tmp_path) == "unknown"
    if (repository / ".git").exists():
        assert len(git_commit(repository).removesuffix("+changes")) == 40


def test_hardware_is_said_in_words():
    cpu = torch.device("cpu")
    assert "threads" in describe_device(cpu) and peak_memory(cpu).endswith("GiB")
