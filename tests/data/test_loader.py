"""Batches are the same for any number of workers, processes and resumes."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from vitinit.data.datasets import ImageFolder, PicturesInMemory
from vitinit.data.draw import SampleKey, draw_view
from vitinit.data.images import DataError, crop_and_flip, resize_and_centre_crop
from vitinit.data.loader import (GRACE_SECONDS, Batch, EvalViews, ToDevice, TrainViews, eval_loader,
                                 steps, train_loader)
from vitinit.data.loader import _leave_signals_to_parent as leave_signals_to_parent
from vitinit.data.sampler import TrainSampler, plan_batches

SIZE = (11, 13)
DRAWS = dict(seed=5, scale=(0.2, 1.0), ratio=(3 / 4, 4 / 3), padding=2, flip=0.5)
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> ImageFolder:
    """23 pictures of 23 sizes in three classes."""
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for number in range(23):
        path = root / f"class_{number % 3}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        pixels = rng.integers(0, 256, (17 + number, 41 - number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return ImageFolder(root)


def numbered(count: int) -> PicturesInMemory:
    """Pictures whose label is their own index."""
    pictures = np.random.default_rng(1).integers(0, 256, (count, 3, 17, 19), dtype=np.uint8)
    return PicturesInMemory(torch.from_numpy(pictures), np.arange(count), [""] * count)


def loader_of(source, *, workers: int, step: int = 0, epoch: int = 3, max_batch: int = 2):
    """Epochs of three steps of six images; by default three micro-batches of two a step."""
    views = TrainViews(source, size=SIZE, interpolation="bilinear", **DRAWS)
    sampler = TrainSampler(len(source), plan_batches(6, max_batch, 1), rank=0, seed=5)
    sampler.start(epoch=epoch, step=step)
    return train_loader(views, sampler, workers=workers, pin_memory=False)


def copies(loader) -> list[Batch]:
    return [Batch(images.clone(), labels.clone()) for images, labels in loader]


def equal(ours: list[Batch], theirs: list[Batch]) -> bool:
    return len(ours) == len(theirs) and all(
        torch.equal(one, other) for pair in zip(ours, theirs) for one, other in zip(*pair))


def test_a_batch_holds_the_views_that_its_keys_name(folder):
    sampler = TrainSampler(23, plan_batches(6, 2, 1), rank=0, seed=5)
    sampler.start(epoch=3, step=0)
    expected = []
    for keys in sampler:
        views = []
        for key in keys:
            picture = folder.picture(key.index)
            box, flip = draw_view(key, *picture.shape[1:], **DRAWS)
            views.append(crop_and_flip(picture, box, flip, SIZE, "bilinear"))
        expected.append(Batch(torch.stack(views), torch.tensor([folder.labels[key.index]
                                                                for key in keys])))
    batches = copies(loader_of(folder, workers=0))
    assert equal(batches, expected)
    assert batches[0].images.shape == (2, 3, *SIZE) and batches[0].images.dtype == torch.uint8
    assert batches[0].labels.dtype == torch.int64


def test_batches_are_the_same_for_any_number_of_workers(folder):
    without = copies(loader_of(folder, workers=0))
    assert len(without) == 9
    assert equal(copies(loader_of(folder, workers=1)), without)
    assert equal(copies(loader_of(folder, workers=3)), without)


def test_other_epochs_give_other_views_of_one_image(folder):
    views = TrainViews(folder, size=SIZE, interpolation="bilinear", **DRAWS)
    (one, label), (other, same_label) = views[SampleKey(0, 7)], views[SampleKey(1, 7)]
    assert not torch.equal(one, other) and label == same_label
    assert torch.equal(one, views[SampleKey(0, 7)][0])


@pytest.mark.parametrize("step", [1, 2, 3])
def test_resuming_at_a_step_gives_the_tail_of_the_epoch(folder, step):
    whole = copies(loader_of(folder, workers=0))
    assert equal(copies(loader_of(folder, workers=0, step=step)), whole[3 * step:])


def test_one_loader_with_workers_goes_through_epochs_as_fresh_ones_do(folder):
    loader = loader_of(folder, workers=1, epoch=0)
    first = copies(loader)
    loader.batch_sampler.start(epoch=1, step=1)
    second = copies(loader)
    assert equal(first, copies(loader_of(folder, workers=0, epoch=0)))
    assert equal(second, copies(loader_of(folder, workers=0, epoch=1, step=1)))


def test_an_epochs_micro_batches_make_up_its_larger_batches(folder):
    small = [list(micro) for micro in steps(loader_of(folder, workers=0), accumulation=3)]
    large = list(loader_of(folder, workers=0, max_batch=6))
    assert [len(micro_batches) for micro_batches in small] == [3, 3, 3]
    together = [Batch(torch.cat([batch.images for batch in micro_batches]),
                      torch.cat([batch.labels for batch in micro_batches]))
                for micro_batches in small]
    assert equal(together, large)


def test_steps_without_accumulation_hold_one_batch_each(folder):
    loader = loader_of(folder, workers=0, max_batch=6)
    assert equal([only for only, in steps(loader, accumulation=1)], copies(loader))


@pytest.mark.parametrize("world_size", [1, 2, 5, 29])        # 29: more processes than images
def test_evaluation_sees_every_image_exactly_once(world_size):
    source = numbered(23)
    seen = {}
    for rank in range(world_size):
        views = EvalViews(source, rank=rank, world_size=world_size, size=SIZE, crop_pct=0.875,
                          interpolation="bicubic")
        batches = copies(eval_loader(views, batch_size=3, workers=0, pin_memory=False))
        assert all(len(batch.labels) == 3 for batch in batches[:-1])
        for images, labels in batches:
            for image, label in zip(images, labels.tolist(), strict=True):
                assert label not in seen
                seen[label] = image
    assert sorted(seen) == list(range(23))
    for index, image in seen.items():
        assert torch.equal(image, resize_and_centre_crop(source.picture(index), SIZE, 0.875,
                                                         "bicubic"))


def test_evaluation_batches_keep_the_order_of_the_source(folder):
    views = EvalViews(folder, rank=1, world_size=2, size=SIZE, crop_pct=1.0,
                      interpolation="bilinear")
    batches = copies(eval_loader(views, batch_size=5, workers=1, pin_memory=False))
    assert torch.cat([batch.labels for batch in batches]).tolist() == folder.labels[1::2].tolist()
    assert [len(batch.labels) for batch in batches] == [5, 5, 1]


@pytest.mark.parametrize("channels_last", [False, True])
def test_to_device_normalises_as_torchvision_does(channels_last):
    source = numbered(7)
    batch = Batch(source.pictures, torch.from_numpy(source.labels))
    prepare = ToDevice(torch.device("cpu"), mean=MEAN, std=STD, channels_last=channels_last)
    images, labels = prepare(batch)
    scaled = v2.functional.to_dtype(batch.images, torch.float32, scale=True)
    expected = v2.functional.normalize(scaled, list(MEAN), list(STD))
    assert images.dtype == torch.float32
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-6)
    assert torch.equal(labels, batch.labels)
    assert images.is_contiguous(memory_format=torch.channels_last) == channels_last
    assert images.is_contiguous() != channels_last


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_file_ends_the_epoch_with_its_name(tmp_path, workers):
    for number in range(6):
        path = tmp_path / "ant" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (17, 19), (number, 0, 0)).save(path)
    broken: Path = tmp_path / "ant" / "4.png"
    broken.write_bytes(broken.read_bytes()[:41])
    last_line = re.escape(f"{broken}: not a readable picture") + r"[^\n]*\n?\Z"
    with pytest.raises(DataError, match=last_line) as error:
        copies(loader_of(ImageFolder(tmp_path), workers=workers))
    traceback.clear_frames(error.tb)             # they hold the loader, and the loader its worker


def test_an_epoch_goes_on_after_ctrl_c_and_one_sigterm_to_its_worker(folder):
    others = multiprocessing.active_children()
    loader = loader_of(folder, workers=1)
    batches = []
    for images, labels in loader:
        batches.append(Batch(images.clone(), labels.clone()))
        if len(batches) == 2:
            worker, = set(multiprocessing.active_children()) - set(others)
            os.kill(worker.pid, signal.SIGINT)
            os.kill(worker.pid, signal.SIGTERM)
    assert equal(batches, copies(loader_of(folder, workers=0)))


def test_a_worker_outlives_signals_for_a_while():
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work():
        leave_signals_to_parent(0)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
            sender.send(signal.alarm(0))             # seconds it has left; 0: no end is set

    worker = context.Process(target=work)
    worker.start()
    worker.join()
    assert receiver.recv() == 0
    assert GRACE_SECONDS - 5 <= receiver.recv() <= GRACE_SECONDS
    assert worker.exitcode == 0


@pytest.mark.parametrize("how", ["pass", "sys.exit(3)", "raise SystemExit(5)"])
def test_a_program_that_leaves_a_loader_open_ends_at_once(folder, how):
    """multiprocessing would wait for workers that outlive its SIGTERM."""
    root = Path(os.fsdecode(folder.paths[0])).parents[1]
    program = f"""
import sys
from vitinit.data.datasets import ImageFolder
from vitinit.data.loader import EvalViews, eval_loader
from pathlib import Path
views = EvalViews(ImageFolder(Path({str(root)!r})), rank=0, world_size=1, size=(7, 7),
                  crop_pct=1.0, interpolation="bilinear")
batches = iter(eval_loader(views, batch_size=2, workers=1, pin_memory=False))
next(batches)
{how}
"""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True,
                            text=True, timeout=GRACE_SECONDS - 10)
    assert result.returncode == {"p": 0, "s": 3, "r": 5}[how[0]]
    assert result.stderr == ""

