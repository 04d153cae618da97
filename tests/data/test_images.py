"""Decoding equals Pillow; resizing, cropping and the evaluation view equal their references."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from vitinit.data.images import (Box, DataError, crop, crop_and_flip, decode_image, from_pillow,
                                 resize, resize_and_centre_crop)

PILLOWS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
TORCHVISIONS = {"bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}


def photo(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth waves and a little noise: what a photograph looks like to a filter."""
    row, column = np.mgrid[:height, :width]
    waves = np.stack([np.sin(column / 29 + row / 17), np.cos(column / 23 - row / 31),
                      np.sin(row / 13 - column / 19)], axis=-1)
    noise = np.random.default_rng(seed).normal(0, 12, waves.shape)
    return Image.fromarray((125 + 100 * waves + noise).clip(0, 255).round().astype(np.uint8))


def planes(picture: Image.Image) -> np.ndarray:
    """Pillow's own RGB as (3, H, W)."""
    return np.asarray(picture.convert("RGB")).transpose(2, 0, 1)


def encoded(picture: Image.Image, file_format: str, **options) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, file_format, **options)
    return buffer.getvalue()


def png_of_16_bits(values: np.ndarray) -> bytes:
    """A PNG of (H, W) or (H, W, 3) 16-bit values; Pillow cannot write the latter."""
    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(name + content)
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)
    height, width = values.shape[:2]
    colour_type = 0 if values.ndim == 2 else 2
    header = struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
            + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


RGB = photo(29, 43)
SECOND = photo(29, 43, seed=1)
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


@pytest.mark.parametrize("name", FILES)
def test_a_decoded_file_equals_pillows_rgb(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(FILES[name])
    picture = decode_image(str(path))
    with Image.open(path) as reference:
        assert np.array_equal(picture.numpy(), planes(reference))
    assert picture.dtype == torch.uint8
    assert picture.permute(1, 2, 0).is_contiguous()          # channels-last in memory


@pytest.mark.parametrize("name, first", [("animated.gif", PALETTE), ("animated.webp", RGB)])
def test_an_animation_decodes_to_its_first_frame(tmp_path, name, first):
    path = tmp_path / name
    path.write_bytes(FILES[name])
    with Image.open(path) as reference:
        assert reference.n_frames == 2
    assert np.array_equal(decode_image(str(path)).numpy(), planes(first))


@pytest.mark.parametrize("shape", [(29, 43), (29, 43, 3)])
def test_a_16_bit_png_is_divided_by_257(tmp_path, shape):
    values = np.random.default_rng(3).integers(0, 2**16, shape)
    values[0, :3].flat[:3] = (0, 256, 65535)
    (tmp_path / "deep.png").write_bytes(png_of_16_bits(values))
    eight_bits = np.broadcast_to(values.reshape(29, 43, -1) // 257, (29, 43, 3))
    picture = decode_image(str(tmp_path / "deep.png"))
    assert picture.dtype == torch.uint8
    assert np.array_equal(picture.numpy(), eight_bits.transpose(2, 0, 1))


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
def test_a_truncated_file_is_refused_in_one_line(tmp_path, name, kept):
    content = FILES[name][:int(kept * len(FILES[name]))]
    (tmp_path / name).write_bytes(content)
    assert f"not a readable picture, {len(content)} bytes" in refusal(tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"a line of text\n", b"\xff\xd8\xff", b"GIF89a"])
def test_a_file_that_is_no_picture_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "odd.jpg").write_bytes(content)
    assert f"not a readable picture, {len(content)} bytes" in refusal(tmp_path / "odd.jpg")


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
    picture = photo(211, 307)
    ours = resize(from_pillow(picture), size, interpolation).numpy()
    pillows = planes(picture.resize(size[::-1], PILLOWS[interpolation]))
    assert ours.dtype == np.uint8 and ours.shape == (3, *size)
    difference = abs(ours.astype(int) - pillows)
    assert difference.max() <= 1
    assert (difference > 0).mean() <= share


def test_resize_to_the_same_size_changes_nothing():
    picture = from_pillow(RGB)
    assert torch.equal(resize(picture, (29, 43), "bicubic"), picture)


@pytest.mark.parametrize("box", [
    Box(2, 3, 11, 17), Box(0, 0, 29, 43), Box(28, 42, 1, 1), Box(-5, -7, 29, 43), Box(5, 7, 29, 43),
    Box(-3, 11, 41, 13), Box(7, -2, 5, 47), Box(-3, -2, 37, 53), Box(-5, 3, 6, 1),
    # Nothing but border: beyond the picture on one side, on two, and just past its edge.
    Box(-11, 5, 7, 13), Box(5, -13, 7, 11), Box(31, 5, 7, 11), Box(5, 47, 7, 11),
    Box(-11, -13, 2, 3), Box(29, 43, 2, 3), Box(-7, -5, 7, 5)], ids=str)
def test_crop_equals_slicing_the_zero_padded_picture(box):
    top, left, height, width = box
    padded = np.pad(planes(RGB), ((0, 0), (19, 19), (19, 19)))
    expected = padded[:, top + 19:top + 19 + height, left + 19:left + 19 + width]
    assert expected.shape == (3, height, width)
    assert np.array_equal(crop(from_pillow(RGB), box).numpy(), expected)


@pytest.mark.parametrize("interpolation", PILLOWS)
@pytest.mark.parametrize("box", [Box(17, 23, 131, 149), Box(-19, -11, 211, 307)], ids=str)
@pytest.mark.parametrize("flip", [False, True])
def test_crop_and_flip_equals_pillows_steps(interpolation, box, flip):
    picture = photo(211, 307)
    top, left, height, width = box
    expected = picture.crop((left, top, left + width, top + height))     # black outside, too
    expected = expected.resize((89, 71), PILLOWS[interpolation])
    if flip:
        expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    ours = crop_and_flip(from_pillow(picture), box, flip, (71, 89), interpolation).numpy()
    difference = abs(ours.astype(int) - planes(expected))
    assert ours.shape == (3, 71, 89)
    assert difference.max() <= 1 and (difference > 0).mean() <= 0.005


@pytest.mark.parametrize("interpolation", TORCHVISIONS)
@pytest.mark.parametrize("height, width", [(307, 401), (401, 307), (257, 263), (101, 103),
                                           (256, 379), (389, 256), (224, 224), (139, 797)])
def test_the_evaluation_view_equals_torchvisions_to_one_grey_level(interpolation, height, width):
    picture = from_pillow(photo(height, width))
    reference = v2.Compose([v2.Resize(256, TORCHVISIONS[interpolation], antialias=True),
                            v2.CenterCrop(224)])
    ours = resize_and_centre_crop(picture, (224, 224), 0.875, interpolation)
    expected = reference(picture)
    assert ours.shape == expected.shape == (3, 224, 224)
    # To the bit with torch 2.15; torchvision 0.21 takes another kernel that rounds differently.
    assert (ours.int() - expected.int()).abs().max() <= 1


# Rounding must not make a whole number one less: 135 / 0.54 gives 249.99999999999997.
@pytest.mark.parametrize("size, crop_pct, shorter", [
    (224, 0.875, 256), (224, 0.9, 248), (224, 0.95, 235), (384, 1.0, 384), (32, 1.0, 32),
    (32, 0.875, 36), (288, 0.95, 303), (63, 0.7, 90), (135, 0.54, 250)])
def test_a_picture_already_at_the_evaluation_size_is_only_cut(size, crop_pct, shorter):
    longer = shorter + 10
    picture = from_pillow(photo(shorter, longer))
    top, left = round((shorter - size) / 2), round((longer - size) / 2)
    view = resize_and_centre_crop(picture, (size, size), crop_pct, "bilinear")
    assert torch.equal(view, picture[:, top:top + size, left:left + size])


# The sizes in between, worked out by hand: 97 / .875 = 110.9, 131 / .875 = 149.7. For 211 × 307 the
# height decides (110 / 211 > 149 / 307) and the width is 110 · 307 / 211 = 160.05.
@pytest.mark.parametrize("height, width, between", [(211, 307, (110, 160)), (307, 211, (216, 149)),
                                                    (220, 298, (110, 149)), (89, 97, (136, 149))])
def test_a_rectangular_evaluation_view_covers_its_target(height, width, between):
    picture = from_pillow(photo(height, width))
    whole = v2.functional.resize(picture, between, InterpolationMode.BICUBIC, antialias=True)
    expected = v2.functional.center_crop(whole, (97, 131))
    assert torch.equal(resize_and_centre_crop(picture, (97, 131), 0.875, "bicubic"), expected)


@pytest.mark.parametrize("name", ["grey.tiff", "grey.pgm"])
def test_16_bit_grey_that_pillow_reads_is_divided_by_257(tmp_path, name):
    values = np.random.default_rng(0).integers(0, 65536, (29, 37)).astype(np.uint16)
    Image.fromarray(values).save(tmp_path / name)
    picture = decode_image(str(tmp_path / name))
    assert picture.shape == (3, 29, 37) and picture.dtype == torch.uint8
    for channel in picture.numpy():
        assert np.array_equal(channel, values // 257)
