"""Agreement between processes: alone, and in two real processes."""

from __future__ import annotations

import pytest
import torch

from vitinit.train import distributed
from vitinit.messages import OneLineError
from vitinit.train.distributed import LaunchError, Processes

ALONE = Processes(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))


def raising(error: Exception):
    def action() -> None:
        raise error
    return action


def test_a_single_process_needs_no_agreement():
    values = torch.tensor([1.0, 2.0])
    assert ALONE.sum(values) is values and ALONE.maximum(7) == 7 and ALONE.is_main
    assert ALONE.on_all(lambda: 3) == 3
    with pytest.raises(LaunchError, match="mine"):
        ALONE.on_all(raising(LaunchError("mine")))


def agreements(processes: Processes) -> list[str]:
    """Run in each of two processes: what it gets from sums, signals and errors."""
    rank = processes.rank
    lines = [str(processes.sum(torch.tensor([rank + 1.0])).item()),
             str(processes.maximum(15 * rank))]
    for broken in (0, 1):                            # the error of either is raised on both
        def action(broken=broken):
            if rank == broken:
                raise LaunchError(f"folder of {rank}")
            return "fine"
        try:
            lines.append(processes.on_all(action))
        except OneLineError as error:
            lines.append(error.args[0])
    lines.append(str(processes.on_all(lambda: rank)))
    processes.on_main(lambda: lines.append("written"))
    norm = torch.nn.BatchNorm1d(3)
    norm.running_mean.fill_(rank + 5.0)
    processes.share_buffers([torch.nn.Sequential(norm)])
    lines.append(str(norm.running_mean.tolist()))
    return lines


def test_two_processes_agree_on_sums_signals_and_errors(in_two_processes):
    found = in_two_processes(agreements)
    assert found[0] == ["3.0", "15", "folder of 0", "folder of 1", "0", "written",
                        "[5.0, 5.0, 5.0]"]
    assert found[1] == ["3.0", "15", "folder of 0", "folder of 1", "1", "[5.0, 5.0, 5.0]"]


def test_start_reads_the_launchers_environment(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    processes = distributed.start()
    assert (processes.rank, processes.local_rank, processes.world_size) == (0, 0, 1)
    monkeypatch.setenv("RANK", "5")
    assert distributed.environment_rank() == 5


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
