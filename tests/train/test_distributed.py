"""Agreement between processes: alone, and in two real processes."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from vitinit.messages import OneLineError
from vitinit.train import distributed
from vitinit.train.distributed import LaunchError, Processes, agreed
from vitinit.train.interruption import Interrupted, StopRequest

ALONE = Processes(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


def test_a_single_process_needs_no_agreement():
    values = torch.tensor([1.0, 2.0])
    assert ALONE.sum(values) is values and ALONE.maximum(7) == 7 and ALONE.is_main
    with pytest.raises(LaunchError, match="mine"), ALONE.together():
        raise LaunchError("mine")


def agreements(processes: Processes) -> list[str]:
    """Run in each of two processes: what it gets from sums, signals and errors."""
    rank = processes.rank
    lines = [str(processes.sum(torch.tensor([rank + 1.0])).item()),
             str(processes.maximum(15 * rank))]
    for broken in (0, 1):                            # the error of either is raised on both
        try:
            with processes.together():
                if rank == broken:
                    raise LaunchError(f"folder of {rank}")
        except OneLineError as error:
            lines.append(error.args[0])
    norm = torch.nn.BatchNorm1d(3)
    norm.running_mean.fill_(rank + 5.0)
    processes.share(torch.nn.Sequential(norm))
    lines.append(str(norm.running_mean.tolist()))
    return lines


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


def outcome(items, processes: Processes) -> str:
    """The items that this process gets, and how they end."""
    seen, how = [], "end"
    with StopRequest() as stop:
        try:
            for item in agreed(items, processes, stop):
                seen.append(item)
        except (OneLineError, Interrupted) as error:
            how = str(error)
    return f"{seen} {how}"


def test_alone_the_items_come_one_by_one_and_end():
    assert outcome(range(3), ALONE) == "[0, 1, 2] end"
    assert outcome(broken(2), ALONE) == "[0, 1] broken after 2"
    assert outcome(interrupted(2), ALONE) == "[0, 1] stopped by SIGUSR1"


def what_is_agreed(processes: Processes) -> list[str]:
    """Run in each of two processes."""
    cases = [(range(2), range(5)), (broken(3), range(5)), (range(5), broken(1)),
             (range(5), interrupted(2)), (range(1), interrupted(3)), (broken(2), interrupted(2))]
    return [outcome(case[processes.rank], processes) for case in cases]


def waits_in_vain(processes: Processes) -> str:
    """Run in each of two processes: the line with which the second gives up waiting for the first."""
    brief, line = timedelta(seconds=0.2), ""
    if processes.rank == 0:
        dist.new_group(backend="gloo", timeout=brief)        # and nothing else that the other waits for
    else:
        with pytest.raises(RuntimeError) as caught, processes.together(within=brief):
            pass
        error = distributed.connection_error(caught.value)
        assert error.of_one_process
        line = str(error)
    processes.maximum(0)                             # the first waits here, with more patience
    return line


def everything(processes: Processes) -> list:
    return [agreements(processes), what_is_agreed(processes), waits_in_vain(processes)]


def test_two_processes_agree_on_sums_items_signals_errors_and_on_silence(in_two_processes, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv(distributed.PATIENCE, "7")
    (first, items, _), (second, other_items, line) = in_two_processes(everything)
    assert first == second == ["3.0", "15", "folder of 0", "folder of 1", "[5.0, 5.0, 5.0]"]
    assert items == ["[0, 1, None, None, None] end", "[0, 1, 2] broken after 3",
                     "[0] broken after 1", "[0, 1] stopped by SIGUSR1",
                     "[0, None, None] stopped by SIGUSR1", "[0, 1] broken after 2"]
    assert other_items == ["[0, 1, 2, 3, 4] end", "[0, 1, 2] broken after 3", "[0] broken after 1",
                           "[0, 1] stopped by SIGUSR1", "[0, 1, 2] stopped by SIGUSR1",
                           "[0, 1] broken after 2"]
    assert line.startswith("process 1 waited in vain for another one, which hangs, or whose machine "
                           "or network is down (Timed out waiting 200ms for ")
    assert line.endswith(f"; {distributed.PATIENCE} is 7)") and "\n" not in line


def test_the_environment_says_how_long_to_wait(monkeypatch):
    waits = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout: waits.append(timeout))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    for text in (None, "5", "0", "5m", ""):
        if text is not None:
            monkeypatch.setenv(distributed.PATIENCE, text)
        if text in (None, "5"):
            distributed.start()
            continue
        with pytest.raises(LaunchError, match=f"{distributed.PATIENCE} is '{text}', expected"):
            distributed.start()
    assert waits == [timedelta(minutes=30), timedelta(minutes=5)]


def test_more_processes_than_gpus_is_one_line(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(LaunchError, match="process 2 of this machine has no GPU: 2 are visible"):
        distributed.start()


@pytest.mark.parametrize("environment, tasks", [
    ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, 4), ({"SLURM_PROCID": "2"}, 3),
    ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, 0), ({"SLURM_NTASKS": "4", "RANK": "0"}, 0),
    ({"SLURM_NTASKS": "(null)"}, 0), ({}, 0)])
def test_tasks_of_slurm_without_ranks_are_one_line_with_the_right_command(monkeypatch, environment,
                                                                          tasks):
    """Each would be a run of its own, in the same folder. Only one task prints the error."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_NTASKS", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if not tasks:
        assert distributed.start().world_size == 1
        return
    with pytest.raises(distributed.LaunchError, match=f"SLURM has {tasks} tasks .* srun "
                       "--ntasks-per-node=1 torchrun") as caught:
        distributed.start()
    assert "\n" not in str(caught.value)
    assert distributed.environment_rank() == int(environment["SLURM_PROCID"])
