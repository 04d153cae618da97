"""Functions in processes of their own that need no import of torch, since they are forked."""

import contextlib
import inspect
import multiprocessing
import os
import pickle
import runpy
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

import torch

PATIENCE = 240  # seconds
# What test files import, and what a run imports when it reads its first JPEG.
PRELOAD = ["vitinit.run", "pytest", "torchvision.io"]


class Ended(NamedTuple):
    """What a function returned, and what it printed."""

    result: Any
    out: str
    err: str


class Fork:
    """A process that calls a function; what that returns and prints is in files in `folder`.
    method: "fork" copies this process, which may hold threads. Where one has run a backward pass
        on a fake device, a fork can run none; "forkserver" copies one that has only imported
        PRELOAD, and takes a function that can be pickled.
    environment: variables that are set there alone."""

    def __init__(
        self, function: Callable[[], Any], folder: Path, method: str = "fork", **environment: str
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            if forkserver._forkserver._preload_modules != PRELOAD:  # an earlier test's server
                _leave_server()
            context.set_forkserver_preload(PRELOAD)
        self.process = context.Process(target=_work, args=(function, folder, environment))
        self.process.start()

    def ended(self) -> Ended:
        """Wait for its end."""
        try:
            self.process.join(PATIENCE)
        finally:
            self.process.kill()
        out, err = ((self.folder / name).read_text(encoding="utf-8") for name in ("out", "err"))
        assert self.process.exitcode == 0, err
        return Ended(pickle.loads((self.folder / "result").read_bytes()), out, err)


def _leave_server() -> None:
    """Let the next process have another server. The one there is ends when nothing holds its pipe,
    which processes hold that were forked meanwhile, such as a loader's workers until they are
    collected: so nobody waits for its end, as `_stop` of it would."""
    server = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
    server._forkserver_address = server._forkserver_alive_fd = server._forkserver_pid = None


def _work(function: Callable[[], Any], folder: Path, environment: dict[str, str]) -> None:
    os.environ |= environment
    with (
        open(folder / "out", "w") as out,
        open(folder / "err", "w") as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            (folder / "result").write_bytes(pickle.dumps(function()))
        except BaseException:
            traceback.print_exc()
            raise


def in_two_processes(
    function: Callable[..., Any],
    folder: Path,
    *arguments: Any,
    store: torch.distributed.TCPStore | None = None,
    attempt: int = 0,
) -> list[Ended]:
    """Call a function of a test file in two processes, which have the variables of torchrun; as
    there, the launcher keeps the store, over all attempts."""
    store = store or launchers_store()
    call = partial(_call, inspect.getfile(function), function.__name__, arguments)
    forks = [
        Fork(
            call,
            folder / str(rank),
            "forkserver",
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="localhost",
            MASTER_PORT=str(store.port),
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RUN_ID="tests",
            TORCHELASTIC_RESTART_COUNT=str(attempt),
        )
        for rank in (0, 1)
    ]
    try:
        return [fork.ended() for fork in forks]
    finally:
        for fork in forks:
            fork.process.kill()


def launchers_store() -> torch.distributed.TCPStore:
    return torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def _call(file: str, name: str, arguments: tuple) -> Any:
    return runpy.run_path(file)[name](*arguments)
