"""The run folder: its lines and checkpoints, how the run was started, and who writes to it."""

import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from refused import refused

from vitinit.base.files import CheckpointError, FileError
from vitinit.runs import keeper
from vitinit.runs.checkpoint import read_checkpoint_file as load
from vitinit.runs.folder import Lines, RunFolder, git_commit
from vitinit.runs.resume import RunLock


def training_state(step: int) -> dict:
    return {
        "model": {},
        "optimizer": {},
        "recipe": {},
        "step": step,
        "progress": {"step": step},
        "weights": torch.full((501,), float(step)),
    }


def flip_a_bit(path: Path) -> None:
    """Flip a bit in the middle of the file's largest tensor."""
    content = bytearray(path.read_bytes())
    place = content.index(torch.full((501,), 1.0).numpy().tobytes()[:64]) + 1001
    content[place] ^= 4
    path.write_bytes(content)


def test_every_start_is_recorded(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "a")
    folder.make()
    for count in (1, 2):
        folder.record_start(
            "quickstart",
            {"resume": str(count)},
            ["train.py", f"--start={count}"],
            {"mine.py": f"{count}2ab"},
            processes=3,
            device="CPU",
            data={"training images": count},
            resumed=count > 1,
        )
        starts = json.loads(folder.info.read_text())
        assert len(starts) == count and starts == folder.starts()
        assert starts[-1]["command"] == ["train.py", f"--start={count}"]
        assert (starts[-1]["recipe"], starts[-1]["arguments"]) == (
            "quickstart",
            {"resume": str(count)},
        )
        assert starts[-1]["processes"] == 3 and starts[-1]["torch"] == torch.__version__
    assert folder.data_of(0) == {"training images": 1}
    assert folder.imports == {"mine.py": "22ab"}
    for text in (
        '[{"data": {"root": {}}}]',
        '[{"data": 5}]',
        '[{"imports": 5}]',
        '[{"command": [1]}]',
        '[{"comm',
    ):
        folder.info.write_text(text)
        assert "run.json: not what a run writes (" in refused(CheckpointError, folder.starts)
    with pytest.raises(CheckpointError, match=r"run\.json: not what a run writes"):
        folder.record_start(
            "quickstart", {}, None, {}, processes=1, device="", data={}, resumed=False
        )
    assert folder.info.read_text() == '[{"comm'


def test_a_file_of_a_run_keeps_a_new_one_out(tmp_path):
    """A recipe, a start and an empty file of lines are no results: such a run starts again."""
    folder = RunFolder(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "notes.txt").write_text("mine")
    folder.require_unused()
    for name in ("run.json", "previous.pt", "epoch_0003.pt", "steps.jsonl"):
        folder.require_unused(starts_again=True)
        (tmp_path / name).write_text("x")
        for starts_again in (False, True)[: 1 if name == "run.json" else 2]:
            assert re.search(
                rf"already holds a run \({name}\); --resume auto goes",
                refused(CheckpointError, folder.require_unused, starts_again=starts_again),
            )
        (tmp_path / name).unlink()


def test_lines_are_cut_back_to_the_checkpoint(tmp_path):
    """A last one that a crash cut short counts for nothing; a damaged one before it is named."""
    file = Lines(tmp_path / "lines.jsonl", "step")
    file.cut_back(0)
    assert [*file.rows()] == []  # nothing there yet
    for number in range(10, 60, 10):
        file.append({"step": number, "loss": None})
    with file.path.open("a") as written:
        written.write('{"step": 60, "lo')
    assert file.cut_back(30) == 3
    assert [row["step"] for row in file.rows()] == [10, 20, 30]
    node = file.path.stat().st_ino
    assert file.cut_back(30) == 3 and file.path.stat().st_ino == node  # not written anew
    assert file.path.read_text().count("\n") == 3
    file.path.write_bytes(file.path.read_bytes().rstrip())  # whole, but for its end
    assert file.cut_back(30) == 3 == file.path.read_text().count("\n")
    for end in (b'\n{"step": 30}\n', b"\n", b""):  # the last, too, as it was not cut short
        file.path.write_bytes(b'{"step": 10}\n{"step": 20, "loss": 1.5, "loss": 9.9}' + end)
        rows = file.rows()
        assert next(rows) == {"step": 10}  # one at a time: the next is not yet read
        with pytest.raises(CheckpointError, match="line 2 is no .* each key once; mend the file"):
            next(rows)
    for line in (b'{"epoch": 1}', b"\xff", b'{"step": 10}', b'{"step": 20, "loss": "1"}'):
        file.path.write_bytes(b'{"step": 10}\n' + line + b'\n{"step": 30}\n')
        with pytest.raises(CheckpointError, match="lines.jsonl: line 2 is no JSON object with its"):
            file.count()


@pytest.mark.parametrize("links", [True, False])
def test_each_last_checkpoint_becomes_the_previous_one(tmp_path, monkeypatch, links):
    """Also where there are no hard links. A step that is saved again, as after the evaluation of an
    epoch or by a process that resumed the run, leaves the previous one."""

    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    folder = RunFolder(tmp_path)
    for step in (1, 2, 3, 3):
        folder.save(training_state(step), folder.last)
        folder.save({"step": step}, folder.best)
    folder = RunFolder(tmp_path)
    folder.load_last()
    folder.save(training_state(3) | {"again": True}, folder.last)
    assert load(folder.last)["again"] and load(folder.previous)["step"] == 2
    assert sorted(os.listdir(tmp_path)) == ["best.pt", "last.pt", "previous.pt"]


def test_a_flipped_bit_is_noticed_and_the_run_goes_on_from_the_checkpoint_before(tmp_path, capsys):
    folder = RunFolder(tmp_path)
    folder.save(training_state(0), folder.last)
    folder.save(training_state(1), folder.last)
    flip_a_bit(folder.last)
    assert torch.load(folder.last)["weights"].unique().numel() == 2  # torch does not notice
    assert folder.load_last()["step"] == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "last.pt: damaged after it was written, the checksum of" in line
    assert line.endswith(f"; going on with {folder.previous}")
    # The next save does not replace the good checkpoint by the damaged one; the one after it does.
    (tmp_path / "best.pt.partial").write_bytes(b"cut short")
    folder.tidy(epochs=0, steps=0)
    for step, previous in ((5, 0), (6, 5)):
        folder.save(training_state(step), folder.last)
        assert load(folder.previous)["step"] == previous
        assert RunFolder(tmp_path).load_last()["step"] == step
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    "best, words",
    [
        ({"progress": {"step": 8}}, "best.pt: is of step 8, after the checkpoint's 7, and in no"),
        ({"progress": {"step": 7}}, ""),
        ({"progress": [8]}, ""),
        ({"step": 8}, ""),
        (b"damaged", ""),
    ],
)
def test_the_best_weights_of_an_epoch_that_is_repeated_are_named(best, words, tmp_path, capsys):
    folder = RunFolder(tmp_path)
    if isinstance(best, bytes):
        folder.best.write_bytes(best)
    else:
        folder.save(best, folder.best)
    folder.tidy(epochs=0, steps=7)
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == bool(words) and folder.best.exists()


def test_the_best_weights_that_the_disk_refuses_stop_no_run(tmp_path, monkeypatch):
    def read(*arguments, **options):
        raise FileError(f"{tmp_path}/best.pt: cannot be read: Input/output error")

    monkeypatch.setattr("vitinit.runs.folder.read_checkpoint", read)
    RunFolder(tmp_path).tidy(epochs=0, steps=7)


def test_what_the_system_refuses_to_look_at_is_one_line(tmp_path):
    """A link to nowhere, and a name that is too long."""
    (tmp_path / "epoch_0001.pt").symlink_to(tmp_path / "nowhere")
    assert "epoch_0001.pt: cannot be read: No such" in refused(
        FileError, RunFolder(tmp_path).results
    )
    odd = RunFolder(tmp_path / ("a" * 300))
    for look in (odd.holds_checkpoint, odd.steps.count, odd.steps.sync):
        assert re.search("cannot be (read|written): File name too long", refused(FileError, look))


def test_a_folder_with_a_file_of_ones_own_that_a_run_would_write_is_not_used(tmp_path):
    folder = RunFolder(tmp_path)
    for name in ("images.txt", "start.txt", "recipe.toml", "run.json"):
        (tmp_path / name).write_text("mine")
        for starts_again in (False, True)[: 1 + (name not in ("recipe.toml", "run.json"))]:
            assert f"already holds a run ({name})" in refused(
                CheckpointError, folder.require_unused, starts_again=starts_again
            )
        (tmp_path / name).unlink()


def test_what_cannot_be_resumed_is_one_line(tmp_path):
    folder, whole = RunFolder(tmp_path), training_state(3)
    for state, words in (
        ({"model": {}, "step": 1}, "cannot be resumed; expected a dictionary 'optimizer'"),
        (whole | {"recipe": [1]}, "its 'recipe' cannot be used ([1], expected a table)"),
    ):
        folder.save(state, folder.last)
        assert words in refused(CheckpointError, folder.load_last)
    for step in (0, 1):
        folder.save(training_state(step), folder.last)
    flip_a_bit(folder.last)
    folder.previous.write_bytes(folder.previous.read_bytes()[:-100])
    assert re.search(
        "last.pt: damaged.*previous.pt: not a readable", refused(CheckpointError, folder.load_last)
    )
    # An error of the disk, not of the file, may be temporary: the run must not repeat any steps.
    folder.save(training_state(2), folder.previous)
    folder.last.unlink()
    folder.last.mkdir()
    assert "last.pt: is a folder, a pipe or a dev" in refused(CheckpointError, folder.load_last)
    folder.last.rmdir()
    os.mkfifo(folder.last)  # which would wait for who writes to it
    assert "last.pt: is a folder, a pipe or a dev" in refused(CheckpointError, folder.load_last)


def test_the_commit_counts_changes_of_tracked_files_alone(tmp_path, monkeypatch):
    """A picture that a figure has left in the repository changes no result."""
    assert git_commit(tmp_path) == "unknown"
    for name in (
        "GIT_AUTHOR_NAME",
        "GIT_AUTHOR_EMAIL",
        "GIT_COMMITTER_NAME",
        "GIT_COMMITTER_EMAIL",
    ):
        monkeypatch.setenv(name, "ada")
    code = tmp_path / "code.py"
    code.write_text("1")
    for words in (["init"], ["add", "code.py"], ["commit", "-m", "first"], ["tag", "v1"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)
    (tmp_path / "attention.png").write_bytes(b"")
    commit = git_commit(tmp_path)
    assert len(commit) == 40 and set(commit) <= set("0123456789abcdef")
    code.write_text("2")
    assert git_commit(tmp_path) == f"{commit}+changes"
    (site := tmp_path / ".venv" / "vitinit").mkdir(parents=True)
    (site / "run.py").write_text("")
    assert git_commit(site) == "unknown"  # installed into somebody's repository


# The lock, which ends with its process, however that ends ----------------------------------------
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


def test_a_second_run_is_told_who_writes_and_a_killed_one_keeps_no_lock_though_its_child_lives(
    train_program, small_run, tmp_path, holder, capsys
):
    """Not even a file that it could not read: the other process may be writing it."""
    (tmp_path / "metrics.jsonl").write_text("half a li")
    (tmp_path / "last.pt").write_bytes(b"half a checkpo")
    for resume in ("auto", str(tmp_path)):
        assert train_program.main(small_run(tmp_path, "--resume", resume)) == 2
        error = capsys.readouterr().err
        assert f"is writing here (process {holder[0]} on {socket.gethostname()}, since " in error
        assert error.count("\n") == 1
    assert (tmp_path / "metrics.jsonl").read_text() == "half a li"
    process, worker = holder
    kill(process)
    os.kill(worker, 0)  # raises if the worker has ended
    with RunLock() as lock:
        lock.take(tmp_path)
    assert (tmp_path / "run.lock").read_text().startswith(f"process {os.getpid()} on ")


def is_free(folder: Path) -> bool:
    """As another process sees it."""
    child = os.fork()
    if child == 0:
        try:
            RunLock().take(folder)
        except CheckpointError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def test_a_lock_is_given_back_and_if_deleted_taken_again_or_refused_and_a_disk_without_any_told(
    tmp_path, monkeypatch, capsys
):
    """Another one's stops this run even once that one has ended: its results are newer."""
    with RunLock() as lock:
        for _ in range(2):  # again is fine, and changes nothing
            lock.take(tmp_path)
            assert not is_free(tmp_path)
        (tmp_path / "link").symlink_to(tmp_path)
        for folder in (tmp_path, tmp_path / "link"):  # of another thread
            assert "another run of this process" in refused(CheckpointError, RunLock().take, folder)
        assert not is_free(tmp_path)
    assert is_free(tmp_path)
    with RunLock() as lock:
        lock.keep()  # nothing, before it is taken
        lock.take(tmp_path)
        lock.keep()
        (tmp_path / "run.lock").unlink()
        lock.keep()
        assert not is_free(tmp_path)
        (tmp_path / "run.lock").unlink()
        assert is_free(tmp_path)
        assert "another run has begun here; this one writes" in refused(CheckpointError, lock.keep)

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with RunLock() as lock:
        lock.take(tmp_path)
    assert capsys.readouterr().err == (
        f"warning {tmp_path}: this file system has no locks, so nothing keeps a second run out\n"
    )
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    assert "expected Linux, macOS, or" in refused(CheckpointError, RunLock().take, tmp_path)


def test_a_run_whose_folder_another_run_has_taken_writes_nothing_more(
    train_program, small_run, tmp_path, monkeypatch, capsys
):
    folder, kept = tmp_path / "run", {}

    def stolen(self) -> None:
        (folder / "run.lock").unlink()
        assert is_free(folder)
        kept.update({path.name: path.read_bytes() for path in folder.iterdir()})
        save(self)

    save = keeper.RunKeeper.save
    monkeypatch.setattr(keeper.RunKeeper, "save", stolen)
    assert train_program.main(small_run(folder, schedule__epochs="1")) == 2
    assert capsys.readouterr().err == (
        f"train.py: {folder}: run.lock was deleted, and another run "
        "has begun here; this one writes nothing more\n"
    )
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == kept
