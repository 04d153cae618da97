"""Only one process writes to a run's folder; the lock ends with its process, however that ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
from collections.abc import Callable

import pytest

from vitinit.files import FileError
from vitinit.runs.resume import RunLock
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


def kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of tmp_path, and a worker that it forked afterwards."""
    workers, lock = tmp_path / "worker", RunLock()

    def hold() -> None:
        lock.take(tmp_path)
        workers.write_text(str(forked(lambda: None)))
    process = forked(hold)
    worker = int(workers.read_text())
    workers.unlink()
    yield process, worker
    kill(worker)
    kill(process)


def test_a_second_run_is_told_who_writes_and_reads_and_writes_nothing(
        train_program, small_run, tmp_path, holder, capsys):
    """Not even a file that it could not read: the other process may be writing it."""
    (tmp_path / "metrics.jsonl").write_text("half a li")
    (tmp_path / "last.pt").write_bytes(b"half a checkpo")
    for resume in ("auto", str(tmp_path)):
        assert train_program.main(small_run(tmp_path, "--resume", resume)) == 2
        error = capsys.readouterr().err
        assert f"is writing here (process {holder[0]} on {socket.gethostname()}, since " in error
        assert error.count("\n") == 1
    assert (tmp_path / "metrics.jsonl").read_text() == "half a li"


def test_a_killed_process_keeps_no_lock_though_its_child_lives_on(tmp_path, holder):
    process, worker = holder
    kill(process)
    os.kill(worker, 0)                               # raises if the worker has ended
    with RunLock() as lock:
        lock.take(tmp_path)
    assert (tmp_path / "run.lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_lock_is_given_back_at_the_end(tmp_path):
    def is_free() -> bool:
        """As another process sees it."""
        child = os.fork()
        if child == 0:
            try:
                RunLock().take(tmp_path)
            except CheckpointError:
                os._exit(1)
            os._exit(0)
        return os.waitpid(child, 0)[1] == 0
    with RunLock() as lock:
        for _ in range(2):                           # again is fine, and changes nothing
            lock.take(tmp_path)
            assert not is_free()
    assert is_free()


def test_without_locks_a_run_goes_on_with_a_line(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "lockf", refuse)
    with RunLock() as lock:
        lock.take(tmp_path)
    assert capsys.readouterr().err == (f"warning {tmp_path}: this file system has no locks, so "
                                       "nothing keeps a second run out\n")
    with RunLock() as lock, pytest.raises(FileError, match="gone: cannot be written: No su"):
        lock.take(tmp_path / "gone")
