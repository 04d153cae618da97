"""Decoding equals Pillow; resizing, cropping and the evaluation view equal their references."""

import io
import os
import signal
import struct
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from broken_files import SIZES, broken_files, encoded, noise, png_of_16_bits, valid_files
from PIL import Image, ImageOps, features
from refused import refused
from torchvision.transforms import InterpolationMode, v2

from vitinit.data import images
from vitinit.data.images import (
    Box,
    DataError,
    JpegDecoder,
    crop,
    crop_and_flip,
    decode_bytes,
    decode_image,
    fit_whole,
    from_pillow,
    plain_jpeg_size,
    resize,
    resize_and_centre_crop,
)
from vitinit.watch.survey import dark_in_16_bits

CIFAR10 = Path(__file__).parent / "cifar10"  # 50 JPEG files
PILLOWS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
TORCHVISIONS = {"bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}


def planes(image: Image.Image) -> np.ndarray:
    """Pillow's own RGB, turned upright by Pillow, as (3, H, W)."""
    return np.asarray(ImageOps.exif_transpose(image).convert("RGB")).transpose(2, 0, 1)


RGB = noise(29, 43)
FRAMES = {"save_all": True, "append_images": [noise(29, 43, seed=1)]}
TURNED = Image.Exif()
TURNED[0x0112] = 6  # orientation: a quarter turn

FILES = valid_files(29, 43) | {
    "coarse.jpeg": encoded(RGB, "JPEG", quality=37, subsampling=2),
    "two.jpg": encoded(RGB, "MPO", **FRAMES),
    "animated.gif": encoded(RGB.quantize(61), "GIF", **FRAMES),
    "animated.webp": encoded(RGB, "WEBP", lossless=True, **FRAMES),
    "png_inside.jpg": encoded(RGB, "PNG"),
    "grey_alpha.png": encoded(Image.merge("LA", RGB.split()[:2]), "PNG"),
}


def refuses(_):
    raise RuntimeError("no")


def found_without(library: str, monkeypatch) -> JpegDecoder | None:
    """The decoder that is found where a library is not installed."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, library, None)
        return images.jpeg_decoder.__wrapped__()


@pytest.fixture(params=["torchcodec", "torchvision", "none", "one that refuses"])
def jpeg_decoder(request, monkeypatch) -> None:
    """What decodes JPEGs; Pillow does where there is nothing else, and what that refuses."""
    decoder = JpegDecoder("", refuses) if "refuses" in request.param else None
    if request.param == "torchcodec":
        pytest.importorskip("torchcodec")
        decoder = found_without("torchvision.io", monkeypatch)
    elif request.param == "torchvision":
        decoder = found_without("torchcodec.decoders", monkeypatch)
    if request.param.startswith("torch"):
        assert decoder is not None and decoder.name == request.param
    monkeypatch.setattr(images, "jpeg_decoder", lambda: decoder)


def test_a_decoded_file_equals_pillows_rgb(tmp_path, jpeg_decoder, held_against):
    photographs = {path.name: path.read_bytes() for path in CIFAR10.glob("[a-d]*/*.jpg")}
    for files in (FILES, photographs, *(valid_files(*size) for size in SIZES)):
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
            image = decode_image(str(tmp_path / name))
            assert image.dtype == torch.uint8
            assert image.permute(1, 2, 0).is_contiguous(), name  # channels-last in memory
            with Image.open(tmp_path / name) as reference:
                if "grey_16" not in name:  # which Pillow's convert clips
                    assert np.array_equal(image.numpy(), planes(reference)), name
                    held_against(image, planes(reference))
    assert Image.open(io.BytesIO(FILES["two.jpg"])).n_frames == 2


@pytest.mark.parametrize("kind, apply", [("avif", True), ("heic", True), ("heic", False)])
def test_photographs_of_phones_are_turned_once(kind, apply):
    """Where Pillow, or pillow-heif in any case, can write and read them."""
    if kind == "heic":
        pytest.importorskip("pillow_heif").register_heif_opener()
    elif not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    down, across = np.mgrid[:48, :64]
    levels = np.stack([4 * across, 5 * down, 0 * down], axis=2).astype(np.uint8)
    content = io.BytesIO()
    Image.fromarray(levels).save(content, "HEIF" if kind == "heic" else kind, exif=TURNED.tobytes())
    image = decode_bytes(content.getvalue(), "a", apply_exif_orientation=apply)
    assert np.abs(np.rot90(levels, -1) - image.permute(1, 2, 0).numpy().astype(float)).mean() < 8


def write_16_bits(path: Path, values: np.ndarray) -> Path:
    """Write (H, W, 3) values below 2^16, or, unless the file is named after RGB, one channel."""
    if path.suffix == ".png":
        path.write_bytes(png_of_16_bits(values if "rgb" in path.name else values[..., 0]))
    else:
        Image.fromarray(values[..., 0].astype(np.uint16)).save(path)
    return path


OF_16_BITS = ("rgb.png", "grey.png", "grey.tiff", "grey.pgm")


def test_of_16_bits_the_higher_byte_is_kept(tmp_path):
    """As Pillow does with colours; values that were converted from 8 bits (v · 257) come back."""
    values = np.random.default_rng(3).integers(0, 2**16, (29, 43, 3))
    values[0, :4, 0] = (0, 255, 256, 65535)
    values[1] = 257 * (values[1] // 257)
    assert np.array_equal(values[1] >> 8, values[1] // 257)
    for name in OF_16_BITS:
        expected = (values if name == "rgb.png" else values[..., :1].repeat(3, axis=2)) >> 8
        image = decode_image(str(write_16_bits(tmp_path / name, values)))
        assert image.dtype == torch.uint8
        assert np.array_equal(image.numpy(), expected.transpose(2, 0, 1)), name


def test_of_a_tiff_of_12_bits_the_higher_8_are_kept():
    """Pillow reads it as 16 bits, of which the higher 4 are zero."""
    values = np.random.default_rng(3).integers(0, 2**12, (7, 10))
    digits = "".join(f"{value:03x}" for value in values.flatten())
    tags = {256: 10, 257: 7, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: 7, 279: 105}
    content = struct.pack("<2sHI105sxH", b"II", 42, 8 + 106, bytes.fromhex(digits), len(tags))
    content += b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    image = decode_bytes(content + bytes(4), "x")
    assert np.array_equal(image.numpy(), np.stack(3 * [values // 16]))


def bomb(height: int, width: int) -> bytes:
    """A small JPEG whose header promises height × width pixels."""
    content = encoded(noise(13, 17), "JPEG")
    place = content.index(b"\xff\xc0") + 5
    return content[:place] + struct.pack(">HH", height, width) + content[place + 4 :]


def refusal(path) -> str:
    return refused(DataError, decode_image, str(path))


@pytest.mark.usefixtures("without_heif")
def test_a_file_that_is_no_whole_image_is_refused_in_one_line(tmp_path, jpeg_decoder):
    cases = [
        (name, FILES[name][: int(0.3 * len(FILES[name]))], "")
        for name in (
            "rgb.jpg",
            "progressive.jpg",
            "rgb.png",
            "still.gif",
            "lossless.webp",
            "rgb.bmp",
            "rgb.tiff",
            "rgb.ppm",
        )
    ]
    cases += [
        ("a\n\x1b[31mred.jpg", content, reason)
        for content, reason in (
            (b"", "(empty)"),
            (b"a line of text\n", "(none of JPEG, "),
            (b"\xff\xd8\xff", ""),
            (bomb(20_011, 20_021), "(Image size (400640231 pixels) exceeds limit"),
            (bytes(3) + b"\x18ftypmif1" + bytes(99), f"({images.HEIF_REMEDY})"),
        )
    ]
    for name, content, reason in cases:
        (tmp_path / name).write_bytes(content)
        shown = name.replace("\n", r"\n").replace("\x1b", r"\x1b")
        assert refusal(tmp_path / name).startswith(
            f"{tmp_path / shown}: not a readable image, {len(content)} bytes {reason}"
        )
    for name, reason in (
        ("missing.jpg", "No such file"),
        ("", "Is a directory"),
        (300 * "x", "File name too long"),
        ("a\0b.jpg", "embedded null byte"),
    ):
        assert f": cannot be read: {reason}" in refusal(tmp_path / name)


def test_only_files_are_read_and_none_that_is_too_large_to_be_an_image(tmp_path):
    """A pipe would wait for ever, and a device has no end. A caution reads such files no more."""
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    (tmp_path / "sparse.png").touch()
    os.truncate(tmp_path / "sparse.png", 50_000_000_000)
    paths = [tmp_path / f"{name}.png" for name in ("pipe", "zero", "sparse")]
    signal.alarm(60)
    try:
        assert [refusal(path) for path in paths] == [
            *(f"{path}: is a pipe or a device, expected a file" for path in paths[:2]),
            f"{paths[2]}: has 50,000,000,000 bytes, expected a file of at most 1,073,741,824",
        ]
        assert dark_in_16_bits(map(str, paths)) == ""
    finally:
        signal.alarm(0)


def test_too_little_memory_names_the_image(tmp_path, monkeypatch):
    path = tmp_path / "x.png"
    path.write_bytes(FILES["rgb.png"])
    view = partial(
        crop_and_flip, box=Box(2, 3, 5, 7), flip=False, size=(11, 13), interpolation="bilinear"
    )
    torchs = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to …")
    for place, error, reason in (
        ("read_bytes", MemoryError(), "MemoryError"),
        ("from_pillow", MemoryError(), "MemoryError"),
        ("resize", torchs, str(torchs)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(images, place, Mock(side_effect=error))
            assert refused(DataError, decode_image, str(path), view) == (
                f"{path}: too little memory to read it ({reason})"
            )
    monkeypatch.setattr(images, "resize", Mock(side_effect=RuntimeError("a mistake")))
    assert "a mistake" in refused(RuntimeError, decode_image, str(path), view)


@pytest.mark.parametrize("interpolation", PILLOWS)
def test_crop_and_flip_is_within_one_grey_level_of_pillows_steps(interpolation, held_against):
    """As measured on an AVX-512 processor; of all values, this share differs at all."""
    image = noise(211, 307)
    for box, size, share in (
        (Box(0, 0, 211, 307), (223, 401), 0.006),
        (Box(17, 23, 131, 149), (71, 89), 0.005),
        (Box(-19, -11, 211, 307), (71, 89), 0.005),
    ):
        top, left, height, width = box
        expected = image.crop((left, top, left + width, top + height))  # black outside, too
        expected = expected.resize(size[::-1], PILLOWS[interpolation])
        for flip in (False, True):
            ours = crop_and_flip(from_pillow(image), box, flip, size, interpolation).numpy()
            difference = abs(ours.astype(int) - planes(expected))
            assert ours.dtype == np.uint8 and ours.shape == (3, *size)
            assert difference.max() <= 1 and (difference > 0).mean() <= share
            held_against(ours, planes(expected), within=1)
            expected = expected.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


@pytest.mark.parametrize("interpolation", PILLOWS)
def test_a_resized_view_is_channels_last_as_its_image_with_the_bits_of_any_layout(interpolation):
    part, size = crop(from_pillow(noise(211, 307)), Box(17, 23, 131, 149)), (71, 89)
    view = resize(part, size, interpolation)
    assert view.permute(1, 2, 0).is_contiguous()
    assert torch.equal(
        view,
        torch.nn.functional.interpolate(
            part.contiguous()[None], size, mode=interpolation, antialias=True
        )[0],
    )


def test_crop_equals_slicing_the_zero_padded_image():
    rng = np.random.default_rng(0)
    padded = np.pad(planes(RGB), ((0, 0), (101, 101), (101, 101)))
    for _ in range(503):
        top, left = rng.integers(-47, 47, 2)
        height, width = rng.integers(1, 101, 2) // rng.integers(1, 7) + 1
        box = Box(*map(int, (top, left, height, width)))
        expected = padded[:, top + 101 : top + 101 + height, left + 101 : left + 101 + width]
        assert np.array_equal(crop(from_pillow(RGB), box).numpy(), expected), box


@pytest.mark.parametrize("interpolation", TORCHVISIONS)
def test_the_evaluation_view_equals_torchvisions_to_one_grey_level(interpolation, held_against):
    """Of any sizes. In floats, 135 / 0.54 is 249.99999999999997, and must not become 249. Equal bit
    for bit with torch 2.15; an older torchvision used a kernel that rounds otherwise."""
    mode, rng = TORCHVISIONS[interpolation], np.random.default_rng(5)
    cases = [
        ((307, 401), (224, 224), 0.875),
        ((389, 256), (224, 224), 0.875),
        ((250, 260), (135, 135), 0.54),
        ((90, 100), (63, 63), 0.7),
        ((32, 37), (32, 32), 1.0),
    ]
    cases += [
        (
            rng.integers(61, 400, 2).tolist(),
            tuple(rng.integers(7, 200, 2).tolist()),
            float(rng.choice([0.875, 0.9, 1.0])),
        )
        for _ in range(17)
    ]
    for own, size, crop_pct in cases:
        image = from_pillow(noise(*own))
        least = [int(side / Fraction(str(crop_pct))) for side in size]
        factor = max(Fraction(side, its) for side, its in zip(least, own))
        whole = v2.functional.resize(
            image, [int(side * factor) for side in own], mode, antialias=True
        )
        expected = v2.functional.center_crop(whole, size)
        if size == (224, 224):
            deits = v2.Compose([v2.Resize(256, mode, antialias=True), v2.CenterCrop(224)])
            assert torch.equal(expected, deits(image))
        ours = resize_and_centre_crop(image, size, crop_pct, interpolation)
        assert ours.shape == (3, *size) and (ours.int() - expected.int()).abs().max() <= 1
        assert torch.equal(ours, expected) or whole.shape != image.shape  # only cropped
        held_against(ours, expected, within=1)


@pytest.mark.parametrize("interpolation", PILLOWS)
def test_a_whole_image_is_squashed_as_by_torchvision_and_padded_as_by_pillow(interpolation):
    """Photographs and noise, wide, tall and so thin that a side would vanish, to sizes of odd and
    even rest; the border is exact, and at least 23 views have one. To one grey level of torchvision's,
    and to two of Pillow's, rows first, since in one call it may begin with columns."""
    mode, border, bordered = PILLOWS[interpolation], (131, 17, 89), 0

    def resized(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
        return picture.resize((size[0], picture.height), mode).resize(size, mode)

    pictures = [Image.open(path).convert("RGB") for path in CIFAR10.glob("[a-b]*/*.jpg")][:7]
    pictures += [noise(*size) for size in ((61, 97), (97, 61), (53, 53), (211, 1), (307, 211))]
    for picture, size in product(pictures, ((31, 31), (48, 67), (29, 13))):
        height, width = size
        image, own = from_pillow(picture), picture.size
        squashed = resized(picture, (width, height))
        factor = min(Fraction(width, own[0]), Fraction(height, own[1]))
        inner = tuple(max(1, round(side * factor)) for side in own)
        padded = Image.new("RGB", (width, height), border)
        corner = (width - inner[0]) // 2, (height - inner[1]) // 2
        padded.paste(resized(picture, inner), corner)
        assert max(inner[0] / width, inner[1] / height) == 1.0
        for expected, colour in ((squashed, None), (padded, border)):
            ours = fit_whole(image, size, interpolation, colour)
            assert ours.dtype == torch.uint8 and ours.permute(1, 2, 0).is_contiguous()
            assert abs(ours.numpy().astype(int) - planes(expected)).max() <= 2
        (left, top), way = corner, TORCHVISIONS[interpolation]
        inside = crop(ours, Box(top, left, *inner[::-1]))
        for part, its in ((fit_whole(image, size, interpolation), size), (inside, inner[::-1])):
            expected = v2.functional.resize(image, its, way, antialias=True)
            assert (part.int() - expected.int()).abs().max() <= 1
        if max(corner):
            bordered += 1
            corners = ours[:, [0, 0, -1, -1], [0, -1, 0, -1]]
            assert corners.T.tolist() == 4 * [list(border)]
    assert bordered >= 23


@pytest.mark.parametrize("interpolation", PILLOWS)
def test_of_a_thin_image_only_the_centre_is_enlarged(interpolation, monkeypatch):
    """To one grey level as if Pillow enlarged all of it. Others, up to 32 times as long as their
    view by its width, go the way of before, to the bit."""
    interpolate = Mock(side_effect=F.interpolate)
    monkeypatch.setattr(F, "interpolate", interpolate)
    values = np.random.default_rng(7).integers(0, 256, (65_500, 7, 3), np.uint8)
    for height, width in ((31, 1), (217, 7), (37, 1), (1009, 7), (4999, 5), (65_500, 1)):
        first = 32_700 if height == 65_500 else 0  # the view shows nothing of what is before
        for axes in ((0, 1, 2), (1, 0, 2)):
            image = values[:height, :width].transpose(axes)
            centre = Image.fromarray(values[first : height - first, :width].transpose(axes).copy())
            whole = [int(60 * side / width) for side in centre.size]  # 60: of 53 / 0.875
            left, top = (round((side - 53) / 2) for side in whole)
            rows = centre.resize((whole[0], centre.height), PILLOWS[interpolation])
            expected = planes(
                rows.resize(whole, PILLOWS[interpolation]).crop((left, top, left + 53, top + 53))
            ).astype(int)
            ours = resize_and_centre_crop(
                torch.from_numpy(image).permute(2, 0, 1), (53, 53), 0.875, interpolation
            )
            assert abs(ours.numpy() - expected).max() <= 1 + (height == 31 * width)
            if height == 31 * width:
                _, size = interpolate.call_args.args
                assert size == (whole[1], whole[0])
                assert torch.equal(
                    ours,
                    interpolate.side_effect(
                        torch.from_numpy(image).permute(2, 0, 1)[None],
                        size,
                        mode=interpolation,
                        antialias=True,
                    )[0, :, top : top + 53, left : left + 53],
                )
    assert interpolate.call_count == 4


@pytest.mark.parametrize(
    "kind, options, words",
    [
        (np.int32, {}, "32"),
        (np.float32, {}, "32"),
        (np.uint16, {"tiffinfo": {339: 2}}, "signed 16"),
    ],
)
def test_32_bit_and_signed_values_are_refused_whatever_they_are(tmp_path, kind, options, words):
    Image.fromarray(np.array([[0, 100, 255]], kind)).save(tmp_path / "x.tif", **options)
    assert refusal(tmp_path / "x.tif").endswith(
        f"(an image of {words}-bit values, whose black and white are not known; expected 8 or 16 "
        "bits per channel)"
    )


@pytest.mark.parametrize("name", OF_16_BITS)
def test_images_of_16_bits_are_cautioned_of_if_none_reaches_a_quarter_of_white(tmp_path, name):
    """As none does that a camera of 14 bits stores as it is; 8 bits may be as dark as they like."""

    def write(number: int, highest: int) -> str:
        values = np.random.default_rng(number).integers(0, highest, (13, 17, 3))
        values[7, 5] = highest
        return str(write_16_bits(tmp_path / f"{number}{name}", values))

    (tmp_path / "broken.png").write_bytes(FILES["grey_16.png"][:99])
    Image.fromarray(np.ones((3, 5), np.uint8)).save(tmp_path / "8.png")
    dark = [str(tmp_path / "broken.png"), str(tmp_path / "8.png")]
    assert dark_in_16_bits(dark) == ""
    dark += [write(bits, 2**bits - 1) for bits in (10, 12, 14)]
    assert dark_in_16_bits(dark).startswith(
        "3 images of 16 bits were looked at, and their highest value is 2"
    )
    assert dark_in_16_bits([write(15, 2**15), *dark]) == ""


# Orientation, and the two decoders of JPEG ----------------------------------------------------
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "TIFF"])
def test_an_image_is_turned_as_its_exif_data_say(jpeg_decoder, file_format):
    exif = Image.Exif()
    for orientation in range(10):  # 0 and 9 are none
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
        for loaded in (False, True):  # a Pillow image may be loaded already, or not
            with Image.open(io.BytesIO(content)) as given:
                if loaded:
                    given.load()
                assert np.array_equal(from_pillow(given).numpy(), upright)
                assert np.array_equal(from_pillow(ImageOps.exif_transpose(given)).numpy(), upright)


def test_damaged_exif_data_turn_nothing(jpeg_decoder):
    exif = TURNED.tobytes()
    for damaged in (
        exif[:9],
        exif[:-9] + bytes(9),
        exif.replace(b"\6", b"\xee"),
        exif[:10] + b"\xff\xff\xff\xff" + exif[14:],
    ):
        for file_format in ("JPEG", "PNG"):
            content = encoded(RGB, file_format, exif=damaged)
            with warnings.catch_warnings(action="error"):  # nor are they warned of
                image = decode_bytes(content, "x")
            assert torch.equal(image, decode_bytes(content, "x", apply_exif_orientation=False))


def test_decoding_in_threads_leaves_the_filters_of_warnings_as_they_were(jpeg_decoder):
    """`predict` decodes in threads. Eight files each, twenty times."""
    content, before = encoded(RGB, "JPEG"), list(warnings.filters)
    for _ in range(20):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: decode_bytes(content, "x"), range(64)))
        assert warnings.filters == before
    with pytest.warns(UserWarning, match="heard"):
        warnings.warn("heard")


def test_libraries_without_a_decoder_are_done_without(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    assert found_without("torchvision.io", monkeypatch) is None
    assert images.jpeg_decoder.__wrapped__().name == "torchvision"


# The size that the head of a JPEG states ------------------------------------------------------
def with_segment(code: int, body: bytes, content: bytes = FILES["rgb.jpg"]) -> bytes:
    """A JPEG with one more segment, in front of all others."""
    return content[:2] + struct.pack(">BBH", 0xFF, code, len(body) + 2) + body + content[2:]


SMALLER = encoded(noise(11, 7), "JPEG")
PLAIN_JPEGS = {
    **{name: FILES[name] for name in ("rgb.jpg", "progressive.jpg", "grey.jpg", "cmyk.jpg")},
    "comment": encoded(RGB, "JPEG", comment=SMALLER),
    "profile with a frame in it": encoded(RGB, "JPEG", icc_profile=SMALLER),
    "Adobe's": with_segment(0xEE, b"Adobe" + bytes(7)),
    "restarts": encoded(RGB, "JPEG", restart_marker_blocks=1),
    **{path.name: path.read_bytes() for path in CIFAR10.glob("*/*.jpg")},
}
UNUSUAL_JPEGS = {
    "turned": FILES["turned.jpg"],
    "two": FILES["two.jpg"],
    "thumbnail": with_segment(0xE1, b"Exif\0\0" + SMALLER),
    "another APP": with_segment(0xED, b"Photoshop 3.0\0" + SMALLER),
    "padding": FILES["rgb.jpg"][:2] + b"\xff" + FILES["rgb.jpg"][2:],
    "junk": FILES["rgb.jpg"][:2] + b"\0" + FILES["rgb.jpg"][2:],
    "arithmetic coding": FILES["rgb.jpg"].replace(b"\xff\xc0\0", b"\xff\xc9\0"),
    "12 bits": FILES["rgb.jpg"].replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"),
    "two layers": with_segment(0xC0, b"\x08\0\x0d\0\x11\x02" + bytes(6)),
    "no start": bytes(2) + FILES["rgb.jpg"][2:],
    "no scan": FILES["rgb.jpg"][: FILES["rgb.jpg"].index(b"\xff\xda")],
    "JFIF too short": with_segment(0xE0, b"JFIF\0"),
    "Adobe's too short": with_segment(0xEE, b"Adobe"),
    "profile too short": with_segment(0xE2, b"ICC_PROFILE\0"),
    "PNG": FILES["rgb.png"],
    "empty": b"",
}


def test_a_plain_jpegs_size_is_pillows_and_of_others_it_is_not_told():
    for name, content in PLAIN_JPEGS.items():
        with Image.open(io.BytesIO(content)) as image:
            assert plain_jpeg_size(content) == (image.height, image.width), name
    for name, content in UNUSUAL_JPEGS.items():
        assert plain_jpeg_size(content) is None, name
    for size in ((13_367, 13_381), (0, 17), (13, 0), (13_381, 13_397)):
        assert plain_jpeg_size(bomb(*size)) == (size if size == (13_367, 13_381) else None)


def test_a_jpeg_is_decoded_or_refused_as_if_pillow_had_opened_it_first(jpeg_decoder, monkeypatch):
    """Also one that is broken, as most of these are, and one with more pixels than Pillow reads."""

    def outcomes() -> list[bytes | str]:
        found: list[bytes | str] = []
        for content in contents:
            for apply in (True, False):
                try:
                    image = decode_bytes(content, "x", apply_exif_orientation=apply)
                    found.append(repr(image.shape).encode() + image.numpy().tobytes())
                except DataError as error:
                    found.append(str(error))
        return found

    contents = [*PLAIN_JPEGS.values(), *UNUSUAL_JPEGS.values(), bomb(20_011, 20_021)]
    contents += [content for name, content in broken_files(4_001, seed=2) if name.endswith(".jpg")]
    fast = outcomes()
    monkeypatch.setattr(images, "plain_jpeg_size", lambda content: None)
    assert outcomes() == fast
    assert {type(outcome) for outcome in fast} == {bytes, str}


def test_a_plain_jpeg_is_not_opened_by_pillow(monkeypatch):
    monkeypatch.setattr(images.Image, "open", None)
    assert all(decode_bytes(content, "x").shape[0] == 3 for content in PLAIN_JPEGS.values())


# Damaged, dangerous and strange files ---------------------------------------------------------
def test_a_broken_file_is_decoded_or_refused_in_one_line(tmp_path):
    """A crash ends the tests, and so does a file that takes a minute; a seed breaks the same files.
    VITINIT_CASES: a longer run, of so many files."""
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


@pytest.mark.parametrize(
    "mode, meaning", [("RGBA", 0), ("RGBA", 1), ("RGBA", 2), ("RGBA", None), ("LA", 0), ("LA", 2)]
)
def test_a_band_of_a_tiff_that_is_not_called_alpha_is_refused(tmp_path, mode, meaning):
    """Pillow writes 2, alpha that colours are not multiplied by, into its tag ExtraSamples, 338."""
    pixels = np.random.default_rng(0).integers(0, 256, (7, 5, len(mode)), np.uint8)
    Image.fromarray(pixels, mode).save(tmp_path / "a.tif")
    content = (tmp_path / "a.tif").read_bytes()
    tag = struct.pack("<HHIHH", 338, 3, 1, 2, 0)
    assert content.count(tag) == 1
    other = (65_000, 2) if meaning is None else (338, meaning)
    content = content.replace(tag, struct.pack("<HHIHH", other[0], 3, 1, other[1], 0))
    if meaning in (1, 2):
        assert decode_bytes(content, "a").shape == (3, 7, 5)
        return
    assert refused(DataError, decode_bytes, content, "a") == (
        f"a: not a readable image, {len(content)} bytes (a TIFF with bands beside its colours, none of "
        "which it calls alpha; expected RGB)"
    )


def test_the_address_of_an_image_is_refused_with_the_way():
    line = refused(DataError, decode_image, "https://example.org/a.jpg")
    assert line.endswith("; fetch an image from its address first")
