"""StopRequest under real signals."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from vitinit.train.distributed import Processes, agreed
from vitinit.train.interruption import STOP_SIGNALS, Interrupted, StopRequest

ALONE = Processes(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


def test_signals_of_terminals_launchers_and_slurm_are_remembered_and_never_raised():
    assert set(STOP_SIGNALS) == {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1}
    for number in STOP_SIGNALS:
        before = signal.getsignal(number)
        with StopRequest() as stop:
            assert stop.number == 0
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGINT)  # at once: the same, as torchrun passes it on
            assert stop.number == number  # the first one counts
            with pytest.raises(Interrupted) as caught:
                list(agreed(range(3), ALONE, stop))
            assert caught.value.number == number
            # What a notebook shows, which calls `Run.train`.
            assert str(caught.value) == f"stopped by {signal.Signals(number).name}"
        assert signal.getsignal(number) is before


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup leaves it
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.number == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# By its clock each signal comes two seconds after the one before.
TWICE = """
import itertools, os, signal
from vitinit.train import interruption
interruption.time.monotonic = itertools.count(0.0, 2.0).__next__
with interruption.StopRequest():
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
        print("on", flush=True)
"""


def test_a_second_ctrl_c_ends_the_program_at_once():
    result = subprocess.run(
        [sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 128 + signal.SIGINT and result.stdout == "on\non\n"
    assert result.stderr == "ended at once by a second Ctrl-C\n"
