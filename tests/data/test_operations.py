"""Operations on batches equal Pillow's, image by image: RandAugment's, and all of 3-Augment."""

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from deit import RAND_AUGMENT, THREE_AUGMENT, augmented, noisy_batch, random_operations
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor
from torchvision.transforms import Grayscale, functional as of_torchvision

from vitinit.data import rand_augment
from vitinit.data.images import from_pillow
from vitinit.data.rand_augment import ALL_OPERATIONS, Operation

FILL = RAND_AUGMENT.fill
GEOMETRIC = ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY")
PLAIN = tuple(name for name in ALL_OPERATIONS if name not in GEOMETRIC)
RESAMPLING = {False: Image.Resampling.BILINEAR, True: Image.Resampling.BICUBIC}


@functools.cache
def photograph(height: int, width: int) -> Image.Image:
    """The photograph of Grace Hopper that matplotlib contains."""
    path = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    with Image.open(path) as image:
        return image.convert("RGB").resize((width, height))


def images_of_all_kinds(rng: np.random.Generator) -> Iterator[Image.Image]:
    """Photographs, noise with many levels and with few, one level, and a ramp, of random sizes."""
    for size in [*rng.integers(2, 83, (2, 2)), (1, 1), (1, 13), (2, 7), (3, 3)]:
        yield photograph(*map(int, size))
        low, high = sorted(rng.integers(0, 256, 2))
        yield Image.fromarray(rng.integers(low, high, (*size, 3), np.uint8, endpoint=True))
    for level in (0, 83, 255):
        yield Image.fromarray(np.full((19, 29, 3), level, np.uint8))
    # 490 of 509 pixels are below the lightest: a step of 1 and a large remainder in Equalize.
    ramp = (np.arange(509) // 2).clip(max=245).astype(np.uint8)
    yield Image.fromarray(np.tile(ramp[:, None], (1, 1, 3)))


def with_pillow(
    image: Image.Image,
    operation: Operation,
    argument: float,
    bicubic: bool = True,
    fill: tuple[int, int, int] = FILL,
) -> Image.Image:
    """Apply one operation by the calls of Pillow that AutoAugment's and timm's code make.
    argument: factor, angle, threshold or share of the side. fill: colour of pixels from outside.
    Posterising to 0 bits, which Pillow refuses, gives black."""
    name, level = operation.name, int(argument)
    if name in ("Color", "Contrast", "Brightness", "Sharpness"):
        return getattr(ImageEnhance, name)(image).enhance(argument)
    if name in ("AutoContrast", "Equalize", "Invert"):
        return getattr(ImageOps, name.lower())(image)
    if name in ("Posterize", "Solarize"):
        black = name == "Posterize" and level == 0
        return (
            Image.new("RGB", image.size) if black else getattr(ImageOps, name.lower())(image, level)
        )
    if name == "SolarizeAdd":
        return image.point([min(255, own + level) if own < 128 else own for own in range(256)] * 3)
    if name == "GaussianBlur":
        return image.filter(ImageFilter.GaussianBlur(argument))
    if name == "Rotate":
        return image.rotate(argument, RESAMPLING[bicubic], fillcolor=fill)
    matrix = {
        "ShearX": (1, argument, 0, 0, 1, 0),
        "ShearY": (1, 0, 0, argument, 1, 0),
        "TranslateX": (1, 0, argument * image.width, 0, 1, 0),
        "TranslateY": (1, 0, 0, 0, 1, argument * image.height),
    }.get(name)
    return (
        image.transform(
            image.size, Image.Transform.AFFINE, matrix, RESAMPLING[bicubic], fillcolor=fill
        )
        if matrix
        else image
    )  # "NONE"


def both_ways(
    image: Image.Image,
    name: str,
    arguments: np.ndarray,
    bicubic: bool = True,
    fill: tuple[int, int, int] = FILL,
) -> tuple[Tensor, Tensor]:
    """One image per argument, by ours and by Pillow, (n, 3, H, W) each."""
    batch = from_pillow(image).expand(len(arguments), -1, -1, -1)
    drawn = np.array([[(Operation[name], argument, bicubic)] for argument in arguments])
    ours = augmented(batch, drawn, fill)
    assert torch.equal(augmented(batch, drawn, fill, few_launches=True), ours)
    return ours, torch.stack(
        [
            from_pillow(with_pillow(image, Operation[name], float(argument), bicubic, fill))
            for argument in arguments
        ]
    )


def arguments_of(name: str, rng: np.random.Generator, count: int = 7) -> np.ndarray:
    """The arguments at random magnitudes and signs, and at the least and largest magnitude."""
    magnitudes = np.concatenate([rng.uniform(0, 10, count), [0.0, 10.0, 10.0]])
    signs = np.concatenate([rng.choice([-1.0, 1.0], count), [1.0, 1.0, -1.0]])
    return RAND_AUGMENT.arguments(np.full(len(signs), Operation[name]), magnitudes, signs)


@pytest.mark.parametrize("name", [*PLAIN, "GaussianBlur"])
def test_plain_operations_equal_pillows_to_the_bit(name, held_against):
    rng = np.random.default_rng(Operation[name])
    extremes = {
        "Posterize": range(9),
        "Solarize": (0, 1, 127, 128, 255, 256),
        "SolarizeAdd": (0, 1, 127, 128),
        "Brightness": (0.0, 1.0, 2.0),
        # From √2 on a box has more than a whole pixel, and from 2.44 on more than two.
        "GaussianBlur": (0.1, 1.4142, 1.4143, 2.0, 2.4, *rng.uniform(0.1, 2.0, 11)),
    }.get(name, ())
    levels = Image.fromarray(np.arange(3 * 256, dtype=np.uint8).reshape(3, 256).T[None].copy())
    for image in (levels, *images_of_all_kinds(rng)):
        ours, pillows = both_ways(image, name, np.array([*extremes, *arguments_of(name, rng)]))
        assert torch.equal(ours, pillows)
        held_against(ours, pillows, cases=len(ours))


@pytest.mark.parametrize("bicubic", [False, True])
@pytest.mark.parametrize("name", GEOMETRIC)
def test_geometric_operations_equal_pillows_up_to_rounding(name, bicubic, held_against):
    # Pillow interpolates in float64, ours in float32; both truncate to integers.
    rng = np.random.default_rng(Operation[name])
    for image in images_of_all_kinds(rng):
        arguments = arguments_of(name, rng, 3)
        if name.startswith("Translate"):  # by whole pixels except for the last bits
            side = image.size[name == "TranslateY"]
            nearly = [np.nextafter(-2 / side, 1), np.nextafter(1 / side, 0)]
            arguments = np.append(arguments, nearly)
        ours, pillows = both_ways(image, name, arguments, bicubic)
        off = (ours.int() - pillows.int()).abs()
        assert off.max() <= 1
        held_against(ours, pillows, cases=len(ours), within=1)
        if min(image.size) > 10 and len(image.getcolors(1 << 20)) > 500:
            assert off.float().mean() < 2e-2
        # Pixels come from outside where they do in Pillow: fills of two colours show which.
        dark, light = (
            both_ways(image, name, arguments, bicubic, fill)
            for fill in ((0, 1, 2), (253, 254, 255))
        )
        for one, two in zip(dark, light):
            outside = (one != two).any(1, keepdim=True).expand_as(one)
            assert (one[outside] <= 2).all() and (two[outside] >= 253).all()
        assert torch.equal(dark[0] != light[0], dark[1] != light[1])


@pytest.mark.parametrize(
    "name, size, arguments",
    [
        ("TranslateX", (11, 13), [-1.5 / 13, 1.5 / 13]),
        ("TranslateY", (11, 13), [-1.5 / 11, 1.5 / 11]),
        # sin 30° is 1/2: on the middle row, the pixel `height` columns from the centre comes from the
        # very edge. Pillow rounds sines and cosines to 15 decimals, so that it is 1/2 there, too.
        ("Rotate", (1, 13), [-30.0, 30.0]),
        ("Rotate", (3, 17), [-30.0, 30.0]),
        ("Rotate", (17, 3), [-30.0, 30.0]),
    ],
)
def test_a_centre_moved_onto_the_very_edge_is_in_or_out_as_in_pillow(name, size, arguments):
    for bicubic in (False, True):
        dark, light = (
            both_ways(photograph(*size), name, np.array(arguments), bicubic, fill)
            for fill in ((0, 1, 2), (253, 254, 255))
        )
        outside = [(one != two).any(1) for one, two in zip(dark, light)]
        assert torch.equal(*outside) and outside[0].any() and not outside[0].all()


def test_a_whole_3_augment_is_the_calls_that_deit_iii_makes(held_against):
    """As its augment.py, by torchvision and Pillow, with what is drawn here."""
    jitters = {
        Operation.Brightness: of_torchvision.adjust_brightness,
        Operation.Contrast: of_torchvision.adjust_contrast,
        Operation.Color: of_torchvision.adjust_saturation,
    }
    rng = np.random.default_rng(5)
    for image in images_of_all_kinds(rng):
        drawn = THREE_AUGMENT.draw([rng] * 13, 13)
        ours = augmented(from_pillow(image).expand(13, -1, -1, -1), drawn)
        for found, operations in zip(ours, drawn[..., :2].tolist()):
            code, argument = operations[0]
            theirs = {
                Operation.Color: Grayscale(3),
                Operation.Solarize: ImageOps.solarize,
                Operation.GaussianBlur: lambda image: image.filter(
                    ImageFilter.GaussianBlur(argument)
                ),
            }[code](image)
            for code, factor in operations[1:]:
                theirs = jitters[code](theirs, factor)
            assert torch.equal(found, from_pillow(theirs))
            held_against(found, from_pillow(theirs))


EVERY = replace(RAND_AUGMENT, layers=3, probability=0.9, interpolation="random")


@pytest.mark.parametrize("height, width, extreme", [(29, 23, False), (1, 3, False), (9, 11, True)])
def test_an_image_has_the_same_bits_in_any_batch_or_parts(monkeypatch, height, width, extreme):
    settings = (
        replace(
            EVERY,
            magnitude_std=100.0,
            rotate_degrees=360.0,
            shear_factor=100.0,
            translate_share=100.0,
            enhance_factor=100.0,
        )
        if extreme
        else EVERY
    )
    images, drawn = noisy_batch(61, height, width), random_operations(61, settings)
    further = THREE_AUGMENT.draw([np.random.default_rng(0)] * 61, 61)
    drawn = np.concatenate([drawn, further], 1)
    assert set(drawn[..., 0].flat) == set(Operation)  # all of them, and none
    together = augmented(images, drawn)
    assert torch.equal(augmented(images, drawn[:, :0]), images)  # no layers
    for few_launches in (False, True):
        for number in range(61):
            alone = augmented(
                images[number : number + 1], drawn[number : number + 1], few_launches=few_launches
            )
            assert torch.equal(together[number], alone[0])
        for most in (0, 3 * height * width, 2**40):
            monkeypatch.setattr(rand_augment, "CPU_CHUNK", most)
            assert torch.equal(augmented(images, drawn, few_launches=few_launches), together)


def test_the_bits_are_those_of_earlier_runs():
    images = noisy_batch(211, 31, 37)
    found = augmented(images, random_operations(211, EVERY))
    assert hashlib.sha256(found.numpy().tobytes()).hexdigest()[:16] == "43e054241f1a0af1"
