"""Keyed randomness: every draw of a run comes from a generator named by what it is for.

`keyed_generator(seed, stream, *counters)` is a counter-based generator (Philox, Salmon et al. 2011):
the same key gives the same draws on any machine, in any process, in any order. So nothing that a
run does depends on how many workers load its data, how many processes share its batch, or how often
it was interrupted, and any single draw can be made again to be looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """What a draw is for. Two streams never share numbers; values never change."""

    ORDER = 1           # the order of an epoch: counters (epoch,)
    CROP_AND_FLIP = 2   # one sample's crop and flip: counters (epoch, index, repeat)
    DROP_PATH = 3       # stochastic depth of a global batch: counters (step,)
    SHAPES = 4          # one embedded image: counters (split, index); its seed is fixed
    RAND_AUGMENT = 5    # one sample's operations: counters (epoch, index, repeat)
    ERASE = 6           # one sample's erased box and its noise: counters (epoch, index, repeat)
    MIX = 7             # mixup or cutmix of a group of images: counters (step, group)
    SUBSET = 8          # the order of a class' images, of which a subset takes the first: (class,)


def keyed_generator(seed: int, stream: Stream, *counters: int) -> np.random.Generator:
    """A numpy generator for up to three counters; seed and counters are non-negative integers."""
    if len(counters) > 3:
        raise ValueError(f"{len(counters)} counters, expected at most 3")
    # Philox counts its blocks in the lowest word, so that word must start at zero.
    words = [0, *counters, *[0] * (3 - len(counters))]
    return np.random.Generator(np.random.Philox(key=[seed, int(stream)], counter=words))


def keyed_generators(seed: int, stream: Stream, keys: Iterable[tuple[int, int, int]]
                     ) -> Iterator[np.random.Generator]:
    """`keyed_generator(seed, stream, *key)` for each of many keys, at a tenth of its cost.

    It is one generator, set to each key in turn: draw from it before the next one is asked for.
    """
    generator = keyed_generator(seed, stream)
    bits = generator.bit_generator
    state = bits.state                               # of a generator that has drawn nothing
    # numpy reads Python's own numbers several times as fast as arrays.
    words = state["state"] = {name: words.tolist() for name, words in state["state"].items()}
    state["buffer"] = state["buffer"].tolist()
    for epoch, index, repeat in keys:
        words["counter"] = 0, epoch, index, repeat
        bits.state = state
        yield generator
