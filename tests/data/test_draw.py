"""A sample's draws depend on its key alone, and have the stated distributions."""

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from bounds import bounds_in
from deit import (
    AUGMENT,
    MIX,
    RAND_AUGMENT,
    SHIFT,
    THREE_AUGMENT,
    box_and_key,
    draws_of as drawn,
    samples,
    view_of,
)
from torchvision.transforms import RandomErasing, RandomResizedCrop

from vitinit.base.keys import Purpose, keyed_generator, keyed_generators
from vitinit.data.draw import (
    UNMIXED,
    Augmentation,
    Masks,
    MixDraw,
    SampleKey,
    View,
    draw_crop,
    draw_erasing,
    draw_view,
    epoch_order,
    unpack,
)
from vitinit.data.images import NOWHERE, Box, crop_and_flip
from vitinit.data.rand_augment import Operation, RandAugment, draw_operations
from vitinit.models.layers import draw_drop_path

KS_LIMIT = 1.95  # for √n times the Kolmogorov-Smirnov distance; exceeded once in a thousand
HEIGHT, WIDTH = 223, 227  # of a view


def draws_of(*, seed=3, augment={}, **rand_augment) -> Augmentation:
    """The draws of a run; augment, rand_augment: changes to DeiT's settings."""
    return Augmentation(
        seed,
        (HEIGHT, WIDTH),
        replace(AUGMENT, **augment),
        replace(RAND_AUGMENT, **rand_augment),
        MIX,
    )


def views(draws: Augmentation, keys: list[SampleKey]) -> list[View]:
    return [view_of(draws, key, 101, 103) for key in keys]


def boxes_of(count: int, height: int, width: int, **changes) -> np.ndarray:
    """(count, 4): top, left, height and width of boxes that are erased."""
    rng = np.random.default_rng(17)
    augment = replace(AUGMENT, **dict(erase_probability=1.0) | changes)
    return np.array([draw_erasing(rng, augment, height, width)[0] for _ in range(count)])


def crops(
    count: int, height: int, width: int, *, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), padding=0
) -> np.ndarray:
    """(count, 4): top, left, height and width of crops."""
    rng = np.random.default_rng(7)
    augment = replace(AUGMENT, crop_scale=scale, crop_ratio=ratio, crop_padding=padding)
    return np.array([draw_crop(rng, augment, height, width) for _ in range(count)])


def distance_between(one: np.ndarray, two: np.ndarray) -> float:
    """The Kolmogorov-Smirnov distance between two samples of the same size n, times √(n / 2)."""
    at = np.concatenate([one, two])
    shares = [
        np.searchsorted(np.sort(sample), at, side="right") / len(sample) for sample in (one, two)
    ]
    return abs(shares[0] - shares[1]).max() * (len(one) / 2) ** 0.5


def assert_rate(hits: np.ndarray, rate: float) -> None:
    """Assert that a share `rate` of `hits` is true, within four standard errors."""
    assert abs(np.mean(hits) - rate) <= 4 * math.sqrt(rate * (1 - rate) / len(hits))


def assert_even(counts: np.ndarray) -> None:
    """Assert that Pearson's χ² of counts is at most five standard deviations above its mean."""
    expected, freedom = counts.mean(), counts.size - 1
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 5 * (2 * freedom) ** 0.5


def test_boxes_are_distributed_like_torchvisions(held_against):
    torch.manual_seed(11)
    height, width, count = 61, 197, 2003
    image = torch.empty(3, height, width)
    theirs = [
        RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(count)
    ]
    erased = [
        RandomErasing.get_params(image, (0.02, 1 / 3), (0.3, 1 / 0.3))[:4] for _ in range(count)
    ]
    for ours, theirs in (
        (crops(count, height, width), np.array(theirs)),
        (boxes_of(count, height, width), np.array(erased)),
    ):
        areas = [boxes[:, 2] * boxes[:, 3] for boxes in (ours, theirs)]
        for pair in (*zip(ours.T, theirs.T), areas):  # top, left, height, width
            distance = distance_between(*pair)
            assert distance < KS_LIMIT
            held_against(distance, 0.0, cases=count if pair is areas else 0, within=KS_LIMIT)


def test_a_shift_reaches_every_position_equally_often_and_no_other():
    boxes = crops(8100, 31, 31, scale=(1.0, 1.0), ratio=(1.0, 1.0), padding=4)
    assert (boxes[:, 2:] == 31).all()
    found, counts = np.unique(boxes[:, :2], axis=0, return_counts=True)
    assert found.tolist() == [[top, left] for top in range(-4, 5) for left in range(-4, 5)]
    assert_even(counts)


def test_an_extreme_image_falls_back_to_torchvisions_centre(held_against):
    """With (2, 2) no box fits any image."""
    for height, width, scale in (
        (5, 101, (0.08, 1.0)),
        (103, 5, (0.08, 1.0)),
        (31, 37, (2.0, 2.0)),
        (53, 43, (2.0, 2.0)),
        (17, 17, (2.0, 2.0)),
    ):
        expected = RandomResizedCrop.get_params(
            torch.empty(3, height, width), list(scale), [3 / 4, 4 / 3]
        )
        found = crops(13, height, width, scale=scale)
        assert (found == expected).all()
        held_against(found, [expected] * 13, cases=13)


def test_every_crop_of_every_shape_becomes_a_view():
    rng = np.random.default_rng(0)
    for ratio in ((0.01, 0.01), (0.01, 100.0), (100.0, 100.0), (0.75, 4 / 3)):
        for scale in ((1e-9, 1e-9), (1e-9, 1.0), (1.0, 1.0)):
            for height, width in ((1, 1), (1, 503), (503, 1), (2, 2), (3, 7)):
                settings = replace(
                    AUGMENT,
                    crop_scale=scale,
                    crop_ratio=ratio,
                    crop_padding=5,
                    erase_probability=1.0,
                    erase_area=scale,
                    erase_ratio=ratio,
                )
                view = draw_view(rng, settings, height, width)
                decoded = torch.zeros(3, height, width, dtype=torch.uint8)
                image = crop_and_flip(decoded, view.box, view.flip, (5, 7), view.interpolation)
                assert image.shape == (3, 5, 7)
                box, _ = draw_erasing(rng, settings, height, width)
                assert box.height < height and box.width < width


def test_flips_erasing_and_interpolations_come_at_their_rates_and_leave_the_crop_alone():
    keys = [SampleKey(5, index) for index in range(3001)]
    reference = views(draws_of(), keys)
    for rate in (0.0, 0.3, 1.0):
        drawn = views(draws_of(augment=dict(flip=rate, interpolation="random")), keys)
        assert_rate([view.flip for view in drawn], rate)
        assert [view.box for view in drawn] == [view.box for view in reference]
        bicubic = [view.interpolation == "bicubic" for view in drawn if view.flip == (rate > 0)]
        assert_rate(bicubic, 0.5)
        assert_rate((boxes_of(3001, HEIGHT, WIDTH, erase_probability=rate) != NOWHERE).any(1), rate)
    assert {view.interpolation for view in reference} == {"bicubic"}


class Uniform(np.random.Generator):
    """Every uniform number is this one, from 0 up to 1 − 2⁻⁵³."""

    def __init__(self, number: float) -> None:
        super().__init__(np.random.PCG64(0))
        self.number = number

    def random(self, size=None, dtype=np.float64, out=None):
        if out is not None:
            out[...] = self.number
        return self.number if size is None else np.full(size, self.number)


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("number", [0.0, 0.3, 1 - 2**-53])
def test_what_has_a_probability_takes_place_for_every_number_below_it(number, rate):
    """So never for 0, and for 1 always: numbers are uniform on [0, 1)."""

    def mix(**changes) -> MixDraw:
        return replace(MIX, **changes).draw(Uniform(number), HEIGHT, WIDTH)

    augment = replace(AUGMENT, flip=rate, erase_probability=rate)
    settings = replace(RAND_AUGMENT, probability=rate)
    operations = draw_operations([Uniform(number)], 1, settings)[..., 0]
    assert {
        draw_view(Uniform(number), augment, HEIGHT, WIDTH).flip,
        draw_erasing(Uniform(number), augment, HEIGHT, WIDTH) != (NOWHERE, 0),
        mix(probability=rate) != UNMIXED,
        mix(probability=1.0, switch_probability=rate).box != NOWHERE,
        *(operations != Operation.NONE).flatten().tolist(),
        bool(replace(THREE_AUGMENT, probability=rate).draw([Uniform(number)], 1)[0, 0, 0]),
        rate == 1.0 or draw_drop_path([rate], 1, Uniform(number)).item() == 0.0,
    } == {number < rate}


def ends_of(kind: Any) -> list[Any]:
    """The least and the largest value that a key of this kind takes, of two numbers also both; a
    number without such a bound goes far out. [] if it is none."""
    if get_origin(kind) is tuple and get_args(kind)[-1] is not ...:
        least, most = ends_of(get_args(kind)[0])
        return [
            (least,) * len(get_args(kind)),
            (least, *(most,) * (len(get_args(kind)) - 1)),
            (most,) * len(get_args(kind)),
        ]
    if not bounds_in(kind):
        return []
    (bounds,) = bounds_in(kind)
    within, far = math.nextafter, 1e300
    least, most = bounds.minimum, bounds.maximum
    if least is None:
        least = -far if bounds.above is None else within(bounds.above, far)
    if most is None:
        most = far if bounds.below is None else within(bounds.below, -far)
    if get_args(kind)[0] is int:
        most = bounds.maximum if bounds.below is None else bounds.below - 1
    return [least, most]


def settings_at_ends() -> Iterator[tuple[str, dict[str, Any]]]:
    """(key, the sections with one key at an end of what it takes)."""
    sections = {
        "augment": AUGMENT,
        "rand_augment": RAND_AUGMENT,
        "mix": MIX,
        "three_augment": THREE_AUGMENT,
    }
    for title, section in sections.items():
        for key, kind in get_type_hints(type(section), include_extras=True).items():
            for end in ends_of(kind):
                yield f"{title}.{key} = {end}", sections | {title: replace(section, **{key: end})}


def test_draws_are_finite_at_the_ends_of_what_every_key_takes():
    seen = 0
    for case, sections in settings_at_ends():
        try:
            draws = Augmentation(3, (HEIGHT, WIDTH), **sections)
            found = draws.draws(samples([SampleKey(5, 7), SampleKey(5, 11)]))
            view = view_of(draws, SampleKey(5, 7), 101, 103)
        except Exception as error:
            pytest.fail(f"{case}: {type(error).__name__}: {error}")
        parts = unpack(found)  # of whose keys of noise the bits are no number
        for part in (parts.operations, parts.erased[:, :4], parts.mixed):
            assert part.isfinite().all(), case
        assert view.box.height > 0 < view.box.width, case
        seen += 1
    assert seen > 50


def test_an_epochs_order_is_a_permutation_by_its_key_in_which_every_image_is_first_equally_often():
    order = epoch_order(3, 5, 1009)
    assert sorted(order.tolist()) == list(range(1009))
    assert np.array_equal(order, epoch_order(3, 5, 1009))
    for other in (epoch_order(3, 6, 1009), epoch_order(4, 5, 1009), np.arange(1009)):
        assert (order == other).sum() < 10  # about one agrees by chance
    assert_even(np.bincount([epoch_order(3, epoch, 7)[0] for epoch in range(1400)], minlength=7))


def exact_arguments(settings: RandAugment, magnitude: Fraction, sign: int) -> list[Fraction]:
    """The arguments of all operations, in their order, in exact fractions."""

    def strength(value: float) -> Fraction:
        return Fraction(str(value)) * magnitude / 10

    factor = max(Fraction(1, 10), 1 + sign * strength(settings.enhance_factor))
    shear, shift = (
        sign * strength(value) for value in (settings.shear_factor, settings.translate_share)
    )
    return [
        0,
        0,
        0,
        sign * strength(settings.rotate_degrees),
        settings.posterize_bits - int(strength(settings.posterize_bits)),
        256 - min(256, int(strength(settings.solarize_levels))),
        min(128, int(strength(settings.solarize_add_levels))),
        *[factor] * 4,
        shear,
        shear,
        shift,
        shift,
    ]


def test_arguments_are_timms_formulas_at_every_half_magnitude(held_against):
    names = (
        "rotate_degrees",
        "shear_factor",
        "translate_share",
        "enhance_factor",
        "posterize_bits",
        "solarize_levels",
        "solarize_add_levels",
    )
    for extents in ((30.0, 0.3, 0.45, 0.9, 4, 256, 110), (23.0, 0.7, 0.31, 1.3, 7, 307, 211)):
        settings = replace(RAND_AUGMENT, **dict(zip(names, extents)))
        assert extents[0] != 30.0 or settings == RAND_AUGMENT  # rand-m9-mstd0.5-inc1
        for sign in (-1, 1):
            for halves in range(21):
                ours = settings.arguments(
                    np.arange(1, 16), np.full(15, halves / 2), np.full(15, sign)
                )
                exact = exact_arguments(settings, Fraction(halves, 2), sign)
                assert ours == pytest.approx(np.array(exact, float), rel=1e-12, abs=0)
                held_against(ours, np.array(exact, float), cases=15)


# Changes to augment and to rand_augment.
SETTINGS = {
    "DeiT": ({}, {}),
    "random interpolation": (
        dict(interpolation="random", erase_probability=0.6),
        dict(interpolation="random"),
    ),
    "pad and shift": (dict(SHIFT, crop_padding=4, erase_probability=0.0), dict(layers=0)),
    "extreme": (
        dict(
            crop_ratio=(0.01, 100.0),
            crop_scale=(1e-6, 1.0),
            erase_probability=1.0,
            erase_area=(1e-6, 1.0),
            erase_ratio=(0.01, 100.0),
        ),
        dict(layers=3, magnitude=5.0, magnitude_std=30.0),
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_batch_draws_what_a_generator_of_its_own_gives_each_sample(name, held_against):
    augment, rand_augment = SETTINGS[name]
    draws = draws_of(seed=2**63 - 25, augment=augment, **rand_augment)
    keys = [SampleKey(number % 11, 2**40 + number, number % 3) for number in range(211)]

    def own(stream: Purpose, key: SampleKey) -> np.random.Generator:
        return keyed_generator(draws.seed, stream, *key)

    groups = [number % 7 for number in range(211)]
    found = unpack(draws.draws(samples(keys, groups, step=29)))
    for key, group, operations, erased, mixed in zip(keys, groups, *found):
        rng, settings = own(Purpose.RAND_AUGMENT, key), draws.rand_augment
        chosen = rng.integers(len(settings.operations), size=settings.layers)
        chances = rng.random(settings.layers)
        magnitudes = rng.normal(settings.magnitude, settings.magnitude_std, settings.layers)
        signs, kinds = rng.random(settings.layers), rng.random(settings.layers)
        codes = np.array([Operation[settings.operations[which]] for which in chosen], int)
        codes[chances >= settings.probability] = 0
        arguments = settings.arguments(codes, magnitudes.clip(0, 10), np.where(signs < 0.5, -1, 1))
        share = {"bilinear": 0.0, "bicubic": 1.0, "random": 0.5}[settings.interpolation]
        written = np.stack([codes, arguments, kinds < share], 1)
        assert np.array_equal(operations[:, :3], written)
        box, noise_key = draw_erasing(own(Purpose.ERASE, key), draws.augment, *draws.size)
        assert box_and_key(erased) == [*box, noise_key]
        share, box = MIX.draw(keyed_generator(draws.seed, Purpose.MIX, 29, group), *draws.size)
        assert mixed.tolist() == [share, *box]
        held_against([operations[:, :3], mixed], [written, share, *box], within=0)


@pytest.mark.parametrize(
    "index, repeat, view, operations, arguments, bicubic, erased",
    [
        (
            1,
            2,
            View(Box(20, 11, 62, 65), True, "bicubic"),
            [5, 9],
            [1.0, 0.26311644389023003],
            [1, 1],
            [100, 67, 114, 135, 3316390439248388076],
        ),
        (
            15,
            0,
            View(Box(2, 16, 62, 67), False, "bicubic"),
            [11, 4],
            [1.8109339311982113, -25.664239556477018],
            [1, 1],
            [0, 0, 0, 0, 0],
        ),
    ],
)
def test_the_draws_of_seed_0_are_those_of_runs_on_disk(
    index, repeat, view, operations, arguments, bicubic, erased
):
    key = SampleKey(0, index, repeat)
    draws = draws_of(
        seed=0,
        probability=0.9,
        interpolation="random",
        augment=dict(interpolation="random", erase_probability=0.9),
    )
    assert views(draws, [key]) == [view]
    found = drawn(draws, [key])
    # Compilers may round a product and a sum once or twice.
    assert found.operations[0, :, :3].T.numpy() == pytest.approx(
        np.array([operations, arguments, bicubic]), rel=1e-12
    )
    assert box_and_key(found.erased[0]) == erased


def test_masks_show_each_patch_equally_often_by_the_key_alone():
    """5 of 17 patches, ascending, each in 5 / 17 of the views; any two in 5 · 4 / (17 · 16)."""
    masks, keys = Masks(17, 5), [SampleKey(0, index) for index in range(4_001)]
    visible = masks.draw(keyed_generators(3, Purpose.MASK, keys))
    assert visible.shape == (4_001, 5) and (np.diff(visible) > 0).all()
    assert visible.min() == 0 and visible.max() == 16
    seen = (visible[..., None] == np.arange(17)).any(1)  # (4001, 17)
    for patch in range(17):
        assert_rate(seen[:, patch], 5 / 17)
    assert_rate(seen[:, 2] & seen[:, 11], 5 * 4 / (17 * 16))
    alone = masks.draw(keyed_generators(3, Purpose.MASK, keys[7:8]))
    assert (alone[0] == visible[7]).all()
    again = masks.draw(keyed_generators(3, Purpose.MASK, [SampleKey(1, 7), SampleKey(0, 7, 1)]))
    assert not (again == visible[7]).all(1).any()


def test_3_augment_draws_one_of_three_and_jitters_in_any_order_by_the_key_alone():
    """Uniformly all of them, and RandAugment, erasing and mixing draw as without it."""
    count = 4_001
    keys = [SampleKey(1, index, index % 3) for index in range(count)]
    draws = replace(draws_of(), three_augment=replace(THREE_AUGMENT, color_jitter=0.23))
    operations, erased, mixed = drawn(draws, keys)
    without = drawn(draws_of(), keys)
    assert torch.equal(operations[:, :2], without.operations)
    assert torch.equal(erased.view(torch.int64), without.erased.view(torch.int64))
    assert torch.equal(mixed, without.mixed)
    assert torch.equal(drawn(draws, keys[7:8]).operations[0], operations[7])
    own = keyed_generator(3, Purpose.THREE_AUGMENT, *keys[7])
    assert np.array_equal(operations[7, 2:, :3], draws.three_augment.draw([own], 1)[0])
    for other in (SampleKey(2, 7, 1), SampleKey(1, 8, 1), SampleKey(1, 7, 2)):
        assert not torch.equal(drawn(draws, [other]).operations[0, 2:], operations[7, 2:])

    three = operations[:, 2:, :2].numpy()  # codes and arguments of four layers
    for code, argument in ((Operation.Color, 0.0), (Operation.Solarize, 128.0)):
        of_code = three[:, 0, 0] == code
        assert_rate(of_code, 1 / 3)
        assert (three[of_code, 0, 1] == argument).all()
    radii = three[three[:, 0, 0] == Operation.GaussianBlur, 0, 1]
    jitters = {Operation.Brightness, Operation.Contrast, Operation.Color}
    orders, counts = np.unique(three[:, 1:, 0], axis=0, return_counts=True)
    assert len(orders) == 6 and all(set(order) == jitters for order in orders)
    assert_even(counts)
    rng = np.random.default_rng(0)
    for found, least, most in ((radii, 0.1, 2.0), (three[:, 1:, 1].flatten(), 0.77, 1.23)):
        near = (most - least) / 100
        assert least <= found.min() < least + near and most - near < found.max() <= most
        assert distance_between(found, rng.uniform(least, most, len(found))) < KS_LIMIT
