"""Decode image files, resize and crop; worker processes do this, one image at a time.

Images are (3, H, W) uint8 tensors whose memory is channels-last. The JPEG decoder returns them so,
and torch's antialiased interpolation of uint8 is fastest with that layout.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor

from ..messages import OneLineError, in_brief

try:
    from torchvision.io import ImageReadMode, decode_jpeg
except ImportError:                                  # deprecated since 0.29, to be removed
    decode_jpeg = None

IMMENSE = 10**8                 # pixels; no larger image is made only to crop a small part of it
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM")   # Pillow's names
HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"mif1", b"msf1", b"avif", b"avis")
HEIF_REMEDY = ("HEIC, HEIF and AVIF are not read: convert them, on macOS by sips -s format jpeg "
               "FILE --out FILE.jpg, elsewhere by heif-convert FILE FILE.jpg")
# How an image of each EXIF orientation has to be turned: the axes of (3, H, W) that are flipped,
# after height and width have been swapped for the orientations from 5 on.
FLIPS = {1: (), 2: (2,), 3: (1, 2), 4: (1,), 5: (), 6: (2,), 7: (1, 2), 8: (1,)}


class DataError(OneLineError):
    """Something is wrong with a data set or one of its files; the message is one line."""


class Box(NamedTuple):
    """A rectangle in an image, in pixels; it may reach beyond the image."""

    top: int
    left: int
    height: int
    width: int


def decode_image(path: str, *, apply_exif_orientation: bool = True) -> Tensor:
    """Read and decode an image file: RGB, (3, H, W) uint8; see `decode_bytes`.

    Raises DataError, which names the file, if it cannot be read or decoded.
    """
    try:
        with open(path, "rb") as file:
            content = file.read()
    except (OSError, ValueError) as error:           # ValueError: a zero byte in the name
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}") from None
    return decode_bytes(content, path, apply_exif_orientation=apply_exif_orientation)


def decode_bytes(content: bytes, name: str, *, apply_exif_orientation: bool = True) -> Tensor:
    """Decode the content of an image file: RGB, (3, H, W) uint8.

    torchvision decodes JPEGs, because it is fast, and Pillow all other formats. Pillow also decodes
    JPEGs if torchvision has no decoder, and those that torchvision refuses, because no damaged file
    makes Pillow crash; both give the same pixels. The first bytes of the content decide which
    format it is, not the name of the file. Of an animation the first frame is taken; transparency
    is dropped as by Pillow's convert("RGB"); of 16-bit values the higher 8 bits are kept.

    apply_exif_orientation: turn the image as its EXIF data say, so that a photograph taken with an
        upright camera is upright; False leaves it as it is stored, as torchvision's and timm's
        loaders do. A TIFF is turned in any case, because Pillow does so.

    Raises DataError, which calls the image `name`, if the content is empty, truncated or not an
    image, if it has 32-bit values, or if the image has more pixels than Pillow considers harmless
    (Image.MAX_IMAGE_PIXELS, 89,478,485 by default).
    """
    # torchvision warns of its deprecation, torch of bytes that cannot be written to, and Pillow of
    # damaged files; Pillow's warning of too many pixels is an error here.
    with warnings.catch_warnings(action="ignore"):
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:  # reads its header
                if decode_jpeg and image.format in ("JPEG", "MPO"):
                    with contextlib.suppress(RuntimeError):  # Pillow may decode it, or say why not
                        decoded = decode_jpeg(torch.frombuffer(content, dtype=torch.uint8),
                                              mode=ImageReadMode.RGB)
                        return turned(decoded, exif_orientation(image) if apply_exif_orientation
                                      else 1)
                return from_pillow(image, apply_exif_orientation=apply_exif_orientation)
        except UnidentifiedImageError:
            reason = f"none of {', '.join(FORMATS)}" if content else "empty"
            if content[4:8] == b"ftyp" and content[8:12] in HEIF_BRANDS:
                reason = HEIF_REMEDY                 # also if it is called .jpg, as some phones do
        except Exception as error:                   # Pillow's plug-ins raise many kinds
            reason = in_brief(error)
    raise DataError(f"{name}: not a readable image, {len(content)} bytes ({reason})")


def exif_orientation(image: Image.Image) -> int:
    """The orientation, 1 … 8, in the EXIF or XMP data of a Pillow image.

    It is 1 (upright) if there are none, or damaged ones. A TIFF has to be loaded before, because
    Pillow turns it when it loads.
    """
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:                                # Pillow's parsers raise many kinds
        return 1
    return orientation if orientation in FLIPS else 1


def turned(image: Tensor, orientation: int) -> Tensor:
    """The image (3, H, W) turned upright: (3, H, W), or (3, W, H) for orientations from 5 on."""
    if orientation == 1:
        return image
    upright = image.transpose(1, 2) if orientation > 4 else image
    return upright.flip(FLIPS[orientation]).permute(1, 2, 0).contiguous().permute(2, 0, 1)


def from_pillow(image: Image.Image, *, apply_exif_orientation: bool = True) -> Tensor:
    """Convert a Pillow image to RGB, (3, H, W) uint8, channels-last in memory.

    Raises DataError for 32-bit values: which of them is black and which is white is not known.
    """
    # Pillow reads 16-bit values as 32-bit integers, too; PNG and PPM have no others.
    deep = 32 in image.tag_v2.get(258, ()) if image.format == "TIFF" else (       # BitsPerSample
        image.format not in ("PNG", "PPM"))
    if image.mode == "F" or image.mode == "I" and deep:
        raise DataError("an image of 32-bit values, whose black and white are not known; expected "
                        "8 or 16 bits per channel")
    image.load()                                     # turns a TIFF; its orientation is then 1
    orientation = exif_orientation(image) if apply_exif_orientation else 1
    if image.mode == "I" or image.mode.startswith("I;16"):
        # convert("RGB") would clip 16-bit grey levels above 255 to white. For 16-bit colours Pillow
        # itself keeps the higher byte.
        image = Image.fromarray((np.asarray(image) // 256).clip(0, 255).astype(np.uint8))
    image = image.convert("RGB")
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return turned(flat.view(image.height, image.width, 3).permute(2, 0, 1), orientation)


def resize(image: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    """Resize an image (3, H, W) uint8 to (3, *size), antialiased like Pillow.

    interpolation: "bilinear" or "bicubic".
    """
    if tuple(image.shape[1:]) == size:
        return image
    if size == (1, 1):                               # torch can do this only in channels-last
        image = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    return F.interpolate(image[None], size, mode=interpolation, antialias=True)[0]


def crop(image: Tensor, box: Box) -> Tensor:
    """The pixels in `box`, (3, box.height, box.width); black where it reaches beyond the image."""
    top, left, height, width = box
    inside = image[:, max(top, 0):max(top + height, 0), max(left, 0):max(left + width, 0)]
    if inside.shape[1:] == (height, width):
        return inside
    above, before = min(max(-top, 0), height), min(max(-left, 0), width)
    return F.pad(inside, (before, width - before - inside.shape[2],
                          above, height - above - inside.shape[1]))


def crop_and_flip(image: Tensor, box: Box, flip: bool, size: tuple[int, int],
                  interpolation: str) -> Tensor:
    """The training view: `box`, resized to `size`, mirrored if `flip`: (3, *size) uint8."""
    view = resize(crop(image, box), size, interpolation)
    return view.flip(-1) if flip else view


def resize_and_centre_crop(image: Tensor, size: tuple[int, int], crop_pct: float,
                           interpolation: str) -> Tensor:
    """The evaluation view: resize the image until it covers size / crop_pct, then crop the centre.

    For a square size this is Resize(floor(size / crop_pct)) of the shorter side, followed by
    CenterCrop(size), as in timm and DeiT: with crop_pct = 0.875 an image is resized to 256 pixels
    and cropped to 224. If the resized image would be immense (because the image is a single line of
    pixels, or crop_pct is tiny), the part that ends up in the view is cropped from the original,
    rounded to whole pixels, and only that part is resized.
    """
    height, width = image.shape[1:]
    # 1e-9 because floor(224 / 0.875) must not become 255 through a rounding error.
    wanted = [int(min(side / crop_pct, IMMENSE) + 1e-9) for side in size]
    if wanted[0] * width >= wanted[1] * height:      # height is scaled by the larger factor
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
