"""The processes of a run: who am I, and what do all of us agree on?

Under torchrun (or anything that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) there
are several; alone there is one, and every function here is then a no-op.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..messages import OneLineError, in_brief
from .interruption import Interrupted, StopRequest

BROKEN_DATA = 1_000             # agreed on like a signal's number, and larger than any
ALL_DONE = -1                   # likewise, and smaller than any
T = TypeVar("T")


class LaunchError(OneLineError):
    """What is wrong with how the processes were started, in one line."""


@dataclass(frozen=True)
class Processes:
    """This process among the others."""

    rank: int
    local_rank: int             # among the processes of this machine
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place; CPU tensors travel by gloo, CUDA ones by nccl."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def maximum(self, value: int) -> int:
        """The largest of all processes' integers, known to all of them."""
        if self.world_size == 1:
            return value
        box = torch.tensor(value)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        return int(box)

    def share_weights(self, model: torch.nn.Module) -> None:
        """Give every process the main one's parameters and buffers.

        From one seed and the same code each process may compute others, if threads or CPUs differ.
        """
        if self.world_size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), src=0)

    def share_buffers(self, models: Sequence[torch.nn.Module]) -> None:
        """Give every process the main one's buffers: BatchNorm's running statistics.

        Each process has seen other images since the last step began, but all must measure the model
        that is saved.
        """
        if self.world_size > 1:
            for model in models:
                for buffer in model.buffers():
                    dist.broadcast(buffer, src=0)

    def on_all(self, action: Callable[[], Any]) -> Any:
        """Run `action` on every process; if a OneLineError is raised on any, raise it on all.

        So that a folder missing on one machine ends the run everywhere, with one message, instead
        of leaving the others to wait for it.
        """
        result = failure = None
        try:
            result = action()
        except OneLineError as error:
            failure = error
        if self.world_size > 1:
            failures: list[Exception | None] = [None] * self.world_size
            dist.all_gather_object(failures, failure)
            failure = next((f for f in failures if f is not None), None)
        if failure is not None:
            raise failure from None
        return result

    def on_main(self, action: Callable[[], Any]) -> None:
        """`on_all`, with something to do on the main process alone (files it writes)."""
        self.on_all(action if self.is_main else lambda: None)


def agreed(items: Iterable[T], processes: Processes, stop: StopRequest, *,
           due: Callable[[T], bool] = lambda item: True) -> Iterator[T | None]:
    """The items, each given out once every process has its own; None where it has no more.

    So broken data or a signal on one process finds all of them between two items: Interrupted, or
    the OneLineError of `items`, is raised on all of them together. Whoever is asked to stop while
    waiting for an item waits no longer.

    due: whether the others are waited for before this item. Those between are given out at once;
        who has trouble with one meets the others at the next that is due. Due must be the same
        items on all processes.
    """
    items = iter(items)
    while True:
        item = problem = None
        try:
            with stop.at_once():
                item = next(items, None)
        except Interrupted as interrupted:
            request = interrupted.number
        except OneLineError as error:
            request, problem = BROKEN_DATA, error
        else:
            request = ALL_DONE if item is None else 0
        if not request and not due(item):
            yield item
            continue
        verdict = processes.maximum(request)
        if verdict == ALL_DONE:
            return
        if verdict == BROKEN_DATA:
            processes.on_all(lambda: _raise(problem))
        if verdict:
            raise Interrupted(verdict)
        yield item


def _raise(problem: Exception | None) -> None:
    if problem is not None:
        raise problem


def environment_rank() -> int:
    """The rank that the launcher gave this process, before anything is connected."""
    return int(os.environ["RANK"]) if "RANK" in os.environ else _number("SLURM_PROCID")


def require_ranks() -> None:
    """LaunchError if this is one of several tasks of `srun` without a rank: each would be a lone
    run, all in one folder."""
    tasks = max(_number("SLURM_NTASKS"), _number("SLURM_PROCID") + 1)
    if "RANK" not in os.environ and tasks > 1:
        raise LaunchError(
            f"SLURM has {tasks} tasks here, and none has a RANK; start one torchrun a machine: srun "
            "--ntasks-per-node=1 torchrun --nproc_per_node=GPUS …, or set RANK, WORLD_SIZE, "
            "LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each task (RANK=0 alone: a single process)")


def _number(name: str) -> int:
    """That the environment gives, or 0."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def start() -> Processes:
    """Join the other processes, if there are any, and choose the device: CUDA if present.

    Raises LaunchError if there are more processes than GPUs, or if SLURM started several that do
    not know of each other.
    """
    require_ranks()
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    cuda = torch.cuda.is_available()
    if cuda and local_rank >= torch.cuda.device_count():
        raise LaunchError(f"process {local_rank} of this machine has no GPU: "
                          f"{torch.cuda.device_count()} are visible; start at most so many with "
                          "--nproc_per_node")
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    return Processes(environment_rank(), local_rank, world_size, device)


@contextmanager
def joined() -> Iterator[Processes]:
    """`start`, and `stop` at the end. Where another process dies in between, LaunchError says so."""
    try:
        processes = start()
        yield processes
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "by peer" not in str(error):
            raise
        raise LaunchError(f"another process of the run has ended, and says why itself "
                          f"({in_brief(error)})") from None
    finally:
        stop()


def stop() -> None:
    """Leave the process group, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()
