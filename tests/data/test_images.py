"""Decoding equals Pillow; resizing, cropping and the evaluation view equal their references."""

from __future__ import annotations

import io
import os
import signal
import socket
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
from vitinit.data.images import (Box, DataError, crop, crop_and_flip, decode_image, from_pillow,
                                 jpeg_size, resize, resize_and_centre_crop)

CIFAR10 = Path(__file__).parent / "cifar10"         # 50 JPEG files
PILLOWS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
TORCHVISIONS = {"bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}


def planes(image: Image.Image) -> np.ndarray:
    """Pillow's own RGB, turned upright by Pillow, as (3, H, W)."""
    return np.asarray(ImageOps.exif_transpose(image).convert("RGB")).transpose(2, 0, 1)


RGB = noise(29, 43)
SECOND = noise(29, 43, seed=1)
GREY = RGB.convert("L")
PALETTE = RGB.quantize(61)
ALPHA = Image.fromarray(np.random.default_rng(2).integers(0, 256, (29, 43), dtype=np.uint8))
RGBA = Image.merge("RGBA", (*RGB.split(), ALPHA))
FRAMES = {"save_all": True, "append_images": [SECOND]}
PALETTE_FRAMES = {"save_all": True, "append_images": [SECOND.quantize(37)]}
TURNED = Image.Exif()
TURNED[0x0112] = 6                                           # orientation: a quarter turn

FILES = {
    "rgb.jpg": encoded(RGB, "JPEG"),
    "coarse.jpeg": encoded(RGB, "JPEG", quality=37, subsampling=2),
    "full_chroma.jpg": encoded(RGB, "JPEG", quality=97, subsampling=0),
    "progressive.jpg": encoded(RGB, "JPEG", progressive=True),
    "grey.jpg": encoded(GREY, "JPEG"),
    "cmyk.jpg": encoded(RGB.convert("CMYK"), "JPEG"),
    "turned.jpg": encoded(RGB, "JPEG", exif=TURNED),
    "rgb.png": encoded(RGB, "PNG"),
    "grey.png": encoded(GREY, "PNG"),
    "palette.png": encoded(PALETTE, "PNG"),
    "palette_transparent.png": encoded(PALETTE, "PNG", transparency=5),
    "rgba.png": encoded(RGBA, "PNG"),
    "grey_alpha.png": encoded(Image.merge("LA", (GREY, ALPHA)), "PNG"),
    "one_bit.png": encoded(RGB.convert("1"), "PNG"),
    "turned.png": encoded(RGB, "PNG", exif=TURNED),
    "png_inside.jpg": encoded(RGB, "PNG"),
    "still.gif": encoded(PALETTE, "GIF"),
    "transparent.gif": encoded(PALETTE, "GIF", transparency=5),
    "animated.gif": encoded(PALETTE, "GIF", **PALETTE_FRAMES),
    "lossless.webp": encoded(RGB, "WEBP", lossless=True),
    "lossy.webp": encoded(RGB, "WEBP", quality=61),
    "rgba.webp": encoded(RGBA, "WEBP", lossless=True, exact=True),
    "animated.webp": encoded(RGB, "WEBP", lossless=True, **FRAMES),
    "rgb.bmp": encoded(RGB, "BMP"),
    "palette.bmp": encoded(PALETTE, "BMP"),
    "rgb.tiff": encoded(RGB, "TIFF"),
    "lzw.tif": encoded(RGB, "TIFF", compression="tiff_lzw"),
    "rgb.ppm": encoded(RGB, "PPM"),
    "grey.pgm": encoded(GREY, "PPM"),
}


@pytest.fixture(params=["torchvision's decoder", "Pillow's decoder"])
def jpeg_decoder(request, monkeypatch) -> str:
    """Which of the two decodes JPEGs; Pillow's does it where torchvision's is gone."""
    if request.param == "Pillow's decoder":
        monkeypatch.setattr(images, "decode_jpeg", None)
    return request.param


@pytest.mark.parametrize("name", FILES)
def test_a_decoded_file_equals_pillows_rgb(tmp_path, jpeg_decoder, name):
    path = tmp_path / name
    path.write_bytes(FILES[name])
    image = decode_image(str(path))
    with Image.open(path) as reference:
        assert np.array_equal(image.numpy(), planes(reference))
    assert image.dtype == torch.uint8
    assert image.permute(1, 2, 0).is_contiguous()            # channels-last in memory


@pytest.mark.parametrize("name, first", [("animated.gif", PALETTE), ("animated.webp", RGB)])
def test_an_animation_decodes_to_its_first_frame(tmp_path, name, first):
    path = tmp_path / name
    path.write_bytes(FILES[name])
    with Image.open(path) as reference:
        assert reference.n_frames == 2
    assert np.array_equal(decode_image(str(path)).numpy(), planes(first))


def test_a_jpeg_of_several_images_decodes_to_its_first(tmp_path):
    (tmp_path / "two.jpg").write_bytes(encoded(RGB, "MPO", **FRAMES))
    with Image.open(tmp_path / "two.jpg") as reference:
        assert reference.format == "MPO" and reference.n_frames == 2
        assert np.array_equal(decode_image(str(tmp_path / "two.jpg")).numpy(), planes(reference))


# The higher 8 of 16 bits are kept, as Pillow does with colours: every level stands for 256 values, and
# values that were converted from 8 bits (v · 257) come back.
@pytest.mark.parametrize("shape", [(29, 43), (29, 43, 3)])
def test_of_a_16_bit_png_the_higher_byte_is_kept(tmp_path, shape):
    values = np.random.default_rng(3).integers(0, 2**16, shape)
    values[0, :4].flat[:4] = (0, 255, 256, 65535)
    values[1] = 257 * (values[1] // 257)
    (tmp_path / "deep.png").write_bytes(png_of_16_bits(values))
    eight_bits = np.broadcast_to(values.reshape(29, 43, -1) >> 8, (29, 43, 3))
    assert np.array_equal(values[1] >> 8, values[1] // 257)
    image = decode_image(str(tmp_path / "deep.png"))
    assert image.dtype == torch.uint8
    assert np.array_equal(image.numpy(), eight_bits.transpose(2, 0, 1))


def refusal(path) -> str:
    """The one line with which the file at `path` is refused."""
    with pytest.raises(DataError) as error:
        decode_image(str(path))
    line = str(error.value)
    assert "\n" not in line and line.startswith(f"{path}: ")
    return line


@pytest.mark.parametrize("name", [
    "rgb.jpg", "progressive.jpg", "cmyk.jpg", "rgb.png", "palette.png", "still.gif", "animated.gif",
    "lossless.webp", "animated.webp", "rgb.bmp", "rgb.tiff", "lzw.tif", "rgb.ppm"])
@pytest.mark.parametrize("kept", [0.1, 0.5])
def test_a_truncated_file_is_refused_in_one_line(tmp_path, jpeg_decoder, name, kept):
    content = FILES[name][:int(kept * len(FILES[name]))]
    (tmp_path / name).write_bytes(content)
    assert f"not a readable image, {len(content)} bytes" in refusal(tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"a line of text\n", b"\xff\xd8\xff", b"GIF89a"])
def test_a_file_that_is_no_image_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "odd.jpg").write_bytes(content)
    assert f"not a readable image, {len(content)} bytes" in refusal(tmp_path / "odd.jpg")


def test_a_missing_file_and_a_folder_are_refused_in_one_line(tmp_path):
    assert "No such file" in refusal(tmp_path / "missing.jpg")
    assert "Is a directory" in refusal(tmp_path)


def test_from_pillow_keeps_every_pixel():
    assert np.array_equal(from_pillow(RGB).numpy(), planes(RGB))


# Measured on an AVX-512 processor: at most 1 grey level; of all values, this share differs at all.
@pytest.mark.parametrize("interpolation", PILLOWS)
@pytest.mark.parametrize("size, share", [
    ((97, 131), 0.005), ((131, 97), 0.005), ((223, 401), 0.006), ((211, 101), 0.005),
    ((59, 307), 0.005), ((13, 503), 0.25)])
def test_resize_is_within_one_grey_level_of_pillows(interpolation, size, share):
    image = noise(211, 307)
    ours = resize(from_pillow(image), size, interpolation).numpy()
    pillows = planes(image.resize(size[::-1], PILLOWS[interpolation]))
    assert ours.dtype == np.uint8 and ours.shape == (3, *size)
    difference = abs(ours.astype(int) - pillows)
    assert difference.max() <= 1
    assert (difference > 0).mean() <= share


def test_resize_to_the_same_size_changes_nothing():
    image = from_pillow(RGB)
    assert torch.equal(resize(image, (29, 43), "bicubic"), image)


@pytest.mark.parametrize("box", [
    Box(2, 3, 11, 17), Box(0, 0, 29, 43), Box(28, 42, 1, 1), Box(-5, -7, 29, 43), Box(5, 7, 29, 43),
    Box(-3, 11, 41, 13), Box(7, -2, 5, 47), Box(-3, -2, 37, 53), Box(-5, 3, 6, 1),
    # Boxes outside of the image: beyond it on one side, on two, and just past its edge.
    Box(-11, 5, 7, 13), Box(5, -13, 7, 11), Box(31, 5, 7, 11), Box(5, 47, 7, 11),
    Box(-11, -13, 2, 3), Box(29, 43, 2, 3), Box(-7, -5, 7, 5)], ids=str)
def test_crop_equals_slicing_the_zero_padded_image(box):
    top, left, height, width = box
    padded = np.pad(planes(RGB), ((0, 0), (19, 19), (19, 19)))
    expected = padded[:, top + 19:top + 19 + height, left + 19:left + 19 + width]
    assert expected.shape == (3, height, width)
    assert np.array_equal(crop(from_pillow(RGB), box).numpy(), expected)


@pytest.mark.parametrize("interpolation", PILLOWS)
@pytest.mark.parametrize("box", [Box(17, 23, 131, 149), Box(-19, -11, 211, 307)], ids=str)
@pytest.mark.parametrize("flip", [False, True])
def test_crop_and_flip_equals_pillows_steps(interpolation, box, flip):
    image = noise(211, 307)
    top, left, height, width = box
    expected = image.crop((left, top, left + width, top + height))       # black outside, too
    expected = expected.resize((89, 71), PILLOWS[interpolation])
    if flip:
        expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    ours = crop_and_flip(from_pillow(image), box, flip, (71, 89), interpolation).numpy()
    difference = abs(ours.astype(int) - planes(expected))
    assert ours.shape == (3, 71, 89)
    assert difference.max() <= 1 and (difference > 0).mean() <= 0.005


@pytest.mark.parametrize("interpolation", TORCHVISIONS)
@pytest.mark.parametrize("height, width", [(307, 401), (401, 307), (257, 263), (101, 103),
                                           (256, 379), (389, 256), (224, 224), (139, 797)])
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
    (224, 0.875, 256), (224, 0.9, 248), (224, 0.95, 235), (384, 1.0, 384), (32, 1.0, 32),
    (32, 0.875, 36), (288, 0.95, 303), (63, 0.7, 90), (135, 0.54, 250)])
def test_an_image_already_at_the_evaluation_size_is_only_cropped(size, crop_pct, shorter):
    longer = shorter + 10
    image = from_pillow(noise(shorter, longer))
    top, left = round((shorter - size) / 2), round((longer - size) / 2)
    view = resize_and_centre_crop(image, (size, size), crop_pct, "bilinear")
    assert torch.equal(view, image[:, top:top + size, left:left + size])


# The intermediate sizes, computed by hand: 97 / .875 = 110.9, 131 / .875 = 149.7. For 211 × 307 the
# height decides (110 / 211 > 149 / 307) and the width is 110 · 307 / 211 = 160.05.
@pytest.mark.parametrize("height, width, between", [(211, 307, (110, 160)), (307, 211, (216, 149)),
                                                    (220, 298, (110, 149)), (89, 97, (136, 149))])
def test_a_rectangular_evaluation_view_covers_its_target(height, width, between):
    image = from_pillow(noise(height, width))
    whole = v2.functional.resize(image, between, InterpolationMode.BICUBIC, antialias=True)
    expected = v2.functional.center_crop(whole, (97, 131))
    assert torch.equal(resize_and_centre_crop(image, (97, 131), 0.875, "bicubic"), expected)


@pytest.mark.parametrize("name", ["grey.tiff", "grey.pgm"])
def test_of_16_bit_grey_that_pillow_reads_the_higher_byte_is_kept(tmp_path, name):
    values = np.random.default_rng(0).integers(0, 65536, (29, 37)).astype(np.uint16)
    Image.fromarray(values).save(tmp_path / name)
    image = decode_image(str(tmp_path / name))
    assert image.shape == (3, 29, 37) and image.dtype == torch.uint8
    for channel in image.numpy():
        assert np.array_equal(channel, values >> 8)


@pytest.mark.parametrize("name, kind", [("x.tif", np.int32), ("x.tiff", np.float32),
                                        ("x.pfm", np.float32)])
def test_32_bit_values_are_refused_whatever_they_are(tmp_path, name, kind):
    for values in ([[0, 100, 255]], [[0, 2**16, 2**31 - 1]]):
        Image.fromarray(np.array(values, kind)).save(tmp_path / name)
        assert refusal(tmp_path / name).endswith(
            "an image of 32-bit values, whose black and white are not known; expected 8 or 16 bits "
            "per channel")


# ---------------------------------------------------------------------------------------------
# Orientation, and the two decoders of JPEG
# ---------------------------------------------------------------------------------------------


ORIENTED = {"JPEG": {}, "PNG": {}, "WEBP": {"lossless": True}, "TIFF": {}}


def oriented(file_format: str, orientation: int) -> bytes:
    """A file of 29 × 43 stored pixels that state an orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(RGB, file_format, exif=exif, **ORIENTED[file_format])


@pytest.mark.parametrize("orientation", range(0, 10))        # 0 and 9 are none
@pytest.mark.parametrize("file_format", ORIENTED)
def test_an_image_is_turned_as_its_exif_data_say(tmp_path, jpeg_decoder, file_format, orientation):
    content = oriented(file_format, orientation)
    with Image.open(io.BytesIO(content)) as one, Image.open(io.BytesIO(content)) as again:
        upright = planes(one)
        lying = np.asarray(again.convert("RGB")).transpose(2, 0, 1)
    assert np.array_equal(lying, upright) == (file_format == "TIFF" or orientation in (0, 1, 9))
    (tmp_path / "photo").write_bytes(content)
    image = decode_image(str(tmp_path / "photo"))
    assert np.array_equal(image.numpy(), upright) and image.permute(1, 2, 0).is_contiguous()
    stored = decode_image(str(tmp_path / "photo"), apply_exif_orientation=False)
    assert np.array_equal(stored.numpy(), lying)
    for loaded in (False, True):                     # a Pillow image may be loaded already, or not
        with Image.open(tmp_path / "photo") as given:
            if loaded:
                given.load()
            assert np.array_equal(from_pillow(given).numpy(), upright)
            assert np.array_equal(from_pillow(ImageOps.exif_transpose(given)).numpy(), upright)


@pytest.mark.parametrize("brand", [b"heic", b"mif1", b"avif"])
def test_a_heif_file_by_any_name_is_told_how_to_convert_it(tmp_path, brand):
    (tmp_path / "photo.jpg").write_bytes(bytes(3) + b"\x18ftyp" + brand + bytes(99))
    assert images.HEIF_REMEDY in refusal(tmp_path / "photo.jpg")


def test_an_orientation_in_xmp_data_counts_as_in_pillow(jpeg_decoder):
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="8"/></x:xmpmeta>'
    content = encoded(RGB, "JPEG", xmp=xmp)
    with Image.open(io.BytesIO(content)) as stored:
        assert np.array_equal(images.decode_bytes(content, "x").numpy(), planes(stored))
        assert stored.size == (43, 29) and planes(stored).shape == (3, 43, 29)


@pytest.mark.parametrize("damage", [
    lambda exif: exif[:9], lambda exif: exif[:6] + b"XX" + exif[8:],
    lambda exif: exif[:-9] + bytes(9),
    lambda exif: exif[:10] + b"\xff\xff\xff\xff" + exif[14:],
    lambda exif: exif.replace(b"\6", b"\xee")])
def test_damaged_exif_data_turn_nothing(jpeg_decoder, damage):
    exif = damage(TURNED.tobytes())
    for file_format, options in (("JPEG", {}), ("PNG", {}), ("WEBP", {"lossless": True})):
        content = encoded(RGB, file_format, exif=exif, **options)
        with warnings.catch_warnings(action="error"):        # nor are they warned of
            image = images.decode_bytes(content, "x")
        assert torch.equal(image, images.decode_bytes(content, "x", apply_exif_orientation=False))


def test_both_decoders_of_jpeg_give_the_same_bits(monkeypatch):
    contents = {name: content for name, content in FILES.items()
                if content.startswith(images.JPEG_START)}
    contents |= {str(path): path.read_bytes() for path in sorted(CIFAR10.glob("*/*.jpg"))}
    assert len(contents) > 50
    ours = [images.decode_bytes(content, name) for name, content in contents.items()]
    monkeypatch.setattr(images, "decode_jpeg", None)
    for (name, content), image in zip(contents.items(), ours):
        assert torch.equal(images.decode_bytes(content, name), image), name


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


def test_valid_files_of_every_format_equal_pillows_rgb(tmp_path):
    for height, width in SIZES:
        for name, content in valid_files(height, width).items():
            (tmp_path / name).write_bytes(content)
            image = decode_image(str(tmp_path / name)).numpy()
            if "grey_16" not in name:                # which Pillow's convert clips
                with Image.open(tmp_path / name) as reference:
                    assert np.array_equal(image, planes(reference)), name
            expected = (3, width, height) if "turned" in name else (3, height, width)
            assert image.shape == expected, name


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


@pytest.mark.parametrize("height, width", [(20_011, 20_021), (10_007, 10_009)])
@pytest.mark.parametrize("file_format", ["PNG", "JPEG"])
def test_more_pixels_than_pillow_takes_for_harmless_are_refused(tmp_path, file_format, height,
                                                                width, monkeypatch):
    # Pillow refuses the larger one and only warns of the smaller one.
    (tmp_path / "bomb.jpg").write_bytes(bomb(file_format, height, width))
    for decoder in ("decode_jpeg", "from_pillow"):
        monkeypatch.setattr(images, decoder, None)   # neither gets so far
    line = refusal(tmp_path / "bomb.jpg")
    assert "too large an image" in line and str(height * width) in line


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_rows": 1},
                                     {"exif": TURNED}, {"comment": b"\xff\xc0" * 99}], ids=str)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_the_size_in_a_jpegs_header_is_pillows(mode, options):
    content = encoded(noise(31, 59).convert(mode), "JPEG", **options)
    assert jpeg_size(content) == (31, 59)
    assert jpeg_size(content[:2] + b"garbage\xff\xff\x00" + content[2:]) == (31, 59)
    assert jpeg_size(content[:content.index(b"\xff\xda")].replace(b"\xff\xc0", b"\xff\xfe")
                     .replace(b"\xff\xc2", b"\xff\xfe")) == (0, 0)
    assert jpeg_size(content[:3]) == jpeg_size(b"\xff\xd8\xff\xff") == (0, 0)


def test_a_jpeg_that_torchvision_refuses_goes_to_pillow(tmp_path, monkeypatch):
    def refuses(*_, **__):
        raise RuntimeError("no")
    monkeypatch.setattr(images, "decode_jpeg", refuses)
    (tmp_path / "rgb.jpg").write_bytes(FILES["rgb.jpg"])
    with Image.open(tmp_path / "rgb.jpg") as reference:
        assert np.array_equal(decode_image(str(tmp_path / "rgb.jpg")).numpy(), planes(reference))


def test_pipes_sockets_and_devices_are_refused_at_once(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.jpg")
    assert "not a regular file" in refusal(tmp_path / "pipe.jpg")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    assert "not a regular file" in refusal(tmp_path / "zero.jpg")
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(tmp_path)                  # a socket's path must be short
        listener.bind("socket.jpg")
        assert "No such device" in refusal(tmp_path / "socket.jpg")


@pytest.mark.parametrize("name, reason", [("a\0b.jpg", "zero byte"), (300 * "x", "File name too long")])
def test_a_name_that_no_file_can_have_is_refused_in_one_line(name, reason):
    with pytest.raises(DataError, match=reason) as error:
        decode_image(name)
    assert str(error.value).isprintable()


def test_what_a_name_holds_cannot_break_or_colour_the_line(tmp_path):
    name = "a\n\x1b[31mred.jpg"
    (tmp_path / name).write_bytes(b"no image")
    with pytest.raises(DataError) as error:
        decode_image(str(tmp_path / name))
    assert str(error.value).startswith(rf"{tmp_path}/a\n\x1b[31mred.jpg: not a readable image")


# ---------------------------------------------------------------------------------------------
# Extreme shapes
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (1, 5003), (5003, 1), (2, 3), (211, 307)], ids=str)
@pytest.mark.parametrize("size", [(1, 1), (224, 224), (7, 499)], ids=str)
@pytest.mark.parametrize("crop_pct", [5e-324, 1e-30, 1e-3, 0.875, 1.0])
def test_the_evaluation_view_of_an_extreme_shape_is_a_view(shape, size, crop_pct):
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
@pytest.mark.parametrize("shape", [(2, 1), (3, 400), (31, 37)])
def test_one_pixel_can_be_left_of_any_layout(layout, shape):
    image = torch.full((1, 3, *shape), 71, dtype=torch.uint8).contiguous(memory_format=layout)[0]
    assert resize(image, (1, 1), "bicubic").flatten().tolist() == [71, 71, 71]
