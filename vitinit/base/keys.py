"""Keyed randomness: each random draw of a run has a generator of its own, identified by a key.

`keyed_generator(seed, purpose, *counters)` is a counter-based generator (Philox, Salmon et al.
2011): the same key gives the same draws on any machine, in any process, in any order. So a run does
not depend on how many workers load its data, how many processes share its batch, or how often it
was interrupted; and any single draw can be repeated in order to inspect it.
"""

from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any

import numpy as np


class Purpose(IntEnum):
    """What a draw is for, with its counters. Draws for two purposes are independent. No number here
    ever changes, or runs would draw otherwise.
    """

    ORDER = 1  # (epoch): the order of an epoch
    CROP_AND_FLIP = 2  # (epoch, index, repeat): the crop and flip of a sample
    DROP_PATH = 3  # (step): drop path (stochastic depth) in a global batch
    SHAPES = 4  # (split, index): an image of the embedded data set, whose seed is fixed
    RAND_AUGMENT = 5  # (epoch, index, repeat): the operations of a sample
    ERASE = 6  # (epoch, index, repeat): the erased box of a sample, and its noise
    MIX = 7  # (step, group): mixup or cutmix of a group of images
    SUBSET = 8  # (class): the order of a class's images, from which subsets are taken
    INIT_IMAGES = 9  # (): the training images that an init reads
    FILE_SIZES = 10  # (split): the files whose sizes are recorded
    MASK = 11  # (epoch, index, repeat): the visible patches of a sample
    EVAL_MASK = 12  # (index): those of a validation image, whose seed is fixed
    THREE_AUGMENT = 13  # (epoch, index, repeat): the operations of a sample that 3-Augment draws


def keyed_generator(seed: int, purpose: Purpose, *counters: int) -> np.random.Generator:
    """The generator of a seed, a purpose and at most three counters, non-negative integers."""
    # While it draws, Philox counts in the lowest word, so that word must start at zero.
    words = [0, *counters, *[0] * (3 - len(counters))]
    return np.random.Generator(np.random.Philox(key=[seed, int(purpose)], counter=words))


def keyed_generators(
    seed: int, purpose: Purpose, keys: Iterable[tuple[int, int, int]]
) -> Iterator[np.random.Generator]:
    """Yield one generator, set to each key in turn, ten times as fast: draw before the next one."""
    generator = keyed_generator(seed, purpose)
    bits = generator.bit_generator
    state: dict[str, Any] = dict(bits.state)  # of a generator that has drawn nothing
    # Python's own numbers, because numpy reads them faster than arrays when it sets the state.
    words = state["state"] = {name: array.tolist() for name, array in state["state"].items()}
    state["buffer"] = state["buffer"].tolist()
    for epoch, index, repeat in keys:
        words["counter"] = 0, epoch, index, repeat
        bits.state = state
        yield generator
