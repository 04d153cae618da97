"""Of two processes that need the same download, one does it and the other waits for it."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path

import pytest

from vitinit.data import datasets
from vitinit.data.datasets import download, one_at_a_time
from vitinit.data.images import DataError

FORK = multiprocessing.get_context("fork")


def fetch(root: Path, begun, go_on, said) -> None:
    """A process whose download appends its number to a file, unless the data is there already."""
    def stub(folder: Path) -> None:
        if not (folder / "data").exists():
            with open(folder / "downloads", "a") as log:
                log.write(f"{os.getpid()}\n")
            begun.set()
            assert go_on.wait(60)
            (folder / "data").write_text("whole")
    datasets.DATA_SETS["cifar10"] = datasets.DataSet(None, "data", 10, [stub])
    download("cifar10", str(root), said.put)


def started(root: Path):
    begun, go_on, said = FORK.Event(), FORK.Event(), FORK.Queue()
    process = FORK.Process(target=fetch, args=(root, begun, go_on, said), daemon=True)
    process.start()
    return process, begun, go_on, said


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "not yet" / "there"


def test_of_two_processes_one_downloads_and_the_other_finds_it_there(root):
    first, begun, go_on, _ = started(root)
    assert begun.wait(60)
    second, other_begun, _, said = started(root)
    assert said.get(timeout=60) == f"{root}: waiting for another process that downloads into it"
    assert not other_begun.is_set()
    go_on.set()
    for process in (first, second):
        process.join(60)
        assert process.exitcode == 0
    assert not other_begun.is_set() and (root / "downloads").read_text() == f"{first.pid}\n"
    assert sorted(os.listdir(root)) == ["data", "downloads"]     # no lock is left


def test_a_killed_download_leaves_the_lock_to_the_next(root):
    first, begun, _, _ = started(root)
    assert begun.wait(60)
    second, other_begun, go_on, said = started(root)
    assert "waiting" in said.get(timeout=60)
    first.kill()
    assert other_begun.wait(60)
    go_on.set()
    second.join(60)
    assert second.exitcode == 0 and (root / "data").exists()
    assert (root / "downloads").read_text() == f"{first.pid}\n{second.pid}\n"


def test_where_files_cannot_be_locked_it_goes_on(tmp_path, monkeypatch):
    def lockf(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    monkeypatch.setattr(datasets.fcntl, "lockf", lockf)
    said = []
    with one_at_a_time(tmp_path / ".lock", said.append):
        assert said == []
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_needs_no_lock(tmp_path):
    (tmp_path / "file").touch()                      # in the place of a folder
    said = []
    with one_at_a_time(tmp_path / "file" / ".lock", said.append):
        assert said == []


def test_a_failed_download_gives_the_lock_back(root, monkeypatch):
    def fails(folder: Path) -> None:
        raise RuntimeError("File not found or corrupted.\n" + 99 * "x ")
    monkeypatch.setitem(datasets.DATA_SETS, "cifar10", datasets.DataSet(None, "data", 10, [fails]))
    said = []
    for _ in range(2):
        with pytest.raises(DataError, match="cifar10: not complete in .*File not found or corrupted"):
            download("cifar10", str(root), said.append)
    assert said == []
