"""Only one process writes to a run's folder; the lock ends with its process, however that ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from vitinit.runs.lock import RunLock
from vitinit.train.checkpoint import CheckpointError


def forked(action: Callable[[], None]) -> int:
    """Fork a child that does `action` and then waits to be killed; return its process id."""
    ready, written = os.pipe()
    child = os.fork()
    if child == 0:
        action()
        os.write(written, b"done")
        while True:
            signal.pause()
    assert os.read(ready, 4) == b"done"
    os.close(ready)
    os.close(written)
    return child


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of tmp_path, and a worker that it forked afterwards."""
    workers = tmp_path / "worker"
    lock = RunLock()

    def hold() -> None:
        lock.take(tmp_path, print)
        workers.write_text(str(forked(lambda: None)))
    process = forked(hold)
    worker = int(workers.read_text())
    workers.unlink()
    yield process, worker
    os.kill(worker, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def test_a_second_process_is_told_who_holds_the_folder(tmp_path, holder):
    """Deleting the file that says so lets nobody in."""
    process, _ = holder
    for words in (f"process {process} on {socket.gethostname()}, since 20",
                  "its run.lock was deleted"):
        with RunLock() as lock, pytest.raises(CheckpointError) as caught:
            lock.take(tmp_path, print)
        assert str(caught.value).startswith(f"{tmp_path}: another run is writing here ({words}")
        assert "\n" not in str(caught.value)
        (tmp_path / "run.lock").unlink()


def test_a_killed_process_keeps_no_lock_though_its_child_lives_on(tmp_path, holder):
    process, worker = holder
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    os.kill(worker, 0)                               # raises if the worker has ended
    with RunLock() as lock:
        lock.take(tmp_path, print)
    assert (tmp_path / "run.lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_lock_is_given_back_at_the_end(tmp_path):
    def is_free() -> bool:
        """As another process sees it."""
        check = ("import fcntl, sys\nwith open(sys.argv[1], 'a') as file:\n"
                 "    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)")
        return subprocess.run([sys.executable, "-c", check, tmp_path / "run.lock"],
                              capture_output=True).returncode == 0
    with RunLock() as lock:
        for _ in range(2):                           # again is fine, and changes nothing
            lock.take(tmp_path, print)
            assert not is_free()
    assert is_free()


def test_without_locks_a_run_goes_on_with_a_line(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")
    said = []
    for name in ("flock", "lockf"):                  # a network file system has the second alone
        assert said == []
        monkeypatch.setattr(fcntl, name, refuse)
        with RunLock() as lock:
            lock.take(tmp_path, said.append)
    assert said == [f"lock    {tmp_path}: this file system has no locks, so nothing keeps a second "
                    "run out"]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    with RunLock() as lock, pytest.raises(CheckpointError,
                                          match="gone: cannot be written: No such"):
        lock.take(tmp_path / "gone", print)


@pytest.mark.parametrize("how", ["auto", "folder"])
def test_a_second_run_reads_and_writes_nothing(train_program, small_run, tmp_path, holder, capsys,
                                               how):
    """Not even a file that it could not read: the other process may be writing it."""
    (tmp_path / "metrics.jsonl").write_text("half a li")
    (tmp_path / "last.pt").write_bytes(b"half a checkpo")
    resume = {"auto": "auto", "folder": str(tmp_path)}[how]
    assert train_program.main(small_run(tmp_path, "--resume", resume)) == 2
    error = capsys.readouterr().err
    assert "another run is writing here" in error and error.count("\n") == 1
    assert (tmp_path / "metrics.jsonl").read_text() == "half a li"
