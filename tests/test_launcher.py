"""Programs that are launched: their output, their errors, and how signals reach them."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import torch

from vitinit.launcher import Launcher, SideBySide, shares
from vitinit.recipe.files import RecipeError
from vitinit.train.interruption import STOP_SIGNALS


# ---------------------------------------------------------------------------------------------
# One program
# ---------------------------------------------------------------------------------------------


def launched(code: str) -> str | None:
    with Launcher() as launcher:
        return launcher.run([sys.executable, "-c", code])


@pytest.mark.parametrize("code, error", [
    ("", None),
    ("import sys; print('a warning', file=sys.stderr)", None),
    ("import sys; sys.exit(3)", "ended with status 3"),
    ("import sys; sys.exit('one\\ntwo\\n')", "two"),
    ("import sys; sys.exit('x\\ntrain.py: why\\ntorchrun: so\\n====')", "train.py: why"),
])
def test_the_error_of_a_program_is_train_pys_line_or_else_the_last(capfd, code, error):
    assert launched(code) == error


def test_what_a_program_prints_is_passed_on(capfd):
    launched("import sys; print('out'); print('err', file=sys.stderr)")
    assert capfd.readouterr() == ("out\n", "err\n")


def test_a_program_has_a_session_of_its_own_so_that_a_terminals_ctrl_c_does_not_reach_it():
    assert launched("import os, sys; sys.exit(os.getsid(0) != os.getpid())") is None


def test_signal_handlers_are_taken_out_again():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with Launcher():
        assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


@pytest.mark.parametrize("sent, arrives", [
    (signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGTERM),
    (signal.SIGHUP, signal.SIGTERM), (signal.SIGUSR1, signal.SIGTERM)])
def test_a_signal_is_handed_on_as_one_that_train_py_knows(sent, arrives):
    """The program sends the signal to this process, its parent, and waits for what it receives."""
    code = ("import os, signal, sys\n"
            "known = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}\n"
            "signal.pthread_sigmask(signal.SIG_BLOCK, known)\n"
            f"os.kill(os.getppid(), {int(sent)})\n"
            "sys.exit(signal.sigwait(known).name)\n")
    with Launcher() as launcher:
        assert launcher.run([sys.executable, "-c", code]) == arrives.name
    assert launcher.stopped_by == sent


@pytest.mark.parametrize("set_to, arrives", [(None, "600"), ("90", "90")])
def test_torchrun_is_told_to_wait_for_a_checkpoint(monkeypatch, set_to, arrives):
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    if set_to is not None:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", set_to)
    code = "import os, sys; sys.exit(os.environ['TORCH_ELASTIC_SHUTDOWN_TIMEOUT'])"
    with Launcher() as launcher:
        assert launcher.run([sys.executable, "-c", code]) == arrives


def test_with_a_log_what_a_program_prints_goes_there_alone(tmp_path, capfd):
    log = tmp_path / "log"
    log.write_text("before\n")
    with Launcher() as launcher:
        code = "import sys; print('out', flush=True); sys.exit('train.py: why')"
        assert launcher.run([sys.executable, "-c", code], log=log) == "train.py: why"
    assert sorted(log.read_text().splitlines()) == ["before", "out", "train.py: why"]
    assert log.read_text().startswith("before\n") and capfd.readouterr() == ("", "")


def test_a_log_is_utf_8_whatever_the_terminals_encoding_is(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    with Launcher() as launcher:
        launcher.run([sys.executable, "-c", "import sys; print('×'); print('→', file=sys.stderr)"],
                     log=tmp_path / "log")
    assert sorted((tmp_path / "log").read_text(encoding="utf-8").split()) == ["×", "→"]


def test_an_environment_is_added_to_the_programs_own(monkeypatch):
    monkeypatch.setenv("OURS", "kept")
    code = "import os, sys; sys.exit(os.environ['OURS'] + os.environ['THEIRS'])"
    with Launcher() as launcher:
        assert launcher.run([sys.executable, "-c", code], environment={"THEIRS": "set"}) == "keptset"


# ---------------------------------------------------------------------------------------------
# Several
# ---------------------------------------------------------------------------------------------


def run_all(codes: list[str], slots: int) -> tuple[Launcher, dict[str, str | None]]:
    with Launcher() as launcher:
        jobs = SideBySide(launcher, lambda code, slot: launcher.run(
            [sys.executable, "-c", code, str(slot)]))
        jobs.run(codes, slots, lambda: None)
    assert not jobs.slots and not launcher.running
    return launcher, dict(jobs.ended)


def test_jobs_run_at_the_same_time(tmp_path):
    """Each waits for output of the other, so that one after the other they would never end."""
    os.mkfifo(tmp_path / "there")
    os.mkfifo(tmp_path / "back")
    one = f"open({str(tmp_path / 'there')!r}, 'w').write('a'); open({str(tmp_path / 'back')!r}).read()"
    two = f"open({str(tmp_path / 'there')!r}).read(); open({str(tmp_path / 'back')!r}, 'w').write('b')"
    assert run_all([one, two], 2)[1] == {one: None, two: None}


@pytest.mark.parametrize("slots", [1, 2, 7])
def test_every_job_runs_once_in_one_of_the_slots(tmp_path, slots):
    """Each writes a file of its own, since lines that several processes print at once may mingle."""
    codes = [f"import sys; open({str(tmp_path)!r} + '/{number}', 'a').write(sys.argv[1] + ' '); "
             f"sys.exit({number} % 2)" for number in range(5)]
    _, ended = run_all(codes, slots)
    assert ended == {code: None if number % 2 == 0 else "ended with status 1"
                     for number, code in enumerate(codes)}
    used = {int(file.name): file.read_text().split() for file in tmp_path.iterdir()}
    assert sorted(used) == list(range(5)) and all(len(lines) == 1 for lines in used.values())
    assert {int(slot) for [slot] in used.values()} <= set(range(min(slots, 5)))


def test_a_signal_reaches_all_running_jobs_and_no_more_are_started(tmp_path):
    os.mkfifo(tmp_path / "ready")
    waits = ("import os, signal, sys\n"
             "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\n"
             "%s\n"
             "signal.sigwait({signal.SIGINT}); sys.exit('saved')")
    one = waits % f"open({str(tmp_path / 'ready')!r}, 'w').write('a')"
    two = waits % (f"open({str(tmp_path / 'ready')!r}).read()\n"
                   "os.kill(os.getppid(), signal.SIGINT)")
    launcher, ended = run_all([one, two, "open('never', 'w')"], 2)
    assert launcher.stopped_by == signal.SIGINT
    assert ended == {one: "saved", two: "saved"}


def test_a_log_that_cannot_be_written_is_that_jobs_error(tmp_path):
    with Launcher() as launcher:
        jobs = SideBySide(launcher, lambda log, slot: launcher.run([sys.executable, "-c", ""],
                                                                    log=log))
        good, bad = tmp_path / "log", tmp_path / "no" / "log"
        jobs.run([bad, good], 1, lambda: None)
    assert jobs.ended == [(bad, f"{bad}: No such file or directory"), (good, None)]


# ---------------------------------------------------------------------------------------------
# The machine
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """A function that makes this machine appear to have a given number of cores and GPUs."""
    def of(cores: int, gpus: int, visible: str | None = None) -> None:
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    return of


@pytest.mark.parametrize("cores, jobs, processes, threads, expected", [
    (2, 1, 1, None, None), (2, 1, 1, 3, "3"), (2, 2, 1, None, "1"), (17, 5, 1, None, "3"),
    (17, 2, 3, None, "2"), (3, 7, 1, None, "1"), (3, 7, 1, 2, "2")])
def test_threads_are_divided_or_as_given(machine, cores, jobs, processes, threads, expected):
    machine(cores, 0)
    found = shares(jobs, processes, threads)
    assert found == [{} if expected is None else {"OMP_NUM_THREADS": expected}] * jobs


@pytest.mark.parametrize("gpus, visible, jobs, processes, expected", [
    (3, None, 3, 1, ["0", "1", "2"]), (2, None, 3, 1, ["0", "1", "0"]), (5, None, 2, 2, ["0,1", "2,3"]),
    (3, "4,6,7", 3, 1, ["4", "6", "7"]), (2, "GPU-a,GPU-b", 2, 1, ["GPU-a", "GPU-b"])])
def test_gpus_are_divided(machine, gpus, visible, jobs, processes, expected):
    machine(16, gpus, visible)
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares(jobs, processes, 1)] == expected


def test_one_job_sees_all_gpus(machine):
    machine(16, 3)
    assert shares(1, 3, None) == [{}]


def test_too_few_gpus_are_one_line(machine):
    machine(16, 3)
    with pytest.raises(RecipeError, match="--jobs 2 runs of --nproc 2 processes need 4 GPUs, and 3 are"):
        shares(2, 2, None)
