"""What is printed: lines and progress bars, on a terminal, in a log, and where nothing can be."""

import contextlib
import fcntl
import os
import struct
import subprocess
import sys
import termios
from itertools import count

import pytest
import tqdm.std
from lost_output import LOST, lost_stream

from vitinit.base import messages
from vitinit.base.messages import ProgressBar, counted, say, shortened, warn
from vitinit.programs.shared.command_line import drop_unwritten


def test_a_number_has_its_noun():
    assert [
        counted(*case) for case in ((1, "epoch"), (2, "epoch"), (1_000, "process"), (0, "batch"))
    ] == ["1 epoch", "2 epochs", "1,000 processes", "0 batches"]
    assert [shortened([*"abcdefg"[:end]]) for end in (5, 7)] == [
        "a, b, c, d, e",
        "a, b, c, d, e and 2 more",
    ]


def test_without_a_terminal_there_are_plain_lines_now_and_then(capsys, monkeypatch):
    clock = [0]
    monkeypatch.setattr(tqdm.std, "time", lambda: clock[0])
    monkeypatch.setattr(messages.time, "perf_counter", lambda: clock[0])
    for shown in (True, False):  # other processes print nothing
        with ProgressBar("epoch 1/2", 7, initial=1, shown=shown, scale=5, run=(0, 3, 13)) as bar:
            for _ in range(6):
                clock[0] += 20
                bar.set_postfix_str("loss 2.000", refresh=False)
                bar.update()
    printed = capsys.readouterr()
    assert printed.err == "" and "\r" not in printed.out
    assert printed.out.splitlines() == [  # two images later, at the earliest after 30 s
        "epoch 1/2  43%, 00:40<01:20, loss 2.000, run 00:40<02:16, 0.25 img/s",
        "epoch 1/2  71%, 01:20<00:40, loss 2.000, run 01:20<02:51, 0.25 img/s",
        "epoch 1/2 100%, 02:00<00:00, loss 2.000, run 02:00<02:53, 0.25 img/s",
    ]


def test_a_notebook_without_widgets_is_no_warning():
    """tqdm warns there when it is imported."""
    code = (
        "import sys, types\n"
        "kernel = types.SimpleNamespace(config={'IPKernelApp': 1})\n"
        "sys.modules['IPython'] = types.SimpleNamespace(get_ipython=lambda: kernel)\n"
        "sys.modules['ipykernel.zmqshell'] = sys.modules['ipywidgets'] = None\n"
        "import %s"
    )
    for module, warned in (("tqdm.auto", True), ("vitinit.base.messages", False)):
        command = [sys.executable, "-W", "always", "-c", code % module]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert ("IProgress" in done.stderr) == warned


@pytest.mark.parametrize("columns", [80, 40])
def test_on_a_terminal_one_line_is_rewritten_and_said_lines_stand_above(monkeypatch, columns):
    main, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    clock = count(0, 20)
    monkeypatch.setattr(tqdm.std, "time", lambda: next(clock))
    with open(terminal, "w") as stream, open(main, "rb", buffering=0) as screen:
        with contextlib.redirect_stderr(stream), contextlib.redirect_stdout(stream):
            with ProgressBar("a loop of this name", 3, scale=11) as bar:
                bar.update()
                say("a line")
                bar.set_postfix_str("x" * 50)
        stream.close()
        written = b""
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            while part := screen.read(10_000):
                written += part
    states = written.decode().replace("\n", "").split("\r")
    assert all(len(state) < columns for state in states)
    assert states[1].startswith("a loop of this name  33%|") and states[2].isspace()
    assert states[3] == "a line"  # where the bar has been erased
    assert states[-2].isspace() and states[-1] == ""


@pytest.mark.parametrize("kind", LOST)
def test_what_cannot_be_printed_is_lost_and_nothing_else(kind, monkeypatch):
    monkeypatch.setattr(tqdm.std, "time", count(0, 20).__next__)
    with (
        lost_stream(kind) as stream,
        contextlib.redirect_stderr(stream),
        contextlib.redirect_stdout(stream),
    ):
        say("3 × 5")
        warn("3 × 5")
        with ProgressBar("a loop", 7) as bar:
            for _ in range(3):
                bar.update()
                say("3 × 5")
        drop_unwritten()
        if not stream.closed:
            stream.flush()  # as Python does when it ends
