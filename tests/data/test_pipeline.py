"""A mixed global batch is the same however it is made, evaluation views however they are kept."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock, call

import numpy as np
import pytest
import torch
from deit import (
    AUGMENT,
    CPU,
    MIX,
    RAND_AUGMENT,
    SHIFT,
    as_drawn,
    augmented,
    cropped,
    draws_of,
    equal,
    erase,
    write_images,
)
from refused import refused
from torch import Tensor

from vitinit.base.keys import Purpose, keyed_generator
from vitinit.data.augment import (
    ToDevice,
    TrainToDevice,
    mix_images,
    mix_targets,
    normalise,
    smooth_one_hot,
)
from vitinit.data.draw import Augmentation, Masks, SampleKey, epoch_order
from vitinit.data.images import NOWHERE, Box, DataError, crop_and_flip, resize_and_centre_crop
from vitinit.data.loader import EvalViews, TrainViews
from vitinit.data.pipeline import (
    GIB,
    Ahead,
    EvaluationBatches,
    TrainingBatches,
    cut,
    decode_to_device,
    decoded_apart,
    decoding_stream,
    preparing_stream,
)
from vitinit.data.sampler import TrainSampler, plan_batches
from vitinit.data.sources import ImageFolder, ImagesInMemory

SIDE, COUNT, CLASSES, SEED, REPEATS = 7, 29, 5, 31, 3
GLOBAL_BATCH, GROUP, EPOCHS = 48, 8, 4  # one step per epoch, six groups
MEAN, STD, FILL = (0.5, 0.4, 0.3), (0.3, 0.2, 0.1), (17, 131, 251)
DRAWS = Augmentation(
    SEED,
    (SIDE, SIDE),
    replace(AUGMENT, **SHIFT, crop_padding=2, erase_probability=0.5),
    replace(RAND_AUGMENT, probability=0.7, fill=FILL),
    replace(MIX, probability=0.9),
)
AFTER = replace(DRAWS, augment=replace(DRAWS.augment, erase_after_mix=True))
AS_INPUT = dict(mean=MEAN, std=STD, channels_last=False)


def random_images(height: int = SIDE, width: int = SIDE) -> ImagesInMemory:
    rng = np.random.default_rng(2)
    pixels = rng.integers(0, 256, (COUNT, 3, height, width), dtype=np.uint8)
    return ImagesInMemory(torch.from_numpy(pixels), rng.integers(0, CLASSES, COUNT), [""] * COUNT)


def batches_of(
    plan, *, draws: Augmentation = DRAWS, rank: int = 0, repeats: int = REPEATS, **options
) -> TrainingBatches:
    return TrainingBatches(
        random_images(),
        TrainSampler(COUNT, plan, rank=rank, seed=SEED, repeats=repeats),
        TrainToDevice(CPU, draws, **AS_INPUT, num_classes=CLASSES),
        **options,
    )


# Training -------------------------------------------------------------------------------------
def all_steps(
    draws: Augmentation,
    world_size: int,
    max_batch: int,
    workers: int = 0,
    resident: bool = False,
    strided: bool = False,
) -> list[tuple[Tensor, Tensor]]:
    """Images and targets of each step, of all processes, in the order of the global batch."""
    plan = plan_batches(GLOBAL_BATCH, max_batch, world_size, group=GROUP, strided=strided)
    found = [
        (
            torch.full((GLOBAL_BATCH, 3, SIDE, SIDE), torch.nan),
            torch.full((GLOBAL_BATCH, CLASSES), torch.nan),
        )
        for _ in range(EPOCHS)
    ]
    for rank in range(world_size):
        batches = batches_of(
            plan, draws=draws, rank=rank, budget_gib=float(resident), workers=workers
        )
        assert batches.resident == resident
        for epoch in range(EPOCHS):
            ((number, step),) = batches.steps(epoch)
            assert number == epoch and len(step) == plan.accumulation
            for micro_batch in step:
                (images, targets), positions = micro_batch.prepare(), micro_batch.positions
                found[epoch][0][positions], found[epoch][1][positions] = images, targets
    return found


def by_definition(draws: Augmentation) -> list[tuple[Tensor, Tensor]]:
    """The same by the definition: single views, then every G-th image of a global batch mixed."""
    source, found, groups = random_images(), [], GLOBAL_BATCH // GROUP
    for step in range(EPOCHS):
        views = np.repeat(epoch_order(SEED, step, COUNT), REPEATS)[:GLOBAL_BATCH].tolist()
        keys = [SampleKey(step, index, place % REPEATS) for place, index in enumerate(views)]
        drawn = draws_of(draws, keys)
        images = augmented(
            torch.stack([cropped(draws, source, key) for key in keys]), drawn.operations, FILL
        )
        targets = smooth_one_hot(torch.from_numpy(source.labels[views]), CLASSES, 0.1)

        def ready(images: Tensor) -> Tensor:
            return erase(normalise(images, MEAN, STD), drawn.erased, "pixel")

        after = draws.augment.erase_after_mix
        images = images.clone() if after else ready(images)
        for group in range(groups):
            mix = draws.mix.draw(keyed_generator(SEED, Purpose.MIX, step, group), SIDE, SIDE)
            own = slice(group, None, groups)
            images[own] = mix_images(images[own], as_drawn([mix] * GROUP))
            targets[own] = mix_targets(targets[own], as_drawn([mix] * GROUP))
        found.append((ready(images) if after else images, targets))
    return found


@pytest.mark.parametrize("draws", [DRAWS, AFTER], ids=["erased", "mixed first"])
def test_a_mixed_global_batch_is_bit_for_bit_the_same_however_it_is_distributed(
    draws, held_against
):
    expected = by_definition(draws)
    for how in (
        (1, 48),
        (1, 16, 2),
        (2, 12),
        (3, 9),
        (8, 2),
        (2, 4, 1, True),
        (3, 4, 0, False, True),
        (1, 24, 0, True, True),
    ):
        for ours, theirs in zip(all_steps(draws, *how), expected, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert one.numpy().tobytes() == other.numpy().tobytes(), how
            held_against(ours, theirs, cases=GLOBAL_BATCH, within=0)
    mixes = [
        draws.mix.draw(keyed_generator(SEED, Purpose.MIX, step, group), SIDE, SIDE)
        for step in range(EPOCHS)
        for group in range(GLOBAL_BATCH // GROUP)
    ]
    assert len(set(mixes)) >= 10  # of both kinds, so that this means something
    assert 2 < sum(mix.box != NOWHERE for mix in mixes) < len(mixes) - 2


def test_a_step_comes_once_all_its_images_are_loaded():
    """So an image that cannot be read never leaves half a step."""
    batches, prepared = batches_of(plan_batches(GLOBAL_BATCH, 8, 1, group=GROUP)), []

    def loaded() -> Iterator[int]:
        yield from range(5)  # of six micro-batches
        raise DataError("image 7")

    batches.loader = loaded()
    with pytest.raises(DataError, match="image 7"):
        for _, step in batches.steps(0):
            prepared.extend(step)
    assert prepared == []


def test_workers_are_ahead_by_two_micro_batches_each_and_by_a_step():
    """Each step of 6 images has 1, 3 or 6 micro-batches. No more workers than there is to do."""
    for max_batch, workers, each in ((6, 2, 2), (2, 2, 2), (1, 2, 3), (1, 1, 6), (1, 0, None)):
        plan = plan_batches(6, max_batch, 1, group=1)
        assert batches_of(plan, workers=workers).loader.prefetch_factor == each
        assert batches_of(plan, workers=1000).loader.num_workers == 4 * plan.accumulation


# Images that are stored on the device ---------------------------------------------------------
def test_a_cut_is_the_crop_of_the_image_wherever_the_window_lies():
    for height, width, flip in ((7, 7, True), (5, 11, False), (5, 11, True)):
        images = random_images(height, width).stored
        corners = [
            (top, left) for top in range(-height - 1, height + 2) for left in (-13, -2, 0, 3, 12)
        ]
        indices = (torch.arange(len(corners)) % 3).tolist()
        views = cut(
            images,
            torch.tensor([(index, *corner, int(flip)) for index, corner in zip(indices, corners)]),
        )
        assert views.dtype == torch.uint8 and views.is_contiguous()
        for view, index, (top, left) in zip(views, indices, corners):
            expected = crop_and_flip(
                images[index], Box(top, left, height, width), flip, (height, width), "bicubic"
            )
            assert torch.equal(view, expected)


def test_images_are_stored_if_views_only_move_pixels_and_all_fit(tmp_path):
    exactly = COUNT * 3 * SIDE * SIDE / GIB

    def stored(source=random_images(), gib: float = exactly, size=(SIDE, SIDE), **augment):
        draws = replace(DRAWS, size=size, augment=replace(DRAWS.augment, **augment))
        return decode_to_device(source, CPU, draws, gib, lambda: calls.append(1))

    calls = []
    assert torch.equal(stored(), random_images().stored) and len(calls) == COUNT
    assert stored(crop_padding=0, flip=0.0) is not None
    for unfit in (
        dict(gib=exactly * 0.999),
        dict(crop_scale=(0.5, 1.0)),
        dict(crop_ratio=(1.0, 1.9)),
        dict(source=random_images(height=8)),
        dict(source=random_images(width=8), size=(SIDE, 8), gib=1.0),
    ):
        assert stored(**unfit) is None
    broken = tmp_path / "ant" / "odd.png"
    broken.parent.mkdir()
    broken.write_bytes(b"no image")
    assert "odd.png: not a readable image" in refused(DataError, stored, ImageFolder(tmp_path))


def test_workers_that_only_draw_are_not_sent_the_images():
    source = random_images(height=53)
    sent, whole = (
        len(pickle.dumps(TrainViews(source, DRAWS, decode=decode))) for decode in (False, True)
    )
    assert sent < 3_000 < source.stored.nbytes < whole


# Evaluation views -----------------------------------------------------------------------------
SIZE = (11, 13)
PREPARE = ToDevice(CPU, **AS_INPUT)


class Counted(ImageFolder):
    decoded = 0

    def image(self, *arguments) -> Tensor:
        self.decoded += 1
        return super().image(*arguments)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_images(tmp_path)


def views_of(source, **which) -> EvalViews:
    return EvalViews(
        source,
        **dict(rank=0, world_size=1) | which,
        size=SIZE,
        view=partial(resize_and_centre_crop, size=SIZE, crop_pct=0.875, interpolation="bicubic"),
    )


def evaluation(views: EvalViews, *, stored: bool, workers: int = 0) -> EvaluationBatches:
    return EvaluationBatches(views, PREPARE, batch_size=5, workers=workers, cache_gib=float(stored))


def expected_of(source: ImageFolder, rank: int = 0, world_size: int = 1) -> list[tuple]:
    found = []
    for indices in torch.arange(rank, len(source), world_size).split(5):
        images = torch.stack(
            [
                resize_and_centre_crop(source.image(index), SIZE, 0.875, "bicubic")
                for index in indices.tolist()
            ]
        )
        found.append((normalise(images, MEAN, STD), torch.from_numpy(source.labels)[indices]))
    return found


@pytest.mark.parametrize("rank, world_size, workers", [(0, 1, 0), (1, 2, 2), (4, 5, 1)])
def test_every_pass_gives_each_image_of_a_share_once_kept_or_not(folder, rank, world_size, workers):
    """What is kept is decoded once. Workers end where views are kept, and else wait."""
    others = set(multiprocessing.active_children())
    source = Counted(folder)
    expected = expected_of(source, rank, world_size)
    for stored in (True, False):
        batches = evaluation(
            views_of(source, rank=rank, world_size=world_size), stored=stored, workers=workers
        )
        source.decoded = 0
        for _ in range(3):
            assert len(batches) == len(expected) and equal(batches, expected)
        share = len(range(rank, 23, world_size))
        assert source.decoded == (0 if workers else share if stored else 3 * share)
        more_processes_than_images = views_of(source, rank=28, world_size=29)
        assert list(evaluation(more_processes_than_images, stored=stored)) == []
        waiting = set(multiprocessing.active_children()) - others
        assert len(waiting) == (0 if stored else min(workers, len(batches)))
        assert not any(part.is_shared() for batch in batches.stored or () for part in batch)
    whole, part = (
        views_of(source, masks=Masks(17, 5), **which)
        for which in ({}, dict(rank=rank, world_size=world_size))
    )  # by images, not by processes
    assert all(np.array_equal(part[n][1], whole[rank + n * world_size][1]) for n in range(share))


@pytest.mark.parametrize("stored, workers", [(True, 0), (False, 2), (True, 1)])
def test_a_pass_that_is_not_completed_is_no_part_of_the_next(folder, stored, workers):
    """It was left, after all five batches at the latest, or ended at an image that is broken."""
    batches, broken = (
        evaluation(views_of(ImageFolder(folder)), stored=stored, workers=workers),
        folder / "class_2" / "20.png",
    )
    for taken in (1, 5):
        unfinished = iter(batches)
        for _ in range(taken):
            next(unfinished)
        assert batches.stored is None
        unfinished.close()
    whole = broken.read_bytes()
    broken.write_bytes(b"no image")
    for _ in range(2):
        assert "20.png: not a readable image" in refused(DataError, list, batches)
    broken.write_bytes(whole)
    for _ in range(2):
        assert equal(batches, expected_of(ImageFolder(folder)))


@pytest.mark.parametrize(
    "on_device, cache, place", [(1.0, 1.0, "meta"), (0.999, 1.0, "cpu"), (0.999, 0.999, None)]
)
def test_the_budgets_are_the_bytes_of_this_process_share(folder, on_device, cache, place):
    """Of 23 images the second of two processes has eleven. The meta device stands for a GPU."""
    whole = 11 * 3 * 11 * 13 / GIB
    batches = EvaluationBatches(
        views_of(ImageFolder(folder), rank=1, world_size=2),
        ToDevice(torch.device("meta"), **AS_INPUT),
        batch_size=4,
        workers=1000,
        on_device_gib=on_device * whole,
        cache_gib=cache * whole,
    )
    assert batches.place == (place and torch.device(place)) and batches.loader.num_workers == 3
    words = {
        "meta": "then kept on the device: 0 MiB",
        "cpu": "then kept in memory: 0 MiB",
        None: "decoded for every validation: 0 MiB",
    }
    assert words[place] in batches.in_words()


# Batches are prepared in a stream of their own, and the streams wait where they must ----------
class Queue:
    """A stand-in for a CUDA stream that records what must have ended before each piece of work.
    past: for each queue, how many of its pieces end before the next one in this queue begins."""

    current: Queue

    def __init__(self, device: torch.device | None = None) -> None:
        self.past: dict[Queue, int] = {self: 0}
        self.ended = 0

    def launch(self) -> dict[Queue, int]:
        """Launch a piece of work; how many pieces of each queue end before it, with itself."""
        self.past[self] += 1
        return dict(self.past)

    def record_event(self) -> dict[Queue, int]:
        return dict(self.past)

    def wait_event(self, event: dict[Queue, int]) -> None:
        for queue, count in event.items():
            self.past[queue] = max(self.past.get(queue, 0), count)

    def wait_stream(self, other: Queue) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.ended = self.past[self]  # pieces of it that have ended for the host


@pytest.fixture
def queues(monkeypatch) -> Iterator[Queue]:
    """Replaces the streams of torch.cuda by queues; gives the one in which training is launched."""

    @contextlib.contextmanager
    def within(queue: Queue) -> Iterator[None]:
        before, Queue.current = Queue.current, queue
        try:
            yield
        finally:
            Queue.current = before

    Queue.current = Queue()
    monkeypatch.setattr(torch.cuda, "Stream", Queue)
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Queue.current)
    caches = preparing_stream, decoding_stream
    for cache in caches:
        cache.cache_clear()
    yield Queue.current
    for cache in caches:
        cache.cache_clear()


def test_the_next_batch_is_prepared_while_the_one_before_is_trained_on(queues):
    def after(later: dict[Queue, int], earlier: dict[Queue, int]) -> bool:
        return all(later.get(queue, 0) >= count for queue, count in earlier.items())

    prepared, trained = [], []
    uploaded = queues.launch()  # such as the copy of a set to the device
    ahead = Ahead(torch.device("cuda", 0))

    def prepare() -> dict[Queue, int]:
        assert ahead.batch is (prepared[-1] if prepared else None)  # its memory is kept
        return Queue.current.launch()

    for _ in range(7):
        prepared.append(ahead(prepare))
        assert Queue.current is queues
        trained.append(queues.launch())
    for number in range(7):
        assert after(prepared[number], uploaded)
        assert after(trained[number], prepared[number])
        if number >= 1:  # may run at the same time
            assert not after(prepared[number], trained[number - 1])
        if number >= 2:  # so its memory is free
            assert after(prepared[number], trained[number - 2])
    # torch reuses memory that was freed in a stream only for that stream.
    assert (
        Ahead(torch.device("cuda", 0))(lambda: Queue.current)
        is preparing_stream(torch.device("cuda", 0))
        is not queues
    )
    with pytest.raises(KeyError):
        ahead({}.__getitem__, "three")
    assert Queue.current is queues and Ahead(CPU)(pow, 3, 2) == 9


def test_images_are_decoded_to_their_end_apart_and_kept_until_they_are_prepared(queues):
    """As a thread decodes at any time, and a decoder's own stream waits for nothing."""
    cuda, views = torch.device("cuda", 0), MagicMock()

    def decode() -> MagicMock:
        assert Queue.current is decoding_stream(cuda)
        assert Queue.current.ended == Queue.current.past[Queue.current]  # nothing is left to do
        Queue.current.launch()
        return views

    for number in range(1, 4):
        assert decoded_apart(decode, cuda) is views and Queue.current is queues
        assert decoding_stream(cuda).ended == number
    assert views.record_stream.call_args_list == [call(preparing_stream(cuda))] * 3
    assert len({queues, decoding_stream(cuda), preparing_stream(cuda)}) == 3
    assert decoded_apart(lambda: torch.ones(2), CPU).sum() == 2
