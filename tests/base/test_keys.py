"""Keyed generators are Philox with the key and counters that the docstring states."""

import numpy as np

from vitinit.base.keys import Purpose, keyed_generator, keyed_generators

MASK = 2**64 - 1


def philox4x64(counter: list[int], key: list[int]) -> list[int]:
    """Ten rounds of Philox-4x64 (Salmon et al. 2011, section 3.3) in plain integers."""
    a, b, c, d = counter
    left, right = key
    for _ in range(10):
        high_a, low_a = divmod(a * 0xD2E7470EE14C6C93, 2**64)
        high_c, low_c = divmod(c * 0xCA5A826395121157, 2**64)
        a, b, c, d = high_c ^ b ^ left, low_c, high_a ^ d ^ right, low_a
        left, right = (left + 0x9E3779B97F4A7C15) & MASK, (right + 0xBB67AE8584CAA73B) & MASK
    return [a, b, c, d]


def test_raw_numbers_equal_philox_written_out_in_integers_which_gives_the_known_answer():
    # Random123's kat_vectors, "philox4x64 10", counter and key zero.
    assert philox4x64([0] * 4, [0] * 2) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]
    seed, stream = 13, Purpose.CROP_AND_FLIP
    for counters in ((), (3,), (3, 5), (3, 5, 7), (2**40, 11, 2**63)):
        words = [*counters, 0, 0, 0][:3]
        blocks = [philox4x64([block, *words], [seed, int(stream)]) for block in (1, 2)]
        raw = keyed_generator(seed, stream, *counters).bit_generator.random_raw(8).tolist()
        assert raw == blocks[0] + blocks[1]


def test_values_of_streams_are_those_of_runs_on_disk():
    assert {stream.name: stream.value for stream in Purpose} == {
        "ORDER": 1,
        "CROP_AND_FLIP": 2,
        "DROP_PATH": 3,
        "SHAPES": 4,
        "RAND_AUGMENT": 5,
        "ERASE": 6,
        "MIX": 7,
        "SUBSET": 8,
        "INIT_IMAGES": 9,
        "FILE_SIZES": 10,
        "MASK": 11,
        "EVAL_MASK": 12,
        "THREE_AUGMENT": 13,
    }


def test_generators_of_many_keys_are_those_of_each_key_whatever_was_drawn_from_the_one_before():
    keys = [(5, 7, 11), (0, 0, 0), (2**40, 3, 2**63), (5, 7, 11), (5, 7, 12)]
    draws = [
        lambda rng: rng.integers(15, size=3),
        lambda rng: rng.normal(size=1009),
        lambda rng: rng.random(5),
        lambda rng: rng.integers(15),
        lambda rng: rng.random(7),
    ]
    found = []
    for draw, rng in zip(draws, keyed_generators(2**63 + 13, Purpose.ERASE, keys)):
        draw(rng)  # an odd number of halves, blocks begun
        found.append(draw(rng))
    for draw, key, ours in zip(draws, keys, found, strict=True):
        alone = keyed_generator(2**63 + 13, Purpose.ERASE, *key)
        draw(alone)
        assert np.array_equal(ours, draw(alone))
