"""Decoding equals Pillow; resizing, cropping and the evaluation view equal their references."""

from __future__ import annotations

import importlib.util
import io
import os
import signal
import struct
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms import InterpolationMode, v2

from broken_files import SIZES, broken_files, encoded, noise, png_of_16_bits, valid_files
from vitinit.data import images
from vitinit.data.images import (Box, DataError, crop, crop_and_flip, decode_bytes, decode_image,
                                 from_pillow, resize_and_centre_crop)

CIFAR10 = Path(__file__).parent / "cifar10"         # 50 JPEG files
PILLOWS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
TORCHVISIONS = {"bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}


def planes(image: Image.Image) -> np.ndarray:
    """Pillow's own RGB, turned upright by Pillow, as (3, H, W)."""
    return np.asarray(ImageOps.exif_transpose(image).convert("RGB")).transpose(2, 0, 1)


RGB = noise(29, 43)
FRAMES = {"save_all": True, "append_images": [noise(29, 43, seed=1)]}
TURNED = Image.Exif()
TURNED[0x0112] = 6                                           # orientation: a quarter turn

FILES = valid_files(29, 43) | {
    "coarse.jpeg": encoded(RGB, "JPEG", quality=37, subsampling=2),
    "two.jpg": encoded(RGB, "MPO", **FRAMES),
    "animated.gif": encoded(RGB.quantize(61), "GIF", **FRAMES),
    "animated.webp": encoded(RGB, "WEBP", lossless=True, **FRAMES),
    "png_inside.jpg": encoded(RGB, "PNG"),
    "grey_alpha.png": encoded(Image.merge("LA", RGB.split()[:2]), "PNG"),
}


@pytest.fixture(params=["torchvision's decoder", "Pillow's decoder"])
def jpeg_decoder(request, monkeypatch) -> str:
    """Which of the two decodes JPEGs; Pillow's does it where torchvision's is gone."""
    if request.param == "Pillow's decoder":
        monkeypatch.setattr(images, "decode_jpeg", None)
    return request.param


def test_a_decoded_file_equals_pillows_rgb(tmp_path, jpeg_decoder):
    """Also the first of several frames, and of several images in a JPEG."""
    for files in (FILES, *(valid_files(*size) for size in SIZES)):
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
            image = decode_image(str(tmp_path / name))
            assert image.dtype == torch.uint8
            assert image.permute(1, 2, 0).is_contiguous(), name      # channels-last in memory
            with Image.open(tmp_path / name) as reference:
                if "grey_16" not in name:                            # which Pillow's convert clips
                    assert np.array_equal(image.numpy(), planes(reference)), name
    assert Image.open(io.BytesIO(FILES["two.jpg"])).n_frames == 2


# As Pillow does with colours: every level stands for 256 values, and values that were converted
# from 8
# bits (v · 257) come back.
def test_of_16_bits_the_higher_byte_is_kept(tmp_path):
    values = np.random.default_rng(3).integers(0, 2**16, (29, 43, 3))
    values[0, :4, 0] = (0, 255, 256, 65535)
    values[1] = 257 * (values[1] // 257)
    assert np.array_equal(values[1] >> 8, values[1] // 257)
    grey = values[..., 0].astype(np.uint16)
    (tmp_path / "rgb.png").write_bytes(png_of_16_bits(values))
    (tmp_path / "grey.png").write_bytes(png_of_16_bits(grey))
    for name in ("grey.tiff", "grey.pgm"):
        Image.fromarray(grey).save(tmp_path / name)
    for name in ("rgb.png", "grey.png", "grey.tiff", "grey.pgm"):
        expected = (values if name == "rgb.png" else grey[..., None].repeat(3, axis=2)) >> 8
        image = decode_image(str(tmp_path / name))
        assert image.dtype == torch.uint8
        assert np.array_equal(image.numpy(), expected.transpose(2, 0, 1)), name


def bomb(height: int, width: int) -> bytes:
    """A small JPEG whose header promises height × width pixels."""
    content = encoded(noise(13, 17), "JPEG")
    place = content.index(b"\xff\xc0") + 5
    return content[:place] + struct.pack(">HH", height, width) + content[place + 4:]


def refusal(path) -> str:
    """The one line with which the file at `path` is refused."""
    with pytest.raises(DataError) as error:
        decode_image(str(path))
    line = str(error.value)
    assert line.isprintable()
    return line


def test_a_truncated_file_is_refused_in_one_line(tmp_path, jpeg_decoder):
    for name in ("rgb.jpg", "progressive.jpg", "rgb.png", "still.gif", "lossless.webp", "rgb.bmp",
                 "rgb.tiff", "rgb.ppm"):
        content = FILES[name][:int(0.3 * len(FILES[name]))]
        (tmp_path / name).write_bytes(content)
        assert refusal(tmp_path / name).startswith(
            f"{tmp_path / name}: not a readable image, {len(content)} bytes")


@pytest.mark.parametrize("content, reason", [
    (b"", "(empty)"), (b"a line of text\n", "(none of JPEG, "), (b"\xff\xd8\xff", ""),
    (bomb(20_011, 20_021), "(Image size (400640231 pixels) exceeds limit"),
    (bytes(3) + b"\x18ftypmif1" + bytes(99), f"({images.HEIF_REMEDY})")])
def test_a_file_that_is_no_image_is_refused_in_one_line(tmp_path, content, reason):
    (tmp_path / "a\n\x1b[31mred.jpg").write_bytes(content)
    assert refusal(tmp_path / "a\n\x1b[31mred.jpg").startswith(
        rf"{tmp_path}/a\n\x1b[31mred.jpg: not a readable image, {len(content)} bytes {reason}")


@pytest.mark.parametrize("name, reason", [
    ("missing.jpg", "No such file"), ("", "Is a directory"), (300 * "x", "File name too long"),
    ("a\0b.jpg", "embedded null byte")])
def test_a_file_that_cannot_be_read_is_refused_in_one_line(tmp_path, name, reason):
    assert f": cannot be read: {reason}" in refusal(tmp_path / name)


# Measured on an AVX-512 processor: at most 1 grey level; of all values, this share differs at all.
@pytest.mark.parametrize("interpolation", PILLOWS)
@pytest.mark.parametrize("box, size, share", [
    (Box(0, 0, 211, 307), (223, 401), 0.006), (Box(17, 23, 131, 149), (71, 89), 0.005),
    (Box(-19, -11, 211, 307), (71, 89), 0.005)])
def test_crop_and_flip_is_within_one_grey_level_of_pillows_steps(interpolation, box, size, share):
    image = noise(211, 307)
    top, left, height, width = box
    expected = image.crop((left, top, left + width, top + height))       # black outside, too
    expected = expected.resize(size[::-1], PILLOWS[interpolation])
    for flip in (False, True):
        ours = crop_and_flip(from_pillow(image), box, flip, size, interpolation).numpy()
        difference = abs(ours.astype(int) - planes(expected))
        assert ours.dtype == np.uint8 and ours.shape == (3, *size)
        assert difference.max() <= 1 and (difference > 0).mean() <= share
        expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def test_crop_equals_slicing_the_zero_padded_image():
    """Boxes that lie within the image, reach beyond it, contain it, or lie outside."""
    rng = np.random.default_rng(0)
    padded = np.pad(planes(RGB), ((0, 0), (101, 101), (101, 101)))
    for _ in range(503):
        top, left = rng.integers(-47, 47, 2)
        height, width = rng.integers(1, 101, 2) // rng.integers(1, 7) + 1
        box = Box(*map(int, (top, left, height, width)))
        expected = padded[:, top + 101:top + 101 + height, left + 101:left + 101 + width]
        assert np.array_equal(crop(from_pillow(RGB), box).numpy(), expected), box


@pytest.mark.parametrize("interpolation", TORCHVISIONS)
@pytest.mark.parametrize("height, width", [(307, 401), (101, 103), (389, 256)])
def test_the_evaluation_view_equals_torchvisions_to_one_grey_level(interpolation, height, width):
    image = from_pillow(noise(height, width))
    reference = v2.Compose([v2.Resize(256, TORCHVISIONS[interpolation], antialias=True),
                            v2.CenterCrop(224)])
    ours = resize_and_centre_crop(image, (224, 224), 0.875, interpolation)
    expected = reference(image)
    assert ours.shape == expected.shape == (3, 224, 224)
    # Equal bit for bit with torch 2.15; an older torchvision used a kernel that rounds differently.
    assert (ours.int() - expected.int()).abs().max() <= 1


# A rounding error must not make an integer one less: 135 / 0.54 gives 249.99999999999997.
@pytest.mark.parametrize("size, crop_pct, shorter", [
    (224, 0.875, 256), (384, 1.0, 384), (32, 0.875, 36), (63, 0.7, 90), (135, 0.54, 250)])
def test_an_image_already_at_the_evaluation_size_is_only_cropped(size, crop_pct, shorter):
    longer = shorter + 10
    image = from_pillow(noise(shorter, longer))
    top, left = round((shorter - size) / 2), round((longer - size) / 2)
    view = resize_and_centre_crop(image, (size, size), crop_pct, "bilinear")
    assert torch.equal(view, image[:, top:top + size, left:left + size])


# The intermediate sizes, computed by hand: 97 / .875 = 110.9, 131 / .875 = 149.7. For 211 × 307 the
# height decides (110 / 211 > 149 / 307) and the width is 110 · 307 / 211 = 160.05.
@pytest.mark.parametrize("height, width, between", [(211, 307, (110, 160)), (307, 211, (216, 149)),
                                                    (89, 97, (136, 149))])
def test_a_rectangular_evaluation_view_covers_its_target(height, width, between):
    image = from_pillow(noise(height, width))
    whole = v2.functional.resize(image, between, InterpolationMode.BICUBIC, antialias=True)
    expected = v2.functional.center_crop(whole, (97, 131))
    assert torch.equal(resize_and_centre_crop(image, (97, 131), 0.875, "bicubic"), expected)


def test_32_bit_values_are_refused_whatever_they_are(tmp_path):
    for kind in (np.int32, np.float32):
        Image.fromarray(np.array([[0, 100, 255]], kind)).save(tmp_path / "x.tif")
        assert refusal(tmp_path / "x.tif").endswith(
            "(an image of 32-bit values, whose black and white are not known; expected 8 or 16 "
            "bits per channel)")


# ---------------------------------------------------------------------------------------------
# Orientation, and the two decoders of JPEG
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "TIFF"])
def test_an_image_is_turned_as_its_exif_data_say(jpeg_decoder, file_format):
    exif = Image.Exif()
    for orientation in range(10):                    # 0 and 9 are none
        exif[0x0112] = orientation
        content = encoded(RGB, file_format, exif=exif)
        with Image.open(io.BytesIO(content)) as one, Image.open(io.BytesIO(content)) as again:
            upright = planes(one)
            lying = np.asarray(again.convert("RGB")).transpose(2, 0, 1)
        assert np.array_equal(lying, upright) == (file_format == "TIFF" or orientation in (0, 1, 9))
        image = decode_bytes(content, "x")
        assert np.array_equal(image.numpy(), upright) and image.permute(1, 2, 0).is_contiguous()
        stored = decode_bytes(content, "x", apply_exif_orientation=False)
        assert np.array_equal(stored.numpy(), lying)
        for loaded in (False, True):                 # a Pillow image may be loaded already, or not
            with Image.open(io.BytesIO(content)) as given:
                if loaded:
                    given.load()
                assert np.array_equal(from_pillow(given).numpy(), upright)
                assert np.array_equal(from_pillow(ImageOps.exif_transpose(given)).numpy(), upright)


def test_damaged_exif_data_turn_nothing(jpeg_decoder):
    exif = TURNED.tobytes()
    for damaged in (exif[:9], exif[:-9] + bytes(9), exif.replace(b"\6", b"\xee"),
                    exif[:10] + b"\xff\xff\xff\xff" + exif[14:]):
        for file_format in ("JPEG", "PNG"):
            content = encoded(RGB, file_format, exif=damaged)
            with warnings.catch_warnings(action="error"):    # nor are they warned of
                image = decode_bytes(content, "x")
            assert torch.equal(image, decode_bytes(content, "x", apply_exif_orientation=False))


def test_jpegs_have_the_same_bits_without_torchvisions_decoder(monkeypatch):
    """As a later torchvision may leave it, or where it refuses a file."""
    contents = [content for content in FILES.values() if content.startswith(b"\xff\xd8\xff")]
    contents += [path.read_bytes() for path in sorted(CIFAR10.glob("*/*.jpg"))]
    assert len(contents) > 50
    ours = [decode_bytes(content, "x") for content in contents]

    def refuses(*_, **__):
        raise RuntimeError("no")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torchvision.io", None)
        spec = importlib.util.spec_from_file_location("vitinit.data.others", images.__file__)
        others = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(others)
    assert others.decode_jpeg is None
    monkeypatch.setattr(images, "decode_jpeg", refuses)
    for content, image in zip(contents, ours):
        for other in (others, images):
            assert torch.equal(other.decode_bytes(content, "x"), image)


# ---------------------------------------------------------------------------------------------
# Damaged, dangerous and strange files
# ---------------------------------------------------------------------------------------------


def test_a_broken_file_is_decoded_or_refused_in_one_line(tmp_path):
    """A crash ends the tests, and so does a file that takes a minute; a seed breaks the same files.

    VITINIT_CASES: a longer run, of so many files.
    """
    decoded = refused = 0
    count = int(os.environ.get("VITINIT_CASES", 4 * len(SIZES) * len(valid_files(1, 1))))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for name, content in broken_files(count, seed=1):
            path = str(tmp_path / name)
            Path(path).write_bytes(content)
            signal.alarm(60)
            try:
                decode_image(path)
                decoded += 1
            except DataError as error:
                line = str(error)
                assert line.startswith(f"{path}: ") and line.isprintable()
                assert len(line) - len(path) <= 200
                refused += 1
            finally:
                signal.alarm(0)
            os.remove(path)
    assert min(decoded, refused) > count // 6 and not heard
    assert list(broken_files(60)) == list(broken_files(60)) != list(broken_files(60, seed=1))
