"""Stored evaluation views equal decoded ones, bit for bit, whatever happened before."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from vitinit.data.augment import ToDevice, normalise
from vitinit.data.sources import ImageFolder
from vitinit.data.images import DataError, resize_and_centre_crop
from vitinit.data.loader import EvalViews
from vitinit.data.pipeline import GIB, EvaluationBatches, KeptViews

CPU, SIZE, COUNT = torch.device("cpu"), (11, 13), 23
PREPARE = ToDevice(CPU, mean=(0.5, 0.4, 0.3), std=(0.3, 0.2, 0.1), channels_last=False)


class Counted(ImageFolder):
    """Counts how many images are decoded."""

    decoded = 0

    def image(self, index: int) -> Tensor:
        self.decoded += 1
        return super().image(index)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """23 images of 23 sizes in three classes."""
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        path = tmp_path / f"class_{number % 3}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        pixels = rng.integers(0, 256, (17 + number, 41 - number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return tmp_path


def views_of(source, *, rank: int = 0, world_size: int = 1, crop_pct: float = 0.875) -> EvalViews:
    return EvalViews(source, rank=rank, world_size=world_size, size=SIZE, crop_pct=crop_pct,
                     interpolation="bicubic")


def batches_of(kept: KeptViews, *, batch_size: int = 5, workers: int = 0) -> EvaluationBatches:
    return EvaluationBatches(kept, batch_size=batch_size, workers=workers, prepare=PREPARE)


def kept_on(views: EvalViews, place: torch.device | None) -> KeptViews:
    """The views, stored on `place`; None: decoded in every pass."""
    return KeptViews(views, CPU, on_device_gib=float(place is not None), cache_gib=0.0)


def equal(ours, theirs) -> bool:
    pairs = list(zip(ours, theirs, strict=True))
    return bool(pairs) and all(torch.equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True))


# ---------------------------------------------------------------------------------------------
# The same bits
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank, world_size", [(0, 1), (0, 2), (1, 2), (4, 5)])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_pass_gives_the_views_as_they_are_decoded(folder, rank, world_size, workers):
    source = ImageFolder(folder)
    views = views_of(source, rank=rank, world_size=world_size)
    expected = []
    for indices in torch.arange(rank, COUNT, world_size).split(5):
        images = torch.stack([resize_and_centre_crop(source.image(index), SIZE, 0.875, "bicubic")
                              for index in indices.tolist()])
        expected.append((normalise(images, *PREPARE.statistics), torch.from_numpy(source.labels)[indices]))
    for place in (CPU, None):
        batches = batches_of(kept_on(views, place), workers=workers)
        assert len(batches) == len(expected)
        for _ in range(3):
            assert equal(batches, expected)


def test_what_is_kept_is_not_decoded_again(folder):
    source = Counted(folder)
    for place, passes in ((CPU, 1), (None, 3)):
        source.decoded, batches = 0, batches_of(kept_on(views_of(source), place))
        for _ in range(3):
            for _ in batches:
                pass
        assert source.decoded == passes * COUNT


def test_views_stored_with_one_batch_size_are_given_out_with_another(folder):
    source = Counted(folder)
    kept = kept_on(views_of(source), CPU)
    single, = batches_of(kept, batch_size=COUNT)
    parts = list(batches_of(kept, batch_size=7))
    assert source.decoded == COUNT and [len(labels) for _, labels in parts] == [7, 7, 7, 2]
    assert equal([tuple(map(torch.cat, zip(*parts)))], [single])


# ---------------------------------------------------------------------------------------------
# Passes that are not completed
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [1, 4, 5])         # of five batches; with all five, not yet ended
def test_a_pass_that_is_not_completed_stores_nothing(folder, taken):
    source = Counted(folder)
    batches = batches_of(kept_on(views_of(source), CPU))
    unfinished = iter(batches)
    for _ in range(taken):
        next(unfinished)
    del unfinished
    source.decoded = 0
    assert equal(batches, batches_of(kept_on(views_of(source), None)))
    assert source.decoded == 2 * COUNT


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_named_in_every_pass_until_it_is_mended(folder, workers):
    broken = folder / "class_2" / "20.png"
    whole = broken.read_bytes()
    broken.write_bytes(b"no image")
    source = ImageFolder(folder)
    batches = batches_of(kept_on(views_of(source), CPU), workers=workers)
    for _ in range(2):
        with pytest.raises(DataError, match="20.png: not a readable image"):
            list(batches)
    broken.write_bytes(whole)
    for _ in range(2):
        assert equal(batches, batches_of(kept_on(views_of(source), None)))


# ---------------------------------------------------------------------------------------------
# Workers
# ---------------------------------------------------------------------------------------------


def test_workers_end_where_views_are_kept_and_wait_where_they_are_not(folder):
    others = set(multiprocessing.active_children())

    def workers() -> set[int]:
        return {child.pid for child in set(multiprocessing.active_children()) - others}
    kept, decoded = (batches_of(kept_on(views_of(ImageFolder(folder)), place), workers=2)
                     for place in (CPU, None))
    for _ in kept:
        assert len(workers()) == 2
    assert workers() == set()
    assert equal(kept, decoded)
    waiting = workers()
    assert len(waiting) == 2 and equal(kept, decoded) and workers() == waiting


def test_an_unfinished_pass_of_waiting_workers_is_no_part_of_the_next(folder):
    batches = batches_of(kept_on(views_of(ImageFolder(folder)), None), workers=2)
    unfinished = iter(batches)
    next(unfinished)
    expected = list(batches_of(kept_on(views_of(ImageFolder(folder)), None)))
    assert equal(batches, expected) and equal(batches, expected)


# ---------------------------------------------------------------------------------------------
# Where they are kept
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_device, cache, place", [
    (1.0, 1.0, "meta"), (1.0, 0.0, "meta"), (0.999, 1.0, "cpu"), (0.0, 1.0, "cpu"),
    (0.999, 0.999, None), (0.0, 0.0, None)])
def test_the_budgets_are_the_bytes_of_this_process_share(folder, on_device, cache, place):
    """Of 23 images the second of two processes has eleven. The meta device stands for a GPU."""
    views = views_of(ImageFolder(folder), rank=1, world_size=2)
    whole = 11 * 3 * 11 * 13 / GIB
    kept = KeptViews(views, torch.device("meta"), on_device_gib=on_device * whole,
                     cache_gib=cache * whole)
    assert kept.device == (None if place is None else torch.device(place))
    if place is not None:
        assert kept.images.shape == (11, 3, *SIZE) and kept.images.device == kept.device
    words = {"meta": "then kept on the device: 0 MiB", "cpu": "then kept in memory: 0 MiB",
             None: "decoded for every validation: 0 MiB"}
    assert words[place] in kept.in_words()
