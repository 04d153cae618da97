"""JPEGs that a GPU decodes, where data.decode = "cuda": workers read files and draw views.

    files → workers: read, draw crop and flip → bytes and boxes → GPU: decode, cut, resize, flip

The draws are those of a run that decodes on CPUs. The pixels are not quite: a GPU's decoder rounds,
and enlarges colours, in another way than libjpeg, and resizes without rounding in between.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import groupby, islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from numpy import ndarray
from numpy.random import Generator
from torch import Tensor

from ..base.messages import ran_out_of_memory, warn, without_warnings
from .draw import Augment, draw_view
from .images import DataError, HeightWidth, decode_bytes, jpeg_decoder, plain_jpeg_size
from .sources import Source

END_OF_IMAGE = b"\xff\xd9"  # how a whole JPEG ends
INTERPOLATIONS = ("bilinear", "bicubic")  # by the number in a view's row
MOST_TIMES = 32  # a box so many times as long as its view is averaged first


class Encoded(NamedTuple):
    """Images as they lie in files, and the views to make of them; views of an image are neighbours."""

    content: Tensor  # (bytes,) uint8: of one image after the other
    # (images, 4) int64: its number in the set, its bytes, and height and width of one that is no
    # JPEG for a GPU, and was decoded, or zeros.
    images: Tensor
    # (B, 7) int64: which of the images, top, left, height and width of the box, whether it is
    # flipped, and the number of its interpolation.
    views: Tensor


def encoded(
    source: Source, indices: ndarray, generators: Iterator[Generator], augment: Augment
) -> Encoded:
    """Read the images of `indices`, and draw their views, each by the next generator. Raises
    DataError for an image that is not whole, or cannot be decoded here if a GPU does not.
    """
    contents, images, views = [], [], []
    for number, (index, same) in enumerate(groupby(indices.tolist())):
        content, size = read_jpeg(source, index)
        row = [index, len(content), 0, 0]
        if size is None:
            image = source.image(index)
            content, size = image.permute(1, 2, 0).flatten(), (image.shape[1], image.shape[2])
            row = [index, len(content), *size]
        contents.append(content)
        images.append(row)
        for rng in islice(generators, len(list(same))):
            box, flip, interpolation = draw_view(rng, augment, *size)
            views.append([number, *box, flip, INTERPOLATIONS.index(interpolation)])
    return Encoded(torch.cat(contents), torch.tensor(images), torch.tensor(views))


def read_jpeg(source: Source, index: int) -> tuple[Tensor, HeightWidth | None]:
    """The bytes of an image's file, and its height and width; no bytes, and None, unless it is a
    whole JPEG whose head says no more than them.
    """
    content = b""
    with suppress(DataError):  # `Source.image` will say why
        content = source.content(index)
    size = plain_jpeg_size(content, layers=(1, 3))
    if size is None or not content.endswith(END_OF_IMAGE):
        return torch.empty(0, dtype=torch.uint8), None
    return torch.frombuffer(bytearray(content), dtype=torch.uint8), size


def views_of(batch: Encoded, size: HeightWidth, device: torch.device, source: Source) -> Tensor:
    """The views of a batch, (B, 3, *size) uint8 on the device. source: as of `encoded`, to name a
    file that cannot be decoded: DataError.
    """
    images = decoded(batch, device, source)
    resized = []
    for number, top, left, height, width, _, interpolation in batch.views.tolist():
        part = images[number][None, :, top : top + height, left : left + width].float()
        # CUDA's interpolation has too little shared memory from 47 times on, if bicubic.
        enough = min(height, MOST_TIMES * size[0]), min(width, MOST_TIMES * size[1])
        if enough != (height, width):
            part = F.adaptive_avg_pool2d(part, enough)
        mode = INTERPOLATIONS[interpolation]
        resized.append(F.interpolate(part, size, mode=mode, antialias=True))
    views = torch.cat(resized).round_().clamp_(0, 255).to(torch.uint8)
    flipped = batch.views[:, 5, None, None, None].to(device, non_blocking=True)
    return torch.where(flipped == 1, views.flip(-1), views)


@cache
def tell_once(line: str) -> None:
    warn(line)


def decoded(batch: Encoded, device: torch.device, source: Source) -> list[Tensor]:
    """The images of a batch, each (3, h, w) uint8 on the device."""
    rows = batch.images.tolist()
    contents = batch.content.split([count for _, count, _, _ in rows])
    files = [content for content, row in zip(contents, rows) if not row[2]]
    numbers = [row[0] for row in rows if not row[2]]
    of_files = iter(decoded_files(files, numbers, device, source))
    images = []
    for content, (_, _, height, width) in zip(contents, rows):
        if height:
            pixels = content.view(height, width, 3).to(device, non_blocking=True)
            images.append(pixels.permute(2, 0, 1))
        else:
            images.append(next(of_files))
    return images


def decoded_files(
    files: list[Tensor], numbers: list[int], device: torch.device, source: Source
) -> list[Tensor]:
    """JPEGs as `decoded`, of these numbers in the set. One that the device refuses is decoded here;
    it refuses all for one of them, so that each is tried alone: the others keep their pixels.
    """
    decoder = jpeg_decoder()
    assert decoder is not None  # torchvision has one, and is required
    try:
        with without_warnings():  # of deprecation
            return decoder.decode(files, device=device) if files else []
    except RuntimeError as error:
        if ran_out_of_memory(error):
            raise
    if len(files) > 1:
        alone = zip(files, numbers)
        return [decoded_files([file], [number], device, source)[0] for file, number in alone]
    tell_once("data.decode = cuda: the GPU refuses images, which the CPU decodes in its place")
    name = source.path(numbers[0])  # to be named if it is damaged
    return [decode_bytes(files[0].numpy().tobytes(), name).to(device)]
