"""Decoding equals Pillow; resizing, cropping and the evaluation view equal their references."""

from __future__ import annotations

import io
import os
import signal
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.io
from PIL import Image, ImageOps
from torchvision.transforms import InterpolationMode, v2

from broken_files import (SIZES, broken_files, encoded, noise, png_chunk, png_of_16_bits,
                          valid_files)
from vitinit.data import images
from vitinit.data.images import (Box, DataError, crop, crop_and_flip, decode_bytes, decode_image,
                                 from_pillow, resize, resize_and_centre_crop)

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


# As Pillow does with colours: every level stands for 256 values, and values that were converted from 8
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


def refusal(path) -> str:
    """The one line with which the file at `path` is refused."""
    with pytest.raises(DataError) as error:
        decode_image(str(path))
    line = str(error.value)
    assert line.isprintable()
    return line


@pytest.mark.parametrize("kept", [0.1, 0.3])
def test_a_truncated_file_is_refused_in_one_line(tmp_path, jpeg_decoder, kept):
    for name in ("rgb.jpg", "progressive.jpg", "cmyk.jpg", "rgb.png", "palette.png", "still.gif",
                 "animated.gif", "lossless.webp", "animated.webp", "rgb.bmp", "rgb.tiff", "lzw.tif",
                 "rgb.ppm"):
        content = FILES[name][:int(kept * len(FILES[name]))]
        (tmp_path / name).write_bytes(content)
        assert refusal(tmp_path / name).startswith(
            f"{tmp_path / name}: not a readable image, {len(content)} bytes")


@pytest.mark.parametrize("content, reason", [
    (b"", "(empty)"), (b"a line of text\n", "(none of JPEG, "), (b"\xff\xd8\xff", ""),
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
    (Box(0, 0, 211, 307), (97, 131), 0.005), (Box(0, 0, 211, 307), (223, 401), 0.006),
    (Box(0, 0, 211, 307), (13, 503), 0.25), (Box(17, 23, 131, 149), (71, 89), 0.005),
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
@pytest.mark.parametrize("height, width", [(307, 401), (257, 263), (101, 103), (389, 256), (139, 797)])
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


@pytest.mark.parametrize("name, kind", [("x.tif", np.int32), ("x.tiff", np.float32),
                                        ("x.pfm", np.float32)])
def test_32_bit_values_are_refused_whatever_they_are(tmp_path, name, kind):
    for values in ([[0, 100, 255]], [[0, 2**16, 2**31 - 1]]):
        Image.fromarray(np.array(values, kind)).save(tmp_path / name)
        assert refusal(tmp_path / name).endswith(
            "(an image of 32-bit values, whose black and white are not known; expected 8 or 16 bits "
            "per channel)")


# ---------------------------------------------------------------------------------------------
# Orientation, and the two decoders of JPEG
# ---------------------------------------------------------------------------------------------


ORIENTED = {"JPEG": {}, "PNG": {}, "WEBP": {"lossless": True}, "TIFF": {}}


def oriented(file_format: str, orientation: int) -> bytes:
    """A file of 29 × 43 stored pixels that state an orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(RGB, file_format, exif=exif, **ORIENTED[file_format])


@pytest.mark.parametrize("file_format", ORIENTED)
def test_an_image_is_turned_as_its_exif_data_say(jpeg_decoder, file_format):
    for orientation in range(10):                    # 0 and 9 are none
        content = oriented(file_format, orientation)
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


def test_an_orientation_in_xmp_data_counts_as_in_pillow(jpeg_decoder):
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="8"/></x:xmpmeta>'
    content = encoded(RGB, "JPEG", xmp=xmp)
    with Image.open(io.BytesIO(content)) as stored:
        assert np.array_equal(decode_bytes(content, "x").numpy(), planes(stored))
        assert stored.size == (43, 29) and planes(stored).shape == (3, 43, 29)


def test_damaged_exif_data_turn_nothing(jpeg_decoder):
    exif = TURNED.tobytes()
    for damaged in (exif[:9], exif[:6] + b"XX" + exif[8:], exif[:-9] + bytes(9),
                    exif[:10] + b"\xff\xff\xff\xff" + exif[14:], exif.replace(b"\6", b"\xee")):
        for file_format, options in (("JPEG", {}), ("PNG", {}), ("WEBP", {"lossless": True})):
            content = encoded(RGB, file_format, exif=damaged, **options)
            with warnings.catch_warnings(action="error"):    # nor are they warned of
                image = decode_bytes(content, "x")
            assert torch.equal(image, decode_bytes(content, "x", apply_exif_orientation=False))


def test_both_decoders_of_jpeg_give_the_same_bits(monkeypatch):
    contents = {name: content for name, content in FILES.items()
                if content.startswith(b"\xff\xd8\xff")}
    contents |= {str(path): path.read_bytes() for path in sorted(CIFAR10.glob("*/*.jpg"))}
    assert len(contents) > 50
    ours = [decode_bytes(content, name) for name, content in contents.items()]
    monkeypatch.setattr(images, "decode_jpeg", None)
    for (name, content), image in zip(contents.items(), ours):
        assert torch.equal(decode_bytes(content, name), image), name


def test_the_package_needs_no_decoder_of_torchvision():
    """As a later torchvision may leave it: without decoders, or their module. Nothing is warned."""
    photograph = str(next(CIFAR10.glob("*/*.jpg")))
    program = ("import sys, warnings; warnings.simplefilter('error'); import torchvision.io; {}"
               "from vitinit.data import images;"
               f"print(images.decode_jpeg, images.decode_image({photograph!r}).sum())")
    found = [subprocess.run([sys.executable, "-c", program.format(change)], text=True,
                            capture_output=True, check=True)
             for change in ("del torchvision.io.decode_jpeg;",
                            "sys.modules['torchvision.io'] = None;", "")]
    assert all(result.stderr == "" for result in found)
    assert found[0].stdout == found[1].stdout and found[0].stdout.startswith("None ")
    assert found[0].stdout.split()[-1] == found[2].stdout.split()[-1]
    assert found[2].stdout.startswith("<function") == hasattr(torchvision.io, "decode_jpeg")


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


def bomb(file_format: str, height: int, width: int) -> bytes:
    """A small file whose header promises height × width pixels."""
    if file_format == "PNG":
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        return (b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header)
                + png_chunk(b"IDAT", zlib.compress(bytes(1000))) + png_chunk(b"IEND", b""))
    content = encoded(noise(13, 17), "JPEG")
    place = content.index(b"\xff\xc0") + 5
    return content[:place] + struct.pack(">HH", height, width) + content[place + 4:]


@pytest.mark.parametrize("file_format", ["PNG", "JPEG"])
def test_more_pixels_than_pillow_takes_for_harmless_are_refused(tmp_path, file_format, monkeypatch):
    monkeypatch.setattr(images, "from_pillow", None)     # neither decoder gets so far
    monkeypatch.setattr(images, "decode_jpeg", None if file_format == "PNG" else decode_image)
    for height, width in ((20_011, 20_021), (10_007, 10_009)):   # of the latter Pillow only warns
        (tmp_path / "bomb.jpg").write_bytes(bomb(file_format, height, width))
        assert f"Image size ({height * width} pixels) exceeds" in refusal(tmp_path / "bomb.jpg")


def test_a_jpeg_that_torchvision_refuses_goes_to_pillow(tmp_path, monkeypatch):
    def refuses(*_, **__):
        raise RuntimeError("no")
    monkeypatch.setattr(images, "decode_jpeg", refuses)
    (tmp_path / "rgb.jpg").write_bytes(FILES["rgb.jpg"])
    with Image.open(tmp_path / "rgb.jpg") as reference:
        assert np.array_equal(decode_image(str(tmp_path / "rgb.jpg")).numpy(), planes(reference))


# ---------------------------------------------------------------------------------------------
# Extreme shapes
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("crop_pct", [5e-324, 1e-3, 0.875, 1.0])
def test_the_evaluation_view_of_an_extreme_shape_is_a_view(crop_pct):
    for shape in ((1, 1), (1, 5003), (5003, 1), (2, 3), (211, 307)):
        for size in ((1, 1), (224, 224), (7, 499)):
            image = torch.full((3, *shape), 83, dtype=torch.uint8)
            view = resize_and_centre_crop(image, size, crop_pct, "bicubic")
            assert view.shape == (3, *size) and (view == 83).all()


def test_cropping_the_centre_first_gives_nearly_the_same_view(monkeypatch):
    image = from_pillow(noise(211, 307))
    whole = resize_and_centre_crop(image, (224, 224), 0.25, "bicubic")
    monkeypatch.setattr(images, "IMMENSE", 10_000)
    part = resize_and_centre_crop(image, (224, 224), 0.25, "bicubic")
    assert not torch.equal(part, whole)
    # Rounding to whole pixels shifts the crop by up to half a pixel, which is two pixels of the view.
    assert (part.int() - whole.int()).abs().float().mean() < 5


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_one_pixel_can_be_left_of_any_layout(layout):
    for shape in ((2, 1), (3, 400), (31, 37)):
        image = torch.full((1, 3, *shape), 71, dtype=torch.uint8).contiguous(memory_format=layout)[0]
        assert resize(image, (1, 1), "bicubic").flatten().tolist() == [71, 71, 71]
