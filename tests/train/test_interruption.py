"""StopRequest under real signals."""

from __future__ import annotations

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
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.number == number             # the first one counts
            with pytest.raises(Interrupted) as caught:
                list(agreed(range(3), ALONE, stop))
            assert caught.value.number == number
        assert signal.getsignal(number) is before


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)        # as nohup leaves it
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.number == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# The main thread locks a mutex that it holds already, in C, where no Python handler ever runs. A
# thread of its own sends the signals once it does.
HANGING = """
import ctypes, os, signal, threading
from vitinit.train.interruption import StopRequest
library = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(64)
library.pthread_mutex_lock(mutex)
def interrupt():
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.pthread_kill(threading.main_thread().ident, number)
        handled.wait(0.01)
handled = threading.Event()
with StopRequest(second_seconds=0.0) as stop:
    threading.Thread(target=interrupt, daemon=True).start()
    library.pthread_mutex_lock(mutex)
"""


def test_a_second_ctrl_c_ends_even_what_hangs_outside_of_python():
    result = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True,
                            timeout=120)
    assert result.returncode == 128 + signal.SIGINT
    assert result.stderr == "ended at once by a second Ctrl-C\n"
