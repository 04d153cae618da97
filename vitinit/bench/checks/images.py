"""Checks of what happens to images before the model sees them.

Every device, batch size and code path has to give the same images and targets to the bit.
"""

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
    """Test images (count, 3, height, width), uint8.

    They are noise, noise of low contrast, slopes and images of one colour.
    """
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, 3, height, width), dtype=np.uint8)
    images[1::4] //= 5
    images[2::4] = (np.arange(height * width) % 251).reshape(height, width)
    images[3::8] = 77
    return torch.from_numpy(images)


def preparation(device: torch.device, mixing: MixSettings, *, fill: str = "pixel",
                erase_after_mix: bool = False, passes: Passes | None = None) -> TrainToDevice:
    """The device's part of augmentation, with these settings and otherwise fixed ones."""
    return TrainToDevice(device, mean=IMAGENET_MEAN, std=IMAGENET_STD, channels_last=False,
                         fill=(1, 120, 254), erase_fill=fill, erase_after_mix=erase_after_mix,
                         mixing=mixing, num_classes=CLASSES, seed=3, passes=passes)


def differing(found: Sequence[Tensor], reference: Sequence[Tensor]) -> int:
    """How many numbers in `found` differ from those in `reference`, which is on the CPU.

    Raises AssertionError if shapes or types differ.
    """
    count = 0
    for tensor, expected in zip(found, reference, strict=True):
        tensor = tensor.cpu()
        assert tensor.shape == expected.shape and tensor.dtype == expected.dtype, (
            f"{tuple(tensor.shape)} {tensor.dtype} where {tuple(expected.shape)} "
            f"{expected.dtype} is right")
        count += int((tensor != expected).sum())
    return count


def pair_by_pair(prepare: TrainToDevice, batch: TrainBatch, groups: np.ndarray
                 ) -> tuple[Tensor, Tensor]:
    """Prepare a batch pair by pair: each image together with its mixing partner only.

    The partner of image i is image B - 1 - i, as in data/mix.py. Returns images and targets of the
    whole batch in its order.
    """
    count = len(batch.images)
    images, targets = [None] * count, [None] * count
    for first in range(count // 2):
        pair = [first, count - 1 - first]
        part = TrainBatch(batch.images[pair], batch.labels[pair],
                          Draws(*(column[pair] for column in batch.draws)))
        for index, image, target in zip(pair, *prepare(part, 0, groups[pair])):
            images[index], targets[index] = image, target
    return torch.stack(images), torch.stack(targets)


def equal_to_pairs(conditions: Conditions, batch: TrainBatch, groups: np.ndarray,
                   mixing: MixSettings, **options) -> int:
    """How many numbers differ between a whole batch on the device and its pairs on the CPU.

    The whole batch is augmented in the few large passes that suit a GPU, even on a CPU, so that
    these are checked there; the pairs are augmented in the small passes that suit a CPU's cache.
    """
    prepare = preparation(conditions.torch_device, mixing, passes=FEW_LAUNCHES, **options)
    pairs = pair_by_pair(preparation(CPU, mixing, passes=IN_CACHE, **options), batch, groups)
    return differing(prepare(batch, 0, groups), pairs)


def drawn_batch(draws: Sequence[Draws], height: int = HEIGHT, width: int = WIDTH) -> TrainBatch:
    """A batch of test images with these draws."""
    return TrainBatch(noisy_images(len(draws), height, width), torch.arange(len(draws)) % CLASSES,
                      stack_draws(draws))


# ---------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------


def augmentation(conditions: Conditions) -> list[Row]:
    """RandAugment: each operation with both filters gives the CPU's bits, in any batch.

    A batch on the device has to equal its pairs on the CPU to the bit, since all operations use
    integers or single float operations, which IEEE 754 rounds alike everywhere. Each image goes
    through two layers: of the same operation for each in turn, then of any operation. Magnitudes
    and signs are drawn as in training.
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
    """Normalising, erasing and mixing give the CPU's bits, in images and targets, in any batch.

    A batch on the device has to equal its pairs on the CPU to the bit: for three ways to fill an
    erased box, both orders of erasing and mixing, mixup, cutmix, a choice of both where some images
    stay unmixed, and no mixing.
    """
    count, numbers = 48, 0
    kinds = [MixSettings(0.8, 1.0, 0.7, 0.5, 0.1, group=2),
             MixSettings(0.8, 0.0, 1.0, 0.5, 0.1, group=2),
             MixSettings(0.0, 1.0, 1.0, 0.5, 0.0, group=2), NO_MIXING]
    groups = np.arange(count) % (count // 2)         # partners i and count - 1 - i share a group
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
    """A training set that is kept on the device gives the same batches, to the bit, as the loader.

    Images are padded and shifted, flipped, augmented, erased and mixed, by the same functions that
    train.py calls.
    """
    found = differing(epochs_of(conditions.torch_device, budget_gib=1.0),
                      epochs_of(CPU, budget_gib=0.0))
    assert not found, f"{found} numbers differ"
    return [{"numbers that differ": 0}]


def streams(conditions: Conditions) -> list[Row]:
    """Batches prepared while the device is busy with the batch before equal the CPU's, to the bit.

    A GPU prepares batches in a CUDA stream of its own. If the streams did not wait for each other,
    memory would be read or overwritten too early, and numbers would differ. Both ways to get
    batches are checked: through the loader with two workers, and from images kept on the device.
    """
    matrix = (torch.randn(4096, 4096, device=conditions.torch_device) if conditions.on_gpu else
              torch.ones(1, 1))

    def work() -> None:
        for _ in range(20):                          # tens of milliseconds on a large GPU
            matrix @ matrix
    reference, rows = epochs_of(CPU, budget_gib=0.0), []
    for way, options in (("loader", dict(budget_gib=0.0, workers=2)),
                         ("resident", dict(budget_gib=1.0))):
        found = differing(epochs_of(conditions.torch_device, before=work, **options), reference)
        assert not found, f"{found} numbers differ: {way}"
        rows.append({"way": way, "numbers that differ": 0})
    return rows


def epochs_of(device: torch.device, *, budget_gib: float, workers: int = 0,
              before: Callable[[], None] = lambda: None) -> list[Tensor]:
    """Images, targets and positions of all micro-batches of two epochs, copied to the CPU.

    budget_gib: memory on the device for the training set; 0: it is loaded anew in every epoch.
    before: called before each micro-batch is copied. It has to be copied because its memory is used
    again for a later one: see data/ahead.py.
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
    """Evaluation batches equal the CPU's to the bit, decoded or kept on the device or in memory."""
    size, count = (31, 31), 23
    source = ImagesInMemory(noisy_images(count, *size), np.arange(count) % CLASSES,
                            list(map(str, range(CLASSES))))

    def batches(device: torch.device, crop_pct: float, **budgets: float) -> list[Tensor]:
        views = EvalViews(source, rank=0, world_size=1, size=size, crop_pct=crop_pct,
                          interpolation="bicubic")
        found = EvaluationBatches(kept_views(views, device, **budgets), batch_size=10, workers=0,
                                  prepare=ToDevice(device, mean=IMAGENET_MEAN, std=IMAGENET_STD,
                                                   channels_last=True))
        # The second pass reads what the first one kept.
        return [tensor.clone() for _ in range(2) for batch in found for tensor in batch]
    for crop_pct in (1.0, 0.875):
        reference = batches(CPU, crop_pct, on_device_gib=0.0, cache_gib=0.0)
        for budgets in ({"on_device_gib": 1.0, "cache_gib": 0.0},
                        {"on_device_gib": 0.0, "cache_gib": 1.0},
                        {"on_device_gib": 0.0, "cache_gib": 0.0}):
            found = differing(batches(conditions.torch_device, crop_pct, **budgets), reference)
            assert not found, f"{found} numbers differ at crop_pct {crop_pct} with {budgets}"
    return [{"views": 2 * count, "numbers that differ": 0}]
