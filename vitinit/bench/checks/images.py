"""Images on the way to the model: the same bits on every device, in every batch, by every path."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ...data.augment import IMAGENET_MEAN, IMAGENET_STD
from ...data.datasets import ImagesInMemory
from ...data.draw import ALL_OPERATIONS, CropAndFlip, Draws, Erasing, RandAugment, SampleDraws, \
    SampleKey, stack_draws
from ...data.kept import kept_views
from ...data.loader import EvalViews, TrainBatch
from ...data.mix import MixSettings
from ...data.passes import FEW_LAUNCHES, IN_CACHE, Passes
from ...data.pipeline import EvaluationBatches, training_batches
from ...data.sampler import TrainSampler, plan_batches
from ...data.to_device import ToDevice, TrainToDevice
from ..item import Conditions, Row

HEIGHT, WIDTH, CLASSES = 37, 41, 7
CPU = torch.device("cpu")
NO_MIXING = MixSettings(mixup_alpha=0.0, cutmix_alpha=0.0, group=2)


def noisy_images(count: int, height: int = HEIGHT, width: int = WIDTH) -> Tensor:
    """(count, 3, height, width) uint8: noise, noise of little contrast, slopes, and one colour."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, 3, height, width), dtype=np.uint8)
    images[1::4] //= 5
    images[2::4] = (np.arange(height * width) % 251).reshape(height, width)
    images[3::8] = 77
    return torch.from_numpy(images)


def preparation(device: torch.device, mixing: MixSettings, *, fill: str = "pixel",
                erase_after_mix: bool = False, passes: Passes | None = None) -> TrainToDevice:
    return TrainToDevice(device, mean=IMAGENET_MEAN, std=IMAGENET_STD, channels_last=False,
                         fill=(1, 120, 254), erase_fill=fill, erase_after_mix=erase_after_mix,
                         mixing=mixing, num_classes=CLASSES, seed=3, passes=passes)


def differing(ours: Sequence[Tensor], reference: Sequence[Tensor]) -> int:
    """How many numbers differ, or AssertionError where shapes do; on the CPU."""
    count = 0
    for one, other in zip(ours, reference, strict=True):
        one = one.cpu()
        assert one.shape == other.shape and one.dtype == other.dtype, \
            f"{tuple(one.shape)} {one.dtype} where {tuple(other.shape)} {other.dtype} is right"
        count += int((one != other).sum())
    return count


def pair_by_pair(prepare: TrainToDevice, batch: TrainBatch, groups: np.ndarray
                 ) -> tuple[Tensor, Tensor]:
    """What `prepare` makes of a batch, made of each image with its partner alone.

    The partner of image i is image B - 1 - i, as in mix.py.
    """
    count = len(batch.images)
    images, targets = [None] * count, [None] * count
    for first in range(count // 2):
        pair = [first, count - 1 - first]
        part = TrainBatch(batch.images[pair], batch.labels[pair],
                          Draws(*(column[pair] for column in batch.draws)))
        for place, image, target in zip(pair, *prepare(part, 0, groups[pair])):
            images[place], targets[place] = image, target
    return torch.stack(images), torch.stack(targets)


def equal_to_pairs(conditions: Conditions, batch: TrainBatch, groups: np.ndarray, mixing: MixSettings,
                   **options) -> int:
    """How many numbers differ between the device's whole batch and the CPU's pairs.

    The batch goes a GPU's way, in few passes, where there is none as well; pairs go a CPU's.
    """
    whole = preparation(conditions.place, mixing, passes=FEW_LAUNCHES, **options)(batch, 0, groups)
    pairs = pair_by_pair(preparation(CPU, mixing, passes=IN_CACHE, **options), batch, groups)
    return differing(whole, pairs)


def drawn_batch(draws: Sequence[Draws], height: int = HEIGHT, width: int = WIDTH) -> TrainBatch:
    return TrainBatch(noisy_images(len(draws), height, width), torch.arange(len(draws)) % CLASSES,
                      stack_draws(draws))


# ---------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------


def augmentation(conditions: Conditions) -> list[Row]:
    """RandAugment, each operation and both filters: a batch on the device = pairs on the CPU.

    To the bit: operations are integers and single float operations that IEEE 754 rounds. Two layers
    of the same operation, and then two of any, with magnitudes and signs as they are drawn.
    """
    wrong, rows = [], 0
    for operations in [*((name,) for name in ALL_OPERATIONS), ALL_OPERATIONS]:
        draws = SampleDraws(
            5, (HEIGHT, WIDTH), erasing=Erasing(probability=0.0), rand_augment=RandAugment(
                probability=1.0, operations=operations, interpolation="random"))
        count = 8 if len(operations) == 1 else 120
        batch = drawn_batch([draws.for_device(SampleKey(0, index)) for index in range(count)])
        rows += count
        if equal_to_pairs(conditions, batch, np.zeros(count, np.int64), NO_MIXING):
            wrong.append(operations[0] if len(operations) == 1 else "all together")
    assert not wrong, f"differ from the CPU's: {', '.join(wrong)}"
    return [{"images": rows, "numbers that differ": 0}]


def erasing_and_mixing(conditions: Conditions) -> list[Row]:
    """Normalising, erasing and mixing: a batch on the device = pairs of it on the CPU, to the bit.

    Three ways to fill a box, both orders of erasing and mixing, mixup, cutmix, and images of which
    some are mixed and some are not. Targets as well.
    """
    count, numbers = 48, 0
    kinds = [MixSettings(0.8, 1.0, 0.7, 0.5, 0.1, group=2), MixSettings(0.8, 0.0, 1.0, 0.5, 0.1, group=2),
             MixSettings(0.0, 1.0, 1.0, 0.5, 0.0, group=2), NO_MIXING]
    groups = np.arange(count) % (count // 2)         # partners share one: i and count - 1 - i
    groups[count // 2:] = groups[:count // 2][::-1]
    for mixing in kinds:
        for fill in ("pixel", "rand", "const"):
            draws = SampleDraws(7, (HEIGHT, WIDTH), erasing=Erasing(probability=0.6, fill=fill))
            batch = drawn_batch([draws.for_device(SampleKey(1, index)) for index in range(count)])
            for erase_after_mix in (False, True):
                found = equal_to_pairs(conditions, batch, groups, mixing, fill=fill,
                                       erase_after_mix=erase_after_mix)
                assert not found, f"{found} numbers differ: {mixing}, fill {fill}, erase_after_mix " \
                                  f"{erase_after_mix}"
                numbers += count * (3 * HEIGHT * WIDTH + CLASSES)
    return [{"numbers": numbers, "that differ": 0}]


def resident_cutting(conditions: Conditions) -> list[Row]:
    """A set that lives on the device: its training batches = those through the loader, to the bit.

    Pad and shift, flips, RandAugment, erasing and mixing, by the doors that train.py uses.
    """
    found = differing(epochs_of(conditions.place, budget_gib=1.0), epochs_of(CPU, budget_gib=0.0))
    assert not found, f"{found} numbers differ"
    return [{"numbers that differ": 0}]


def streams(conditions: Conditions) -> list[Row]:
    """Batches that are made while the device is busy with the one before = the CPU's, to the bit.

    A GPU makes them in a stream of its own, where a missing wait would show: in memory that is
    written too early, or read too early. Through the loader with two workers, and cut there.
    """
    busy = torch.randn(4096, 4096, device=conditions.place) if conditions.on_gpu else torch.ones(1, 1)

    def work() -> None:
        for _ in range(20):                          # some 50 ms on an H100, in float32
            busy @ busy
    reference, rows = epochs_of(CPU, budget_gib=0.0), []
    for way, options in (("loader", dict(budget_gib=0.0, workers=2)),
                         ("resident", dict(budget_gib=1.0))):
        found = differing(epochs_of(conditions.place, before=work, **options), reference)
        assert not found, f"{found} numbers differ: {way}"
        rows.append({"way": way, "numbers that differ": 0})
    return rows


def epochs_of(device: torch.device, *, budget_gib: float, workers: int = 0,
              before: Callable[[], None] = lambda: None) -> list[Tensor]:
    """Images, targets and positions of all micro-batches of two epochs, copied to the CPU.

    before: called before each is copied. Who takes batches may not keep them: see data/ahead.py.
    """
    size, count = (29, 29), 60
    source = ImagesInMemory(noisy_images(count, *size), np.arange(count) % CLASSES,
                            list(map(str, range(CLASSES))))
    draws = SampleDraws(2, size, crop=CropAndFlip(scale=(1.0, 1.0), ratio=(1.0, 1.0), padding=4))
    mixing = MixSettings(group=10)
    sampler = TrainSampler(count, plan_batches(20, 10, 1, group=10), rank=0, seed=0, repeats=1)
    batches = training_batches(source, sampler=sampler, draws=draws, workers=workers,
                               prepare=preparation(device, mixing), budget_gib=budget_gib)
    assert batches.resident == (budget_gib > 0)
    found: list[Tensor] = []
    for epoch in range(2):
        for step in batches.steps(epoch=epoch):
            for images, targets, positions in step:
                before()
                found += [images.clone(), targets.clone(), torch.as_tensor(positions)]
    return [tensor.cpu() for tensor in found]


def evaluation_views(conditions: Conditions) -> list[Row]:
    """Evaluation batches = the CPU's, to the bit: decoded, and kept on the device or in memory."""
    size, count = (31, 31), 23
    source = ImagesInMemory(noisy_images(count, *size), np.arange(count) % CLASSES,
                            list(map(str, range(CLASSES))))

    def batches(device: torch.device, crop_pct: float, **rooms: float) -> list[Tensor]:
        views = EvalViews(source, rank=0, world_size=1, size=size, crop_pct=crop_pct,
                          interpolation="bicubic")
        found = EvaluationBatches(kept_views(views, device, **rooms), batch_size=10, workers=0,
                                  prepare=ToDevice(device, mean=IMAGENET_MEAN, std=IMAGENET_STD,
                                                   channels_last=True))
        # The second pass finds what the first one kept.
        return [tensor.clone() for _ in range(2) for batch in found for tensor in batch]
    for crop_pct in (1.0, 0.875):
        reference = batches(CPU, crop_pct, on_device_gib=0.0, cache_gib=0.0)
        for rooms in ({"on_device_gib": 1.0, "cache_gib": 0.0}, {"on_device_gib": 0.0, "cache_gib": 1.0},
                      {"on_device_gib": 0.0, "cache_gib": 0.0}):
            found = differing(batches(conditions.place, crop_pct, **rooms), reference)
            assert not found, f"{found} numbers differ at crop_pct {crop_pct} with {rooms}"
    return [{"views": 2 * count, "numbers that differ": 0}]
