"""From file bytes to a uint8 image of the size that the model sees. All of it runs in workers.

Images are (3, H, W) uint8 tensors whose memory is channels-last, as the JPEG decoder leaves them:
torch's antialiased uint8 interpolation is fastest there.
"""

from __future__ import annotations

import io
import math
import os
import stat
import struct
import warnings
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

from ..messages import OneLineError, in_brief

IMMENSE = 10**8                 # pixels; more of them are not made to keep a few
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM")   # Pillow's names
JPEG_START = b"\xff\xd8\xff"
# Markers: SOF0 … SOF15, without DHT, JPG and DAC among them; TEM and RST0 … RST7 have no content.
FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
MARKERS_ALONE = frozenset({0x00, 0x01, *range(0xD0, 0xD9)})


class DataError(OneLineError):
    """What is wrong with a data set or one of its files, in one line."""


class Box(NamedTuple):
    """A rectangle in pixels; it may reach beyond the image."""

    top: int
    left: int
    height: int
    width: int


def decode_image(path: str) -> Tensor:
    """The image in a file as RGB, (3, H, W) uint8.

    Raises DataError naming the file if it is missing or no regular file, and as `decode_bytes`.
    """
    return decode_bytes(read_file(path), path)


def decode_bytes(content: bytes, name: str) -> Tensor:
    """A file's content as RGB, (3, H, W) uint8.

    JPEG by torchvision, which is fast; all else by Pillow, which no damaged file brings down (of an
    animation the first frame). What a file is, its first bytes say, not its name. Transparency is
    dropped as Pillow's convert("RGB") drops it, and the EXIF rotation of JPEGs is ignored. Of 16
    bits the higher 8 are kept. Raises DataError, which calls it by `name`, if it is empty,
    truncated, no image, or of more pixels than Pillow takes for harmless (Image.MAX_IMAGE_PIXELS,
    89,478,485).
    """
    if content.startswith(JPEG_START):
        height, width = jpeg_size(content)
        if 0 < height * width <= (Image.MAX_IMAGE_PIXELS or math.inf):
            try:
                encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                return decode_jpeg(encoded, mode=ImageReadMode.RGB)
            except RuntimeError:                     # Pillow says better what is wrong
                pass
    return _decode_with_pillow(name, content)


def read_file(path: str) -> bytes:
    """The content of a regular file; a pipe or a device, which may never end, is a DataError."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for somebody to write into it.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return file.read()
        reason = "not a regular file"
    except OSError as error:
        reason = error.strerror
    except ValueError:
        reason = "its name holds a zero byte"
    raise DataError(f"{path}: cannot be read: {reason}")


def jpeg_size(content: bytes) -> tuple[int, int]:
    """(height, width) in the frame header of a JPEG; (0, 0) if there is none (ITU-T T.81, annex B).

    Goes from marker to marker as libjpeg does, which skips what is no marker.
    """
    place = len(JPEG_START) - 1                      # the first marker's own 0xFF
    try:
        while (place := content.index(0xFF, place)) >= 0:
            while content[place] == 0xFF:            # any number of them may stand before a marker
                place += 1
            marker, place = content[place], place + 1
            if marker in FRAME_HEADERS:
                return struct.unpack_from(">HH", content, place + 3)   # after length and precision
            if marker in (0xD9, 0xDA):               # the end, or the image's data
                break
            if marker not in MARKERS_ALONE:
                place += struct.unpack_from(">H", content, place)[0]
    except (ValueError, IndexError, struct.error):   # the file ends
        pass
    return 0, 0


def _decode_with_pillow(path: str, content: bytes) -> Tensor:
    """For all but sound JPEGs. A truncated file is an error, too."""
    try:
        # Pillow prints warnings of damaged files, and of too many pixels, which is an error here.
        with warnings.catch_warnings(action="ignore"):
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                return from_pillow(image)
    except UnidentifiedImageError:
        reason = f"none of {', '.join(FORMATS)}" if content else "empty"
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{path}: too large an image ({in_brief(error)})") from None
    except Exception as error:                       # Pillow's plug-ins raise many kinds
        reason = in_brief(error)
    raise DataError(f"{path}: not a readable image, {len(content)} bytes ({reason})")


def from_pillow(image: Image.Image) -> Tensor:
    """An image of Pillow's as RGB, (3, H, W) uint8, channels-last in memory."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        # 16-bit grey, which convert("RGB") would clip to white. Of 16-bit colours Pillow keeps the
        # higher byte by itself.
        image = Image.fromarray((np.asarray(image) // 256).clip(0, 255).astype(np.uint8))
    image = image.convert("RGB")
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, 3).permute(2, 0, 1)


def resize(image: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    """(3, H, W) → (3, *size) uint8, antialiased like Pillow; "bilinear" or "bicubic"."""
    if tuple(image.shape[1:]) == size:
        return image
    if size == (1, 1):                               # to which torch resizes this layout alone
        image = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    return F.interpolate(image[None], size, mode=interpolation, antialias=True)[0]


def crop(image: Tensor, box: Box) -> Tensor:
    """The pixels in `box`, (3, box.height, box.width); black where it reaches beyond the image."""
    top, left, height, width = box
    # The part of the box that lies on the image; empty if the box lies beside it.
    y0, y1 = (min(max(y, 0), image.shape[1]) for y in (top, top + height))
    x0, x1 = (min(max(x, 0), image.shape[2]) for x in (left, left + width))
    inside = image[:, y0:y1, x0:x1]
    if inside.shape[1:] == (height, width):
        return inside
    above, before = min(max(-top, 0), height), min(max(-left, 0), width)
    return F.pad(inside, (before, width - before - (x1 - x0), above, height - above - (y1 - y0)))


def crop_and_flip(image: Tensor, box: Box, flip: bool, size: tuple[int, int],
                  interpolation: str) -> Tensor:
    """The training view: `box` cut out, resized to `size`, mirrored if `flip`: (3, *size) uint8."""
    view = resize(crop(image, box), size, interpolation)
    return view.flip(-1) if flip else view


def resize_and_centre_crop(image: Tensor, size: tuple[int, int], crop_pct: float,
                           interpolation: str) -> Tensor:
    """The evaluation view: resize until it covers size / crop_pct, cut out the centre.

    For a square size this is Resize(floor(size / crop_pct)) of the shorter side, then
    CenterCrop(size), as in timm and DeiT: .875 makes 256 of 224. Where that would be an immense
    image (of a line of pixels, or at a tiny crop_pct), its centre is cut out of the original,
    rounded to whole pixels, and resized alone.
    """
    height, width = image.shape[1:]
    # 1e-9: floor(224 / 0.875) must not become 255 by rounding.
    wanted = [int(min(side / crop_pct, IMMENSE) + 1e-9) for side in size]
    if wanted[0] * width >= wanted[1] * height:      # the height decides
        target = (wanted[0], int(wanted[0] * width / height))
    else:
        target = (int(wanted[1] * height / width), wanted[1])
    if target[0] * target[1] > max(IMMENSE, 4 * size[0] * size[1]):
        part = [max(1, round(side * old / new))
                for side, old, new in zip(size, (height, width), target)]
        centre = Box((height - part[0]) // 2, (width - part[1]) // 2, *part)
        return resize(crop(image, centre), size, interpolation)
    image = resize(image, target, interpolation)
    top = round((image.shape[1] - size[0]) / 2)
    left = round((image.shape[2] - size[1]) / 2)
    return crop(image, Box(top, left, *size))
