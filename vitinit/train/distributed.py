"""The processes of a run: which one this is, and how all of them agree on what to do next.

There are several under torchrun, or any launcher that sets RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT. Alone, a process communicates with nobody here.
"""

import atexit
import gc
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.messages import OneLineError, environment_rank, in_brief, say, shortened
from .device import this_device
from .interruption import Interrupted, StopRequest

PATIENCE = timedelta(minutes=30)  # how long a process waits for a silent one
ARRIVAL = timedelta(seconds=60)  # and for one that torchrun has started, too
CONNECTION = timedelta(seconds=12)  # for each of five times that gloo tries to connect
WAITS = (1, 2, 4, 8, 0)  # seconds between looks for an address, which may be a new one
T = TypeVar("T")


class LaunchError(OneLineError):
    """The processes were started wrongly; a message of one line."""


class WrongPlace(LaunchError):
    """This process was given a place that it cannot take; others may not know."""

    of_one_process = True


class LostProcess(OneLineError):
    """Another process has ended, or cannot be reached."""

    of_one_process = True  # each prints it: without a connection they cannot agree on who does


@dataclass(frozen=True)
class Processes:
    """This process's place among all processes of the run, and its device."""

    rank: int  # among all processes, from 0
    local_rank: int  # among the processes of this machine, from 0
    world_size: int  # number of processes
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def say(self, line: str) -> None:
        """Print a line at once, by the main process alone."""
        if self.is_main:
            say(line)

    def sum(self, values: Tensor) -> Tensor:
        """Sum `values` over all processes, in place. CPU tensors use gloo, CUDA tensors NCCL."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def maximum(self, value: int) -> int:
        """The largest of the integers that the processes pass; all of them get it."""
        return self.maxima([value])[0]

    def maxima(self, values: Sequence[int]) -> list[int]:
        """The largest of each integer over all processes; of True and False, whether any has True."""
        if self.world_size == 1:
            return [int(value) for value in values]
        largest = torch.tensor([int(value) for value in values])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.tolist()

    def from_main(self, decide: Callable[[], T]) -> T:
        """What `decide` returns, which the main process alone calls; all processes get it, or the
        OneLineError that it raises.
        """
        answer: list[Any] = [None]
        with self.together():
            if self.is_main:
                answer = [decide()]
        if self.world_size > 1:
            dist.broadcast_object_list(answer, src=0)
        return answer[0]

    def require_equal(self, facts: dict[str, object]) -> None:
        """Raise LaunchError on all processes, naming the first fact (name → value) that differs."""
        of_main = self.from_main(lambda: facts)
        with self.together():
            for name in of_main | facts:
                value, first = facts.get(name), of_main.get(name)
                if value != first:
                    raise LaunchError(
                        f"process {self.rank} has {name} = {value} and process 0 has {first}; "
                        "all processes of a run need the same"
                    )

    def share(self, *models: torch.nn.Module) -> None:
        """Copy the main process's tensors to all: draws and BatchNorm's statistics may differ."""
        if self.world_size > 1:
            for model in models:
                for tensor in model.state_dict().values():
                    dist.broadcast(tensor, src=0)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context that all processes leave together; a OneLineError of one is raised on all."""
        failure = None
        try:
            yield
        except OneLineError as error:
            failure = error
        if self.world_size > 1:
            failures: list[OneLineError | None] = [None] * self.world_size
            dist.all_gather_object(failures, failure)
            failure = next(filter(None, failures), None)
        if failure is not None:
            raise failure from None


def agreed(items: Iterable[T], processes: Processes, stop: StopRequest) -> Iterator[T | None]:
    """Yield the items of each process in step: an item is yielded once every process has its own.

    A process with fewer items than another yields None in their place. A OneLineError of one
    process's `items`, or Interrupted for a signal there, is raised on all, between two items.
    """
    items = iter(items)
    while True:
        item = problem = None
        try:
            item = next(items, None)
        except OneLineError as error:
            problem = error
        some_broken, signal, some_left = processes.maxima(
            [problem is not None, stop.number, item is not None]
        )
        if some_broken:
            with processes.together():
                if problem:
                    raise problem
        if signal:
            raise Interrupted(signal)
        if not some_left:
            return
        yield item


def start() -> Processes:
    """Join the process group, if there are several processes, and choose the device.

    Raises LaunchError if the environment is not what a launcher sets, a machine has more processes
    than GPUs, or a port is in use; and in tasks of `srun` without ranks: each would be a run of its
    own, and all of them would write to one folder.
    """
    if "RANK" not in os.environ and os.environ.get("SLURM_NTASKS", "1") != "1":
        raise LaunchError(
            "several tasks of SLURM, and none has a RANK; start one torchrun per machine: srun "
            "--ntasks-per-node=1 torchrun --nproc_per_node=GPUS …, or set RANK, WORLD_SIZE, "
            "LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each task (RANK=0 alone: a single process)"
        )
    world_size = number_in("WORLD_SIZE", range(1, 2**15), "1")
    rank = number_in("RANK", range(world_size), "" if world_size > 1 else "0")
    local_rank = number_in("LOCAL_RANK", range(2**15), "0")
    cuda = torch.cuda.is_available()
    gpus = torch.cuda.device_count()
    if cuda and local_rank >= gpus:
        raise WrongPlace(
            f"process {local_rank} of this machine has no GPU: {gpus} are visible; start at most "
            "that many with --nproc_per_node"
        )
    device = this_device(local_rank)
    if cuda:
        torch.cuda.set_device(device)
    if world_size > 1:
        join(rank, world_size, "cpu:gloo,cuda:nccl" if cuda else "gloo")
    return Processes(rank, local_rank, world_size, device)


def join(rank: int, world_size: int, backend: str) -> None:
    """Join the process group at the address and port in the environment; WrongPlace if there is no
    such address, or the port is in use.
    """
    port = number_in("MASTER_PORT", range(1, 2**16))
    require_address(os.environ.get("MASTER_ADDR", ""))
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            join_by_torchrun(backend, rank, world_size)
        else:
            dist.init_process_group(backend, timeout=PATIENCE)
    except dist.DistNetworkError as error:
        if "failed to listen" not in str(error):
            raise
        raise WrongPlace(f"MASTER_PORT={port}: in use, say; {in_brief(error)}") from None


def require_address(address: str) -> None:
    """Raise WrongPlace unless the address is known here, at once or, if one is given, soon."""
    for wait in WAITS if address else (0,):
        with suppress(OSError, UnicodeError):
            socket.getaddrinfo(address, None)
            return
        time.sleep(wait)
    raise WrongPlace(
        f"MASTER_ADDR={address}: no such machine is known here; expected the one of process 0, as "
        "torchrun sets it"
    )


def join_by_torchrun(backend: str, rank: int, world_size: int) -> None:
    """Join the process group in the store that torchrun keeps, within two minutes.

    The store outlives the processes: after a restart it still has the addresses of those that have
    ended (pytorch#135712). So each attempt has a part of its own. That goes by the number of
    restarts, which several machines count apart: there it is not used, see runs/README.md. Raises
    LostProcess if a process does not come.
    """
    store, *_ = next(dist.rendezvous("env://", rank, world_size, timeout=ARRIVAL))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt {attempt}", store)
    arrived = [f"process {number}" for number in range(world_size)]
    store.set(arrived[rank], "arrived")
    deadline = time.monotonic() + ARRIVAL.total_seconds()
    while not store.check(arrived):
        if time.monotonic() > deadline:
            absent = [name for name in arrived if not store.check([name])]
            raise LostProcess(
                f"process {rank} waited {ARRIVAL.seconds} s for {shortened(absent)} "
                f"of {world_size}, in vain"
            )
        time.sleep(0.1)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=CONNECTION
    )
    # A function of torch 2.14, and its name before.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(PATIENCE)
    store.set_timeout(PATIENCE)  # by which NCCL connects when it is first used


def number_in(name: str, numbers: range, default: str = "") -> int:
    """The number of this environment variable; LaunchError unless it is one of `numbers`."""
    text = os.environ.get(name) or default
    with suppress(ValueError):
        if int(text) in numbers:
            return int(text)
    raise WrongPlace(
        f"{name}={text} in the environment; expected an integer from {numbers[0]} to "
        f"{numbers[-1]}, as torchrun sets it"
    )


@contextmanager
def joined() -> Iterator[Processes]:
    """A context that calls `start` and at its end leaves the process group, if one was joined.

    Raises LostProcess if the connection to another process breaks, or is silent for `PATIENCE`.
    With GPUs that would wait for the others, which may wait for this process: after an error that
    they do not share it does not leave, and Python ends, with status 1, once that is printed.
    """
    error: BaseException | None = None
    try:
        yield start()
    except BaseException as raised:
        error = raised
        lost = lost_connection(error)
        if not lost:
            raise
        raise LostProcess(
            f"process {environment_rank()} lost another one, which has ended and said why, hangs, "
            f"or cannot be reached ({lost})"
        ) from error
    finally:
        alone = getattr(error, "of_one_process", isinstance(error, Exception))
        if dist.is_initialized() and alone and torch.cuda.is_available():
            atexit.register(os._exit, 1)
        elif dist.is_initialized():
            dist.destroy_process_group()
            # The model that trained holds the group, whose threads go on as long. After a stopped
            # step it is in a reference cycle with the exception; if Python ends beside the threads,
            # it may abort ("terminate called without an active exception").
            gc.collect()


def lost_connection(error: BaseException) -> str:
    """torch's words, if it raised this error since a connection broke or was silent; else "", as
    where there is no other process.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return ""
    text = re.sub(r"^\[\S+\] ", "", str(error))  # gloo starts with a place in its own code
    *_, text = text.split("Last error:")  # NCCL's reason is at the end
    signs = r"(?i)by peer|tim(ed|ing) out|timeout|broken pipe|no route to host|unreachable"
    of_torch = isinstance(error, RuntimeError) and "CUDA error" not in text
    if isinstance(error, dist.DistError) or of_torch and re.search(signs, text):
        return in_brief(text)
    return ""
