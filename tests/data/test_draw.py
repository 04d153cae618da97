"""A sample's draws depend on its key (seed, epoch, index, repeat), and have the stated distributions."""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torchvision.transforms import RandomErasing, RandomResizedCrop

from vitinit.data import draw
from vitinit.data.draw import (ALL_OPERATIONS, NOTHING, CropAndFlip, Draws, Erasing, Operation,
                               RandAugment, SampleDraws, SampleKey, View, draw_crop, epoch_order,
                               stack_draws)
from vitinit.data.images import Box
from vitinit.keys import Stream, keyed_generator

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
KS_LIMIT = 1.95          # for √n times the Kolmogorov-Smirnov distance; exceeded once in a thousand


def views(*, seed=3, epoch=5, first=0, count=53, repeat=0, height=101, width=103,
          **crop) -> list[View]:
    """The views of `count` images from `first` on; crop: changes to CropAndFlip's defaults."""
    draws = SampleDraws(seed, (height, width), CropAndFlip(**crop))
    return [draws.view(SampleKey(epoch, index, repeat), height, width)
            for index in range(first, first + count)]


def crops(count: int, height: int, width: int, *, scale=SCALE, ratio=RATIO,
          padding=0) -> np.ndarray:
    """(count, 4): top, left, height and width of boxes."""
    rng = np.random.default_rng(7)
    return np.array([draw_crop(rng, height, width, scale=scale, ratio=ratio, padding=padding)
                     for _ in range(count)])


def distance_from_uniform(values: np.ndarray, low: float, high: float) -> float:
    """The Kolmogorov-Smirnov distance from a uniform distribution, times √n."""
    steps = (np.arange(len(values)) + 0.5) / len(values)
    return abs((np.sort(values) - low) / (high - low) - steps).max() * len(values)**0.5


def distance_between(one: np.ndarray, two: np.ndarray) -> float:
    """The Kolmogorov-Smirnov distance between two samples of the same size n, times √(n / 2)."""
    at = np.concatenate([one, two])
    shares = [np.searchsorted(np.sort(sample), at, side="right") / len(sample)
              for sample in (one, two)]
    return abs(shares[0] - shares[1]).max() * (len(one) / 2)**0.5


def excess(counts: np.ndarray, expected: np.ndarray | float) -> float:
    """Pearson's χ² of counts with a given sum, as a number of standard deviations above its mean."""
    squares, freedom = (counts - expected)**2 / expected, counts.size - 1
    return (squares.sum() - freedom) / (2 * freedom)**0.5


def assert_rate(hits: np.ndarray, rate: float) -> None:
    """Assert that a share `rate` of `hits` is true, within four standard errors."""
    assert abs(np.mean(hits) - rate) <= 4 * math.sqrt(rate * (1 - rate) / len(hits))


# ---------------------------------------------------------------------------------------------
# Crop and flip
# ---------------------------------------------------------------------------------------------


def test_the_same_key_gives_the_same_view_in_any_order():
    forwards = views()
    backwards = [views(first=index, count=1)[0] for index in reversed(range(53))]
    assert forwards == backwards[::-1]


@pytest.mark.parametrize("other", [{"seed": 4}, {"epoch": 6}, {"first": 53}, {"repeat": 1}])
def test_another_seed_epoch_image_or_repeat_gives_other_views(other):
    same = sum(one == two for one, two in zip(views(), views(**other)))
    assert same <= 1                                         # of 53


def test_epoch_index_and_repeat_are_not_interchangeable():
    keys = [(5, 7, 2), (7, 5, 2), (5, 2, 7), (2, 7, 5)]
    assert len({views(epoch=epoch, first=index, count=1, repeat=repeat)[0]
                for epoch, index, repeat in keys}) == 4


def test_area_share_and_log_ratio_are_uniform_where_every_box_fits():
    # At most half the area at 4:3 fits a nearly square image, so that nothing is rejected.
    boxes = crops(3001, 1009, 1013, scale=(0.1, 0.5))
    top, left, height, width = boxes.T
    assert distance_from_uniform(height * width / (1009 * 1013), 0.1, 0.5) < KS_LIMIT
    assert distance_from_uniform(np.log(width / height), *np.log(RATIO)) < KS_LIMIT
    assert distance_from_uniform((top + 0.5) / (1009 - height + 1), 0, 1) < KS_LIMIT
    assert distance_from_uniform((left + 0.5) / (1013 - width + 1), 0, 1) < KS_LIMIT


def test_with_rejections_the_boxes_are_distributed_like_torchvisions():
    torch.manual_seed(11)
    image = torch.empty(3, 101, 307)
    theirs = np.array([RandomResizedCrop.get_params(image, list(SCALE), list(RATIO))
                       for _ in range(5003)])
    ours = crops(5003, 101, 307)
    for one, two in zip(ours.T, theirs.T):                   # top, left, height, width
        assert distance_between(one, two) < KS_LIMIT
    assert distance_between(ours[:, 2] * ours[:, 3], theirs[:, 2] * theirs[:, 3]) < KS_LIMIT


@pytest.mark.parametrize("height, width", [(31, 37), (47, 11), (5, 101), (1, 1), (2, 3)])
def test_without_padding_a_box_lies_in_the_image(height, width):
    top, left, box_height, box_width = crops(503, height, width).T
    assert min(top.min(), left.min()) >= 0 and min(box_height.min(), box_width.min()) >= 1
    assert (top + box_height).max() <= height and (left + box_width).max() <= width


def test_a_box_reaches_every_position_equally_often_and_no_other():
    # 7 × 11 pixels, 30 % of the area, square: 5 × 5 boxes at 3 × 7 positions.
    boxes = crops(2100, 7, 11, scale=(0.3, 0.3), ratio=(1.0, 1.0))
    assert set(map(tuple, boxes[:, 2:].tolist())) == {(5, 5)}
    corners, counts = np.unique(boxes[:, :2], axis=0, return_counts=True)
    assert corners.tolist() == [[top, left] for top in range(3) for left in range(7)]
    assert abs(counts - 100).max() < 4 * 100**0.5


@pytest.mark.parametrize("scale", [SCALE, (2.0, 2.0)])       # (2, 2): no box fits any image
def test_an_extreme_image_falls_back_to_torchvisions_centre(scale):
    for height, width in ((5, 101), (103, 5), (3, 211), (109, 7)):
        expected = RandomResizedCrop.get_params(torch.empty(3, height, width), list(scale),
                                                list(RATIO))
        assert (crops(13, height, width, scale=scale) == expected).all()


@pytest.mark.parametrize("height, width", [(31, 37), (53, 43), (43, 59), (41, 30), (17, 17)])
def test_when_nothing_fits_the_centre_equals_torchvisions(height, width):
    expected = RandomResizedCrop.get_params(torch.empty(3, height, width), [2.0, 2.0], list(RATIO))
    assert (crops(1, height, width, scale=(2.0, 2.0)) == expected).all()


@pytest.mark.parametrize("size, padding", [(31, 4), (29, 1), (37, 0)])
def test_pad_and_shift_is_uniform_on_all_shifts(size, padding):
    shifts = range(-padding, padding + 1)
    expected = 100
    boxes = crops(expected * len(shifts)**2, size, size, scale=(1.0, 1.0), ratio=(1.0, 1.0),
                  padding=padding)
    assert (boxes[:, 2:] == size).all()
    corners, counts = np.unique(boxes[:, :2], axis=0, return_counts=True)
    assert corners.tolist() == [[down, right] for down in shifts for right in shifts]
    assert abs(counts - expected).max() < 4 * expected**0.5


def test_with_padding_a_box_stays_on_the_padded_image():
    top, left, height, width = crops(2003, 31, 37, padding=5).T
    assert top.min() == -5 and left.min() == -5              # and both borders are reached
    assert (top + height).max() == 31 + 5 and (left + width).max() == 37 + 5


@pytest.mark.parametrize("flip", [0.0, 0.3, 0.5, 1.0])
def test_flips_come_at_their_rate_and_leave_the_crop_alone(flip):
    drawn = views(count=3001, flip=flip)
    assert_rate([view.flip for view in drawn], flip)
    assert [view.box for view in drawn[:53]] == [view.box for view in views(flip=0.9)]
    assert isinstance(drawn[0].flip, bool) and isinstance(drawn[0].box, Box)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_named_interpolation_is_that_of_every_view(interpolation):
    assert {view.interpolation for view in views(interpolation=interpolation)} == {interpolation}


def test_a_random_interpolation_is_either_by_halves_whatever_the_flip():
    drawn = views(count=3001, interpolation="random")
    names = np.array([view.interpolation for view in drawn])
    flips = np.array([view.flip for view in drawn])
    assert set(names) == {"bilinear", "bicubic"}
    for part in (names, names[flips], names[~flips]):
        assert_rate(part == "bicubic", 0.5)


def test_drawing_the_interpolation_leaves_box_and_flip_as_they_were():
    assert ([(view.box, view.flip) for view in views(interpolation="random")]
            == [(view.box, view.flip) for view in views(interpolation="bicubic")])


def test_the_default_is_deits_crop():
    assert CropAndFlip() == CropAndFlip(scale=SCALE, ratio=RATIO, padding=0, flip=0.5,
                                        interpolation="bicubic")


# ---------------------------------------------------------------------------------------------
# The order of an epoch
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 1009])
def test_an_epochs_order_holds_every_image_once(count):
    assert sorted(epoch_order(3, 5, count).tolist()) == list(range(count))


def test_orders_repeat_by_key_and_differ_between_epochs_and_seeds():
    order = epoch_order(3, 5, 1009)
    assert np.array_equal(order, epoch_order(3, 5, 1009))
    for other in (epoch_order(3, 6, 1009), epoch_order(4, 5, 1009), np.arange(1009)):
        assert (order == other).sum() < 10                   # about one agrees by chance


def test_every_image_is_first_equally_often():
    counts = np.bincount([epoch_order(3, epoch, 7)[0] for epoch in range(1400)], minlength=7)
    assert abs(counts - 200).max() < 4 * 200**0.5


# ---------------------------------------------------------------------------------------------
# RandAugment
# ---------------------------------------------------------------------------------------------


HEIGHT, WIDTH = 223, 227                     # of a view
MAGNITUDE = NormalDist(9.0, 0.5)
SIGNED = {Operation.Rotate: 30.0, Operation.ShearX: 0.3, Operation.ShearY: 0.3,
          Operation.TranslateX: 0.45, Operation.TranslateY: 0.45}     # at magnitude 10

# `rand-m9-mstd0.5-inc1` in exact fractions: (magnitude, sign) → argument.
TABLE = {
    "AutoContrast": lambda m, sign: 0,
    "Equalize": lambda m, sign: 0,
    "Invert": lambda m, sign: 0,
    "Rotate": lambda m, sign: sign * 3 * m,
    "Posterize": lambda m, sign: 4 - int(Fraction(4, 10) * m),
    "Solarize": lambda m, sign: 256 - min(256, int(Fraction(256, 10) * m)),
    "SolarizeAdd": lambda m, sign: min(128, int(11 * m)),
    "Color": lambda m, sign: max(Fraction(1, 10), 1 + sign * Fraction(9, 100) * m),
    "Contrast": lambda m, sign: max(Fraction(1, 10), 1 + sign * Fraction(9, 100) * m),
    "Brightness": lambda m, sign: max(Fraction(1, 10), 1 + sign * Fraction(9, 100) * m),
    "Sharpness": lambda m, sign: max(Fraction(1, 10), 1 + sign * Fraction(9, 100) * m),
    "ShearX": lambda m, sign: sign * Fraction(3, 100) * m,
    "ShearY": lambda m, sign: sign * Fraction(3, 100) * m,
    "TranslateX": lambda m, sign: sign * Fraction(45, 1000) * m,
    "TranslateY": lambda m, sign: sign * Fraction(45, 1000) * m,
}


@functools.cache
def many_draws() -> Draws:
    """The draws of 20,011 images, with random interpolation and otherwise DeiT's settings."""
    return drawn(count=20_011, interpolation="random")


def drawn(*, seed=3, epoch=5, first=0, count=53, repeat=0, erasing=Erasing(), **augment) -> Draws:
    """The draws of `count` images from `first` on; augment: settings that are not the defaults."""
    draws = SampleDraws(seed, (HEIGHT, WIDTH), rand_augment=RandAugment(**augment), erasing=erasing)
    return draws.batch_for_device([SampleKey(epoch, index, repeat)
                                   for index in range(first, first + count)])


def equal(one: Draws, two: Draws) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def magnitudes(draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    """Signs and magnitudes, (N, L) each, where an operation's argument shows them; NaN elsewhere."""
    full = np.full(draws.operations.shape, np.nan)
    for operation, at_ten in SIGNED.items():
        full[draws.operations == operation] = at_ten
    return np.sign(draws.arguments / full), 10 * abs(draws.arguments / full)


def test_values_of_operations_are_those_of_runs_on_disk():
    assert {operation.name: operation.value for operation in Operation} == {
        "NONE": 0, "AutoContrast": 1, "Equalize": 2, "Invert": 3, "Rotate": 4, "Posterize": 5,
        "Solarize": 6, "SolarizeAdd": 7, "Color": 8, "Contrast": 9, "Brightness": 10,
        "Sharpness": 11, "ShearX": 12, "ShearY": 13, "TranslateX": 14, "TranslateY": 15}
    assert set(ALL_OPERATIONS) == set(TABLE) and len(ALL_OPERATIONS) == 15


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("sign", [-1, 1])
def test_arguments_are_those_of_the_table_at_every_half_magnitude(name, sign):
    for halves in range(21):
        ours = RandAugment().argument(Operation[name], halves / 2, float(sign))
        assert ours == pytest.approx(float(TABLE[name](Fraction(halves, 2), sign)), rel=1e-12)


@pytest.mark.parametrize("name, magnitude, plus, minus", [
    ("Rotate", 9.0, 27.0, -27.0), ("ShearX", 9.0, 0.27, -0.27), ("ShearY", 9.0, 0.27, -0.27),
    ("TranslateX", 9.0, 0.405, -0.405), ("TranslateY", 9.0, 0.405, -0.405),
    ("Color", 9.0, 1.81, 0.19), ("Contrast", 9.0, 1.81, 0.19), ("Brightness", 9.0, 1.81, 0.19),
    ("Sharpness", 9.0, 1.81, 0.19), ("Sharpness", 10.0, 1.9, 0.1),
    ("Posterize", 7.499, 2, 2), ("Posterize", 7.5, 1, 1), ("Posterize", 9.0, 1, 1),
    ("Posterize", 9.999, 1, 1), ("Posterize", 10.0, 0, 0),
    ("Solarize", 9.0, 26, 26), ("Solarize", 0.0, 256, 256), ("Solarize", 10.0, 0, 0),
    ("SolarizeAdd", 9.0, 99, 99), ("SolarizeAdd", 10.0, 110, 110),
    ("AutoContrast", 9.0, 0, 0), ("Equalize", 9.0, 0, 0), ("Invert", 9.0, 0, 0)])
def test_arguments_that_the_recipe_is_known_by(name, magnitude, plus, minus):
    for sign, argument in ((1.0, plus), (-1.0, minus)):
        assert RandAugment().argument(Operation[name], magnitude, sign) == pytest.approx(argument)


def test_the_extents_are_what_arguments_reach_at_magnitude_ten():
    settings = RandAugment(rotate_degrees=20.0, shear_factor=0.7, translate_share=0.3,
                           enhance_factor=0.5, posterize_bits=6, solarize_levels=100,
                           solarize_add_levels=70)
    expected = {"Rotate": 20.0, "ShearX": 0.7, "ShearY": 0.7, "TranslateX": 0.3,
                "TranslateY": 0.3, "Color": 1.5, "Contrast": 1.5, "Brightness": 1.5,
                "Sharpness": 1.5, "Posterize": 0, "Solarize": 156, "SolarizeAdd": 70}
    for name, argument in expected.items():
        assert settings.argument(Operation[name], 10.0, 1.0) == pytest.approx(argument)
    # Where they end: no factor below .1, no threshold below 0, nothing above 128 is added.
    wide = RandAugment(enhance_factor=1.3, solarize_levels=300, solarize_add_levels=200)
    assert wide.argument(Operation.Color, 9.0, -1.0) == 0.1
    assert wide.argument(Operation.Solarize, 9.0, 1.0) == 0
    assert wide.argument(Operation.SolarizeAdd, 9.0, 1.0) == 128


def test_a_quarter_of_the_images_get_none_a_half_one_and_a_quarter_two_operations():
    applied = many_draws().operations > 0
    for count, rate in ((0, 0.25), (1, 0.5), (2, 0.25)):
        assert_rate(applied.sum(1) == count, rate)
    for layer in applied.T:                                  # and neither layer is favoured
        assert_rate(layer, 0.5)


def test_every_operation_comes_equally_often_in_both_layers():
    for layer in many_draws().operations.T:
        counts = np.bincount(layer, minlength=16)[1:]
        assert len(counts) == 15
        assert excess(counts, counts.sum() / 15) < 5


def test_the_two_operations_of_an_image_are_drawn_independently_and_with_replacement():
    pairs = many_draws().operations
    pairs = pairs[(pairs > 0).all(1)]
    assert_rate(pairs[:, 0] == pairs[:, 1], 1 / 15)
    table = np.zeros((15, 15))
    np.add.at(table, tuple(pairs.T - 1), 1)
    assert excess(table, len(pairs) / 15**2) < 5


def test_magnitudes_are_normal_and_clipped_at_ten():
    _, found = magnitudes(many_draws())
    told = found[~np.isnan(found)]
    for bound in (8.0, 8.5, 9.5, 9.99):                      # sharper than the distance below
        assert_rate(told < bound, MAGNITUDE.cdf(bound))
    for layer in found.T:
        layer = layer[~np.isnan(layer)]
        below = layer[layer < 10 - 1e-9]
        assert layer.max() < 10 + 1e-9
        assert_rate(layer >= 10 - 1e-9, 1 - MAGNITUDE.cdf(10))
        ranks = np.array([MAGNITUDE.cdf(magnitude) for magnitude in below])
        assert distance_from_uniform(ranks, 0.0, MAGNITUDE.cdf(10)) < KS_LIMIT


def test_one_posterize_in_44_keeps_no_bit():
    draws = many_draws()
    bits = draws.arguments[draws.operations == Operation.Posterize]
    assert_rate(bits == 0, 0.0228)                           # magnitudes of 10, two σ above 9
    assert_rate(bits == 2, MAGNITUDE.cdf(7.5))
    assert set(bits) <= {0, 1, 2}


def test_the_magnitudes_of_an_image_are_independent():
    signs, found = magnitudes(many_draws())
    both = ~np.isnan(found).any(1)
    assert both.sum() > 400
    error = 1 / both.sum()**0.5
    assert abs(np.corrcoef(found[both].T)[0, 1]) < 4 * error
    assert abs(np.corrcoef(signs[both].T)[0, 1]) < 4 * error


def test_signs_are_half_and_half_for_every_operation_and_magnitude():
    draws = many_draws()
    signs, found = magnitudes(draws)
    for operation in SIGNED:
        assert_rate(signs[draws.operations == operation] > 0, 0.5)
    for part in (found < 9, found >= 9):
        assert_rate(signs[part] > 0, 0.5)
    for operation in (Operation.Color, Operation.Contrast, Operation.Brightness,
                      Operation.Sharpness):
        factors = draws.arguments[draws.operations == operation]
        assert factors.min() >= 0.1 and factors.max() <= 1.9 + 1e-9
        assert_rate(factors > 1, 0.5)


def test_a_random_interpolation_is_drawn_for_every_application():
    draws = many_draws()
    signs, _ = magnitudes(draws)
    for layer in (0, 1):
        assert_rate(draws.bicubic[:, layer], 0.5)
        assert_rate(draws.bicubic[draws.operations[:, layer] > 0, layer], 0.5)
        assert_rate(draws.bicubic[signs[:, layer] > 0, layer], 0.5)
    assert_rate(draws.bicubic[:, 0] == draws.bicubic[:, 1], 0.5)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_named_interpolation_is_that_of_every_application(interpolation):
    assert (drawn(interpolation=interpolation).bicubic == (interpolation == "bicubic")).all()


def test_no_layers_give_empty_draws():
    draws = drawn(layers=0)
    assert draws.operations.shape == draws.arguments.shape == draws.bicubic.shape == (53, 0)


@pytest.mark.parametrize("layers", [1, 3])
def test_as_many_operations_are_drawn_as_there_are_layers(layers):
    draws = drawn(layers=layers, count=1009)
    assert draws.operations.shape == (1009, layers)
    assert_rate((draws.operations > 0).all(1), 0.5**layers)
    assert_rate((draws.operations == 0).all(1), 0.5**layers)


def test_only_the_operations_of_the_list_are_drawn():
    operations = ("Invert", "ShearY", "Color")
    draws = drawn(operations=operations, count=1009)
    chosen = draws.operations[draws.operations > 0]
    assert set(chosen) == {Operation[name] for name in operations}
    for name in operations:
        assert_rate(chosen == Operation[name], 1 / 3)


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_operations_are_applied_with_their_probability(probability):
    assert_rate(drawn(probability=probability, count=1009).operations.ravel() > 0, probability)


def test_without_deviation_the_magnitude_is_constant():
    draws = drawn(operations=("Rotate",), magnitude=7.0, magnitude_std=0.0, probability=1.0)
    assert np.allclose(abs(draws.arguments), 21.0, rtol=1e-12) and (draws.arguments < 0).any()


def test_a_magnitude_is_not_below_zero():
    draws = drawn(operations=("Rotate",), magnitude=0.0, probability=1.0, count=1009)
    still = draws.arguments.ravel() == 0
    assert_rate(still, 0.5)                                  # half of a normal lies below its mean
    assert_rate(draws.arguments.ravel()[~still] > 0, 0.5)    # a negative magnitude is no sign


def test_changing_one_setting_of_randaugment_leaves_the_other_draws_as_they_were():
    draws = drawn(probability=1.0, interpolation="random")
    fewer = drawn(probability=0.4, interpolation="random")
    use = fewer.operations > 0
    assert 0 < use.sum() < use.size
    for one, two in zip(draws[:3], fewer):
        assert np.array_equal(one[use], two[use])
    assert np.array_equal(draws.bicubic, fewer.bicubic)
    bicubic = drawn(probability=1.0, interpolation="bicubic")
    assert np.array_equal(draws.operations, bicubic.operations)
    assert np.array_equal(draws.arguments, bicubic.arguments)
    constant = drawn(probability=1.0, magnitude=5.0, magnitude_std=0.0, interpolation="random")
    assert np.array_equal(draws.operations, constant.operations)
    signs, constant_signs = (magnitudes(each)[0] for each in (draws, constant))
    assert np.array_equal(signs, constant_signs, equal_nan=True) and (signs < 0).any()
    assert np.array_equal(draws.bicubic, constant.bicubic)


# ---------------------------------------------------------------------------------------------
# Erasing
# ---------------------------------------------------------------------------------------------


def boxes_of(count: int, height: int, width: int, **erasing) -> np.ndarray:
    """(count, 4): top, left, height, width; probability 1 unless said otherwise."""
    rng = np.random.default_rng(17)
    settings = Erasing(**{"probability": 1.0, **erasing})
    return np.array([settings.draw(rng, height, width)[0] for _ in range(count)])


def test_a_quarter_of_the_images_are_erased_and_17_6_percent_of_their_area():
    boxes = many_draws().erase_boxes
    erased = boxes[:, 2] > 0
    assert_rate(erased, 0.25)
    assert (boxes[~erased] == NOTHING).all()
    shares = boxes[erased, 2] * boxes[erased, 3] / (HEIGHT * WIDTH)
    error = shares.std() / erased.sum()**0.5                 # .0013
    assert abs(shares.mean() - 0.176) < 4 * error


def test_whether_an_image_is_erased_does_not_depend_on_its_operations():
    draws = many_draws()
    erased = draws.erase_boxes[:, 2] > 0
    for count in range(3):
        assert_rate(erased[(draws.operations > 0).sum(1) == count], 0.25)


@pytest.mark.parametrize("probability", [0.0, 0.6, 1.0])
def test_erasing_comes_at_its_rate(probability):
    draws = drawn(count=1009, erasing=Erasing(probability=probability))
    assert_rate(draws.erase_boxes[:, 2] > 0, probability)


@pytest.mark.parametrize("height, width", [(101, 103), (61, 197)])
def test_boxes_are_distributed_like_torchvisions(height, width):
    torch.manual_seed(13)
    image, count = torch.empty(3, height, width), 3001
    theirs = np.array([RandomErasing.get_params(image, (0.02, 1 / 3), (0.3, 1 / 0.3))[:4]
                       for _ in range(count)])
    ours = boxes_of(count, height, width)
    for one, two in zip(ours.T, theirs.T):                   # top, left, height, width
        assert distance_between(one, two) < KS_LIMIT
    assert distance_between(ours[:, 2] * ours[:, 3], theirs[:, 2] * theirs[:, 3]) < KS_LIMIT


def test_erased_share_log_ratio_and_position_are_uniform_where_every_box_fits():
    # A quarter of the area at 10:3 is .91 of a square image's side, so nothing is rejected.
    top, left, height, width = boxes_of(3001, 1009, 1009, area=(0.02, 0.25)).T
    assert distance_from_uniform(height * width / 1009**2, 0.02, 0.25) < KS_LIMIT
    assert distance_from_uniform(np.log(height / width), np.log(0.3), -np.log(0.3)) < KS_LIMIT
    assert distance_from_uniform((top + 0.5) / (1009 - height + 1), 0, 1) < KS_LIMIT
    assert distance_from_uniform((left + 0.5) / (1009 - width + 1), 0, 1) < KS_LIMIT


def test_the_ratio_is_height_over_width():
    _, _, height, width = boxes_of(101, 211, 211, area=(0.1, 0.1), ratio=(3.0, 3.0)).T
    assert (abs(height / width - 3.0) < 0.1).all()


def test_an_erased_box_reaches_every_position_equally_often_and_no_other():
    # 7 × 11 pixels, 32 % of the area, square: 5 × 5 boxes at 3 × 7 positions.
    boxes = boxes_of(2100, 7, 11, area=(0.32, 0.32), ratio=(1.0, 1.0))
    assert set(map(tuple, boxes[:, 2:].tolist())) == {(5, 5)}
    corners, counts = np.unique(boxes[:, :2], axis=0, return_counts=True)
    assert corners.tolist() == [[top, left] for top in range(3) for left in range(7)]
    assert abs(counts - 100).max() < 4 * 100**0.5


@pytest.mark.parametrize("height, width", [(1, 1), (1, 7), (11, 1), (2, 2), (3, 2), (5, 3),
                                           (3, 101), (31, 37)])
@pytest.mark.parametrize("area", [(0.02, 1 / 3), (0.9, 1.0)])
def test_an_erased_box_lies_in_the_image_and_is_smaller_on_both_sides(height, width, area):
    boxes = boxes_of(503, height, width, area=area)
    top, left, box_height, box_width = boxes.T
    assert (box_height < height).all() and (box_width < width).all()
    assert (boxes >= 0).all()
    assert (top + box_height <= height).all() and (left + box_width <= width).all()
    nothing = box_height == 0
    assert (boxes[nothing] == NOTHING).all() and (box_width[~nothing] > 0).all()
    assert nothing.all() or min(height, width) > 1


def test_of_two_by_two_pixels_one_is_erased_where_the_area_rounds_to_one():
    boxes = boxes_of(101, 2, 2)
    assert set(map(tuple, boxes[:, 2:].tolist())) == {(1, 1)}


def test_noise_keys_are_uniform_and_no_two_images_share_one():
    draws = many_draws()
    keys = draws.noise_keys[draws.erase_boxes[:, 2] > 0]
    assert len(set(keys.tolist())) == len(keys)
    assert distance_from_uniform(keys / 2.0**63, 0.0, 1.0) < KS_LIMIT


# ---------------------------------------------------------------------------------------------
# One sample
# ---------------------------------------------------------------------------------------------


def test_the_same_key_gives_the_same_draws_in_any_order():
    forwards = drawn(interpolation="random")
    backwards = [drawn(first=index, count=1, interpolation="random")
                 for index in reversed(range(53))]
    assert equal(forwards, Draws(*map(np.concatenate, zip(*backwards[::-1]))))


@pytest.mark.parametrize("other", [{"seed": 4}, {"epoch": 6}, {"first": 53}, {"repeat": 1}])
def test_another_seed_epoch_image_or_repeat_gives_other_draws(other):
    settings = {"probability": 1.0, "interpolation": "random", "erasing": Erasing(probability=1.0)}
    one, two = drawn(**settings), drawn(**settings, **other)
    assert (one.operations == two.operations).all(1).sum() <= 3          # of 53, one in 225 equal
    assert abs(np.mean(one.bicubic == two.bicubic) - 0.5) < 4 * 0.5 / one.bicubic.size**0.5
    assert (one.erase_boxes == two.erase_boxes).all(1).sum() <= 1
    assert not (one.noise_keys == two.noise_keys).any()


@pytest.mark.parametrize("erasing", [Erasing(probability=0.0), Erasing(area=(0.5, 0.6)),
                                     Erasing(probability=1.0, fill="const")])
def test_erasing_leaves_the_operations_as_they_were(erasing):
    assert equal(drawn()[:3], drawn(erasing=erasing)[:3])


@pytest.mark.parametrize("augment", [{"layers": 0}, {"layers": 5}, {"probability": 0.0},
                                     {"magnitude": 3.0}, {"operations": ("Invert",)}])
def test_the_operations_leave_erasing_as_it_was(augment):
    assert equal(drawn()[3:], drawn(**augment)[3:])


def test_each_kind_of_draw_has_a_stream_of_its_own(monkeypatch):
    used, keyed_generators = [], draw.keyed_generators

    def noted(seed, stream, keys):
        used.extend((seed, stream, *key) for key in keys)
        return keyed_generators(seed, stream, keys)
    monkeypatch.setattr(draw, "keyed_generators", noted)
    views(seed=3, epoch=5, first=7, count=1, repeat=2)
    drawn(seed=3, epoch=5, first=7, count=1, repeat=2)
    streams = [Stream.CROP_AND_FLIP, Stream.RAND_AUGMENT, Stream.ERASE]
    assert used == [(3, stream, 5, 7, 2) for stream in streams]


def test_crop_and_flip_are_the_same_whether_or_not_the_rest_is_drawn_between():
    alone, between = views(), []
    for index in range(53):
        drawn(first=index, count=1)
        between += views(first=index, count=1)
    assert between == alone


# ---------------------------------------------------------------------------------------------
# Whole batches
# ---------------------------------------------------------------------------------------------


def argument_alone(settings: RandAugment, operation: str, magnitude: float, sign: float) -> float:
    """The argument of one operation, in plain numbers."""
    share = magnitude / 10
    match operation:
        case "Rotate":
            return sign * share * settings.rotate_degrees
        case "ShearX" | "ShearY":
            return sign * share * settings.shear_factor
        case "TranslateX" | "TranslateY":
            return sign * share * settings.translate_share
        case "Color" | "Contrast" | "Brightness" | "Sharpness":
            return max(0.1, 1 + sign * share * settings.enhance_factor)
        case "Posterize":
            return settings.posterize_bits - int(share * settings.posterize_bits)
        case "Solarize":
            return 256 - min(256, int(share * settings.solarize_levels))
        case "SolarizeAdd":
            return min(128, int(share * settings.solarize_add_levels))
    return 0.0


def sides_alone(rng: np.random.Generator, pixels: int, share, ratio) -> tuple[int, int]:
    area = pixels * rng.uniform(*share)
    quotient = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
    return round(math.sqrt(area * quotient)), round(math.sqrt(area / quotient))


def view_alone(crop: CropAndFlip, rng: np.random.Generator, height: int, width: int) -> View:
    """One sample's view, drawn from a generator of its own with numpy's uniform()."""
    pad = crop.padding
    for _ in range(10):
        box_width, box_height = sides_alone(rng, height * width, crop.scale, crop.ratio)
        if 0 < box_width <= width + 2 * pad and 0 < box_height <= height + 2 * pad:
            box = Box(int(rng.integers(-pad, height + pad - box_height, endpoint=True)),
                      int(rng.integers(-pad, width + pad - box_width, endpoint=True)),
                      box_height, box_width)
            break
    else:
        aspect = min(max(width / height, crop.ratio[0]), crop.ratio[1])
        sides = (max(1, round(min(height, width / aspect))),
                 max(1, round(min(width, height * aspect))))
        box = Box((height - sides[0]) // 2, (width - sides[1]) // 2, *sides)
    flip = bool(rng.random() < crop.flip)
    if crop.interpolation == "random":
        return View(box, flip, "bicubic" if rng.random() < 0.5 else "bilinear")
    return View(box, flip, crop.interpolation)


def operations_alone(settings: RandAugment, rng: np.random.Generator) -> tuple:
    """One sample's codes, arguments and bicubic, drawn `layers` numbers per call."""
    chosen = rng.integers(len(settings.operations), size=settings.layers)
    chances = rng.random(settings.layers)
    magnitudes = rng.normal(settings.magnitude, settings.magnitude_std, settings.layers)
    signs, kinds = rng.random(settings.layers), rng.random(settings.layers)
    names = [settings.operations[which] if chance < settings.probability else "NONE"
             for which, chance in zip(chosen, chances)]
    share = {"bilinear": 0.0, "bicubic": 1.0, "random": 0.5}[settings.interpolation]
    return ([Operation[name] for name in names],
            [argument_alone(settings, name, min(max(magnitude, 0.0), 10.0), -1 if sign < 0.5 else 1)
             for name, magnitude, sign in zip(names, magnitudes, signs)], kinds < share)


def erasing_alone(erasing: Erasing, rng: np.random.Generator, height: int, width: int) -> tuple:
    if rng.random() >= erasing.probability:
        return NOTHING, 0
    noise_key = int(rng.integers(2**63))
    for _ in range(10):
        box_height, box_width = sides_alone(rng, height * width, erasing.area, erasing.ratio)
        if 0 < box_height < height and 0 < box_width < width:
            return Box(int(rng.integers(height - box_height, endpoint=True)),
                       int(rng.integers(width - box_width, endpoint=True)),
                       box_height, box_width), noise_key
    return NOTHING, noise_key


SHIFT = dict(scale=(1.0, 1.0), ratio=(1.0, 1.0))
SETTINGS = {                                 # crop, RandAugment, erasing
    "DeiT": (CropAndFlip(), RandAugment(), Erasing()),
    "random interpolation": (CropAndFlip(interpolation="random"),
                             RandAugment(interpolation="random"), Erasing(probability=0.6)),
    "pad and shift": (CropAndFlip(**SHIFT, padding=4), RandAugment(), Erasing(probability=0.0)),
    "no shift, one operation": (CropAndFlip(**SHIFT, flip=0.0),
                                RandAugment(layers=1, operations=("Rotate",)),
                                Erasing(area=(0.1, 0.1), ratio=(1.0, 1.0))),
    "no operations": (CropAndFlip(scale=(0.05, 1.0), padding=2), RandAugment(layers=0), Erasing()),
    "extreme ratios": (CropAndFlip(ratio=(1e-3, 1e3), scale=(1e-6, 1.0)),
                       RandAugment(layers=3, magnitude=5.0, magnitude_std=30.0),
                       Erasing(probability=1.0, area=(1e-6, 1.0), ratio=(1e-3, 1e3))),
    "nothing fits": (CropAndFlip(scale=(2.0, 2.0), interpolation="random"),
                     RandAugment(probability=1.0, magnitude_std=0.0, posterize_bits=7,
                                 solarize_levels=131, solarize_add_levels=250, enhance_factor=1.7),
                     Erasing(probability=1.0, area=(2.0, 2.0))),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_whole_batches_draw_what_a_generator_of_its_own_gives_each_sample(name):
    crop, rand_augment, erasing = SETTINGS[name]
    size, seed, count = (HEIGHT, WIDTH), 2**63 - 25, 14_303      # of seven settings: 10^5 keys
    draws = SampleDraws(seed, size, crop, rand_augment, erasing)
    keys = [SampleKey(count % 11, 2**40 + number, number % 3) for number in range(count)]
    sizes = [(31 + number % 97, 37 + number % 89) for number in range(count)]
    own = [{stream: keyed_generator(seed, stream, *key) for stream in
            (Stream.CROP_AND_FLIP, Stream.RAND_AUGMENT, Stream.ERASE)} for key in keys]

    assert list(draws.views(keys, sizes)) == [
        view_alone(crop, generators[Stream.CROP_AND_FLIP], *each)
        for generators, each in zip(own, sizes)]
    together = draws.batch_for_device(keys)
    *operations, boxes, noise_keys = together
    alone = [operations_alone(rand_augment, generators[Stream.RAND_AUGMENT]) for generators in own]
    for ours, theirs in zip(operations, zip(*alone), strict=True):
        assert np.array_equal(ours, np.array(theirs).reshape(ours.shape))
    alone = [erasing_alone(erasing, generators[Stream.ERASE], *size) for generators in own]
    assert [(Box(*box), key) for box, key in zip(boxes.tolist(), noise_keys.tolist())] == alone
    for number in (0, 1, count - 1):
        assert equal(draws.for_device(keys[number]), [part[number] for part in together])
        assert draws.view(keys[number], *sizes[number]) == view_alone(
            crop, keyed_generator(seed, Stream.CROP_AND_FLIP, *keys[number]), *sizes[number])


# Each part's shape for L layers, without the batch, and its type.
PARTS = [(lambda layers: (layers,), np.int64), (lambda layers: (layers,), np.float64),
         (lambda layers: (layers,), np.bool_), (lambda layers: (4,), np.int64),
         (lambda layers: (), np.int64)]


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
@pytest.mark.parametrize("operations", [ALL_OPERATIONS, ("Posterize", "Solarize")])
def test_draws_have_the_promised_shapes_and_types(layers, operations):
    settings = RandAugment(layers=layers, operations=operations, probability=1.0)
    samples = [SampleDraws(0, (29, 31), rand_augment=settings, erasing=Erasing(probability=index % 2)
                           ).for_device(SampleKey(0, index)) for index in range(7)]
    batch = stack_draws(samples)
    for draws, leading in ((samples[0], ()), (samples[1], ()), (batch, (7,))):
        for part, (shape, dtype) in zip(draws, PARTS, strict=True):
            assert isinstance(part, np.ndarray)
            assert part.shape == leading + shape(layers) and part.dtype == dtype
    assert equal(samples[3], Draws(*(part[3] for part in batch)))


@pytest.mark.parametrize("index, repeat, view, operations, arguments, bicubic, box, noise_key", [
    (0, 0, View(Box(1, 3, 95, 91), False, "bilinear"),
     [7, 9], [101.0, 0.16369400438478965], [False, True],
     [114, 99, 74, 114], 7041120329487523506),
    (1, 2, View(Box(20, 11, 62, 65), True, "bicubic"),
     [5, 9], [1.0, 0.26311644389023003], [True, True],
     [100, 67, 114, 135], 3316390439248388076),
    (15, 0, View(Box(2, 16, 62, 67), False, "bicubic"),
     [11, 4], [1.8109339311982113, -25.664239556477018], [True, True],
     [0, 0, 0, 0], 0),
    (27, 0, View(Box(25, 39, 64, 58), True, "bilinear"),
     [4, 12], [24.567469344355093, 0.28526668146578593], [False, True],
     [19, 27, 203, 79], 1612671798582134655),
    (43, 0, View(Box(15, 10, 80, 75), False, "bicubic"),
     [14, 9], [0.41261498588970674, 0.1], [True, True],
     [40, 121, 75, 93], 6178297456060555945),
    (1281166, 0, View(Box(9, 13, 72, 87), False, "bilinear"),
     [7, 3], [99.0, 0.0], [False, True],
     [38, 27, 85, 39], 6906525344937196559)])
def test_the_draws_of_seed_0_are_those_of_runs_on_disk(index, repeat, view, operations, arguments,
                                                       bicubic, box, noise_key):
    key = SampleKey(0, index, repeat)
    sample = SampleDraws(0, (HEIGHT, WIDTH), CropAndFlip(interpolation="random"),
                         RandAugment(probability=0.9, interpolation="random"),
                         Erasing(probability=0.9))
    assert sample.view(key, 101, 103) == view
    draws = sample.for_device(key)
    assert draws.operations.tolist() == operations
    # Compilers may round a product and a sum once or twice.
    assert draws.arguments == pytest.approx(np.array(arguments), rel=1e-12)
    assert draws.bicubic.tolist() == bicubic
    assert draws.erase_boxes.tolist() == box and draws.noise_keys == noise_key
