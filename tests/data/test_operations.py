"""RandAugment on batches equals Pillow, image by image and operation by operation."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

import special_operations
from vitinit.data import shapes
from vitinit.data.augment import rand_augment
from vitinit.data.draw import ALL_OPERATIONS, Draws, Operation, RandAugment, stack_draws
from vitinit.data.images import from_pillow
from vitinit.data.operations import (BLENDS, GEOMETRIC, LEVEL_OPERATIONS, affine_matrix, fixed_table,
                                     nearest_of_13th)
from vitinit.data.passes import FEW_LAUNCHES, IN_CACHE, Passes
from vitinit.keys import Stream, keyed_generator

FILL = RandAugment().fill
PLAIN_NAMES = [operation.name for operation in (*LEVEL_OPERATIONS, *BLENDS)]
GEOMETRIC_NAMES = [operation.name for operations in GEOMETRIC.values() for operation in operations]
RESAMPLING = {False: Image.Resampling.BILINEAR, True: Image.Resampling.BICUBIC}
GOLDEN = Path(__file__).parent / "golden"
WAYS = {"as on a GPU": FEW_LAUNCHES, "as on a CPU": IN_CACHE}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, because on images this small a second one waits longer than it works."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


# ---------------------------------------------------------------------------------------------
# Images, and Pillow as the reference
# ---------------------------------------------------------------------------------------------


@functools.cache
def photograph(height: int, width: int) -> Image.Image:
    """The photograph of Grace Hopper that matplotlib contains."""
    path = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    with Image.open(path) as image:
        return image.convert("RGB").resize((width, height))


def uniform(low: int, high: int, height: int, width: int) -> np.ndarray:
    """Noise with levels from `low` to `high`."""
    return np.random.default_rng(0).integers(low, high, (height, width, 3), np.uint8, endpoint=True)


IMAGES = {
    "photograph": photograph(113, 97),
    "small photograph": photograph(13, 17),                  # 221 pixels: no step to equalise by
    **{name: Image.fromarray(pixels) for name, pixels in {
        "noise": uniform(0, 255, 31, 37),
        "faint noise": uniform(101, 107, 29, 23),
        "one level": np.full((19, 29, 3), 83, np.uint8),
        "black": np.zeros((29, 19, 3), np.uint8),
        "white": np.full((23, 19, 3), 255, np.uint8),
        "two levels": np.where(uniform(0, 4, 23, 31) > 3, 211, 59).astype(np.uint8),
        # 490 of 509 pixels are below the lightest: a step of 1 and a large remainder.
        "ramp": np.tile((np.arange(509) // 2).clip(max=245).astype(np.uint8)[:, None], (1, 1, 3)),
        "one row": uniform(0, 255, 1, 13),
        "one column": uniform(0, 255, 11, 1),
        "two rows": uniform(0, 255, 2, 7),
        "3 × 3": uniform(0, 255, 3, 3),
        "2 × 2": uniform(0, 255, 2, 2),
        "1 × 1": uniform(0, 255, 1, 1),
    }.items()},
}


def with_pillow(image: Image.Image, operation: Operation, argument: float, bicubic: bool = True,
                fill: tuple[int, int, int] = FILL) -> Image.Image:
    """Apply one operation by the calls of Pillow that AutoAugment's and timm's code make.

    argument: factor, angle, threshold or share of the side. fill: colour of pixels from outside.
    """
    match operation.name:
        case "NONE":
            return image
        case "AutoContrast":
            return ImageOps.autocontrast(image)
        case "Equalize":
            return ImageOps.equalize(image)
        case "Invert":
            return ImageOps.invert(image)
        case "Posterize" if argument == 0:                   # which Pillow refuses
            return Image.new("RGB", image.size, "black")
        case "Posterize":
            return ImageOps.posterize(image, int(argument))
        case "Solarize":
            return ImageOps.solarize(image, int(argument))
        case "SolarizeAdd":
            table = [min(255, level + int(argument)) if level < 128 else level
                     for level in range(256)]
            return image.point(table * 3)
        case "Color" | "Contrast" | "Brightness" | "Sharpness" as name:
            return getattr(ImageEnhance, name)(image).enhance(argument)
        case "Rotate":
            return image.rotate(argument, RESAMPLING[bicubic], fillcolor=fill)
    matrix = {"ShearX": (1, argument, 0, 0, 1, 0), "ShearY": (1, 0, 0, argument, 1, 0),
              "TranslateX": (1, 0, argument * image.width, 0, 1, 0),
              "TranslateY": (1, 0, 0, 0, 1, argument * image.height)}[operation.name]
    return image.transform(image.size, Image.Transform.AFFINE, matrix, RESAMPLING[bicubic],
                           fillcolor=fill)


def draws_of(*images: list[tuple]) -> Draws:
    """Draws from one list per image, with (operation, argument) or (…, bicubic) for each layer."""
    return stack_draws([
        Draws(np.array([Operation[layer[0]] for layer in layers], dtype=np.int64),
              np.array([layer[1] for layer in layers], dtype=np.float64),
              np.array([layer[2] if len(layer) > 2 else True for layer in layers], dtype=bool),
              np.zeros(4, dtype=np.int64), np.array(0)) for layers in images])


def ours(image: Image.Image, *layers: tuple, fill: tuple[int, int, int] = FILL) -> Tensor:
    """An image (3, H, W) through `layers` of our RandAugment, as a batch of one."""
    return rand_augment(from_pillow(image)[None], draws_of(list(layers)), fill)[0]


def at_each(image: Image.Image, name: str, arguments: Sequence[float], bicubic: bool = True,
            ) -> tuple[Tensor, Tensor]:
    """One image per argument, by ours in one batch and by Pillow: (n, 3, H, W) each."""
    batch = from_pillow(image).expand(len(arguments), -1, -1, -1)
    draws = draws_of(*([(name, argument, bicubic)] for argument in arguments))
    expected = torch.stack([from_pillow(with_pillow(image, Operation[name], argument, bicubic))
                            for argument in arguments])
    return rand_augment(batch, draws, FILL), expected


def arguments_of(name: str, magnitudes: tuple[float, ...]) -> list[float]:
    """The arguments at these magnitudes with both signs, without repetitions."""
    return sorted({RandAugment().argument(Operation[name], magnitude, sign)
                   for magnitude in magnitudes for sign in (-1.0, 1.0)})


def noisy_batch(count: int, height: int, width: int, seed: int = 0) -> Tensor:
    values = np.random.default_rng(seed).integers(0, 256, (count, 3, height, width), np.uint8)
    return torch.from_numpy(values)


def random_draws(count: int, seed: int = 0, **changes) -> Draws:
    """The draws of `count` images, with RandAugment's defaults except for these two and `changes`."""
    settings = RandAugment(**{"probability": 0.9, "interpolation": "random", **changes})
    rng = np.random.default_rng(seed)
    return stack_draws([Draws(*settings.draw(rng), np.zeros(4, dtype=np.int64), np.array(0))
                        for _ in range(count)])


def test_every_operation_is_tested_here():
    assert sorted(PLAIN_NAMES + GEOMETRIC_NAMES) == sorted(ALL_OPERATIONS)


@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_plain_operations_equal_pillows_to_the_bit(name, kind):
    arguments = arguments_of(name, (0.0, 2.3, 5.9, 8.3, 9.0, 10.0))
    found, expected = at_each(IMAGES[kind], name, arguments)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name, arguments", [
    ("Posterize", range(9)), ("Solarize", (0, 1, 127, 128, 255, 256)),
    ("SolarizeAdd", (0, 1, 127, 128)), ("Brightness", (0.0, 0.1, 1.0, 2.0))])
def test_extreme_arguments_equal_pillows_at_every_level(name, arguments):
    levels = Image.fromarray(np.arange(3 * 256, dtype=np.uint8).reshape(3, 256).T[None].copy())
    found, expected = at_each(levels, name, arguments)
    assert torch.equal(found, expected)


def test_of_0_bits_nothing_is_left():
    assert not ours(IMAGES["photograph"], ("Posterize", 0)).any()


@pytest.mark.parametrize("bicubic", [False, True])
@pytest.mark.parametrize("name", GEOMETRIC_NAMES)
@pytest.mark.parametrize("magnitudes, share, decibels", [
    ((0.0, 4.3, 8.3, 9.0, 9.41), 1e-3, 80),
    # Shifts by nearly whole pixels and by round fractions, where many interpolated values are whole
    # numbers but for the last bit.
    ((5.9, 10.0), 1e-2, 65)])
def test_geometric_operations_equal_pillows_up_to_rounding(name, bicubic, magnitudes, share,
                                                           decibels):
    # Pillow interpolates in float64, ours in float32; both truncate to integers.
    arguments = arguments_of(name, magnitudes)
    for found, expected in zip(*at_each(IMAGES["photograph"], name, arguments, bicubic)):
        off = found.int() - expected.int()
        assert off.abs().max() <= 1
        mean_square = off.double().square().mean().item()    # which is also the share that is off
        assert mean_square < share
        assert mean_square == 0 or 10 * math.log10(255**2 / mean_square) > decibels


@pytest.mark.parametrize("kind", [kind for kind in IMAGES if kind != "photograph"])
@pytest.mark.parametrize("name", GEOMETRIC_NAMES)
def test_geometric_operations_equal_pillows_on_extreme_images(name, kind):
    for bicubic in (False, True):
        found, expected = at_each(IMAGES[kind], name, arguments_of(name, (4.3, 9.0)), bicubic)
        assert (found.int() - expected.int()).abs().max() <= 1


def outside(result: Callable[[tuple[int, int, int]], Tensor]) -> Tensor:
    """Which pixels (H, W) come from outside: those that differ between two fill colours."""
    dark, light = (0, 1, 2), (253, 254, 255)
    one, two = result(dark), result(light)
    differs = (one != two).any(0)
    for image, fill in ((one, dark), (two, light)):
        assert (image[:, differs] == torch.tensor(fill)[:, None]).all()
    return differs


def assert_fills_like_pillow(image: Image.Image, name: str, argument: float) -> None:
    for bicubic in (False, True):
        mine = outside(lambda fill: ours(image, (name, argument, bicubic), fill=fill))
        pillows = outside(lambda fill: from_pillow(with_pillow(image, Operation[name], argument,
                                                               bicubic, fill)))
        assert torch.equal(mine, pillows)
        assert mine.any() and not mine.all()


@pytest.mark.parametrize("name", GEOMETRIC_NAMES)
@pytest.mark.parametrize("kind, share", [("photograph", 0.37), ("noise", -0.19),
                                         ("two rows", 0.53)])
def test_the_fill_comes_in_where_it_does_in_pillow(name, kind, share):
    assert_fills_like_pillow(IMAGES[kind], name, share * 89 if name == "Rotate" else share)


@pytest.mark.parametrize("pixels", [-1.5, 1.5])
@pytest.mark.parametrize("name, side", [("TranslateX", 13), ("TranslateY", 11)])
def test_a_centre_shifted_onto_the_very_edge_is_in_or_out_as_in_pillow(name, side, pixels):
    assert pixels / side * side == pixels
    assert_fills_like_pillow(photograph(11, 13), name, pixels / side)


@pytest.mark.parametrize("height, width", [(1, 13), (3, 17), (17, 3)])
@pytest.mark.parametrize("degrees", [-30.0, 30.0])
def test_a_centre_turned_onto_the_very_edge_is_in_or_out_as_in_pillow(height, width, degrees):
    # sin 30° is 1/2: on the middle row, the pixel `height` columns from the centre comes from the
    # very edge. Pillow rounds sines and cosines to 15 decimals, so that it is 1/2 there, too.
    assert_fills_like_pillow(photograph(height, width), "Rotate", degrees)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("name", ALL_OPERATIONS)
def test_passes_equal_each_operation_by_its_own_formula_to_the_bit(name, kind, way):
    image = from_pillow(IMAGES[kind])
    for bicubic in (False, True) if name in GEOMETRIC_NAMES else (True,):
        arguments = arguments_of(name, (0.0, 2.3, 5.9, 8.3, 9.0, 9.41, 10.0))
        images = image.expand(len(arguments), -1, -1, -1)
        draws = draws_of(*([(name, argument, bicubic)] for argument in arguments))
        expected = special_operations.rand_augment(images, draws, FILL)
        assert torch.equal(rand_augment(images, draws, FILL, way), expected)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("height, width", [(29, 23), (1, 3), (2, 2)])
def test_a_batch_of_all_operations_equals_them_one_by_one_to_the_bit(height, width, way):
    images, draws = noisy_batch(211, height, width), random_draws(211, layers=3)
    assert {(code, smooth) for code, smooth in zip(draws.operations.flat, draws.bicubic.flat)} \
        == {(code, smooth) for code in Operation for smooth in (False, True)}
    expected = special_operations.rand_augment(images, draws, FILL)
    assert torch.equal(rand_augment(images, draws, FILL, way), expected)


@pytest.mark.parametrize("name", GEOMETRIC_NAMES)
def test_passes_equal_the_formulas_where_positions_are_nearly_whole_pixels(name):
    # Shifts by whole pixels except for the last bits, in which neighbours in a row differ.
    images, extent = noisy_batch(1, 31, 37), {"TranslateX": 37, "TranslateY": 31}.get(name, 1)
    arguments = [np.nextafter(pixels / extent, towards) for pixels in (-7, -1, 0, 2, 5)
                 for towards in (-np.inf, pixels / extent, np.inf)]
    images = images.expand(len(arguments), -1, -1, -1)
    for bicubic in (False, True):
        draws = draws_of(*([(name, argument, bicubic)] for argument in arguments))
        expected = special_operations.rand_augment(images, draws, FILL)
        for way in WAYS.values():
            assert torch.equal(rand_augment(images, draws, FILL, way), expected)


def test_the_product_for_sharpness_is_a_division_rounded_to_the_nearest():
    sums = torch.arange(13 * 255 + 1, dtype=torch.int16)
    assert torch.equal(nearest_of_13th(sums), (2 * sums.int() + 13) // 26)


def test_an_operation_that_depends_on_the_image_has_no_fixed_table():
    with pytest.raises(ValueError, match="Equalize.* has no fixed table"):
        fixed_table(Operation.Equalize, 0)


def test_a_map_without_an_operation_is_refused():
    with pytest.raises(ValueError, match="Invert.* is not a geometric operation"):
        affine_matrix(Operation.Invert, 0.0, 31, 37)


@pytest.mark.parametrize("layers", [2, 3])
def test_an_image_does_not_depend_on_its_batch_to_the_bit(layers):
    images, draws = noisy_batch(61, 29, 23), random_draws(61, layers=layers)
    assert set(draws.operations.ravel()) == set(Operation)   # all of them, and none
    together = rand_augment(images, draws, FILL)
    for i in range(61):
        alone = rand_augment(images[i:i + 1], Draws(*(part[i:i + 1] for part in draws)), FILL)
        assert torch.equal(together[i], alone[0])


@pytest.mark.parametrize("together", [False, True])
def test_how_many_images_go_through_an_operation_at_once_makes_no_difference(together):
    images, draws = noisy_batch(61, 29, 23), random_draws(61)
    one, three, all_at_once = (rand_augment(images, draws, FILL, Passes(pixels, pixels, together))
                               for pixels in (0, 3 * 29 * 23, 2**40))
    assert torch.equal(one, all_at_once) and torch.equal(three, all_at_once)


def test_a_batch_is_each_image_through_pillow_in_the_order_of_its_draws():
    images = [photograph(41 + 2 * 13, 53).crop((0, top, 53, top + 41)) for top in range(26)]
    draws = random_draws(26, layers=3, operations=PLAIN_NAMES)
    batch = rand_augment(torch.stack([from_pillow(image) for image in images]), draws, FILL)
    for ours, image, codes, arguments in zip(batch, images, draws.operations, draws.arguments):
        for code, argument in zip(codes, arguments):
            image = with_pillow(image, Operation(code), argument) if code else image
        assert torch.equal(ours, from_pillow(image))


@pytest.mark.parametrize("one, two", [
    (("Invert", 0), ("SolarizeAdd", 99)), (("Rotate", 27.0), ("Invert", 0)),
    (("ShearX", 0.27), ("TranslateY", -0.405)), (("Rotate", 27.0), ("ShearX", 0.27))])
def test_the_order_of_two_operations_matters_and_is_that_of_the_draws(one, two):
    image = IMAGES["photograph"]
    results = []
    for layers in ((one, two), (two, one)):
        expected = image
        for name, argument in layers:
            expected = with_pillow(expected, Operation[name], argument)
        results.append(ours(image, *layers))
        # A difference of one level after the first may become two where a bicubic kernel overshoots.
        assert (results[-1].int() - from_pillow(expected).int()).abs().max() <= 2
    assert (results[0].int() - results[1].int()).abs().max() > 40


def test_rand_augment_leaves_its_input_alone():
    images = noisy_batch(61, 11, 13)
    before = images.clone()
    after = rand_augment(images, random_draws(61, probability=1.0), FILL)
    assert torch.equal(images, before) and not torch.equal(after, before)
    assert after.dtype == torch.uint8


@pytest.mark.parametrize("layers", [0, 2])
def test_without_an_operation_images_stay_as_they_are(layers):
    images = noisy_batch(5, 11, 13)
    assert torch.equal(rand_augment(images, random_draws(5, layers=layers, probability=0.0), FILL),
                       noisy_batch(5, 11, 13))


def test_the_images_layout_in_memory_makes_no_difference():
    images, draws = noisy_batch(61, 17, 19), random_draws(61)
    expected = rand_augment(images, draws, FILL)
    channels_last = images.to(memory_format=torch.channels_last)
    assert torch.equal(rand_augment(channels_last, draws, FILL), expected)
    turned = images.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(rand_augment(turned, draws, FILL), expected)


def test_every_operation_gives_the_golden_image():
    # A row of 32×32 tiles: image 0 of shapes' validation split, then each operation in the order
    # of its code, at magnitude 9, positive sign and bicubic. Made once, equal to Pillow's up to one
    # grey level.
    with Image.open(GOLDEN / "operations.png") as sheet:
        original, *expected = from_pillow(sheet.convert("RGB")).int().split(32, dim=2)
    assert len(expected) == 15
    image, _ = shapes.draw_image(keyed_generator(shapes.SEED, Stream.SHAPES, 1, 0))
    assert (torch.from_numpy(image).int() - original).abs().max() <= 1
    draws = draws_of(*([(name, RandAugment().argument(Operation[name], 9.0, 1.0))]
                       for name in ALL_OPERATIONS))
    tiles = rand_augment(original.to(torch.uint8).expand(15, -1, -1, -1), draws, FILL)
    for name, tile, golden in zip(ALL_OPERATIONS, tiles, expected):
        assert (tile.int() - golden).abs().max() <= 1, name
