"""Worker processes give the same batches and end with their parent, however they are started."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from vitinit.data.images import DataError
from vitinit.data.loader import GRACE_SECONDS, Loader, begin_work

METHODS = ("fork", "forkserver", "spawn")


@pytest.fixture
def start_by():
    """Sets the start method of processes for one test."""
    before = multiprocessing.get_start_method()
    yield lambda method: multiprocessing.set_start_method(method, force=True)
    multiprocessing.set_start_method(before, force=True)


# ---------------------------------------------------------------------------------------------
# Every way of starting them
# ---------------------------------------------------------------------------------------------


def test_a_run_is_the_same_however_its_workers_are_started(train_program, small_run, tmp_path,
                                                           start_by):
    """Workers decode files, whose paths they share, for training and for evaluation."""
    weights: dict[str, dict[str, Tensor]] = {}
    for method in ("none", *METHODS):
        if method != "none":
            start_by(method)
        run = tmp_path / method
        assert train_program.main(small_run(
            run, schedule__epochs="2", data__on_device_gib="0.0", eval__cache_gib="0.0",
            data__workers=str(int(method != "none")))) == 0
        weights[method] = torch.load(run / "last.pt", weights_only=True)["model"]
    for method in METHODS:
        for name, value in weights["none"].items():
            assert torch.equal(value, weights[method][name]), (method, name)


def test_where_processes_train_together_workers_are_not_forked(start_by, monkeypatch):
    """A fork may copy a lock that a thread of communication holds, which nobody then releases."""
    start_by("fork")
    assert Loader([1, 2, 3], workers=1).multiprocessing_context.get_start_method() == "fork"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert Loader([1, 2, 3], workers=1).multiprocessing_context.get_start_method() == "forkserver"


PROGRAM = """
import multiprocessing
import os
import signal
import sys

import torch

from vitinit.data.loader import Loader


class Views:
    '''Each worker holds a pipe open for as long as it lives.'''

    def __init__(self, pipe):
        self.pipe, self.held = pipe, None

    def __len__(self):
        return 7

    def __getitem__(self, index):
        self.held = self.held or open(self.pipe, "wb")
        return torch.tensor(index)


if __name__ == "__main__":
    method, pipe, ending = sys.argv[1:]
    multiprocessing.set_start_method(method)
    loader = Loader(Views(pipe), workers=2, batch_size=2, persistent_workers=True)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1]
    exec(ending)
"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize("ending, status", [
    ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL), ("sys.exit(3)", 3)])
def test_workers_end_with_their_parent_however_it_ends(tmp_path, method, ending, status):
    """multiprocessing would wait for workers that outlive its SIGTERM, and a fork server would keep
    those of a parent that was killed."""
    program, pipe = tmp_path / "program.py", tmp_path / "pipe"
    program.write_text(PROGRAM)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    result = subprocess.run([sys.executable, program, method, pipe, ending], text=True,
                            stderr=subprocess.PIPE, timeout=GRACE_SECONDS - 10)
    assert result.returncode == status
    assert result.stderr == "" or status < 0         # then Python says what it cleans up
    # The pipe's other end is closed once nobody holds it any more.
    assert select.select([reader], [], [], GRACE_SECONDS)[0] and os.read(reader, 1) == b""
    os.close(reader)


THREADS_PROGRAM = """
import torch

from vitinit.data.loader import Loader


class Views:
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.full((1, 3, 512, 512), 2.0).sqrt().mean() + index   # of a size that threads share


torch.set_num_threads(2)
torch.full((1 << 22,), 2.0).sqrt().sum()             # now the threads exist, and a fork has none of them
print(len(list(Loader(Views(), workers=2, batch_size=2))))
"""


def test_workers_forked_from_a_process_with_threads_do_not_wait_for_them():
    """The only test whose main process has several threads, whatever OMP_NUM_THREADS says."""
    result = subprocess.run([sys.executable, "-c", THREADS_PROGRAM], text=True, timeout=120,
                            capture_output=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "3\n", "")


# ---------------------------------------------------------------------------------------------
# Signals
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error, heard", [(BrokenPipeError(32, "Broken pipe"), False),
                                          (EOFError(), False), (KeyError("a mistake"), True)])
def test_a_worker_says_nothing_of_a_parent_that_hung_up(capfd, error, heard):
    def work():
        begin_work(0)
        sys.excepthook(type(error), error, None)
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode == 0 and (capfd.readouterr().err != "") is heard


def test_a_worker_outlives_signals_for_a_while():
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work():
        begin_work(0)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
            sender.send(signal.alarm(0))             # seconds it has left; 0: no end is set

    worker = context.Process(target=work)
    worker.start()
    worker.join()
    assert receiver.recv() == 0
    assert GRACE_SECONDS - 5 <= receiver.recv() <= GRACE_SECONDS
    assert worker.exitcode == 0


# ---------------------------------------------------------------------------------------------
# What they need
# ---------------------------------------------------------------------------------------------


def test_more_workers_than_open_files_is_one_line(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda kind: (1024, 4096))
    Loader([1], workers=96)
    with pytest.raises(DataError, match=r"data.workers = 97 need .* 1024 files .* at most 96$"):
        Loader([1], workers=97)


@pytest.mark.parametrize("workers, error, words", [
    (3, MemoryError(), "a worker process of the loader ran out of memory; lower data.workers, now 3"),
    (0, MemoryError(), "memory ran out while images were loaded; lower optim.max_batch_per_process"),
    (0, RuntimeError("DefaultCPUAllocator: can't allocate memory"), "memory ran out while images"),
    (3, RuntimeError("DataLoader worker (pid 5) is killed by signal: Killed."),
     "a worker process of the loader was killed, for example because memory ran out; lower data.w"),
    (3, RuntimeError("unable to mmap 7 bytes"), "batches find no room in /dev/shm"),
    (3, FileNotFoundError(2, "No such file or directory"), "worker processes need /dev/shm, which is"),
])
def test_what_workers_die_of_is_one_line(monkeypatch, workers, error, words):
    """Without workers the message does not mention them."""
    def failing(self):
        raise error
    monkeypatch.setattr("torch.utils.data.DataLoader.__iter__", failing)
    with pytest.raises(DataError) as caught:
        next(iter(Loader([1], workers=workers)))
    assert str(caught.value).startswith(words) and "\n" not in str(caught.value)
    assert workers or "data.workers" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 3])
def test_what_is_no_matter_of_memory_or_workers_is_raised_as_it_is(monkeypatch, workers):
    error = RuntimeError("a mistake")

    def failing(self):
        raise error
    monkeypatch.setattr("torch.utils.data.DataLoader.__iter__", failing)
    with pytest.raises(RuntimeError) as caught:
        next(iter(Loader([1], workers=workers)))
    assert caught.value is error
