"""Real signals in every phase of a run: the resumed run equals one that was never stopped."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import cycle
from unittest.mock import Mock

import pytest
import torch
from forks import in_two_processes
from lost_output import LOST, lost_stream
from same_run import assert_identical, assert_same_run, checkpoint as left_in, family_run, rows_of

import vitinit.run
from vitinit.data import augment, sources
from vitinit.programs import train
from vitinit.runs import data as opening, keeper
from vitinit.tasks import labels
from vitinit.train import loop
from vitinit.train.interruption import STOP_SIGNALS


def signalling(function: Callable, call: int, number: int, before: Callable = bool) -> Callable:
    """Wrap `function` so that call number `call`, from 1, sends this process the signal."""
    calls = []

    def signalled(*arguments, **keywords):
        calls.append(None)
        if len(calls) == call:
            before()
            os.kill(os.getpid(), number)
        return function(*arguments, **keywords)

    return signalled


@contextlib.contextmanager
def closing_terminal(patch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Let this process print to a terminal; yields what closes it."""
    screen, terminal = os.openpty()
    os.set_blocking(terminal, False)  # nobody reads
    with open(terminal, "w") as stream:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, stream)
        yield lambda: os.close(screen)
        with contextlib.suppress(OSError):
            stream.close()


# One after the other in the same run: the function in whose call of this number, from when the run
# went on, the signal comes; and the step that is saved then. An epoch has 4 steps of 12 images in
# micro-batches of 4, and 6 batches of evaluation.
PHASES = {
    "before the first step": (vitinit.run, "train_epochs", 1, 0),
    "decode": (sources.ImageFiles, "image", 22, 2),  # once for both views
    "step": (loop, "update_weights", 1, 3),
    "last step of an epoch": (loop, "update_weights", 1, 4),
    "validation": (augment.ToDevice, "__call__", 3, 4),
    "last batch of validation": (augment.ToDevice, "__call__", 6, 4),
    "between epochs": (keeper, "epoch_line", 1, 4),
    "save": (torch, "save", 1, 5),
    "second epoch": (loop, "update_weights", 2, 7),
    "last validation": (augment.ToDevice, "__call__", 3, 8),  # no step is left
}


@pytest.mark.parametrize("terminal", ["stays", "closes"])
def test_a_signal_in_any_phase_costs_nothing_and_leaves_no_thread(
    train_program, small_run, straight, tmp_path, monkeypatch, capsys, terminal
):
    """Equal to the bit to a run without. Each phase has one of the signals, each signal a phase; if
    a terminal closes, nothing can be printed from then on."""
    folder, two_epochs = tmp_path / "run", dict(schedule__epochs="2", checkpoint__every_steps="5")
    command, uncut = small_run(folder, **two_epochs), straight(**two_epochs)
    for (phase, (place, name, call, step)), number in zip(PHASES.items(), cycle(STOP_SIGNALS)):
        threads = threading.enumerate()
        with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
            before = stack.enter_context(closing_terminal(patch)) if terminal == "closes" else bool
            patch.setattr(place, name, signalling(getattr(place, name), call, number, before))
            assert train_program.main(command) == 128 + number, phase
        assert terminal == "closes" or (
            f"stopped by {number.name} after step {step};" in capsys.readouterr().out
        ), phase
        assert threading.enumerate() == threads, phase
        assert left_in(folder)["step"] == step, phase
        command = ["--resume", str(folder)]
    assert train_program.main(command) == 0
    assert_same_run(uncut, folder)
    assert len(json.loads((folder / "run.json").read_text())) == len(PHASES) + 1


def test_ctrl_c_while_starting_leaves_nothing(
    train_program, small_run, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(opening, "open_split", signalling(opening.open_split, 1, signal.SIGINT))
    assert train_program.main(small_run(tmp_path / "run")) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "train.py: stopped by SIGINT\n"
    assert not (tmp_path / "run").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_evaluation_stops_at_a_signal_with_one_line(eval_program, straight, monkeypatch, capsys):
    run = straight(schedule__epochs="1")
    capsys.readouterr()
    monkeypatch.setattr(
        augment.ToDevice, "__call__", signalling(augment.ToDevice.__call__, 2, signal.SIGINT)
    )
    assert eval_program.main([str(run)]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "eval.py: stopped by SIGINT\n"


def test_a_killed_worker_is_one_line_and_costs_no_step(
    train_program, small_run, straight, tmp_path, monkeypatch, capsys
):
    """As the kernel kills a process when memory runs out."""
    killed, two_epochs = tmp_path / "killed", dict(schedule__epochs="2", data__workers="1")
    uncut = straight(**two_epochs)
    capsys.readouterr()
    with monkeypatch.context() as patch:  # workers are forks and inherit the patch
        real = sources.ImageFiles.image
        patch.setattr(
            sources.ImageFiles,
            "image",  # 51 are read for the init's mass
            signalling(real, 51 + 30, signal.SIGKILL),
        )
        assert train_program.main(small_run(killed, **two_epochs)) == 2
    output = capsys.readouterr()
    assert "a worker process of the loader was killed" in output.err
    assert "lower data.workers, now 1" in output.err and output.err.count("\n") == 1
    assert f"--resume {killed}" in output.out
    assert train_program.main(["--resume", str(killed)]) == 0
    assert_same_run(uncut, killed)


def test_running_out_of_memory_names_the_key_to_lower(
    train_program, small_run, tmp_path, monkeypatch, capsys
):
    for place, name, key, error in (
        (
            labels,
            "evaluate",
            "eval.batch_size",
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has …"),
        ),
        (
            loop,
            "update_weights",
            "optim.max_batch_per_process",
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
        ),
    ):
        monkeypatch.setattr(place, name, Mock(side_effect=error))
        assert train_program.main(small_run(tmp_path / name)) == 2
        assert capsys.readouterr().err == (
            f"train.py: process 0 ran out of memory on the GPU; lower {key}, for example --set "
            f"{key}=2 where it takes 4 images now\n"
        )


@pytest.mark.parametrize("kind", LOST)
def test_a_run_of_which_nothing_can_be_printed_is_the_same(
    train_program, small_run, straight, tmp_path, monkeypatch, kind
):
    uncut = straight(schedule__epochs="1")
    with lost_stream(kind) as stream:
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, stream)
        assert train_program.main(small_run(tmp_path / "run", schedule__epochs="1")) == 0
        monkeypatch.undo()
    assert_same_run(uncut, tmp_path / "run")


# Two processes -----------------------------------------------------------------------------------


def trained(arguments: list[str], stops: bool = False, kind: str = "") -> int:
    """Run in each of two processes: train.py; the second one has five batches of evaluation, and
    where it `stops` a signal comes in the second of them. kind: of a stream that takes nothing."""
    if stops and os.environ["RANK"] == "1":
        augment.ToDevice.__call__ = signalling(augment.ToDevice.__call__, 2, signal.SIGTERM)
    with (
        lost_stream(kind) if kind else contextlib.nullcontext(sys.stdout) as stream,
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
    ):
        return train.main(arguments)


def test_two_processes_with_batch_norm_measure_what_is_saved(
    eval_program, image_tree, tmp_path, capsys
):
    """Each process has seen other images, so its statistics differ from those of last.pt."""
    folder = tmp_path / "run"
    arguments = family_run(
        "cifar10_convmixer",
        image_tree,
        folder,
        mix__group=12,
        schedule__epochs=1,
        ema__decay=0,
        schedule__warmup_epochs=0,
        optim__max_batch_per_process=6,
        optim__base_lr=0.05,
    )
    arguments += ["--log", "tensorboard"]
    for ended in in_two_processes(trained, tmp_path, arguments):
        assert ended.result == 0, ended.err
    assert len([*(folder / "tensorboard").iterdir()]) == 1  # by the main process
    row = json.loads((folder / "metrics.jsonl").read_text())
    assert eval_program.main([str(folder), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["model"]["loss"] == pytest.approx(row["val_loss"], rel=1e-5)


def test_two_processes_train_as_one_and_a_signal_to_either_costs_nothing(
    eval_program, small_run, straight, repository, tmp_path, capsys
):
    """The same global batches, with mixing and stochastic depth: weights agree to 1e-5 per step.

    First with torchrun itself, with workers, and blocks that are computed twice; then without.
    """
    two, stopped, epochs = tmp_path / "two", tmp_path / "stopped", dict(schedule__epochs="2")
    one = straight(data__workers="1", **epochs)
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            str(repository / "train.py"),
            *small_run(two, data__workers="1", engine__recompute="true", **epochs),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "12 = 2 processes × 3 micro-batches × 2 images" in result.stdout
    (ours, rows), (theirs, their_rows) = (
        (left_in(folder), rows_of(folder)) for folder in (one, two)
    )
    for name, value in ours["model"].items():
        torch.testing.assert_close(theirs["model"][name], value, rtol=0, atol=8 * 1e-5)
    for first, second in zip(rows, their_rows, strict=True):
        assert second["train_loss"] == pytest.approx(first["train_loss"], abs=4e-5)
        assert second["val_loss"] == pytest.approx(first["val_loss"], abs=4e-5)
        assert second["val_top1"] == first["val_top1"]

    # The two validated every image once, although 21 is not divisible by two.
    capsys.readouterr()
    assert eval_program.main([str(two), "--json", "-"]) == 0
    alone = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert alone["model"]["top1"] == pytest.approx(their_rows[-1]["val_top1"])
    assert alone["ema"]["top1"] == pytest.approx(their_rows[-1]["ema_top1"])

    main, other = in_two_processes(trained, tmp_path / "first", small_run(stopped, **epochs), True)
    assert main.result == other.result == 128 + signal.SIGTERM
    assert "stopped by SIGTERM after step 4" in main.out
    assert (main.err, other.out, other.err) == ("", "", "")
    for ended in in_two_processes(
        trained, tmp_path / "then", ["--resume", str(stopped)], False, "terminal"
    ):
        assert ended.result == 0, ended.err
    assert_identical(left_in(two) | {"recipe": None}, left_in(stopped) | {"recipe": None})
    assert_identical(their_rows, rows_of(stopped))
