"""From file bytes to a uint8 picture of the size that the model sees. All of it runs in workers.

Pictures are (3, H, W) uint8 tensors whose memory is channels-last, as the JPEG decoder leaves them:
torch's antialiased uint8 interpolation is fastest there.
"""

from __future__ import annotations

import io
from typing import NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode
from torchvision.io import decode_image as decode_common_formats


class DataError(ValueError):
    """What is wrong with a data set or one of its files, in one line."""


class Box(NamedTuple):
    """A rectangle in pixels; it may reach beyond the picture."""

    top: int
    left: int
    height: int
    width: int


def decode_image(path: str) -> Tensor:
    """The picture in a file as RGB, (3, H, W) uint8.

    JPEG, PNG, GIF (first frame) and WebP by torchvision, whatever their name says; BMP, TIFF, PPM
    and all else by Pillow. Transparency is dropped and EXIF rotation ignored, as Pillow's
    convert("RGB") does. 16-bit PNG is divided by 257. Raises DataError naming the file if it is
    missing, truncated or no picture.
    """
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        picture = decode_common_formats(encoded, mode=ImageReadMode.RGB)
    except (RuntimeError, ValueError) as error:      # ValueError: an empty file has no buffer
        return _decode_with_pillow(path, content, str(error))
    if picture.ndim == 4:                            # an animated GIF: (frames, 3, H, W)
        picture = picture[0]
    if picture.dtype == torch.uint16:
        picture = (picture.to(torch.int32) // 257).to(torch.uint8)
    return picture


def _decode_with_pillow(path: str, content: bytes, first_error: str) -> Tensor:
    """For what torchvision does not read. A truncated file is an error here, too."""
    try:
        with Image.open(io.BytesIO(content)) as picture:
            rgb = picture.convert("RGB")
    except Exception as error:                       # Pillow's plug-ins raise many kinds
        reason = str(error) if "truncated" in str(error) else first_error.split(", ")[-1]
        raise DataError(f"{path}: not a readable picture, {len(content)} bytes "
                        f"({reason.strip() or type(error).__name__})") from None
    return from_pillow(rgb)


def from_pillow(picture: Image.Image) -> Tensor:
    """An RGB picture of Pillow's as (3, H, W) uint8, channels-last in memory."""
    flat = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return flat.view(picture.height, picture.width, 3).permute(2, 0, 1)


def resize(picture: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    """(3, H, W) → (3, *size) uint8, antialiased like Pillow; "bilinear" or "bicubic"."""
    if tuple(picture.shape[1:]) == size:
        return picture
    return F.interpolate(picture[None], size, mode=interpolation, antialias=True)[0]


def crop(picture: Tensor, box: Box) -> Tensor:
    """The pixels in `box`; black where it reaches beyond the picture."""
    top, left, height, width = box
    below = top + height - picture.shape[1]
    right = left + width - picture.shape[2]
    inside = picture[:, max(top, 0):top + height, max(left, 0):left + width]
    if top >= 0 and left >= 0 and below <= 0 and right <= 0:
        return inside
    return F.pad(inside, (max(-left, 0), max(right, 0), max(-top, 0), max(below, 0)))


def crop_and_flip(picture: Tensor, box: Box, flip: bool, size: tuple[int, int],
                  interpolation: str) -> Tensor:
    """The training view: `box` cut out, resized to `size`, mirrored if `flip`: (3, *size) uint8."""
    view = resize(crop(picture, box), size, interpolation)
    return view.flip(-1) if flip else view


def resize_and_centre_crop(picture: Tensor, size: tuple[int, int], crop_pct: float,
                           interpolation: str) -> Tensor:
    """The evaluation view: resize until it covers size / crop_pct, cut out the centre.

    For a square size this is Resize(floor(size / crop_pct)) of the shorter side, then
    CenterCrop(size), as in timm and DeiT: .875 makes 256 of 224.
    """
    height, width = picture.shape[1:]
    # 1e-9: floor(224 / 0.875) must not become 255 by rounding.
    wanted = [int(side / crop_pct + 1e-9) for side in size]
    if wanted[0] * width >= wanted[1] * height:      # the height decides
        target = (wanted[0], int(wanted[0] * width / height))
    else:
        target = (int(wanted[1] * height / width), wanted[1])
    picture = resize(picture, target, interpolation)
    top = round((picture.shape[1] - size[0]) / 2)
    left = round((picture.shape[2] - size[1]) / 2)
    return crop(picture, Box(top, left, *size))
