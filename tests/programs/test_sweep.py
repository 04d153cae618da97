"""Sweeps: the plan, what is skipped and resumed, programs side by side, and signals."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import runpy
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from forks import Fork

from vitinit.programs import sweep
from vitinit.recipe.files import RecipeError
from vitinit.runs.resume import RunLock
from vitinit.train import interruption
from vitinit.train.interruption import STOP_SIGNALS

SHORT = dict(schedule__epochs="2", mix__probability="0", augment__repeats="1")
GOOD = ["--recipe", "quickstart", "--seeds", "0"]


def planned(*arguments: object) -> list[sweep.PlannedRun]:
    return sweep.plan_runs(sweep.parse_arguments([str(argument) for argument in arguments]))


@pytest.fixture
def started(monkeypatch, train_program) -> list[Path]:
    """Makes runs go through train.py in this process; the folders of the runs that were started."""
    folders = []

    class InProcess:
        def __init__(self, command: list[str], **options: object) -> None:
            arguments = command[command.index(sweep.TRAIN_WORDS[-1]) + 1 :]
            folders.append(Path(arguments[arguments.index("--out-dir") + 1]))
            monkeypatch.setattr("sys.argv", ["train.py", *arguments])
            with (
                io.TextIOWrapper(options["stdout"], encoding="utf-8") as log,
                contextlib.redirect_stdout(log),
            ):
                self.returncode = train_program.main(arguments, "vitinit train")

        def poll(self) -> int:
            return self.returncode

    monkeypatch.setattr(sweep, "subprocess", SimpleNamespace(Popen=InProcess))
    monkeypatch.setattr(sweep, "LOOK_EVERY", 0.0)
    return folders


def test_seeds_are_numbers_and_spans():
    for text, seeds in (("0", [0]), ("7,0-2", [7, 0, 1, 2]), ("3-3", [3]), ("1, 2", [1, 2])):
        assert sweep.parse_seeds(text) == seeds
    for text in ("", "a", "4-0", "-1", "0-", "0,,1", "1.5", "0-2-4", "²", "1" * 5000):
        with pytest.raises(argparse.ArgumentTypeError, match="is no seed; expected such as 0-4"):
            sweep.parse_seeds(text)


def test_every_init_has_a_run_before_any_has_a_second_and_train_py_is_told_all(
    train_program, tmp_path
):
    """The arguments as train.py itself parses them; without --init it is the recipe's own."""
    runs = planned(
        "--recipe",
        "quickstart",
        "--init",
        "default,impulse",
        "--seeds",
        "3,1",
        "--data-dir",
        "a folder",
        "--set",
        "engine.amp=off",
        "--set",
        "optim.eps=1e-6",
        "--variant",
        "long",
        "schedule.epochs=11",
        "--variant",
        "plain",
        "--out-dir",
        tmp_path,
        "--log",
        "tensorboard",
    )
    assert [run.folder.relative_to(tmp_path).as_posix() for run in runs] == [
        f"quickstart-{init}-{variant}-s{seed}"
        for seed in (3, 1)
        for init in ("default", "impulse")
        for variant in ("long", "plain")
    ]
    assert {run.state for run in runs} == {"new"}
    assert (
        vars(train_program.parse_arguments(runs[2].arguments)).items()
        >= dict(
            recipe="quickstart",
            init="impulse",
            seed=3,
            data_dir="a folder",
            resume="auto",
            dry_run=False,
            log=["tensorboard"],
            out_dir=tmp_path / "quickstart-impulse-long-s3",
            set=["engine.amp=off", "optim.eps=1e-6", "schedule.epochs=11"],
        ).items()
    )
    (run,) = planned(*GOOD, "--out-dir", tmp_path, "--recipe", "cifar10_10k")
    assert run.folder == tmp_path / "cifar10_10k-default-s0"
    assert run.arguments[::2] == ["--recipe", "--seed", "--out-dir", "--resume"]


def test_the_precision_is_decided_once_for_all_runs(monkeypatch, tmp_path, written_run):
    """A run that has begun keeps its own, and the others take it; a variant may name another."""
    arguments = [
        "--recipe",
        "quickstart",
        "--init",
        "default,impulse",
        "--seeds",
        "0,1",
        "--set",
        "schedule.epochs=1",
        "--variant",
        "as-is",
        "--variant",
        "full",
        "engine.amp=off",
        "--out-dir",
        tmp_path,
    ]

    def precisions(fastest: str) -> dict[str, list[str]]:
        """Precision → the runs that are told to take it; "" → those that are told nothing."""
        monkeypatch.setattr("vitinit.train.device.fastest_amp", lambda device: fastest)
        told: dict[str, list[str]] = {}
        for run in planned(*arguments):
            words = [word for word in run.arguments if word.startswith("engine.amp=")]
            told.setdefault(" ".join(words), []).append(run.folder.name)
        return told

    automatic, full = (
        [f"quickstart-{init}-{name}-s{seed}" for seed in (0, 1) for init in ("default", "impulse")]
        for name in ("as-is", "full")
    )
    assert precisions("bf16") == {"engine.amp=bf16": automatic, "engine.amp=off": full}
    written_run(automatic[1], [10.0], init="impulse", sets=("engine.amp=fp16",))
    begun = automatic.pop(1)
    assert precisions("bf16") == {"engine.amp=fp16": automatic, "engine.amp=off": full, "": [begun]}


def test_what_is_wrong_is_one_line_before_anything_starts(monkeypatch, tmp_path, capsys, started):
    monkeypatch.chdir(tmp_path)
    for arguments, message in [
        (["--seeds", "0"], "the following arguments are required: --recipe"),
        ([*GOOD, "--nproc", "0"], "--nproc: 0: expected an integer ≥ 1"),
        ([*GOOD, "--init", "default,impuls"], "--init impuls: there is no init 'impuls'; did"),
        ([*GOOD, "--init", "default,default"], "2 runs would share the folder runs/quickst"),
        ([*GOOD, "--seeds", "0-2", "--set", "run.seed=7"], "3 runs would share the folder"),
        ([*GOOD, "--set", "schedule.epoch=3"], "no key 'epoch'; did you mean 'epochs'?"),
        ([*GOOD, "--variant", "a=b"], "--variant a=b: expected a name"),
        ([*GOOD, "--variant", "long", "schedule.epoch=3"], "--set schedule.epoch=3: "),
        *(
            ([*GOOD, f"--only={part}"], f"--only: {part}: expected K/N with 1 ≤ K ≤ N, such as")
            for part in ("0/3", "4/3", "1", "1/3/5")
        ),
    ]:
        assert sweep.main(arguments) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and started == [] and list(tmp_path.iterdir()) == []
        assert printed.err.startswith("vitinit sweep: ") and message in printed.err
        assert printed.err.count("\n") == 1


def test_a_dry_run_prints_the_plan_of_which_parts_are_the_whole(tmp_path, capsys, started):
    def lines(*more: str) -> list[str]:
        assert (
            sweep.main(
                [
                    "--recipe",
                    "quickstart",
                    "--init",
                    "default,impulse",
                    "--seeds",
                    "0-2",
                    "--out-dir",
                    str(tmp_path),
                    "--dry-run",
                    *more,
                ]
            )
            == 0
        )
        return capsys.readouterr().out.splitlines()

    head, *whole = lines()
    assert head == "plan    6 runs, 0 of them done"
    assert whole[:2] == [
        f"        {tmp_path}/quickstart-{init}-s0: new" for init in ("default", "impulse")
    ]
    parts = [lines("--only", f"{part}/4")[1:] for part in (1, 2, 3, 4)]
    assert sorted(sum(parts, [])) == sorted(whole) and sorted(map(len, parts)) == [1, 1, 2, 2]
    assert lines("--only", "7/9")[1:] == [] == started == list(tmp_path.iterdir())


def test_finished_runs_are_skipped_and_cut_off_ones_go_on(
    small_run, tmp_path, capsys, started, train_program, stop_before, monkeypatch
):
    """The run that was cut off takes its place in the table; a third time nothing is done."""
    arguments = small_run(tmp_path / "sweep", "--seeds", "0,1", init="default,impulse", **SHORT)
    folders = [
        tmp_path / "sweep" / f"quickstart-{init}-s{seed}"
        for seed in (0, 1)
        for init in ("default", "impulse")
    ]

    first = [*arguments[: arguments.index("--seeds")], "--seeds", "0"]
    with monkeypatch.context() as patch:
        # A run looks twelve times per epoch: at four steps and their end, at six batches and their
        # end. SIGTERM comes in the second run, before the second step of its second epoch.
        patch.setattr("vitinit.run.StopRequest", stop_before(24 + 12 + 1))
        assert sweep.main(first) == 1
    printed = capsys.readouterr()
    assert printed.err == (
        f"vitinit sweep: {folders[1]} failed: ended with status 143, "
        f"see {tmp_path / 'sweep' / 'logs' / folders[1].name}.log\n"
    )
    assert "| default | 1 |" in printed.out and "impulse |" not in printed.out

    assert sweep.main([*arguments, "--dry-run"]) == 0
    assert capsys.readouterr().out == (
        "plan    4 runs, 1 of them done\n"
        f"        {folders[0]}: done\n        {folders[1]}: to go on after 1 of 2 epochs\n"
        f"        {folders[2]}: new\n        {folders[3]}: new\n"
    )

    started.clear()
    assert sweep.main(arguments) == 0
    assert started == folders[1:]
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith(("run ", "next "))]
    assert [line.partition(": 2 epochs: ")[0] for line in lines[:-1]] == [
        f"run     {folder.name}" for folder in folders[1:]
    ]
    assert lines[-1].startswith(f"next    vitinit figures report {folders[0]} ")
    assert "| default | 2 |" in printed and "| impulse | 2 |" in printed
    assert "| minus default | of | seeds |" in printed

    started.clear()
    capsys.readouterr()
    assert sweep.main(arguments) == 0
    assert started == [] and "plan    4 runs, 4 of them done" in capsys.readouterr().out


def test_what_a_folder_holds_decides_before_anything_starts(small_run, tmp_path, capsys, started):
    """A finished run is done, also without checkpoints; nothing is ever started over."""
    arguments = small_run(tmp_path, "--seeds", "0", **SHORT)
    folder = tmp_path / "quickstart-mimetic-s0"
    assert sweep.main(arguments) == 0
    started.clear()

    def said(*more: str) -> str:
        """The plan's state, or the error."""
        capsys.readouterr()
        status = sweep.main([*arguments, "--dry-run", *more])
        printed = capsys.readouterr()
        assert printed.err.count("\n") == (status == 2 or printed.err.startswith("warning "))
        return printed.err * (status == 2) or printed.out.splitlines()[-1].rpartition(": ")[2]

    # Another data folder alone does not make it another run.
    assert said() == said("--data-dir", "elsewhere", "--set", "data.workers=1") == "done"
    other = said("--set", "optim.eps=1e-3")
    assert "holds another run" in other and "optim.eps" in other
    for path in folder.glob("*.pt"):
        path.unlink()
    assert said() == "done"
    assert started == []


def test_ctrl_c_ends_the_sweep_once_the_running_runs_have_saved(small_run, tmp_path):
    """With real programs, two at a time; patches of 5 pixels are refused when a model is built.

    The third starts once the first one's failure has been noticed.
    """
    arguments = small_run(
        tmp_path,
        "--seeds",
        "0",
        "--variant",
        "torn",
        "model.options.patch_size=5",
        "--variant",
        "whole",
        "optim.eps=1e-3",
        "--variant",
        "next",
        "--threads",
        "1",
        "--jobs",
        "2",
        schedule__epochs="100000",
    )
    torn, whole = (tmp_path / f"quickstart-mimetic-{name}-s0" for name in ("torn", "whole"))

    def swept() -> int:
        """The status that `vitinit sweep` ends with."""
        sys.argv = ["vitinit", "sweep", *arguments]
        sys.modules.pop("vitinit.__main__", None)
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("vitinit", run_name="__main__")
        return ended.value.code

    fork = Fork(swept, tmp_path / "fork")
    log, third = (
        tmp_path / "logs" / f"quickstart-mimetic-{name}-s0.log" for name in ("whole", "next")
    )
    deadline = time.monotonic() + 240
    while not (third.exists() and "\nepoch      2/" in log.read_text(encoding="utf-8")):
        assert fork.process.is_alive() and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(fork.process.pid, signal.SIGINT)
    status, printed, error = fork.ended()
    assert status == 128 + signal.SIGINT
    assert printed.endswith("stopped by SIGINT; the same command goes on\n")
    assert "recipe  quickstart" not in printed and "Traceback" not in error
    (line,) = error.splitlines()  # to be stopped is not to fail
    assert line.startswith(f"vitinit sweep: {torn} failed: vitinit train: recipe quickstart: patch")
    assert log.read_text(encoding="utf-8").startswith("recipe  quickstart, seed")
    states = {run.folder: run.state for run in planned(*arguments)}
    assert states[whole].startswith("to go on after ") and states[torn] == "new"


# Side by side ---------------------------------------------------------------------------------


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """Does runs of which each is a program of its own instead of train.py, several at a time."""
    monkeypatch.setattr(sweep, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(sweep, "TRAIN_WORDS", ["-c", "import os, signal, sys\nexec(sys.argv[1])\n"])

    def run(codes: dict[str, str], *environments: dict[str, str]) -> tuple[dict[str, str], int]:
        runs = [
            sweep.PlannedRun(tmp_path / name, [code], "new", 3, "off")
            for name, code in codes.items()
        ]
        failures, stopped_by = sweep.do_runs(runs, 1, environments)
        return {folder.name: error for folder, error in failures.items()}, stopped_by

    return run


def test_a_program_has_its_share_its_session_and_its_log(programs, tmp_path, capfd, monkeypatch):
    """The run's line in the log is the error; its last epoch is shown beside it."""
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    code = (
        "print(os.getsid(0) == os.getpid(), os.environ['SHARE'], "
        "os.environ['TORCH_ELASTIC_SHUTDOWN_TIMEOUT'], '×', flush=True)\n"
        "print('epoch 2/3  train loss 9.900', flush=True)\n"
        "sys.exit('vitinit train: why\\ntorchrun: so')"
    )
    log = tmp_path / "logs" / "a.log"
    log.parent.mkdir()
    log.with_name("b.log").write_text("vitinit train: what was wrong last time\n")
    (mine := tmp_path / "mine.txt").write_text("mine")
    log.symlink_to(mine)  # in a folder from elsewhere
    assert programs(
        {"a": code, "b": "sys.exit(3)", "c": "print('epoch 1/1\\ndone    1 epoch: 5.0 %')"},
        {"SHARE": "1"},
        {"SHARE": "2"},
    ) == ({"a": "vitinit train: why", "b": f"ended with status 3, see {log.with_name('b.log')}"}, 0)
    assert log.read_text(encoding="utf-8") == (
        "True 1 600 ×\nepoch 2/3  train loss 9.900\nvitinit train: why\ntorchrun: so\n"
    )
    assert mine.read_text() == "mine"
    printed = capfd.readouterr()
    assert printed.err == "" and sorted(
        re.sub(r"\d+ s$", "N s", line) for line in printed.out.splitlines()
    ) == ["run     a: epoch 2/3  train loss 9.900, N s", "run     c: 1 epoch: 5.0 %, N s"]


def test_a_run_that_another_is_doing_keeps_its_log_and_the_others_go_on(programs, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "a.log"
    log.write_text("epoch 7\n")
    code = "print('done    1 epoch')"
    with RunLock() as lock:
        lock.take(tmp_path / "a")
        failures, _ = programs({"a": code, "b": code}, {})
    assert log.read_text() == "epoch 7\n" and failures.keys() == {"a"}
    assert "is writing here" in failures["a"]
    assert log.with_name("b.log").read_text() == "done    1 epoch\n"
    assert programs({"a": code}, {}) == ({}, 0)  # run.lock is still there
    assert log.read_text() == "done    1 epoch\n"


def test_as_many_run_at_the_same_time_as_there_are_shares_and_each_once(programs, tmp_path):
    """The first two wait for each other, so that one after the other they would never end."""
    there, back = (str(tmp_path / name) for name in ("there", "back"))
    os.mkfifo(there), os.mkfifo(back)
    codes = {
        "a": f"open({there!r}, 'w').write('a'); open({back!r}).read()",
        "b": f"open({there!r}).read(); open({back!r}, 'w').write('b')",
    }
    codes |= {
        str(number): f"print(os.environ['SHARE']); sys.exit({number} % 2)" for number in range(5)
    }
    failures, _ = programs(codes, {"SHARE": "1"}, {"SHARE": "2"})
    assert failures.keys() == {"1", "3"}
    for number in range(5):
        assert (tmp_path / "logs" / f"{number}.log").read_text() in ("1\n", "2\n")


@pytest.mark.parametrize("sent, arrives", [(signal.SIGINT, "SIGINT"), (signal.SIGHUP, "SIGTERM")])
def test_a_signal_reaches_all_running_programs_and_no_more_are_started(
    programs, tmp_path, sent, arrives
):
    """As one that torchrun and train.py know. Afterwards the handlers are those of before."""
    ready = str(tmp_path / "ready")
    os.mkfifo(ready)
    waits = (
        "signal.pthread_sigmask(signal.SIG_BLOCK, {1, 2, 15})\n%s\n"
        "sys.exit('train.py: saved after ' + signal.Signals(signal.sigwait({1, 2, 15})).name)"
    )
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    failures, stopped_by = programs(
        {
            "a": waits % f"open({ready!r}, 'w').write('a')",
            "b": waits % f"open({ready!r}).read(); os.kill(os.getppid(), {int(sent)})",
            "c": "",
        },
        {},
        {},
    )
    assert (failures, stopped_by) == ({}, sent)
    assert {path.read_text() for path in (tmp_path / "logs").iterdir()} == {
        f"train.py: saved after {arrives}\n"
    }
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers


def test_a_second_ctrl_c_reaches_the_programs_too(programs, tmp_path, monkeypatch):
    monkeypatch.setattr(interruption, "SECOND_SECONDS", -1.0)
    failures, stopped_by = programs(
        {
            "a": "signal.pthread_sigmask(signal.SIG_BLOCK, {2})\nfor _ in range(2):\n"
            "    os.kill(os.getppid(), 2)\n    signal.sigwait({2})\nsys.exit('twice')"
        },
        {},
        {},
    )
    assert (failures, stopped_by) == ({}, signal.SIGINT)
    assert (tmp_path / "logs" / "a.log").read_text() == "twice\n"


def test_several_processes_are_started_by_torchrun(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(
        sweep,
        "subprocess",
        SimpleNamespace(Popen=lambda command, **options: commands.append(command)),
    )
    (run,) = planned(*GOOD, "--out-dir", tmp_path)
    for processes in (1, 3):
        sweep.start(run, processes, {}, tmp_path / "logs" / "a.log")
    assert commands[0] == [sys.executable, *sweep.TRAIN_WORDS, *run.arguments]
    assert commands[1] == [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=3",
        *sweep.TRAIN_WORDS,
        *run.arguments,
    ]


def test_threads_and_gpus_are_divided_or_as_given(monkeypatch):
    """By cores, GPUs, jobs, processes of each and threads; a single job sees all GPUs."""

    def shares(cores: int, gpus: int, *how: int | None) -> list[tuple[str | None, str | None]]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        return [
            (share.get("OMP_NUM_THREADS"), share.get("CUDA_VISIBLE_DEVICES"))
            for share in sweep.share_machine(*how)
        ]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for how, threads in (
        ((2, 0, 1, 1, None), None),
        ((2, 0, 1, 1, 3), "3"),
        ((3, 0, 7, 1, 2), "2"),
        ((17, 0, 2, 3, None), "2"),
        ((3, 0, 7, 1, None), "1"),
        ((16, 3, 1, 3, None), None),
    ):
        assert shares(*how) == [(threads, None)] * how[2]
    for how, places in (
        ((16, 3, 3, 1, 1), ["0", "1", "2"]),
        ((16, 2, 3, 1, 1), ["0", "1", "0"]),
        ((16, 5, 2, 2, 1), ["0,1", "2,3"]),
    ):
        assert shares(*how) == [("1", place) for place in places]
    with pytest.raises(RecipeError, match="--jobs 2 runs of --nproc 2 processes need 4 GPUs, an"):
        shares(16, 3, 2, 2, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert shares(16, 2, 2, 1, 1) == [("1", "GPU-a"), ("1", "GPU-b")]
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    assert sweep.share_machine(2, 1, None)[0]["OMP_NUM_THREADS"] == "5"
