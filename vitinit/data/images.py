"""Decode image files, resize and crop; worker processes do this, one image at a time.

Images are (3, H, W) uint8 tensors whose memory is channels-last. The JPEG decoder returns them so,
and torch's antialiased interpolation of uint8 is fastest with that layout. Three channels are RGB,
and elsewhere in this package, too, (3, H, W) stands for as many channels as data.mean has values.
"""

import io
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError, features
from torch import Tensor

from ..base.files import FileError, read_bytes
from ..base.messages import OneLineError, counted, in_brief, ran_out_of_memory, without_warnings
from .operations import grey

LARGEST_FILE = 2**30  # bytes: RGB of 16 bits of the most pixels that Pillow reads
LONG = 32  # an image so many times as long as its view is not enlarged whole
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM")  # Pillow's names
ARRAY, TIFFS = b"\x93NUMPY", (b"II", b"MM")  # how files of numpy's begin, and TIFFs
# Marks of a JPEG's segments: where its scan begins, frames (baseline, extended, progressive), and
# others that Pillow never refuses, by the name that they begin with: tables, comments, JFIF's own, a
# colour profile in one piece or more, Adobe's.
SCAN = 0xFFDA
FRAMES = (0xFFC0, 0xFFC1, 0xFFC2)
TABLES_AND_COMMENT = dict.fromkeys((0xFFC4, 0xFFDB, 0xFFDD, 0xFFFE), b"")
PLAIN = {**TABLES_AND_COMMENT, 0xFFE0: b"JFIF\0", 0xFFE2: b"ICC_PROFILE\0", 0xFFEE: b"Adobe"}
HEIF_BRANDS = {b"ftypheic": "HEIF", b"ftypheix": "HEIF", b"ftypmif1": "HEIF", b"ftypavif": "AVIF"}
HEIF_REMEDY = (
    "HEIC and HEIF are read after pip install 'vitinit[heic]', AVIF by Pillow 11.3 or "
    "later; or convert them, on macOS by sips -s format jpeg FILE --out FILE.jpg, "
    "elsewhere by heif-convert FILE FILE.jpg"
)


class DataError(OneLineError):
    """Something is wrong with a data set or one of its files; the message is one line."""


class Box(NamedTuple):
    """A rectangle in an image, in pixels; it may reach beyond the image."""

    top: int
    left: int
    height: int
    width: int


NOWHERE = Box(0, 0, 0, 0)
HeightWidth = tuple[int, int]  # height and width, in pixels


class JpegDecoder(NamedTuple):
    name: str  # of the library
    # Bytes (n,) uint8 → (3, H, W), upright by EXIF data; or a list of them, on a device, → a list.
    decode: Callable[..., Any]


@cache
def jpeg_decoder() -> JpegDecoder | None:
    """The fastest decoder to RGB that is installed; None if only Pillow is. Importing torchvision
    takes as long as torch, so the first JPEG does it, or whoever starts workers, which would each
    have to.
    """
    with suppress(ImportError, OSError, RuntimeError):  # none, or one for another torch
        from torchcodec.decoders import decode_jpeg

        return JpegDecoder("torchcodec", decode_jpeg)
    with suppress(ImportError):  # deprecated since 0.29, to be removed
        from torchvision.io import ImageReadMode, decode_jpeg

        options = {"mode": ImageReadMode.RGB, "apply_exif_orientation": True}
        return JpegDecoder("torchvision", partial(decode_jpeg, **options))
    return None


def decoded_jpeg(content: bytes) -> Tensor | None:
    """A JPEG, (3, H, W) uint8, upright by its EXIF data; None without a decoder that takes it."""
    decoder = jpeg_decoder()
    if decoder is None:
        return None
    try:
        decoded = decoder.decode(torch.frombuffer(content, dtype=torch.uint8))
    except RuntimeError:  # Pillow may decode it, or say why not
        return None
    return decoded.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def most_pixels() -> float:
    """Pillow refuses an image with more; inf where its limit is lifted."""
    return 2 * (Image.MAX_IMAGE_PIXELS or inf)


def plain_jpeg_size(content: bytes, layers: Sequence[int] = (1, 3, 4)) -> HeightWidth | None:
    """Height and width that the head of a JPEG states, as Pillow reads them, which takes as long as
    it takes to decode 32×32 pixels. None unless every segment before the first scan is one that
    Pillow never refuses: not with EXIF data, a second picture, padding or another process, nor with
    no pixels, or more than Pillow reads, or other layers than so many: grey, colours, or four inks.
    """
    size = None
    place = 2
    while content.startswith(b"\xff\xd8") and place + 16 <= len(content):
        marker, length = struct.unpack_from(">HH", content, place)
        start = place + 4
        if marker == SCAN:
            return size
        if marker in FRAMES:
            bits, height, width, count = struct.unpack_from(">BHHB", content, start)
            if bits != 8 or count not in layers or not 0 < height * width <= most_pixels():
                break
            size = height, width
        elif marker not in PLAIN or not content.startswith(PLAIN[marker], start):
            break
        elif length < len(PLAIN[marker]) + 4:  # Pillow reads two bytes after the name
            break
        place += 2 + length
    return None


@cache
def heif_formats() -> tuple[str, ...]:
    """Pillow's names of the formats like HEIF that it can read here: AVIF itself, and HEIF by
    pillow-heif. Importing that takes as long as Pillow, so the first such file does it.
    """
    formats = []
    with without_warnings():  # of an old Pillow, which knows no "avif"
        if features.check("avif"):
            formats.append("AVIF")
    with suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
        formats.append("HEIF")
    return tuple(formats)


@contextmanager
def room_for(name: str) -> Iterator[None]:
    """A context in which too little memory is DataError, which calls the image `name`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        raise DataError(f"{name}: too little memory to read it ({in_brief(error)})") from None


def decode_image(
    path: str,
    view: Callable = lambda image: image,
    *,
    channels: int = 3,
    apply_exif_orientation: bool = True,
) -> Any:
    """Read and decode an image file as `decode_bytes`, and return what `view` makes of it. Raises
    DataError, which names the file, also where there is too little memory for either.
    """
    with room_for(path):
        image = decode_bytes(
            read_image(path),
            path,
            channels=channels,
            apply_exif_orientation=apply_exif_orientation,
        )
        return view(image)


def read_image(path: str) -> bytes:
    """The content of an image file; DataError, which names it, if it cannot be read."""
    try:
        return read_bytes(path, limit=LARGEST_FILE)
    except FileError as error:
        way = "; fetch an image from its address first" if "://" in path else ""
        raise DataError(f"{error}{way}") from None
    except ValueError as error:  # of a zero byte in the name
        raise DataError(f"{path}: cannot be read: {error}") from None


def decode_bytes(
    content: bytes, name: str, *, channels: int = 3, apply_exif_orientation: bool = True
) -> Tensor:
    """Decode the content of an image file: (channels, H, W) uint8, three of them in RGB.

    `jpeg_decoder` decodes JPEGs, because it is fast, and Pillow other formats, what that refuses,
    and what it would turn and should not; both give the same pixels. Of an animation the first
    frame is taken; transparency is dropped as by Pillow's convert("RGB"); of 16-bit values, and of
    the 12 bits of a grey TIFF, the higher 8 bits are kept.

    channels: as many as the file must have, alpha included, unless it is RGB of which grey is
        wanted, or grey of which RGB is. TIFFs of other numbers are read by tifffile, as Pillow
        reads few.
    apply_exif_orientation: turn a photograph upright, as its EXIF data say; False leaves it as it
        is stored, as torchvision's and timm's loaders do. Pillow turns a TIFF in any case, and
        pillow-heif a HEIC, whose EXIF data then no longer say so.

    Raises DataError, which calls the image `name`, if the content is empty, truncated or not an
    image, if it has 32-bit values, other channels or, as RGB, bands of unknown meaning, or,
    unless it is an array of numpy's, more pixels than Pillow reads (178,956,970 by default).
    """
    formats = list(FORMATS)
    if content[4:8] == b"ftyp":
        formats += heif_formats()
    with without_warnings():  # of deprecation, read-only bytes and damage
        try:
            if content.startswith(ARRAY):
                decoded = from_array(np.load(io.BytesIO(content)))
            elif channels not in (1, 3) and content.startswith(TIFFS):
                decoded = decoded_tiff(content, channels)
            else:
                decoded = decoded_photograph(content, formats, channels, apply_exif_orientation)
        except MemoryError:
            raise
        except UnidentifiedImageError:
            reason = f"none of {', '.join(formats)}" if content else "empty"
            if HEIF_BRANDS.get(content[4:12], formats[0]) not in formats:  # perhaps called .jpg
                reason = HEIF_REMEDY
        except Exception as error:  # Pillow's plug-ins raise many kinds
            reason = in_brief(error)
        else:
            return with_channels(decoded, channels, name)
    raise DataError(f"{name}: not a readable image, {len(content)} bytes ({reason})")


def decoded_photograph(
    content: bytes, formats: list[str], channels: int, apply_exif_orientation: bool
) -> Tensor:
    """A file of Pillow's formats, in RGB, (3, H, W) uint8, or with alpha if `from_pillow` keeps it."""
    decoded = decoded_jpeg(content) if plain_jpeg_size(content) else None
    if decoded is not None:
        return decoded
    with Image.open(io.BytesIO(content), formats=formats) as image:  # reads its header
        if image.format in ("JPEG", "MPO"):
            if apply_exif_orientation or "exif" not in image.info:
                decoded = decoded_jpeg(content)
        if decoded is not None:
            return decoded
        return from_pillow(image, channels, apply_exif_orientation=apply_exif_orientation)


def decoded_tiff(content: bytes, channels: int) -> Tensor:
    """All bands of the first picture of a TIFF, (C, H, W) uint8; DataError without tifffile."""
    try:
        from tifffile import TiffFile
    except ImportError:
        raise DataError(
            "a TIFF of other channels than 1 or 3: pip install 'vitinit[bands]'"
        ) from None
    with TiffFile(io.BytesIO(content)) as file:
        page = file.pages.first
        size = page.imagewidth * page.imagelength * page.samplesperpixel
        if size > most_pixels() * channels:
            raise DataError(
                f"{page.imagelength} × {page.imagewidth} pixels of {page.samplesperpixel} channels, "
                "more than Pillow reads"
            )
        bands = page.asarray()
        return from_array(np.moveaxis(bands, 0, -1) if page.axes == "SYX" else bands)


def from_array(array: np.ndarray) -> Tensor:
    """(H, W) or (H, W, C), uint8, or uint16, whose higher 8 bits are kept → (C, H, W) uint8,
    channels-last. DataError for any other array.
    """
    layers = array[..., None] if array.ndim == 2 else array
    if array.dtype.kind != "u" or array.itemsize > 2 or layers.ndim != 3 or not array.size:
        raise DataError(
            f"an array {array.shape} {array.dtype}; expected (H, W) or (H, W, channels), uint8 or "
            "uint16, whose higher 8 bits are kept"
        )
    # A copy, since a view such as frame[..., ::-1] has strides that torch has not.
    levels = np.array(layers >> 8 * (array.itemsize - 1), np.uint8, order="C")
    return torch.from_numpy(levels).permute(2, 0, 1)


def with_channels(image: Tensor, channels: int, name: str = "an image") -> Tensor:
    """An image (c, H, W) uint8 with so many channels: RGB as grey, as by Pillow's convert("L"), grey
    as RGB, or as it is. DataError, which calls the image `name`, for any other number.
    """
    if len(image) == channels:
        return image
    if (len(image), channels) == (3, 1):
        return grey(image[None].float())[0].to(torch.uint8)
    if (len(image), channels) == (1, 3):
        return image.repeat(3, 1, 1)
    raise DataError(
        f"{name}: has {counted(len(image), 'channel')}, and data.mean "
        f"{counted(channels, 'value')}; expected as many"
    )


def has_unknown_bands(image: Image.Image) -> bool:
    """Whether a TIFF has bands beside its colours, such as infrared, and calls none of them alpha.
    Pillow drops them, or takes the fourth for alpha.
    """
    if image.format != "TIFF":
        return False
    unstated = 0 if image.mode == "RGBA" else 1
    meanings = image.tag_v2.get(338, [unstated])  # type: ignore[attr-defined]  # ExtraSamples
    return {1, 2}.isdisjoint(meanings)  # the two kinds of alpha


def from_pillow(
    image: Image.Image, channels: int = 3, *, apply_exif_orientation: bool = True
) -> Tensor:
    """A Pillow image as RGB, (3, H, W) uint8, channels-last, or, where neither one channel nor three
    are asked for, with its alpha. DataError for 32-bit values, and unknown bands.
    """
    stated = getattr(image, "tag_v2", {}).get(258)  # BitsPerSample of a TIFF
    # Pillow may read 16-bit values as 32-bit integers, too; PNG and PPM have no others.
    if image.mode == "F" or image.mode == "I" and image.format not in ("PNG", "PPM"):
        bits = "signed 16" if stated == (16,) else "32"
        raise DataError(
            f"an image of {bits}-bit values, whose black and white are not known; "
            "expected 8 or 16 bits per channel"
        )
    if has_unknown_bands(image):
        raise DataError(
            "a TIFF with bands beside its colours, none of which it calls alpha; expected RGB"
        )
    image.load()  # turns a TIFF in any case
    if apply_exif_orientation:
        with suppress(Exception):  # of many kinds, where EXIF data are damaged
            image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        # convert("RGB") clips 16-bit grey levels above 255; of colours it keeps the higher byte.
        step = 16 if stated == (12,) else 256
        higher = (np.asarray(image) // step).clip(0, 255)
        image = Image.fromarray(higher.astype(np.uint8))
    if channels in (1, 3) or image.mode not in ("LA", "RGBA"):
        image = image.convert("RGB")
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, -1).permute(2, 0, 1)


def resize(image: Tensor, size: HeightWidth, interpolation: str) -> Tensor:
    """Resize (3, H, W) uint8 to (3, *size), "bilinear" or "bicubic", antialiased like Pillow."""
    if tuple(image.shape[1:]) == size:
        return image
    # As a batch of (H, W, 3) its strides are those of channels-last, and so are the result's.
    batch = image.permute(1, 2, 0)[None].permute(0, 3, 1, 2)
    return F.interpolate(batch, size, mode=interpolation, antialias=True)[0]


def crop(image: Tensor, box: Box) -> Tensor:
    """The pixels in `box`, (3, box.height, box.width); black where it reaches beyond the image."""
    top, left, height, width = box
    inside = image[:, max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)]
    if inside.shape[1:] == (height, width):
        return inside
    above = min(max(-top, 0), height)
    before = min(max(-left, 0), width)
    below = height - above - inside.shape[1]
    after = width - before - inside.shape[2]
    return F.pad(inside, (before, after, above, below))


def fit_whole(
    image: Tensor, size: HeightWidth, interpolation: str, border: Sequence[int] | None = None
) -> Tensor:
    """A view of the whole image, (3, *size) uint8: resized to `size` whatever its proportions, as
    timm's crop_mode "squash"; or, with a colour for the border, by its longer side, and centred on
    that colour, as timm's crop_mode "border".
    """
    if border is None:
        return resize(image, size, interpolation)
    height, width = image.shape[1:]
    ratio = max(height / size[0], width / size[1])
    inner = max(1, round(height / ratio)), max(1, round(width / ratio))
    view = torch.tensor(border, dtype=torch.uint8).repeat(*size, 1).permute(2, 0, 1)
    top, left = ((side - its) // 2 for side, its in zip(size, inner))
    view[:, top : top + inner[0], left : left + inner[1]] = resize(image, inner, interpolation)
    return view


def crop_and_flip(
    image: Tensor,
    box: Box,
    flip: bool,
    size: HeightWidth,
    interpolation: str,
    border: Sequence[int] | None = None,
) -> Tensor:
    """The training view: `box`, by `fit_whole` resized to `size`, mirrored if `flip`: (3, *size)
    uint8.
    """
    view = fit_whole(crop(image, box), size, interpolation, border)
    return view.flip(-1) if flip else view


def resize_and_centre_crop(
    image: Tensor, size: HeightWidth, crop_pct: float, interpolation: str
) -> Tensor:
    """The evaluation view: resize the image until it covers size / crop_pct, then crop the centre.

    For a square size this is Resize(floor(size / crop_pct)) of the shorter side, then
    CenterCrop(size), as in timm and DeiT: with crop_pct = 0.875 to 256 pixels, then to 224. Of a
    LONG image only the centre is enlarged: one of 65,500×1 pixels would take 13 GB.
    """
    height, width = image.shape[1:]
    # 1e-9 because floor(224 / 0.875) must not become 255 through a rounding error.
    down, across = (int(side / crop_pct + 1e-9) for side in size)
    if down * width >= across * height:  # height is scaled by the larger factor
        across = int(down * width / height)
    else:
        down = int(across * height / width)
    box = Box(round((down - size[0]) / 2), round((across - size[1]) / 2), *size)
    if down * across <= max(height * width, LONG * size[0] * size[1] / crop_pct**2):
        return crop(resize(image, (down, across), interpolation), box)
    return enlarged_part(image, (down, across), box, interpolation)


def enlarged_part(image: Tensor, size: HeightWidth, box: Box, interpolation: str) -> Tensor:
    """What lies in `box` of the image enlarged to `size`, by Pillow, which makes nothing else."""
    y = image.shape[1] / size[0]  # pixels per pixel of the enlarged image
    x = image.shape[2] / size[1]
    # Bicubic interpolation reads two pixels beside the box. Pillow's box is of short floats.
    first = max(0, int(box.top * y) - 2)
    before = max(0, int(box.left * x) - 2)
    top = box.top * y - first
    left = box.left * x - before
    piece = image[:, first : first + box.height + 6, before : before + box.width + 6]
    kernel = Image.Resampling[interpolation.upper()]
    # Rows first, as in torch; in one call Pillow may begin with columns.
    across = (left, 0, left + box.width * x, piece.shape[1])
    down = (0, top, box.width, top + box.height * y)
    channels = []
    for values in piece.numpy():
        rows = Image.fromarray(values).resize((box.width, piece.shape[1]), kernel, across)
        channels.append(np.asarray(rows.resize((box.width, box.height), kernel, down)))
    return from_array(np.stack(channels, axis=2))
