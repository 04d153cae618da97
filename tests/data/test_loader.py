"""Loaders give the views and draws of the right samples, whatever their workers live through."""

import multiprocessing
import os
import re
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import forkserver

import pytest
import torch
from deit import AUGMENT, MIX, RAND_AUGMENT, cropped, equal, samples, write_images
from forks import Fork
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from vitinit.data.draw import Augmentation, SampleKey
from vitinit.data.images import DataError, fit_whole
from vitinit.data.loader import NO_ROOM, Batch, Loader, TrainViews, prepare_workers
from vitinit.data.sampler import TrainSampler, plan_batches
from vitinit.data.sources import ImageFolder

SIZE, SEED, PATIENCE = (11, 13), 5, 50
DRAWS = Augmentation(
    SEED,
    SIZE,
    replace(
        AUGMENT,
        crop_scale=(0.2, 1.0),
        crop_padding=2,
        interpolation="random",
        erase_probability=0.5,
    ),
    replace(RAND_AUGMENT, probability=0.7, interpolation="random"),
    MIX,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> ImageFolder:
    return ImageFolder(write_images(tmp_path_factory.mktemp("images")))


@pytest.fixture
def start_by() -> Iterator[Callable[[str], None]]:
    before = multiprocessing.get_start_method()
    yield lambda method: multiprocessing.set_start_method(method, force=True)
    multiprocessing.set_start_method(before, force=True)


def loader_of(source, workers: int) -> Loader:
    """An epoch of nine micro-batches of two views."""
    plan = plan_batches(6, 2, 1, group=2)
    sampler = TrainSampler(len(source), plan, rank=0, seed=SEED, repeats=2)
    return Loader(TrainViews(source, DRAWS), workers=workers, batch_size=None, sampler=sampler)


@pytest.mark.parametrize("fit, border", [("squash", None), ("pad", (131, 17, 89))])
def test_the_training_view_of_a_whole_image_is_mirrored_or_not(folder, fit, border):
    whole = dict(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), crop_padding=0, fit=fit)
    augment = replace(DRAWS.augment, **whole, interpolation="bicubic")
    views = TrainViews(folder, replace(DRAWS, augment=augment, border=border))
    mirrored = 0
    keys = [SampleKey(epoch, image) for epoch in range(7) for image in range(len(folder))]
    for key, view in zip(keys, views[samples(keys)].images):
        expected = fit_whole(folder.image(key.image), SIZE, "bicubic", border)
        mirrored += torch.equal(view, expected.flip(-1))
        assert torch.equal(view, expected) or torch.equal(view, expected.flip(-1))
    assert 0 < mirrored < len(keys)


def test_a_batch_holds_the_views_and_draws_that_its_keys_name(folder, start_by):
    expected = []
    for each in loader_of(folder, workers=0).sampler:
        labels = torch.from_numpy(folder.labels[[key.image for key in each.keys]])
        images = torch.stack([cropped(DRAWS, folder, key) for key in each.keys])
        expected.append(Batch(images, labels, DRAWS.draws(each)))
    for method in ("fork", "forkserver"):
        start_by(method)
        found = list(loader_of(folder, workers=2))
        assert equal(found, expected) and len(found) == 9
        for batch in found:
            assert type(batch) is Batch
            assert [(part.shape[:1], part.dtype) for part in batch] == [
                ((2,), torch.uint8),
                ((2,), torch.int64),
                ((2,), torch.float64),
            ]


def test_an_image_is_decoded_once_for_all_its_views_in_a_micro_batch(folder, monkeypatch):
    sampler = TrainSampler(
        len(folder), plan_batches(12, 12, 1, group=2), rank=0, seed=SEED, repeats=3
    )
    samples = next(iter(sampler))  # three views in a row of each of four images
    views, decoded = TrainViews(folder, DRAWS), []
    expected = torch.cat(
        [
            views[samples._replace(keys=[key], groups=samples.groups[:1])].images
            for key in samples.keys
        ]
    )
    monkeypatch.setattr(
        folder,
        "image",
        lambda *asked, read=folder.image: (decoded.append(asked[0]), read(*asked))[1],
    )
    assert torch.equal(views[samples].images, expected)
    assert decoded == [key.image for key in samples.keys if key.repeat == 0] and len(decoded) == 4


# What torch's errors say: each sign of NO_ROOM alone in one of them.
OF_TORCH = (
    "DataLoader worker (pid(s) 5, 7) exited unexpectedly",
    "DataLoader worker (pid 5) is killed by signal: Killed.",
    "DefaultCPUAllocator: not enough memory: you tried to allocate 49152 bytes.",
    "unable to write to file </torch_5_1>: No space left on device (28)",
    "unable to mmap 128 bytes from file </torch_5_1>: Operation not permitted (1)",
    "unable to open shared memory object </torch_5_1>: Too many open files (24)",
)


def test_each_sign_of_no_room_is_alone_in_an_error():
    assert [[sign for sign in NO_ROOM if sign in words] for words in OF_TORCH] == [
        [sign] for sign in NO_ROOM
    ]


@pytest.mark.parametrize(
    "error, words",
    [
        (MemoryError(), "MemoryError"),
        (EOFError(), "EOFError"),
        (OSError(24, "Too many open files"), "Too many open files"),
        *((RuntimeError(words), words) for words in OF_TORCH),
        (
            RuntimeError(
                "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most "
                "recent call last):\nRuntimeError: unable to allocate shared memory(shm)"
            ),
            "unable to allocate shared memory(shm)",
        ),
    ],
)
def test_a_worker_that_is_killed_or_finds_no_room_is_one_line(monkeypatch, error, words):
    def failing(self):
        raise raised[0]

    monkeypatch.setattr(DataLoader, "__iter__", failing)
    raised = [error]
    with pytest.raises(
        DataError,
        match=r"\Aa worker process of the loader was killed or found no "
        rf"room \({re.escape(words)}\); lower data.workers, now 3, or "
        r"[^\n]*\Z",
    ):
        list(Loader([1], workers=3))
    for workers, raised[0] in ((0, error), (3, RuntimeError("a mistake"))):
        with pytest.raises(type(raised[0])) as caught:
            list(Loader([1], workers=workers))
        assert caught.value is raised[0]


def room_for(files: int, size: int = -1) -> list[int] | str:
    """Images that two workers load where the process may open only `files` more, and write no file
    of over `size` bytes, as if there were no more room in /dev/shm."""
    limit = os.dup(0) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit + files,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    _MultiProcessingDataLoaderIter._try_get_data.__defaults__ = (0.1,)  # seconds
    try:
        return [
            int(batch[0])
            for batch in Loader(torch.arange(5000).view(5, 1000), workers=2, batch_size=None)
        ]
    except DataError as error:
        return str(error)


@pytest.mark.parametrize(
    "limits, words",
    [((19,), "(Too many open files); lower"), ((400, 4096), "exited unexpectedly); lower")],
)
def test_too_few_files_and_too_little_shared_memory_are_one_line(limits, words, tmp_path):
    done = Fork(lambda: room_for(*limits), tmp_path / "fork").ended()
    assert words in done.result and (done.out, done.err) == ("", "")


def test_workers_may_open_many_files_hear_no_ctrl_c_and_are_not_forked_beside_communication(
    tmp_path, start_by, monkeypatch
):
    """A fork may copy a lock that a thread of communication holds, which nobody then releases."""
    (soft, hard), masks = resource.getrlimit(resource.RLIMIT_NOFILE), []
    start_by("forkserver")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(997, soft), hard))
    try:
        monkeypatch.setattr(
            forkserver,
            "ensure_running",
            lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        )
        prepare_workers(1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(10_240, hard), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert masks == [{signal.SIGINT}] and not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    start_by("fork")
    for together, method in ((False, "fork"), (True, "forkserver")):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: together)
        loader = Loader([1, 2, 3], workers=1)
        assert loader.multiprocessing_context.get_start_method() == method


def test_an_epoch_goes_on_after_signals_to_its_worker(folder):
    others, found = multiprocessing.active_children(), []
    for batch in loader_of(folder, workers=1):
        found.append(batch)
        if len(found) == 2:
            (worker,) = set(multiprocessing.active_children()) - set(others)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                os.kill(worker.pid, number)
    assert equal(found, list(loader_of(folder, workers=0)))


PROGRAM = """
import multiprocessing, os, signal, sys, torch
from vitinit.data.loader import Loader

class Views(list):
    def __getitem__(self, index):
        # Each worker holds the pipe open for as long as it lives. Of a size that threads share; a
        # fork has none of them.
        self.held = getattr(self, "held", None) or open(self.pipe, "wb")
        return torch.full((1, 3, 512, 512), 2.0).sqrt().mean() * 0 + index

if __name__ == "__main__":
    method, pipe, ending = sys.argv[1:]
    torch.set_num_threads(2)
    torch.full((1 << 22,), 2.0).sqrt().sum()         # now the threads exist
    multiprocessing.set_start_method(method)
    views = Views(range(7))
    views.pipe = pipe
    loader = Loader(views, workers=2, batch_size=2, persistent_workers=True)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1]
    exec(ending)
"""


def test_workers_end_with_their_parent_however_it_ends(tmp_path):
    """multiprocessing would wait for workers that ignore its SIGTERM, and a fork server would keep
    those of a parent that was killed. Nor do forked workers wait for threads that they lack."""
    program, started = tmp_path / "program.py", []
    program.write_text(PROGRAM)
    for method, ending, status in (
        ("fork", "sys.exit(3)", 3),
        ("forkserver", "os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ):
        os.mkfifo(pipe := tmp_path / method)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        started.append(
            (
                status,
                reader,
                subprocess.Popen(
                    [sys.executable, program, method, pipe, ending],
                    text=True,
                    stderr=subprocess.PIPE,
                ),
            )
        )
    for status, reader, process in started:
        _, printed = process.communicate(timeout=PATIENCE)
        assert process.returncode == status
        assert printed == "" or status < 0  # then Python says what it cleans up
        # The pipe's other end is closed once nobody holds it any more.
        assert select.select([reader], [], [], PATIENCE)[0] and os.read(reader, 1) == b""
        os.close(reader)
