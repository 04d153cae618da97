"""What the model gets: the order of operations, mixing, targets, memory format, and launches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.transforms import v2

import deit
from deit import AUGMENT, CPU, MIX, RAND_AUGMENT, UNMIXED_ALWAYS, OnHost, noisy_batch
from vitinit.bench.launches import Launches, launches_of
from vitinit.data.augment import ToDevice, TrainToDevice, normalise, pairs_in_chunks
from vitinit.data.draw import Augmentation, SampleKey, unpack
from vitinit.data.loader import Batch
from vitinit.data.mix import Mix, mix_images, mix_targets, smooth_one_hot

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE, FILL, CLASSES, SEED = (11, 13), (17, 131, 251), 19, 23
AS_INPUT = dict(mean=MEAN, std=STD, num_classes=CLASSES)
MIXUP, CUTMIX = replace(MIX, cutmix_alpha=0.0), replace(MIX, mixup_alpha=0.0)
HALF = replace(MIX, probability=0.5)


def augmentation(mix: Mix = MIX, **augment) -> Augmentation:
    return Augmentation(SEED, SIZE, replace(AUGMENT, **{"erase_probability": 0.8} | augment),
                        replace(RAND_AUGMENT, probability=0.7, fill=FILL), mix)


def batch_of(settings: Augmentation, count: int = 7) -> Batch:
    """Images of noise, most of which are augmented and erased, in three groups."""
    groups = np.minimum(np.arange(count), np.arange(count)[::-1]) % 3    # the same of partners
    keys = [SampleKey(0, index) for index in range(count)]
    return Batch(noisy_batch(count, *SIZE), torch.arange(count) * 2 % CLASSES,
                 settings.draws(deit.samples(keys, groups.tolist(), step=5)))


def prepared(settings: Augmentation, batch: Batch, *, channels_last: bool = False,
             chunk: int | None = None) -> tuple[Tensor, Tensor]:
    return TrainToDevice(CPU, settings, **AS_INPUT, channels_last=channels_last, chunk=chunk)(batch)


def by_hand(settings: Augmentation, batch: Batch) -> Tensor:
    """RandAugment → normalise → erase → mix, or RandAugment → mix → normalise → erase."""
    draws, after = unpack(batch.draws), settings.augment.erase_after_mix
    mixed = draws.mixed
    images = deit.augmented(batch.images, draws.operations, FILL)
    images = mix_images(images, mixed) if after else images
    images = deit.erase(normalise(images, MEAN, STD), draws.erased,
                        settings.augment.erase_fill)
    return images if after else mix_images(images, mixed)


@pytest.mark.parametrize("channels_last", [False, True])
def test_an_evaluation_batch_is_normalised_as_by_torchvision(channels_last):
    images, labels = noisy_batch(7, *SIZE), torch.arange(7)
    ours, same_labels = ToDevice(CPU, mean=MEAN, std=STD, channels_last=channels_last)(
        [images, labels])
    scaled = v2.functional.to_dtype(images, torch.float32, scale=True)
    expected = v2.functional.normalize(scaled, list(MEAN), list(STD))
    assert ours.dtype == torch.float32 and torch.equal(same_labels, labels)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
    assert torch.equal(images, noisy_batch(7, *SIZE))
    assert ours.is_contiguous(memory_format=torch.channels_last) == channels_last


@pytest.mark.parametrize("mix", [MIXUP, CUTMIX, MIX, HALF, UNMIXED_ALWAYS])
def test_batches_are_those_of_the_functions_by_hand_whatever_the_chunks_and_layout(mix):
    """In both orders, with each fill, and the batch is left alone."""
    for fill, after in (("pixel", False), ("rand", True), ("const", False), ("const", True)):
        settings = augmentation(mix, erase_fill=fill, erase_after_mix=after)
        for count in (1, 2, 13, 14):
            batch = batch_of(settings, count)
            images, targets = prepared(settings, batch)
            assert torch.equal(images, by_hand(settings, batch)) and images.is_contiguous()
            smooth = smooth_one_hot(batch.labels, CLASSES, mix.label_smoothing)
            assert torch.equal(targets, mix_targets(smooth, unpack(batch.draws).mixed))
            assert not torch.equal(images, normalise(batch.images, MEAN, STD))
            for chunk in (0, 2, 5, 100):
                pixels, same_targets = prepared(settings, batch, channels_last=chunk > 0,
                                                chunk=chunk * SIZE[0] * SIZE[1])
                assert torch.equal(images, pixels) and torch.equal(targets, same_targets)
                assert chunk == 0 or pixels.is_contiguous(memory_format=torch.channels_last)
            unused = batch_of(settings, count)
            assert all(map(torch.equal, batch, unused))


@pytest.mark.parametrize("count", [1, 2, 3, 13, 14])
def test_chunks_hold_every_image_once_and_with_its_partner(count):
    for most in (0, 2, 3, 5, 8, count):
        chunks = list(pairs_in_chunks(count, most))
        assert sorted(np.concatenate(chunks).tolist()) == list(range(count))
        for rows in chunks:
            assert len(rows) <= max(2, most) and (rows == count - 1 - rows[::-1]).all()


# ---------------------------------------------------------------------------------------------
# On a GPU: few launches, and no waiting
# ---------------------------------------------------------------------------------------------


def on_fake_gpu(count: int, size: int, settings: Augmentation) -> Launches:
    """What augmentation launches on a GPU, counted with fake tensors that have only shapes."""
    settings = replace(settings, size=(size, size))
    keys = [SampleKey(0, index) for index in range(count)]
    draws = OnHost(settings.draws(deit.samples(keys)))
    with FakeTensorMode():
        batch = Batch(torch.zeros(count, 3, size, size, dtype=torch.uint8),
                      torch.zeros(count, dtype=torch.int64), draws)
        on_gpu = TrainToDevice(torch.device("cuda", 0), settings, **AS_INPUT, channels_last=True)
        return launches_of(lambda: on_gpu(batch))


@pytest.mark.parametrize("count, size, interpolation, probability", [
    (1024, 224, "bicubic", 0.5), (1024, 224, "random", 0.5), (2048, 32, "random", 1.0),
    (64, 16, "random", 1.0)])
def test_at_most_400_operations_and_two_copies_beside_the_images(count, size, interpolation,
                                                                 probability):
    for after in (False, True):
        settings = augmentation(erase_after_mix=after)
        settings = replace(settings, rand_augment=replace(
            settings.rand_augment, interpolation=interpolation, probability=probability))
        launches = on_fake_gpu(count, size, settings)
        assert 200 < launches.count <= 400
        assert launches.uploads == 3 and launches.downloads == 0
