"""Valid image files of every format, and reproducible ways to break them."""

import functools
import io
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image

SIZES = ((1, 1), (13, 17), (61, 47), (128, 160))  # height, width
EXTREMES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
PNG_START = b"\x89PNG\r\n\x1a\n"


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    """An RGB image of smooth waves and a little noise, as a substitute for a photograph."""
    row, column = np.mgrid[:height, :width]
    waves = np.stack(
        [
            np.sin(column / 29 + row / 17),
            np.cos(column / 23 - row / 31),
            np.sin(row / 13 - column / 19),
        ],
        axis=-1,
    )
    grain = np.random.default_rng(seed).normal(0, 12, waves.shape)
    return Image.fromarray((125 + 100 * waves + grain).clip(0, 255).round().astype(np.uint8))


def encoded(image: Image.Image, file_format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def png_chunk(name: bytes, content: bytes) -> bytes:
    """A chunk of a PNG file: length, name, content, checksum."""
    checksum = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)


def png_of_16_bits(values: np.ndarray) -> bytes:
    """A PNG file of 16-bit values: grey (H, W), or RGB (H, W, 3), which Pillow cannot write."""
    height, width = values.shape[:2]
    colour_type = 0 if values.ndim == 2 else 2
    header = struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return (
        PNG_START
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", zlib.compress(rows))
        + png_chunk(b"IEND", b"")
    )


@functools.cache
def valid_files(height: int, width: int) -> dict[str, bytes]:
    """One valid file of every format and mode: file name with the format's extension → content."""
    rgb = noise(height, width)
    grey, palette = rgb.convert("L"), rgb.quantize(61)
    rgba = Image.merge("RGBA", (*rgb.split(), grey))
    deep = np.random.default_rng(1).integers(0, 2**16, (height, width, 3))
    turned = Image.Exif()
    turned[0x0112] = 6  # orientation: a quarter turn
    frames = dict(save_all=True, append_images=[rgb.transpose(Image.Transpose.FLIP_LEFT_RIGHT)])
    return {
        "rgb.jpg": encoded(rgb, "JPEG"),
        "progressive.jpg": encoded(rgb, "JPEG", progressive=True),
        "grey.jpg": encoded(grey, "JPEG"),
        "cmyk.jpg": encoded(rgb.convert("CMYK"), "JPEG"),
        "turned.jpg": encoded(rgb, "JPEG", exif=turned),
        "rgb.png": encoded(rgb, "PNG"),
        "grey.png": encoded(grey, "PNG"),
        "palette.png": encoded(palette, "PNG"),
        "rgba.png": encoded(rgba, "PNG"),
        "one_bit.png": encoded(rgb.convert("1"), "PNG"),
        "grey_16.png": png_of_16_bits(deep[..., 0]),
        "rgb_16.png": png_of_16_bits(deep),
        "still.gif": encoded(palette, "GIF"),
        "animated.gif": encoded(rgb, "GIF", **frames),
        "lossless.webp": encoded(rgb, "WEBP", lossless=True),
        "lossy.webp": encoded(rgb, "WEBP", quality=61),
        "animated.webp": encoded(rgb, "WEBP", **frames),
        "rgb.bmp": encoded(rgb, "BMP"),
        "rgb.tiff": encoded(rgb, "TIFF"),
        "lzw.tif": encoded(rgb, "TIFF", compression="tiff_lzw"),
        "jpeg.tif": encoded(rgb, "TIFF", compression="jpeg"),
        "grey_16.tiff": encoded(Image.fromarray(deep[..., 0].astype(np.uint16)), "TIFF"),
        "rgb.ppm": encoded(rgb, "PPM"),
        "grey.pgm": encoded(grey, "PPM"),
        "grey_16.pgm": encoded(Image.fromarray(deep[..., 0].astype(np.uint16)), "PPM"),
    }


WAYS = (
    "flip bits",
    "flip a bit of the head",
    "truncate",
    "cut out",
    "repeat",
    "blank",
    "extreme number",
    "garbage after the head",
)


def broken(content: bytes, rng: np.random.Generator, way: str) -> bytes:
    changed, size = bytearray(content), len(content)
    place, head = int(rng.integers(size)), int(rng.integers(2, 40))
    start, end = sorted(rng.integers(size, size=2).tolist())
    match way:
        case "flip bits" | "flip a bit of the head":
            for index in (
                [place % 64]
                if "head" in way
                else rng.integers(size, size=2 + size // int(rng.integers(20, 500)))
            ):
                changed[index] ^= 1 << int(rng.integers(8))
        case "truncate":
            del changed[place:]
        case "cut out":
            del changed[place : place + head]
        case "repeat":
            changed = changed[:end] + changed[start:]
        case "blank":
            changed[start:end] = bytes(end - start)
        case "extreme number":  # in the head, where sizes and offsets stand
            width = int(rng.choice((1, 2, 4)))
            number = (int(rng.choice(EXTREMES)) % 256**width).to_bytes(
                width, "big" if rng.random() < 0.5 else "little"
            )
            place %= int(rng.choice((64, 1024)))
            changed[place : place + width] = number
        case "garbage after the head":
            changed[head:] = rng.bytes(size)
    return bytes(changed)


def broken_files(count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """`count` broken files as (name, content), through all formats, sizes and ways to break them.
    File i depends only on (seed, i)."""
    valid = [file for size in SIZES for file in valid_files(*size).items()]
    for number in range(count):
        name, content = valid[number % len(valid)]
        # The ways shift by one in each round of the valid files, so a file meets others in others.
        way = WAYS[(number + number // len(valid)) % len(WAYS)]
        rng = np.random.default_rng((seed, number))
        yield f"{number:06}_{way.replace(' ', '_')}_{name}", broken(content, rng, way)
