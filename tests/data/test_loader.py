"""Loaders give the views and draws of the right samples, whatever their workers live through."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from deit import AUGMENT, CPU, MIX, RAND_AUGMENT, samples
from vitinit.data.augment import ToDevice, TrainToDevice
from vitinit.data.sources import ImageFolder, ImagesInMemory
from vitinit.data.draw import Augmentation, SampleKey
from vitinit.data.images import DataError, crop_and_flip, resize_and_centre_crop
from vitinit.data.loader import Batch, EvalViews, Loader, TrainViews
from vitinit.data.pipeline import EvaluationBatches, KeptViews, TrainingBatches
from vitinit.data.sampler import TrainSampler, plan_batches

SIZE, SEED = (11, 13), 5
DRAWS = Augmentation(SEED, SIZE, replace(AUGMENT, crop_scale=(0.2, 1.0), crop_padding=2,
                                         interpolation="random", erase_probability=0.5),
                     replace(RAND_AUGMENT, probability=0.7, interpolation="random"), MIX)
AS_INPUT = dict(mean=(0.5, 0.4, 0.3), std=(0.3, 0.2, 0.1), channels_last=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> ImageFolder:
    """23 images of 23 sizes in three classes."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for number in range(23):
        path = root / f"class_{number % 3}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        pixels = rng.integers(0, 256, (17 + number, 41 - number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return ImageFolder(root)


def numbered(count: int) -> ImagesInMemory:
    """Images whose label is their own index."""
    images = np.random.default_rng(1).integers(0, 256, (count, 3, 17, 19), dtype=np.uint8)
    return ImagesInMemory(torch.from_numpy(images), np.arange(count), [""] * count)


def batches_of(source, *, workers: int = 0, max_batch: int = 2, repeats: int = 2
               ) -> TrainingBatches:
    """Epochs of three steps of six views."""
    sampler = TrainSampler(len(source), plan_batches(6, max_batch, 1, group=2), rank=0, seed=SEED,
                           repeats=repeats)
    return TrainingBatches(source, sampler, TrainToDevice(CPU, DRAWS, **AS_INPUT, num_classes=3),
                           workers=workers)


def loaded(batches: TrainingBatches) -> list[Batch]:
    return [batch._replace(images=batch.images.clone(), labels=batch.labels.clone())
            for batch in batches.loader]


def equal(ours: list[Batch], theirs: list[Batch]) -> bool:
    return len(ours) == len(theirs) > 0 and all(
        torch.equal(a, b) for one, other in zip(ours, theirs)
        for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_batch_holds_the_views_and_draws_that_its_keys_name(folder, workers):
    batches, expected = batches_of(folder, workers=workers), []
    for each in batches.sampler:
        images = []
        for key in each.keys:
            image = folder.image(key.index)
            view, = DRAWS.views([key], [image.shape[1:]])
            images.append(crop_and_flip(image, view.box, view.flip, SIZE, view.interpolation))
        labels = folder.labels[[key.index for key in each.keys]]
        expected.append(Batch(torch.stack(images), torch.from_numpy(labels), DRAWS.draws(each)))
    found = loaded(batches)
    assert equal(found, expected) and len(found) == 9
    for batch in found:                              # named tuples of tensors, which can be pinned
        assert type(batch) is Batch
        assert [(part.shape[:1], part.dtype) for part in batch] == [
            ((2,), torch.uint8), ((2,), torch.int64), ((2,), torch.float64)]


def test_another_seed_epoch_or_repeat_gives_another_view_and_other_draws_of_an_image(folder):
    def batch(key: SampleKey, seed: int = SEED) -> Batch:
        return TrainViews(folder, replace(DRAWS, seed=seed))[samples([key])]
    one = batch(SampleKey(0, 7))
    for other in (batch(SampleKey(1, 7)), batch(SampleKey(0, 7, 1)), batch(SampleKey(0, 7), SEED + 1)):
        assert torch.equal(one.labels, other.labels) and not torch.equal(one.images, other.images)
        assert not torch.equal(one.draws, other.draws)
    assert torch.equal(one.images, batch(SampleKey(0, 7)).images)


@pytest.mark.parametrize("max_batch, workers, each", [(6, 2, 2), (2, 2, 2), (1, 2, 3), (1, 1, 6),
                                                      (1, 0, None)])
def test_workers_are_ahead_by_two_micro_batches_each_and_by_a_step(max_batch, workers, each):
    """Each step of 6 images has 1, 3 or 6 micro-batches."""
    source, prepare = numbered(23), TrainToDevice(CPU, DRAWS, **AS_INPUT, num_classes=23)
    sampler = TrainSampler(23, plan_batches(6, max_batch, 1, group=1), rank=0, seed=0, repeats=1)
    batches = TrainingBatches(source, sampler, prepare, workers=workers)
    assert batches.loader.prefetch_factor == each


def test_no_more_workers_than_there_is_to_do(folder):
    assert batches_of(folder, workers=1000).loader.num_workers == 9      # micro-batches per epoch
    views = EvalViews(folder, rank=0, world_size=1, size=SIZE, crop_pct=1.0, interpolation="bilinear")
    kept = KeptViews(views, CPU, on_device_gib=0.0, cache_gib=0.0)
    batches = EvaluationBatches(kept, batch_size=4, workers=1000, prepare=ToDevice(CPU, **AS_INPUT))
    assert batches.loader.num_workers == 6           # 23 images in six batches


@pytest.mark.parametrize("world_size", [1, 2, 5, 29])        # 29: more processes than images
def test_evaluation_sees_every_image_exactly_once_in_order(world_size):
    source, seen = numbered(23), {}
    for rank in range(world_size):
        views = EvalViews(source, rank=rank, world_size=world_size, size=SIZE, crop_pct=0.875,
                          interpolation="bicubic")
        labels = []
        for images, some in Loader(views, workers=0, batch_size=3):
            assert some.dtype == torch.int64 and len(some) <= 3
            seen |= dict(zip(some.tolist(), images, strict=True))
            labels += some.tolist()
        assert labels == list(range(rank, 23, world_size))
    for index in range(23):
        assert torch.equal(seen[index], resize_and_centre_crop(source.image(index), SIZE, 0.875,
                                                               "bicubic"))


# ---------------------------------------------------------------------------------------------
# Broken files, signals and exits
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_file_ends_the_epoch_with_its_name(tmp_path, workers):
    for number in range(6):
        path = tmp_path / "ant" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (17, 19), (number, 0, 0)).save(path)
    broken: Path = tmp_path / "ant" / "4.png"
    broken.write_bytes(broken.read_bytes()[:41])
    one_line = r"\A" + re.escape(f"{broken}: not a readable image") + r"[^\n]*\Z"
    with pytest.raises(DataError, match=one_line) as error:
        loaded(batches_of(ImageFolder(tmp_path), workers=workers, repeats=1))
    traceback.clear_frames(error.tb)             # they hold the loader, and the loader its worker


def cannot_read(batch: list) -> None:
    raise DataError("images/a: b.png: cannot be read: Input/output error")


def test_a_workers_error_comes_as_that_worker_raised_it():
    batches = DataLoader([1, 2], num_workers=1, collate_fn=cannot_read, multiprocessing_context="fork")
    with pytest.raises(DataError) as caught:
        next(iter(batches))
    assert str(caught.value) == "images/a: b.png: cannot be read: Input/output error"
    traceback.clear_frames(caught.tb)


def test_an_epoch_goes_on_after_ctrl_c_and_one_sigterm_to_its_worker(folder):
    others, found = multiprocessing.active_children(), []
    for batch in batches_of(folder, workers=1).loader:
        found.append(batch)
        if len(found) == 2:
            worker, = set(multiprocessing.active_children()) - set(others)
            os.kill(worker.pid, signal.SIGINT)
            os.kill(worker.pid, signal.SIGTERM)
    assert equal(found, loaded(batches_of(folder)))


@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), EOFError()])
def test_a_worker_that_is_gone_before_its_batch_is_fetched_was_killed(monkeypatch, error):
    """Fetching an announced batch fails before torch notices that the worker is dead."""
    def gone(self):
        raise error
    monkeypatch.setattr(DataLoader, "__iter__", gone)
    with pytest.raises(DataError, match="a worker process of the loader was killed"):
        list(Loader([1], workers=1))
