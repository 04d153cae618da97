"""What the model gets: the order of operations, keyed mixing, targets and memory format."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.transforms import v2

from vitinit.bench.launches import Launches, launches_of
from vitinit.data.augment import erase, normal_quantiles, normalise, rand_augment
from vitinit.data.draw import Draws, Erasing, RandAugment, SampleDraws, SampleKey, stack_draws
from vitinit.data.loader import Batch, TrainBatch
from vitinit.data.mix import (UNMIXED, MixDraw, MixSettings, mix_images, mix_targets,
                              smooth_one_hot)
from vitinit.data.passes import FEW_LAUNCHES, IN_CACHE
from vitinit.data.to_device import ToDevice, TrainToDevice
from vitinit.keys import Stream, keyed_generator

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE, FILL, CLASSES = (11, 13), (17, 131, 251), 19
SEED, STEP, GROUP = 23, 5, 11
MIXUP, CUTMIX = MixSettings(cutmix_alpha=0), MixSettings(mixup_alpha=0)
NO_MIXING = MixSettings(probability=0)
CPU = torch.device("cpu")


def batch_of(count: int = 7) -> TrainBatch:
    """Images of noise, most of which are augmented and erased; all labels are different."""
    pixels = np.random.default_rng(1).integers(0, 256, (count, 3, *SIZE), dtype=np.uint8)
    sample = SampleDraws(SEED, SIZE, rand_augment=RandAugment(probability=0.7), erasing=Erasing(0.8))
    draws = stack_draws([sample.for_device(SampleKey(0, index)) for index in range(count)])
    return TrainBatch(torch.from_numpy(pixels), torch.arange(count) * 2 % CLASSES, draws)


def without_draws(batch: TrainBatch) -> TrainBatch:
    return batch._replace(draws=Draws(*map(np.zeros_like, batch.draws)))


def to_device(**changes) -> TrainToDevice:
    options = dict(mean=MEAN, std=STD, channels_last=False, fill=FILL, erase_fill="pixel",
                   erase_after_mix=False, mixing=MixSettings(), num_classes=CLASSES, seed=SEED)
    return TrainToDevice(CPU, **options | changes)


def one_group(batch: TrainBatch, group: int = GROUP) -> np.ndarray:
    return np.full(len(batch.labels), group)


def prepare(batch: TrainBatch, **changes) -> tuple[Tensor, Tensor]:
    return to_device(**changes)(batch, STEP, one_group(batch))


def mix_of(mixing: MixSettings, group: int = GROUP) -> MixDraw:
    return mixing.draw(keyed_generator(SEED, Stream.MIX, STEP, group), *SIZE)


def in_deits_order(batch: TrainBatch, mixes: Sequence[MixDraw], fill: str) -> Tensor:
    augmented = rand_augment(batch.images, batch.draws, FILL)
    erased = erase(normalise(augmented, MEAN, STD), batch.draws, fill, normal_quantiles())
    return mix_images(erased, mixes)


def in_timms_order(batch: TrainBatch, mixes: Sequence[MixDraw], fill: str) -> Tensor:
    mixed = mix_images(rand_augment(batch.images, batch.draws, FILL), mixes)
    assert mixed.dtype == torch.uint8
    return erase(normalise(mixed, MEAN, STD), batch.draws, fill, normal_quantiles())


def erased_pixels(images: Tensor, batch: TrainBatch) -> list[Tensor]:
    """The pixels in each erased box."""
    boxes = batch.draws.erase_boxes.tolist()
    return [image[:, top:top + height, left:left + width]
            for image, (top, left, height, width) in zip(images, boxes, strict=True) if height]


# ---------------------------------------------------------------------------------------------
# For evaluation
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels_last", [False, True])
def test_to_device_normalises_as_torchvision_does(channels_last):
    images, labels, _ = batch_of()
    before = images.clone()
    ours, same_labels = ToDevice(CPU, mean=MEAN, std=STD, channels_last=channels_last)(
        Batch(images, labels))
    scaled = v2.functional.to_dtype(images, torch.float32, scale=True)
    expected = v2.functional.normalize(scaled, list(MEAN), list(STD))
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
    assert torch.equal(same_labels, labels) and torch.equal(images, before)
    assert ours.is_contiguous(memory_format=torch.channels_last) == channels_last
    assert ours.is_contiguous() != channels_last


@pytest.mark.parametrize("erase_after_mix", [False, True])
def test_training_with_nothing_to_do_sees_what_evaluation_sees(erase_after_mix):
    batch = without_draws(batch_of())
    images, _ = prepare(batch, mixing=NO_MIXING, erase_after_mix=erase_after_mix)
    expected, _ = ToDevice(CPU, mean=MEAN, std=STD, channels_last=False)(
        Batch(batch.images, batch.labels))
    assert torch.equal(images, expected)


# ---------------------------------------------------------------------------------------------
# The order for training, to the bit
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("fill", ["pixel", "rand", "const"])
@pytest.mark.parametrize("mixing", [MIXUP, CUTMIX, MixSettings(), NO_MIXING])
def test_both_orders_are_those_of_the_functions_by_hand(mixing, fill, count):
    batch, mixes = batch_of(count), [mix_of(mixing)] * count
    ours, _ = prepare(batch, mixing=mixing, erase_fill=fill)
    assert ours.dtype == torch.float32 and ours.shape == (count, 3, *SIZE)
    assert torch.equal(ours, in_deits_order(batch, mixes, fill))
    ours, _ = prepare(batch, mixing=mixing, erase_fill=fill, erase_after_mix=True)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, in_timms_order(batch, mixes, fill))


@pytest.mark.parametrize("mixing", [MIXUP, CUTMIX, MixSettings(), MixSettings(probability=0.5)])
def test_each_pair_of_a_micro_batch_is_mixed_as_its_own_group_draws(mixing):
    groups = [11, 3, 0, 7, 3, 3, 7, 0, 3, 11]
    batch, mixes = batch_of(len(groups)), [mix_of(mixing, group) for group in groups]
    assert len(set(mixes)) > 1 + (mixing.probability == 1)
    ours, targets = to_device(mixing=mixing)(batch, STEP, np.array(groups))
    assert torch.equal(ours, in_deits_order(batch, mixes, "pixel"))
    assert torch.equal(targets, mix_targets(
        smooth_one_hot(batch.labels, CLASSES, mixing.label_smoothing), mixes))
    ours, _ = to_device(mixing=mixing, erase_after_mix=True)(batch, STEP, np.array(groups))
    assert torch.equal(ours, in_timms_order(batch, mixes, "pixel"))


@pytest.mark.parametrize("fill", ["pixel", "rand", "const"])
@pytest.mark.parametrize("mixing", [MIXUP, CUTMIX])
def test_the_orders_differ(mixing, fill):
    one, other = (prepare(batch_of(), mixing=mixing, erase_fill=fill, erase_after_mix=after)[0]
                  for after in (False, True))
    assert not torch.equal(one, other)


def test_without_mixing_the_orders_agree():
    batch = batch_of()
    one, other = (prepare(batch, mixing=NO_MIXING, erase_after_mix=after)[0]
                  for after in (False, True))
    assert torch.equal(one, other)


@pytest.mark.parametrize("mixing", [MIXUP, CUTMIX])
def test_what_is_erased_after_mixing_is_zero_and_what_is_erased_before_is_mixed(mixing):
    batch = batch_of()
    deits, timms = (erased_pixels(prepare(batch, mixing=mixing, erase_fill="const",
                                          erase_after_mix=after)[0], batch)
                    for after in (False, True))
    assert len(timms) > 2 and all(len(box.flatten()) for box in timms)
    assert all((box == 0).all() for box in timms)
    assert any((box != 0).any() for box in deits)


def test_images_are_mixed_as_bytes_only_before_erasing():
    batch = without_draws(batch_of())
    for erase_after_mix in (False, True):
        images, _ = prepare(batch, mixing=MIXUP, erase_after_mix=erase_after_mix)
        mean, std = (torch.tensor(values, dtype=torch.float64).view(3, 1, 1)
                     for values in (MEAN, STD))
        levels = 255 * (images * std + mean)
        whole = (levels - levels.round()).abs() < 1e-4
        assert whole.all() if erase_after_mix else whole[:3].float().mean() < 0.1


# ---------------------------------------------------------------------------------------------
# Mixing by key
# ---------------------------------------------------------------------------------------------


def test_every_seed_step_and_group_has_a_mix_of_its_own():
    batch, images_seen, targets_seen = without_draws(batch_of(2)), set(), set()
    for seed, step, group in itertools.product(range(3), repeat=3):
        images, targets = to_device(mixing=MIXUP, seed=seed)(batch, step, one_group(batch, group))
        images_seen.add(images.numpy().tobytes())
        targets_seen.add(targets.numpy().tobytes())
    assert len(images_seen) == len(targets_seen) == 3**3


def test_the_same_key_gives_the_same_mix_whatever_came_before():
    batch, prepare_step = batch_of(), to_device()
    images, targets = prepare_step(batch, STEP, one_group(batch))
    for other in range(3):
        prepare_step(batch, other, one_group(batch))
        prepare_step(batch, STEP, one_group(batch, other))
    np.random.seed(0)
    torch.manual_seed(0)
    same_images, same_targets = prepare_step(batch, STEP, one_group(batch))
    assert torch.equal(images, same_images) and torch.equal(targets, same_targets)


# ---------------------------------------------------------------------------------------------
# Targets, layout, and what is left alone
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("alphas", [(0.8, 0.0), (0.0, 1.0), (0.0, 0.0)])
@pytest.mark.parametrize("erase_after_mix", [False, True])
def test_targets_share_the_labels_of_both_partners(alphas, smoothing, count, erase_after_mix):
    mixing = MixSettings(*alphas, label_smoothing=smoothing)
    share = mix_of(mixing).share
    assert (share == 1.0) == (mix_of(mixing) == UNMIXED) == (not any(alphas))
    batch = batch_of(count)
    _, targets = prepare(batch, mixing=mixing, erase_after_mix=erase_after_mix)
    expected = np.full((count, CLASSES), smoothing / CLASSES)
    for row, (own, partners) in enumerate(zip(batch.labels, batch.labels.flip(0))):
        expected[row, own] += (1 - smoothing) * share
        expected[row, partners] += (1 - smoothing) * (1 - share)
    assert targets.dtype == torch.float32 and targets.shape == (count, CLASSES)
    np.testing.assert_allclose(targets.numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("erase_after_mix", [False, True])
@pytest.mark.parametrize("mixing", [MIXUP, CUTMIX, NO_MIXING])
def test_the_layout_is_the_one_asked_for_and_changes_no_bit(mixing, erase_after_mix):
    rows, pixels = (prepare(batch_of(), mixing=mixing, erase_after_mix=erase_after_mix,
                            channels_last=channels_last)[0] for channels_last in (False, True))
    assert rows.is_contiguous() and not pixels.is_contiguous()
    assert pixels.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(rows, pixels)


@pytest.mark.parametrize("erase_after_mix", [False, True])
@pytest.mark.parametrize("mixing", [MIXUP, CUTMIX, NO_MIXING])
@pytest.mark.parametrize("change", [lambda batch: batch, without_draws])
def test_the_batch_is_left_alone(change, mixing, erase_after_mix):
    batch, before = change(batch_of()), change(batch_of())
    prepare(batch, mixing=mixing, erase_after_mix=erase_after_mix)
    assert torch.equal(batch.images, before.images) and torch.equal(batch.labels, before.labels)
    assert all(map(np.array_equal, batch.draws, before.draws))


# ---------------------------------------------------------------------------------------------
# Few launches, or what fits into a cache
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("erase_after_mix", [False, True])
@pytest.mark.parametrize("fill", ["pixel", "rand", "const"])
@pytest.mark.parametrize("mixing", [MIXUP, CUTMIX, MixSettings(), MixSettings(probability=0.5),
                                    NO_MIXING])
@pytest.mark.parametrize("count", [1, 2, 13, 14])
def test_however_the_images_go_through_it_the_bits_are_the_same(count, mixing, fill,
                                                               erase_after_mix):
    pixels = SIZE[0] * SIZE[1]
    ways = [FEW_LAUNCHES, IN_CACHE, FEW_LAUNCHES._replace(pixels=3 * pixels),
            # One pair at a time; or two, so that the last piece has one, or one and the middle image.
            *(IN_CACHE._replace(pixels=pairs * pixels, finished_pixels=2 * pairs * pixels)
              for pairs in (0, 2))]
    batch, groups = batch_of(count), np.minimum(np.arange(count), np.arange(count)[::-1]) % 3
    options = dict(mixing=mixing, erase_fill=fill, erase_after_mix=erase_after_mix)
    (images, targets), *others = (to_device(passes=way, **options)(batch, STEP, groups)
                                  for way in ways)
    assert not torch.equal(images, ToDevice(CPU, mean=MEAN, std=STD, channels_last=False)(
        Batch(batch.images, batch.labels))[0])
    for other_images, other_targets in others:
        assert torch.equal(images, other_images) and torch.equal(targets, other_targets)


def on_fake_gpu(count: int, size: int, interpolation: str, probability: float,
                **changes) -> Launches:
    """What DeiT's augmentation launches on a GPU, counted with fake tensors that have only shapes."""
    sample = SampleDraws(SEED, (size, size), rand_augment=RandAugment(
        interpolation=interpolation, probability=probability))
    draws = stack_draws([sample.for_device(SampleKey(0, index)) for index in range(count)])
    with FakeTensorMode():
        batch = TrainBatch(torch.zeros(count, 3, size, size, dtype=torch.uint8),
                           torch.zeros(count, dtype=torch.int64), draws)
        on_gpu = TrainToDevice(torch.device("cuda", 0), mean=MEAN, std=STD, channels_last=True,
                               fill=FILL, erase_fill="pixel", mixing=MixSettings(),
                               num_classes=CLASSES, seed=SEED,
                               **{"erase_after_mix": False} | changes)
        return launches_of(lambda: on_gpu(batch, STEP, np.arange(count) % 16))


@pytest.mark.parametrize("count, size, interpolation, probability", [
    (1024, 224, "bicubic", 0.5), (1024, 224, "random", 0.5), (4096, 96, "bicubic", 0.5),
    (2048, 32, "random", 1.0), (256, 224, "random", 1.0), (64, 16, "random", 1.0)])
def test_at_most_400_operations_and_two_copies_beside_the_images(count, size, interpolation,
                                                                 probability):
    for erase_after_mix in (False, True):
        launches = on_fake_gpu(count, size, interpolation, probability,
                               erase_after_mix=erase_after_mix)
        assert 200 < launches.count <= 400
        assert launches.uploads == 3 and launches.downloads == 0


def test_the_cpu_does_what_was_counted():
    batch, groups = batch_of(64), np.arange(64) % 8
    on_cpu = to_device(passes=FEW_LAUNCHES)
    launches = launches_of(lambda: on_cpu(batch, STEP, groups))
    assert 200 < launches.count <= 400
    # These read values on the host, or make shapes that depend on values, and would wait for a GPU.
    assert not {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"} \
        & set(launches.by_name)
