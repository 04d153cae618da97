"""From file bytes to a uint8 picture of the size that the model sees. All of it runs in workers.

Pictures are (3, H, W) uint8 tensors whose memory is channels-last, as the JPEG decoder leaves them:
torch's antialiased uint8 interpolation is fastest there.
"""

from __future__ import annotations

import io
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.io import ImageReadMode
from torchvision.io import decode_image as decode_common_formats

from ..messages import OneLineError


class DataError(OneLineError):
    """What is wrong with a data set or one of its files, in one line."""


class Box(NamedTuple):
    """A rectangle in pixels; it may reach beyond the picture."""

    top: int
    left: int
    height: int
    width: int


def decode_image(path: str) -> Tensor:
    """The picture in a file as RGB, (3, H, W) uint8.

    JPEG, PNG and still WebP by torchvision, whatever their name says; all else by Pillow (of an
    animation the first frame). Transparency is dropped as Pillow's convert("RGB") drops it, and the
    EXIF rotation of JPEGs is ignored. 16-bit grey is divided by 257. Raises DataError naming the
    file if it is missing, empty, truncated or no picture.
    """
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    if content.startswith(b"GIF8"):                  # torchvision decodes every frame of them
        return _decode_with_pillow(path, content)
    try:
        encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        picture = decode_common_formats(encoded, mode=ImageReadMode.RGB)
    except (RuntimeError, ValueError):               # ValueError: an empty file has no buffer
        return _decode_with_pillow(path, content)
    if picture.dtype == torch.uint16:
        picture = (picture.to(torch.int32) // 257).to(torch.uint8)
    return picture


def _decode_with_pillow(path: str, content: bytes) -> Tensor:
    """For what torchvision does not read or not as wanted. A truncated file is an error, too."""
    try:
        with Image.open(io.BytesIO(content)) as picture:
            if picture.mode == "I" or picture.mode.startswith("I;16"):
                # 16-bit grey, which convert("RGB") would clip to white.
                grey = np.minimum(np.asarray(picture) // 257, 255).astype(np.uint8)
                picture = Image.fromarray(grey)
            return from_pillow(picture.convert("RGB"))
    except UnidentifiedImageError:
        reason = "of no known format" if content else "empty"
    except Exception as error:                       # Pillow's plug-ins raise many kinds
        reason = str(error) or type(error).__name__
    raise DataError(f"{path}: not a readable picture, {len(content)} bytes ({reason})")


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
    """The pixels in `box`, (3, box.height, box.width); black where it reaches beyond the picture."""
    top, left, height, width = box
    # The part of the box that lies on the picture; empty if the box lies beside it.
    y0, y1 = (min(max(y, 0), picture.shape[1]) for y in (top, top + height))
    x0, x1 = (min(max(x, 0), picture.shape[2]) for x in (left, left + width))
    inside = picture[:, y0:y1, x0:x1]
    if inside.shape[1:] == (height, width):
        return inside
    above, before = min(max(-top, 0), height), min(max(-left, 0), width)
    return F.pad(inside, (before, width - before - (x1 - x0), above, height - above - (y1 - y0)))


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
