"""Batches are the same for any number of workers, processes and resumes."""

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
from torch import Tensor
from torch.utils.data import DataLoader

from deit import AUGMENT, MIX, RAND_AUGMENT
from vitinit.data.datasets import ImageFolder, ImagesInMemory
from vitinit.data.draw import Draws, SampleDraws, SampleKey
from vitinit.data.images import DataError, crop_and_flip, resize_and_centre_crop
from vitinit.data.loader import (Batch, EvalViews, TrainBatch, TrainViews, eval_loader,
                                 train_loader)
from vitinit.data.pipeline import TrainingBatches, training_batches
from vitinit.data.sampler import TrainSampler, plan_batches
from vitinit.data.to_device import TrainToDevice

SIZE, SEED = (11, 13), 5
DRAWS = SampleDraws(SEED, SIZE, replace(AUGMENT, crop_scale=(0.2, 1.0), crop_padding=2,
                                        interpolation="random", erase_probability=0.5),
                    replace(RAND_AUGMENT, probability=0.7, interpolation="random"))


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


def views_of(source, *, seed: int = SEED) -> TrainViews:
    return TrainViews(source, replace(DRAWS, seed=seed))


def sampler_of(source, *, step: int = 0, epoch: int = 3, max_batch: int = 2, rank: int = 0,
               world_size: int = 1, repeats: int = 2) -> TrainSampler:
    """Epochs of three steps of six views; by default three micro-batches of two per step."""
    sampler = TrainSampler(len(source), plan_batches(6, max_batch, world_size, group=1),
                           rank=rank, seed=SEED, repeats=repeats)
    sampler.start(epoch=epoch, step=step)
    return sampler


def in_order(shares: list[Tensor], max_batch: int) -> Tensor:
    """An epoch in the order of its global batches; shares: what each process had of it, a tensor."""
    plan = plan_batches(6, max_batch, len(shares), group=1)
    epoch = torch.empty(len(shares) * len(shares[0]), *shares[0].shape[1:], dtype=shares[0].dtype)
    for rank, one in enumerate(shares):
        for number, part in enumerate(one.split(plan.micro_batch_size)):
            step, micro_step = divmod(number, plan.accumulation)
            epoch[6 * step + plan.positions(rank, micro_step)] = part
    return epoch


def loader_of(source, *, workers: int = 0, **options: int):
    return train_loader(views_of(source), sampler_of(source, **options), workers=workers,
                        pin_memory=False)


def copies(loader) -> list:
    return [batch._replace(images=batch.images.clone(), labels=batch.labels.clone())
            for batch in loader]


def parts(batch: Batch | TrainBatch) -> list[np.ndarray]:
    draws = batch.draws if isinstance(batch, TrainBatch) else ()
    return [np.asarray(part) for part in (batch.images, batch.labels, *draws)]


def equal(ours: list, theirs: list) -> bool:
    return len(ours) == len(theirs) and all(
        np.array_equal(one, other) for pair in zip(ours, theirs)
        for one, other in zip(*map(parts, pair), strict=True))


def joined(batches: list[TrainBatch]) -> TrainBatch:
    images, labels, draws = zip(*batches)
    return TrainBatch(torch.cat(images), torch.cat(labels), Draws(*map(torch.cat, zip(*draws))))


def augmented(batches) -> tuple[Tensor, Tensor]:
    """Images and targets that the model would get from these batches, without mixing."""
    prepare = TrainToDevice(torch.device("cpu"), mean=(0.5, 0.4, 0.3), std=(0.3, 0.2, 0.1),
                            channels_last=False, augment=DRAWS.augment,
                            rand_augment=DRAWS.rand_augment, mix=replace(MIX, probability=0.0),
                            num_classes=3, seed=SEED)
    images, targets = zip(*(prepare(batch, 0, np.zeros(len(batch.labels))) for batch in batches))
    return torch.cat(images), torch.cat(targets)


def test_a_batch_holds_the_views_that_its_keys_name(folder):
    expected = []
    for keys in sampler_of(folder):
        images, labels = [], []
        for key in keys:
            image = folder.image(key.index)
            view, = DRAWS.views([key], [image.shape[1:]])
            images.append(crop_and_flip(image, view.box, view.flip, SIZE, view.interpolation))
            labels.append(folder.labels[key.index])
        expected.append(TrainBatch(torch.stack(images), torch.tensor(labels),
                                   DRAWS.for_device(keys)))
    batches = copies(loader_of(folder))
    assert equal(batches, expected)
    assert batches[0].images.shape == (2, 3, *SIZE) and batches[0].images.dtype == torch.uint8
    assert batches[0].labels.dtype == torch.int64


@pytest.mark.parametrize("workers", [0, 1])
def test_draws_arrive_as_tensors_with_one_row_a_sample(folder, workers):
    for keys, batch in zip(sampler_of(folder), loader_of(folder, workers=workers), strict=True):
        assert type(batch) is TrainBatch and type(batch.draws) is Draws      # so they can be pinned
        assert [(part.shape, part.dtype) for part in batch.draws] == [
            ((2, 2, 3), torch.float64), ((2, 5), torch.int64)]
        for row, key in enumerate(keys):
            for part, expected in zip(batch.draws, DRAWS.for_device([key]), strict=True):
                assert torch.equal(part[row], expected[0])


def test_batches_are_the_same_for_any_number_of_workers(folder):
    without = copies(loader_of(folder, workers=0))
    assert len(without) == 9
    assert equal(copies(loader_of(folder, workers=1)), without)
    assert equal(copies(loader_of(folder, workers=3)), without)


def test_another_seed_epoch_or_repeat_gives_another_view_and_other_draws_of_an_image(folder):
    one = views_of(folder).__getitems__([SampleKey(0, 7)])
    for seed, key in ((SEED, SampleKey(1, 7)), (SEED, SampleKey(0, 7, 1)), (SEED + 1, SampleKey(0, 7))):
        other = views_of(folder, seed=seed).__getitems__([key])
        assert torch.equal(one.labels, other.labels) and not torch.equal(one.images, other.images)
        assert not torch.equal(one.draws.operations, other.draws.operations)
    assert torch.equal(one.images, views_of(folder).__getitems__([SampleKey(0, 7)]).images)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_resuming_at_a_step_gives_the_tail_of_the_epoch(folder, step):
    whole = copies(loader_of(folder))
    assert equal(copies(loader_of(folder, step=step)), whole[3 * step:])


def test_one_loader_with_workers_goes_through_epochs_as_fresh_ones_do(folder):
    loader = loader_of(folder, workers=1, epoch=0)
    first = copies(loader)
    loader.batch_sampler.start(epoch=1, step=1)
    second = copies(loader)
    assert equal(first, copies(loader_of(folder, epoch=0)))
    assert equal(second, copies(loader_of(folder, epoch=1, step=1)))


class AsLoaded:
    """A stand-in for TrainToDevice that returns the batch unchanged, instead of its images."""

    device = torch.device("cpu")

    def __call__(self, batch: TrainBatch, step: int, groups: np.ndarray) -> tuple:
        return batch, None


def steps_of(loader) -> list[list[TrainBatch]]:
    """The micro-batches of each step of the epoch that the sampler was built for."""
    sampler = loader.batch_sampler
    batches = TrainingBatches(loader, sampler, prepare=AsLoaded())
    return [[micro_batch.prepare()[0] for micro_batch in step]
            for _, step in batches.steps(sampler.epoch)]


def test_an_epochs_micro_batches_make_up_its_larger_batches(folder):
    small = steps_of(loader_of(folder))
    large = list(loader_of(folder, max_batch=6))
    assert [len(micro_batches) for micro_batches in small] == [3, 3, 3]
    order = [0, 2, 4, 1, 3, 5]                               # they hold (0, 3), (1, 4), (2, 5)
    for micro_batches, whole in zip(small, large, strict=True):
        for ours, expected in zip(parts(joined(micro_batches)), parts(whole), strict=True):
            assert np.array_equal(ours[order], expected)


@pytest.mark.parametrize("max_batch, workers, each", [(6, 2, 2), (2, 2, 2), (1, 2, 3), (1, 1, 6),
                                                      (1, 0, None)])
def test_workers_are_ahead_by_two_micro_batches_each_and_by_a_step(folder, max_batch, workers, each):
    """Each step of 6 images has 1, 3 or 6 micro-batches."""
    batches = training_batches(folder, sampler=sampler_of(folder, max_batch=max_batch),
                               draws=views_of(folder).draws, prepare=AsLoaded(), budget_gib=0.0,
                               workers=workers)
    assert batches.batches.prefetch_factor == each


def test_steps_without_accumulation_hold_one_batch_each(folder):
    loader = loader_of(folder, max_batch=6)
    assert equal([only for only, in steps_of(loader)], copies(loader))


@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"),
                                   ConnectionRefusedError(111, "Connection refused"), EOFError()])
def test_a_worker_that_is_gone_before_its_batch_is_fetched_was_killed(folder, monkeypatch, error):
    """Fetching an announced batch fails before torch notices that the worker is dead."""
    loader = loader_of(folder, workers=1)

    def gone(self):
        raise error
    monkeypatch.setattr(DataLoader, "__iter__", gone)
    with pytest.raises(DataError, match="a worker process of the loader was killed"):
        list(loader)


# ---------------------------------------------------------------------------------------------
# What the model gets without mixing, bit for bit
# ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def epoch(folder) -> tuple[Tensor, Tensor]:
    """Three steps by one process without workers, in micro-batches of two."""
    batches = copies(loader_of(folder))
    draws = joined(batches).draws
    assert (draws.operations[..., 0] > 0).sum() > 13 and (draws.erased[:, 2] > 0).sum() > 3
    return augmented(batches)


def test_an_epoch_is_augmented_and_no_two_of_its_views_are_the_same(folder, epoch):
    """So that equal epochs below mean something."""
    images, targets = epoch
    plain, _ = augmented(batch._replace(draws=Draws(*map(torch.zeros_like, batch.draws)))
                         for batch in loader_of(folder))
    assert images.shape == (18, 3, *SIZE) and targets.shape == (18, 3)
    assert sum(not torch.equal(one, other) for one, other in zip(images, plain)) > 13
    assert len(images.flatten(1).unique(dim=0)) == 18


@pytest.mark.parametrize("workers", [1, 4])
def test_an_epoch_is_the_same_for_any_number_of_workers(folder, epoch, workers):
    images, targets = augmented(copies(loader_of(folder, workers=workers)))
    assert torch.equal(images, epoch[0]) and torch.equal(targets, epoch[1])


@pytest.mark.parametrize("world_size, max_batch", [(1, 1), (1, 3), (1, 6), (2, 1), (2, 3), (3, 2)])
def test_an_epoch_is_the_same_for_any_number_of_processes_and_micro_batches(folder, epoch,
                                                                            world_size, max_batch):
    shares = [augmented(loader_of(folder, rank=rank, world_size=world_size, max_batch=max_batch))
              for rank in range(world_size)]
    for ours, whole in zip(zip(*shares), epoch):             # the images, then the targets
        assert torch.equal(in_order(ours, max_batch), in_order([whole], 2))


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_is_resumed_is_the_same_from_there(folder, epoch, step, workers):
    images, targets = augmented(copies(loader_of(folder, step=step, workers=workers)))
    assert torch.equal(images, epoch[0][6 * step:]) and torch.equal(targets, epoch[1][6 * step:])


def test_every_view_of_an_epoch_can_be_made_again_alone(folder, epoch):
    keys = [key for keys in sampler_of(folder) for key in keys]
    for key, image, target in zip(keys, *epoch, strict=True):
        images, targets = augmented([views_of(folder).__getitems__([key])])
        assert torch.equal(images[0], image) and torch.equal(targets[0], target)


# ---------------------------------------------------------------------------------------------
# Evaluation
# ---------------------------------------------------------------------------------------------


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
        assert torch.equal(image, resize_and_centre_crop(source.image(index), SIZE, 0.875,
                                                         "bicubic"))


def test_evaluation_batches_keep_the_order_of_the_source(folder):
    views = EvalViews(folder, rank=1, world_size=2, size=SIZE, crop_pct=1.0,
                      interpolation="bilinear")
    batches = copies(eval_loader(views, batch_size=5, workers=1, pin_memory=False))
    assert torch.cat([batch.labels for batch in batches]).tolist() == folder.labels[1::2].tolist()
    assert [len(batch.labels) for batch in batches] == [5, 5, 1]


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
        copies(loader_of(ImageFolder(tmp_path), workers=workers, repeats=1))
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
    others = multiprocessing.active_children()
    loader = loader_of(folder, workers=1)
    batches = []
    for batch in loader:
        batches.append(batch)
        if len(batches) == 2:
            worker, = set(multiprocessing.active_children()) - set(others)
            os.kill(worker.pid, signal.SIGINT)
            os.kill(worker.pid, signal.SIGTERM)
    assert equal(batches, copies(loader_of(folder)))


def test_no_more_workers_than_there_is_to_do(folder):
    sampler = sampler_of(folder)                     # nine micro-batches per epoch
    for asked, started in ((0, 0), (4, 4), (1000, 9)):
        assert train_loader(views_of(folder), sampler, workers=asked,
                            pin_memory=False).num_workers == started
    views = EvalViews(folder, rank=0, world_size=1, size=(7, 7), crop_pct=1.0,
                      interpolation="bilinear")      # 23 images in six batches
    assert eval_loader(views, batch_size=4, workers=1000, pin_memory=False).num_workers == 6
