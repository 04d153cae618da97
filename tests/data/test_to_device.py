"""What the model gets: the order of operations, keyed mixing, targets and memory format."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.transforms import v2

import deit
from deit import AUGMENT, CPU, MIX, RAND_AUGMENT, mix_images, mix_targets, noisy_batch
from vitinit.bench.launches import Launches, launches_of
from vitinit.data import operations, to_device
from vitinit.data.augment import normalise
from vitinit.data.draw import Draws, SampleDraws, SampleKey
from vitinit.data.loader import Batch, TrainBatch
from vitinit.data.mix import UNMIXED, Mix, MixDraw, smooth_one_hot
from vitinit.data.to_device import ToDevice, TrainToDevice, pairs_in_chunks, upload
from vitinit.keys import Stream, keyed_generator

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE, FILL, CLASSES = (11, 13), (17, 131, 251), 19
SEED, STEP, GROUP = 23, 5, 11
MIXUP, CUTMIX = replace(MIX, cutmix_alpha=0.0), replace(MIX, mixup_alpha=0.0)
NO_MIXING, HALF = replace(MIX, probability=0.0), replace(MIX, probability=0.5)


def batch_of(count: int = 7) -> TrainBatch:
    """Images of noise, most of which are augmented and erased; all labels are different."""
    draws = SampleDraws(SEED, SIZE, replace(AUGMENT, erase_probability=0.8),
                        replace(RAND_AUGMENT, probability=0.7))
    return TrainBatch(noisy_batch(count, *SIZE), torch.arange(count) * 2 % CLASSES,
                      draws.for_device([SampleKey(0, index) for index in range(count)]))


def without_draws(batch: TrainBatch) -> TrainBatch:
    return batch._replace(draws=Draws(*map(torch.zeros_like, batch.draws)))


def on_cpu(*, channels_last: bool = False, mix: Mix = MIX, seed: int = SEED,
           at_once: bool | None = None, **augment) -> TrainToDevice:
    return TrainToDevice(CPU, mean=MEAN, std=STD, channels_last=channels_last,
                         augment=replace(AUGMENT, **augment),
                         rand_augment=replace(RAND_AUGMENT, fill=FILL), mix=mix,
                         num_classes=CLASSES, seed=seed, at_once=at_once)


def one_group(batch: TrainBatch, group: int = GROUP) -> np.ndarray:
    return np.full(len(batch.labels), group)


def prepare(batch: TrainBatch, **changes) -> tuple[Tensor, Tensor]:
    return on_cpu(**changes)(batch, STEP, one_group(batch))


def mix_of(mixing: Mix, group: int = GROUP) -> MixDraw:
    return mixing.draw(keyed_generator(SEED, Stream.MIX, STEP, group), *SIZE)


def by_hand(batch: TrainBatch, mixes: Sequence[MixDraw], fill: str, *, erase_after_mix: bool
            ) -> Tensor:
    """RandAugment → normalise → erase → mix, or RandAugment → mix → normalise → erase."""
    images = deit.augmented(batch.images, batch.draws.operations, FILL)
    if erase_after_mix:
        images = mix_images(images, mixes)
        assert images.dtype == torch.uint8
    images = deit.erase(normalise(images, MEAN, STD), batch.draws.erased, fill)
    return images if erase_after_mix else mix_images(images, mixes)


def erased_pixels(images: Tensor, batch: TrainBatch) -> list[Tensor]:
    """The pixels in each erased box."""
    boxes = batch.draws.erased[:, :4].tolist()
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
    images, _ = prepare(batch, mix=NO_MIXING, erase_after_mix=erase_after_mix)
    expected, _ = ToDevice(CPU, mean=MEAN, std=STD, channels_last=False)(
        Batch(batch.images, batch.labels))
    assert torch.equal(images, expected)


# ---------------------------------------------------------------------------------------------
# The order for training, to the bit
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("erase_after_mix", [False, True])
@pytest.mark.parametrize("fill", ["pixel", "rand", "const"])
@pytest.mark.parametrize("mixing", [MIXUP, CUTMIX, MIX, NO_MIXING])
def test_both_orders_are_those_of_the_functions_by_hand(mixing, fill, erase_after_mix):
    for groups in ([11], [11, 11], [3] * 7, [11, 3, 0, 7, 3, 3, 7, 0, 3, 11]):
        batch, mixes = batch_of(len(groups)), [mix_of(mixing, group) for group in groups]
        images, targets = on_cpu(mix=mixing, erase_fill=fill, erase_after_mix=erase_after_mix)(
            batch, STEP, np.array(groups))
        assert images.dtype == torch.float32
        assert torch.equal(images, by_hand(batch, mixes, fill, erase_after_mix=erase_after_mix))
        assert torch.equal(targets, mix_targets(
            smooth_one_hot(batch.labels, CLASSES, mixing.label_smoothing), mixes))


@pytest.mark.parametrize("mixing", [MIXUP, CUTMIX])
def test_what_is_erased_after_mixing_is_zero_and_what_is_erased_before_is_mixed(mixing):
    batch = batch_of()
    deits, timms = (erased_pixels(prepare(batch, mix=mixing, erase_fill="const",
                                          erase_after_mix=after)[0], batch)
                    for after in (False, True))
    assert len(timms) > 2 and all(len(box.flatten()) for box in timms)
    assert all((box == 0).all() for box in timms)
    assert any((box != 0).any() for box in deits)


def test_images_are_mixed_as_bytes_only_before_erasing():
    batch = without_draws(batch_of())
    for erase_after_mix in (False, True):
        images, _ = prepare(batch, mix=MIXUP, erase_after_mix=erase_after_mix)
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
        images, targets = on_cpu(mix=MIXUP, seed=seed)(batch, step, one_group(batch, group))
        images_seen.add(images.numpy().tobytes())
        targets_seen.add(targets.numpy().tobytes())
    assert len(images_seen) == len(targets_seen) == 3**3


def test_the_same_key_gives_the_same_mix_whatever_came_before():
    batch, prepare_step = batch_of(), on_cpu()
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


@pytest.mark.parametrize("alphas, smoothing", [((0.8, 0.0), 0.0), ((0.0, 1.0), 0.1),
                                               ((0.0, 0.0), 0.1)])
def test_targets_share_the_labels_of_both_partners(alphas, smoothing):
    mixing = replace(MIX, mixup_alpha=alphas[0], cutmix_alpha=alphas[1], label_smoothing=smoothing)
    share = mix_of(mixing).share
    assert (share == 1.0) == (mix_of(mixing) == UNMIXED) == (not any(alphas))
    for count in (1, 2, 7):
        batch = batch_of(count)
        _, targets = prepare(batch, mix=mixing)
        expected = np.full((count, CLASSES), smoothing / CLASSES)
        for row, (own, partners) in enumerate(zip(batch.labels, batch.labels.flip(0))):
            expected[row, own] += (1 - smoothing) * share
            expected[row, partners] += (1 - smoothing) * (1 - share)
        assert targets.dtype == torch.float32 and targets.shape == (count, CLASSES)
        np.testing.assert_allclose(targets.numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("erase_after_mix", [False, True])
@pytest.mark.parametrize("mixing", [MIXUP, CUTMIX, NO_MIXING])
def test_the_layout_is_the_one_asked_for_and_changes_no_bit(mixing, erase_after_mix):
    rows, pixels = (prepare(batch_of(), mix=mixing, erase_after_mix=erase_after_mix,
                            channels_last=channels_last)[0] for channels_last in (False, True))
    assert rows.is_contiguous() and not pixels.is_contiguous()
    assert pixels.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(rows, pixels)


@pytest.mark.parametrize("erase_after_mix", [False, True])
@pytest.mark.parametrize("mixing", [CUTMIX, NO_MIXING])
@pytest.mark.parametrize("change", [lambda batch: batch, without_draws])
def test_the_batch_is_left_alone(change, mixing, erase_after_mix):
    batch, before = change(batch_of()), change(batch_of())
    prepare(batch, mix=mixing, erase_after_mix=erase_after_mix)
    assert torch.equal(batch.images, before.images) and torch.equal(batch.labels, before.labels)
    assert all(map(torch.equal, batch.draws, before.draws))


# ---------------------------------------------------------------------------------------------
# Few launches, or what fits into a cache
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 13, 14])
def test_chunks_hold_every_image_once_and_with_its_partner(count):
    for most in (0, 2, 3, 5, 8, count):
        chunks = [np.concatenate(halves) for halves in pairs_in_chunks(count, most)]
        assert sorted(np.concatenate(chunks).tolist()) == list(range(count))
        for rows in chunks:
            assert len(rows) <= max(2, most) and (rows == count - 1 - rows[::-1]).all()


@pytest.mark.parametrize("mixing", [MIXUP, CUTMIX, MIX, HALF, NO_MIXING])
@pytest.mark.parametrize("count", [1, 2, 13, 14])
def test_however_the_images_go_through_it_the_bits_are_the_same(monkeypatch, count, mixing):
    batch, groups = batch_of(count), np.minimum(np.arange(count), np.arange(count)[::-1]) % 3
    for fill, erase_after_mix in (("pixel", False), ("rand", True), ("const", False)):
        options = dict(mix=mixing, erase_fill=fill, erase_after_mix=erase_after_mix)
        images, targets = on_cpu(**options, at_once=True)(batch, STEP, groups)
        assert not torch.equal(images, normalise(batch.images, MEAN, STD))
        for pairs in (0, 1, 2, 100):
            for module in (operations, to_device):
                monkeypatch.setattr(module, "CHUNK", 2 * pairs * SIZE[0] * SIZE[1])
            others = on_cpu(**options, at_once=False)(batch, STEP, groups)
            assert torch.equal(images, others[0]) and torch.equal(targets, others[1])


class OnHost:
    """A tensor as the host reads it, which stays real among fake ones."""

    def __init__(self, tensor: Tensor) -> None:
        self.array = tensor.numpy()

    def numpy(self) -> np.ndarray:
        return self.array


def on_fake_gpu(count: int, size: int, interpolation: str, probability: float,
                erase_after_mix: bool) -> Launches:
    """What DeiT's augmentation launches on a GPU, counted with fake tensors that have only shapes."""
    augment = replace(AUGMENT, erase_after_mix=erase_after_mix)
    rand_augment = replace(RAND_AUGMENT, interpolation=interpolation, probability=probability)
    draws = Draws(*map(OnHost, SampleDraws(SEED, (size, size), augment, rand_augment).for_device(
        [SampleKey(0, index) for index in range(count)])))
    with FakeTensorMode():
        batch = TrainBatch(torch.zeros(count, 3, size, size, dtype=torch.uint8),
                           torch.zeros(count, dtype=torch.int64), draws)
        on_gpu = TrainToDevice(torch.device("cuda", 0), mean=MEAN, std=STD, channels_last=True,
                               augment=augment, rand_augment=rand_augment, mix=MIX,
                               num_classes=CLASSES, seed=SEED)
        return launches_of(lambda: on_gpu(batch, STEP, np.arange(count) % 16))


@pytest.mark.parametrize("count, size, interpolation, probability", [
    (1024, 224, "bicubic", 0.5), (1024, 224, "random", 0.5), (2048, 32, "random", 1.0),
    (64, 16, "random", 1.0)])
def test_at_most_400_operations_and_two_copies_beside_the_images(count, size, interpolation,
                                                                 probability):
    for erase_after_mix in (False, True):
        launches = on_fake_gpu(count, size, interpolation, probability, erase_after_mix)
        assert 200 < launches.count <= 400
        assert launches.uploads == 3 and launches.downloads == 0


def test_the_cpu_does_what_was_counted():
    batch, groups = batch_of(64), np.arange(64) % 8
    launches = launches_of(lambda: on_cpu(at_once=True)(batch, STEP, groups))
    assert 200 < launches.count <= 400
    # These read values on the host, or make shapes that depend on values, and would wait for a GPU.
    assert not {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"} \
        & set(launches.by_name)


class Table(NamedTuple):
    """Arrays of every type that is used, in sizes that need aligning, one empty; and what stays."""

    one: np.ndarray = np.arange(15, dtype=np.uint8).reshape(3, 5)
    two: np.ndarray = np.arange(42.0).reshape(2, 7, 3).swapaxes(0, 2)
    stays: tuple = (3, None)
    three: np.ndarray = np.arange(13, dtype=np.float32)
    four: np.ndarray = np.zeros((0, 4), np.int64)
    five: np.ndarray = np.array([-2**63, 2**63 - 1])


@pytest.mark.parametrize("driver", [False, True])
def test_tables_are_uploaded_unchanged_in_one_copy(driver, monkeypatch):
    for there in upload(CPU, [Table(), Table()]):
        assert there.stays == (3, None)
        for tensor, array in zip(there, Table()):
            assert not isinstance(array, np.ndarray) or np.array_equal(tensor.numpy(), array)
            assert not isinstance(array, np.ndarray) or tensor.numpy().dtype == array.dtype
    monkeypatch.setattr(torch.cuda, "is_available", lambda: driver)      # then it is pinned
    with FakeTensorMode():
        launches = launches_of(lambda: upload(torch.device("cuda", 0), [Table(), Table()]))
    assert (launches.uploads, launches.downloads) == (1, 0)
