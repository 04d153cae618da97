"""A mixed global batch is the same for any processes, micro-batches, workers, and resident or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from deit import AUGMENT, MIX, RAND_AUGMENT, SHIFT, augmented, draws_of, erase
from vitinit.data.augment import TrainToDevice, normalise
from vitinit.data.sources import ImagesInMemory
from vitinit.data.draw import Augmentation, SampleKey, epoch_order
from vitinit.data.images import DataError, crop_and_flip
from vitinit.data.mix import UNMIXED, MixDraw, smooth_one_hot
from vitinit.data.pipeline import TrainingBatches
from vitinit.data.sampler import TrainSampler, plan_batches
from vitinit.keys import Stream, keyed_generator

CPU = torch.device("cpu")
SIDE, COUNT, CLASSES, SEED, REPEATS = 7, 29, 5, 31, 3
GLOBAL_BATCH, GROUP, EPOCHS = 24, 8, 4                       # one step per epoch, three groups
MEAN, STD = (0.5, 0.4, 0.3), (0.3, 0.2, 0.1)
DRAWS = Augmentation(SEED, (SIDE, SIDE),
                     replace(AUGMENT, **SHIFT, crop_padding=2, erase_probability=0.5),
                     replace(RAND_AUGMENT, probability=0.7, fill=(17, 131, 251)),
                     replace(MIX, probability=0.9))
MIXING = DRAWS.mix


class Distribution(NamedTuple):
    """How the images of a step are loaded and distributed, which may change during a run."""

    world_size: int
    max_batch: int
    workers: int = 0
    resident: bool = False


def random_images() -> ImagesInMemory:
    rng = np.random.default_rng(2)
    pixels = rng.integers(0, 256, (COUNT, 3, SIDE, SIDE), dtype=np.uint8)
    return ImagesInMemory(torch.from_numpy(pixels), rng.integers(0, CLASSES, COUNT), [""] * COUNT)


def all_steps(how: Distribution, *, erase_after_mix: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Images and targets of each step, of all processes, in the order of the global batch."""
    plan = plan_batches(GLOBAL_BATCH, how.max_batch, how.world_size, group=GROUP)
    found = [(torch.full((GLOBAL_BATCH, 3, SIDE, SIDE), torch.nan),
              torch.full((GLOBAL_BATCH, CLASSES), torch.nan)) for _ in range(EPOCHS)]
    source = random_images()
    for rank in range(how.world_size):
        sampler = TrainSampler(COUNT, plan, rank=rank, seed=SEED, repeats=REPEATS)
        draws = replace(DRAWS, augment=replace(DRAWS.augment, erase_after_mix=erase_after_mix))
        prepare = TrainToDevice(CPU, draws, mean=MEAN, std=STD, channels_last=False,
                                num_classes=CLASSES)
        batches = TrainingBatches(source, sampler, prepare, budget_gib=float(how.resident),
                                  workers=how.workers)
        assert batches.resident == how.resident
        for epoch in range(EPOCHS):
            (number, step), = batches.steps(epoch)
            assert number == epoch and len(step) == plan.accumulation
            for micro_batch in step:
                (images, targets), positions = micro_batch.prepare(), micro_batch.positions
                found[epoch][0][positions], found[epoch][1][positions] = images, targets
    return found


def mixed(images: Tensor, mix: MixDraw) -> Tensor:
    """A group mixed with itself reversed, by timm's formulas."""
    if mix.box != UNMIXED.box:
        rows, columns = (slice(mix.box[0], mix.box[0] + mix.box[2]),
                         slice(mix.box[1], mix.box[1] + mix.box[3]))
        images = images.clone()
        images[..., rows, columns] = images.flip(0)[..., rows, columns]
        return images
    blend = images.float() * mix.share + images.flip(0).float() * (1.0 - mix.share)
    return blend if images.is_floating_point() else blend.round().to(torch.uint8)


def by_definition(*, erase_after_mix: bool = False) -> list[tuple[Tensor, Tensor]]:
    """The same by the definition: single views, then every G-th image of a global batch mixed."""
    source, found = random_images(), []
    for step in range(EPOCHS):
        views = np.repeat(epoch_order(SEED, step, COUNT), REPEATS)[:GLOBAL_BATCH].tolist()
        keys = [SampleKey(step, index, place % REPEATS) for place, index in enumerate(views)]
        images = []
        for key in keys:
            view, = DRAWS.views([key], [(SIDE, SIDE)])
            images.append(crop_and_flip(source.image(key.index), view.box, view.flip,
                                        (SIDE, SIDE), view.interpolation))
        draws = draws_of(DRAWS, keys)
        images = augmented(torch.stack(images), draws.operations, (17, 131, 251))
        targets = smooth_one_hot(torch.from_numpy(source.labels[views]), CLASSES, 0.1)

        def ready(images: Tensor) -> Tensor:
            return erase(normalise(images, MEAN, STD), draws.erased, "pixel")
        images = images if erase_after_mix else ready(images)
        groups, images, targets = GLOBAL_BATCH // GROUP, images.clone(), targets.clone()
        for group in range(groups):
            mix = MIXING.draw(keyed_generator(SEED, Stream.MIX, step, group), SIDE, SIDE)
            own = slice(group, None, groups)
            images[own] = mixed(images[own], mix)
            targets[own] = targets[own] * mix.share + targets[own].flip(0) * (1.0 - mix.share)
        found.append((ready(images) if erase_after_mix else images, targets))
    return found


DISTRIBUTIONS = [Distribution(1, 24), Distribution(1, 8), Distribution(1, 12, workers=2),
                 Distribution(2, 4, workers=1), Distribution(4, 5), Distribution(12, 2)]


@pytest.mark.parametrize("erase_after_mix", [False, True])
@pytest.mark.parametrize("how", [*DISTRIBUTIONS,
                                 *(how._replace(resident=True) for how in DISTRIBUTIONS)], ids=str)
def test_a_mixed_global_batch_is_bit_for_bit_the_same_however_it_is_distributed(how, erase_after_mix):
    ours = all_steps(how, erase_after_mix=erase_after_mix)
    expected = by_definition(erase_after_mix=erase_after_mix)
    for (images, targets), (other_images, other_targets) in zip(ours, expected, strict=True):
        assert images.numpy().tobytes() == other_images.numpy().tobytes()
        assert targets.numpy().tobytes() == other_targets.numpy().tobytes()


def test_steps_and_groups_are_mixed_by_both_kinds_so_that_equal_steps_mean_something():
    mixes = [MIXING.draw(keyed_generator(SEED, Stream.MIX, step, group), SIDE, SIDE)
             for step in range(EPOCHS) for group in range(GLOBAL_BATCH // GROUP)]
    assert len(set(mixes)) >= 10
    assert sum(mix.box != UNMIXED.box for mix in mixes) > 2
    assert sum(mix.box == UNMIXED.box and mix.share < 1 for mix in mixes) > 2


def test_a_step_comes_once_all_its_images_are_loaded():
    """So an image that cannot be read never leaves half a step."""
    plan = plan_batches(GLOBAL_BATCH, 4, 1, group=GROUP)
    sampler = TrainSampler(COUNT, plan, rank=0, seed=SEED, repeats=REPEATS)

    def loaded() -> Iterator[int]:
        yield from range(plan.accumulation - 1)
        raise DataError("image 7")
    prepare = TrainToDevice(CPU, DRAWS, mean=MEAN, std=STD, channels_last=False, num_classes=CLASSES)
    batches, prepared = TrainingBatches(random_images(), sampler, prepare), []
    batches.loader = loaded()
    with pytest.raises(DataError, match="image 7"):
        for _, step in batches.steps(0):
            prepared.extend(step)
    assert plan.accumulation == 6 and prepared == []        # not even five of them


@pytest.mark.parametrize("done", [0, 1, 2])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_is_resumed_is_the_same_from_there(done, workers):
    """Two steps of twelve images; one set of workers goes through both epochs."""
    plan = plan_batches(12, 4, 1, group=4)

    def steps(batches: TrainingBatches, done: int) -> list[bytes]:
        return [micro_batch.prepare()[0].numpy().tobytes() for epoch, skipped in ((1, done), (2, 0))
                for _, step in batches.steps(epoch, skipped) for micro_batch in step]
    batches = [TrainingBatches(
        random_images(), TrainSampler(COUNT, plan, rank=0, seed=SEED, repeats=2),
        TrainToDevice(CPU, DRAWS, mean=MEAN, std=STD, channels_last=False, num_classes=CLASSES),
        workers=number) for number in (0, workers)]
    whole = steps(batches[0], 0)
    assert len(set(whole)) == 12 and steps(batches[1], done) == whole[3 * done:]
