"""StopRequest under real signals, and what two processes agree on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from vitinit.messages import OneLineError
from vitinit.train.distributed import Processes, agreed
from vitinit.train.interruption import STOP_SIGNALS, Interrupted, StopRequest

ALONE = Processes(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_raised_at_first_and_remembered_once_deferred(number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        with pytest.raises(Interrupted) as caught:
            os.kill(os.getpid(), number)
        assert caught.value.number == stop.number == number
    with StopRequest() as stop:
        stop.defer()
        os.kill(os.getpid(), number)
        assert stop.number == number
        with pytest.raises(Interrupted), stop.at_once():
            raise AssertionError("what came before is not forgotten")
    assert signal.getsignal(number) is before


def test_signals_of_terminals_launchers_and_slurm_are_handled():
    assert set(STOP_SIGNALS) == {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1}


def test_within_at_once_a_signal_ends_what_waits_and_afterwards_it_is_remembered_again():
    with StopRequest() as stop:
        stop.defer()
        with pytest.raises(Interrupted), stop.at_once():
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("nothing ended the wait")
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.number == signal.SIGTERM         # the first one counts


def test_where_nothing_can_be_raised_the_signal_is_remembered_silently(monkeypatch):
    said = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)

    class Last:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
    with StopRequest() as stop:
        del [Last()][0]
        assert stop.number == signal.SIGTERM and said == []
    assert sys.unraisablehook == said.append

    class Other:
        def __del__(self) -> None:
            raise KeyError("is still heard")
    with StopRequest():
        del [Other()][0]
    assert len(said) == 1 and isinstance(said[0].exc_value, KeyError)


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
    for number in {signals}:
        signal.pthread_kill(threading.main_thread().ident, number)
        handled.wait({wait})
handled = threading.Event()
with StopRequest(second_seconds=0.0) as stop:
    stop.defer()
    threading.Thread(target=interrupt, daemon=True).start()
    library.pthread_mutex_lock(mutex)
"""


def test_a_second_ctrl_c_ends_even_what_hangs_outside_of_python():
    program = HANGING.format(signals=[int(signal.SIGTERM), int(signal.SIGINT)], wait=0.01)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                            timeout=120)
    assert result.returncode == 128 + signal.SIGINT
    assert result.stderr == "ended at once by a second Ctrl-C\n"


# ---------------------------------------------------------------------------------------------
# What processes agree on
# ---------------------------------------------------------------------------------------------


def broken(count: int):
    yield from range(count)
    raise OneLineError(f"broken after {count}")


def interrupted(count: int):
    yield from range(count)
    os.kill(os.getpid(), signal.SIGUSR1)
    yield count


def test_alone_the_items_come_one_by_one_and_end():
    assert list(agreed(range(3), ALONE, StopRequest())) == [0, 1, 2]
    seen = []
    with pytest.raises(OneLineError, match="broken after 2"):
        for item in agreed(broken(2), ALONE, StopRequest()):
            seen.append(item)
    assert seen == [0, 1]


def every(number: int) -> bool:
    return True


def even(number: int) -> bool:
    return number % 2 == 0


def what_is_agreed(processes: Processes) -> list[str]:
    """Run in each of two processes: the items that it gets, and how they end."""
    lines = []
    cases = [(range(2), range(5), every), (broken(3), range(5), every), (range(5), broken(1), every),
             (range(5), interrupted(2), every), (range(1), interrupted(3), every),
             (broken(3), range(7), even), (range(7), interrupted(3), even),
             (broken(4), range(7), even)]
    for *case, due in cases:
        seen = []
        with StopRequest() as stop:
            stop.defer()
            try:
                for item in agreed(case[processes.rank], processes, stop, due=due):
                    seen.append(item)
                how = "end"
            except (OneLineError, Interrupted) as error:
                how = str(error)
        lines.append(f"{seen} {how}")
    return lines


def test_two_processes_go_on_and_end_together(in_two_processes):
    """If every second item is due, an error between two of them is raised at the next one."""
    first, second = in_two_processes(what_is_agreed)
    assert first[:5] == ["[0, 1, None, None, None] end", "[0, 1, 2] broken after 3",
                         "[0] broken after 1", "[0, 1] stopped by SIGUSR1",
                         "[0, None, None] stopped by SIGUSR1"]
    assert second[:5] == ["[0, 1, 2, 3, 4] end", "[0, 1, 2] broken after 3", "[0] broken after 1",
                          "[0, 1] stopped by SIGUSR1", "[0, 1, 2] stopped by SIGUSR1"]
    assert first[5:] == ["[0, 1, 2] broken after 3", "[0, 1, 2, 3] stopped by SIGUSR1",
                         "[0, 1, 2, 3] broken after 4"]
    assert second[5:] == ["[0, 1, 2, 3] broken after 3", "[0, 1, 2] stopped by SIGUSR1",
                          "[0, 1, 2, 3] broken after 4"]
