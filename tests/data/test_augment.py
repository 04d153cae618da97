"""What the model gets: normalising, erasing, their order with mixing, formats, and launches."""

from dataclasses import replace
from statistics import NormalDist

import deit
import numpy as np
import pytest
import torch
from deit import AUGMENT, CPU, MIX, RAND_AUGMENT, UNMIXED_ALWAYS, OnHost, erase, noisy_batch
from launches import Launches, launches_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.transforms import v2

from vitinit.data.augment import (
    ToDevice,
    TrainToDevice,
    erase_one_by_one,
    mix_images,
    mix_targets,
    normal_quantiles,
    normalise,
    pairs_in_chunks,
    smooth_one_hot,
)
from vitinit.data.draw import Augmentation, Mix, SampleKey, unpack
from vitinit.data.images import NOWHERE, Box
from vitinit.data.loader import Batch

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE, FILL, CLASSES, SEED = (11, 13), (17, 131, 251), 19, 23
AS_INPUT = dict(mean=MEAN, std=STD, num_classes=CLASSES)
HALF = replace(MIX, probability=0.5)


def augmentation(mix: Mix = MIX, **augment) -> Augmentation:
    return Augmentation(
        SEED,
        SIZE,
        replace(AUGMENT, **{"erase_probability": 0.8} | augment),
        replace(RAND_AUGMENT, probability=0.7, fill=FILL),
        mix,
    )


def batch_of(settings: Augmentation, count: int = 7) -> Batch:
    """Images of noise, most of which are augmented and erased, in three groups."""
    groups = np.minimum(np.arange(count), np.arange(count)[::-1]) % 3  # the same of partners
    keys = [SampleKey(0, index) for index in range(count)]
    return Batch(
        noisy_batch(count, *SIZE),
        torch.arange(count) * 2 % CLASSES,
        settings.draws(deit.samples(keys, groups.tolist(), step=5)),
    )


def prepared(
    settings: Augmentation, batch: Batch, *, channels_last: bool = False, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    prepare = TrainToDevice(CPU, settings, **AS_INPUT, channels_last=channels_last)
    prepare.chunk = prepare.chunk if chunk is None else chunk
    return prepare(batch)


def by_hand(settings: Augmentation, batch: Batch) -> Tensor:
    """RandAugment → normalise → erase → mix, or RandAugment → mix → normalise → erase."""
    draws, after = unpack(batch.draws), settings.augment.erase_after_mix
    mixed = draws.mixed
    images = deit.augmented(batch.images, draws.operations, FILL)
    images = mix_images(images, mixed) if after else images
    images = deit.erase(normalise(images, MEAN, STD), draws.erased, settings.augment.erase_fill)
    return images if after else mix_images(images, mixed)


def test_an_evaluation_batch_is_normalised_as_by_torchvision(held_against):
    images, labels = noisy_batch(7, *SIZE), torch.arange(7)
    scaled = v2.functional.to_dtype(images, torch.float64, scale=True)
    expected = v2.functional.normalize(scaled, list(MEAN), list(STD))
    for channels_last in (False, True):
        ours, same_labels = ToDevice(CPU, mean=MEAN, std=STD, channels_last=channels_last)(
            [images, labels]
        )
        assert ours.dtype == torch.float32 and torch.equal(same_labels, labels)
        torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-6)
        held_against(ours, expected, cases=7)
        assert torch.equal(images, noisy_batch(7, *SIZE))
        assert ours.is_contiguous(memory_format=torch.channels_last) == channels_last
    tensors = (torch.tensor(values, dtype=torch.float64) for values in (MEAN, STD))
    assert torch.equal(normalise(images, *tensors), ours)


@pytest.mark.parametrize("mix", [MIX, HALF, UNMIXED_ALWAYS])
def test_batches_are_those_of_the_functions_by_hand_whatever_the_chunks_and_layout(mix):
    """In both orders, with each fill, and the batch is left alone."""
    for fill, after in (("pixel", False), ("rand", True), ("const", False), ("const", True)):
        settings = augmentation(mix, erase_fill=fill, erase_after_mix=after)
        for count in (1, 2, 13):
            batch = batch_of(settings, count)
            images, targets = prepared(settings, batch)
            assert torch.equal(images, by_hand(settings, batch)) and images.is_contiguous()
            smooth = smooth_one_hot(batch.labels, CLASSES, mix.label_smoothing)
            assert torch.equal(targets, mix_targets(smooth, unpack(batch.draws).mixed))
            assert not torch.equal(images, normalise(batch.images, MEAN, STD))
            for chunk in (0, 2, 5, 100):
                pixels, same_targets = prepared(
                    settings, batch, channels_last=chunk > 0, chunk=chunk * SIZE[0] * SIZE[1]
                )
                assert torch.equal(images, pixels) and torch.equal(targets, same_targets)
                assert chunk == 0 or pixels.is_contiguous(memory_format=torch.channels_last)
            unused = batch_of(settings, count)
            assert all(map(torch.equal, batch, unused))


@pytest.mark.parametrize("count", [1, 2, 13, 16])
@pytest.mark.parametrize("most", [0, 1, 2, 5, 6, 100])
def test_chunks_hold_every_image_once_beside_its_partner_and_no_more_than_asked_for(count, most):
    chunks = [chunk.tolist() for chunk in pairs_in_chunks(count, most)]
    assert sorted(index for chunk in chunks for index in chunk) == list(range(count))
    for chunk in chunks:
        assert {count - 1 - index for index in chunk} == {*chunk}
        assert len(chunk) <= max(most, 2)


QUANTILES = normal_quantiles()


def split_mix_64(key: int, count: int) -> list[int]:
    """The first outputs of the generator that starts from `key`, in plain integers."""
    outputs, state = [], key
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        bits = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
        outputs.append(bits ^ bits >> 31)
    return outputs


def test_quantiles_are_sorted_symmetric_and_of_mean_0_and_variance_1():
    assert len(QUANTILES) == 2**16 and (QUANTILES.diff() > 0).all()
    torch.testing.assert_close(QUANTILES, -QUANTILES.flip(0), rtol=1e-5, atol=0)
    assert abs(QUANTILES.double().mean()) < 1e-7
    assert abs(QUANTILES.double().square().mean() - 1) < 1e-3
    assert QUANTILES[-1] == pytest.approx(NormalDist().inv_cdf(1 - 2.0**-17), rel=1e-6)


BOXES = [
    Box(3, 5, 7, 11),
    NOWHERE,
    Box(0, 0, 1, 1),
    Box(18, 2, 11, 29),
    Box(28, 30, 1, 1),
    Box(1, 0, 13, 2),
]  # in 29×31 pixels
NOISE_KEYS = [0, 17, 2**63 - 1, 19, 23, 29]


@pytest.mark.parametrize("fill", ["pixel", "rand", "const"])
def test_noise_fills_the_box_by_its_definition_in_plain_integers_and_all_else_stays(
    fill, held_against
):
    """Per value, per channel, or zeros. All noise is much less than the values of the images."""
    assert split_mix_64(0, 2) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]  # as published
    images = 100 + torch.arange(len(BOXES) * 3 * 29 * 31).view(-1, 3, 29, 31).float()
    expected = images.clone()
    for image, (top, left, height, width), key in zip(expected, BOXES, NOISE_KEYS):
        words = torch.tensor([word % len(QUANTILES) for word in split_mix_64(key, 3 * 29 * 31)])
        values = QUANTILES[words[: 3 * height * width] if fill == "pixel" else words[:3]]
        values = values.view(3, height, width) if fill == "pixel" else values.view(3, 1, 1)
        image[:, top : top + height, left : left + width] = 0 if fill == "const" else values
    erased = torch.tensor([[*box, 0] for box in BOXES], dtype=torch.float64)
    erased[:, 4] = torch.tensor(NOISE_KEYS).view(torch.float64)
    found = erase(images, erased, fill)
    assert torch.equal(found, expected) and found.dtype == torch.float32
    held_against(found, expected, cases=len(BOXES), within=0)
    erase_one_by_one(images.numpy(), erased.numpy(), fill, QUANTILES.numpy())  # in place
    assert torch.equal(images, expected)


def on_fake_gpu(count: int, size: int, settings: Augmentation) -> Launches:
    """What augmentation launches on a GPU, counted with fake tensors that have only shapes."""
    settings = replace(settings, size=(size, size))
    keys = [SampleKey(0, index) for index in range(count)]
    draws = OnHost(settings.draws(deit.samples(keys)))
    with FakeTensorMode():
        batch = Batch(
            torch.zeros(count, 3, size, size, dtype=torch.uint8),
            torch.zeros(count, dtype=torch.int64),
            draws,
        )
        on_gpu = TrainToDevice(torch.device("cuda", 0), settings, **AS_INPUT, channels_last=True)
        return launches_of(lambda: on_gpu(batch))


@pytest.mark.parametrize(
    "count, size, interpolation, probability, after",
    [(1024, 224, "bicubic", 0.5, False), (128, 32, "random", 1.0, True)],
)
def test_at_most_400_operations_and_two_copies_beside_the_images(
    count, size, interpolation, probability, after
):
    settings = augmentation(erase_after_mix=after)
    settings = replace(
        settings,
        rand_augment=replace(
            settings.rand_augment, interpolation=interpolation, probability=probability
        ),
    )
    launches = on_fake_gpu(count, size, settings)
    assert 200 < launches.count <= 400
    assert (launches.uploads, launches.downloads, launches.waits) == (3, 0, 0)
