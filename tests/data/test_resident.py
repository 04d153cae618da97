"""Sets that are stored on the device give the same batches as workers, bit for bit."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from deit import AUGMENT, CPU, MIX, RAND_AUGMENT, SHIFT as ONLY_SHIFT
from vitinit.data.sources import ImageFolder, ImagesInMemory
from vitinit.data.draw import Augmentation, SampleKey
from vitinit.data.images import Box, DataError, crop_and_flip
from vitinit.data.loader import TrainViews
from vitinit.data.pipeline import GIB, cut, decode_to_device, only_moves_pixels

SIDE, COUNT, SEED = 7, 23, 5
SHIFT = replace(AUGMENT, **ONLY_SHIFT, crop_padding=3, erase_probability=0.5)
DRAWS = Augmentation(SEED, (SIDE, SIDE), SHIFT,
                     replace(RAND_AUGMENT, probability=0.7, interpolation="random"), MIX)


def noise(count: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, pixels in enumerate(noise(COUNT, SIDE, SIDE)):
        path = tmp_path / f"class_{number % 3}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path)
    return tmp_path


def in_memory(height: int = SIDE, width: int = SIDE, count: int = COUNT) -> ImagesInMemory:
    images = torch.from_numpy(noise(count, height, width)).permute(0, 3, 1, 2)
    return ImagesInMemory(images, np.arange(count) * 7 % 5, [""] * 5)


# ---------------------------------------------------------------------------------------------
# One view
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("height, width", [(7, 7), (5, 11)])
@pytest.mark.parametrize("flip", [False, True])
def test_a_cut_is_the_crop_of_the_image_wherever_the_window_lies(height, width, flip):
    images = torch.from_numpy(noise(3, height, width)).permute(0, 3, 1, 2).contiguous()
    corners = [(top, left) for top in range(-height - 1, height + 2) for left in (-13, -2, 0, 3, 12)]
    indices = torch.arange(len(corners)) % 3
    views = cut(images, torch.tensor([(index, *corner, int(flip))
                                      for index, corner in zip(indices, corners)]))
    assert views.dtype == torch.uint8 and views.is_contiguous()
    for view, index, (top, left) in zip(views, indices, corners):
        expected = crop_and_flip(images[index], Box(top, left, height, width), flip,
                                 (height, width), "bicubic")
        assert torch.equal(view, expected)


@pytest.mark.parametrize("crop, size, expected", [
    (SHIFT, (7, 7), True), (SHIFT, (7, 11), False),
    (replace(SHIFT, crop_scale=(0.5, 1.0)), (7, 7), False),
    (replace(SHIFT, crop_ratio=(1.0, 1.9)), (7, 7), False),
    (replace(SHIFT, crop_padding=0, flip=0.0), (7, 7), True)])
def test_pixels_only_move_where_every_drawn_box_has_the_images_size(crop, size, expected):
    assert only_moves_pixels(crop, size) is expected
    draws = Augmentation(0, size, crop, RAND_AUGMENT, MIX)
    boxes = [view.box for view in draws.views([SampleKey(0, index) for index in range(60)],
                                              [size] * 60)]
    assert all((box.height, box.width) == size for box in boxes) is expected


# ---------------------------------------------------------------------------------------------
# Which sets
# ---------------------------------------------------------------------------------------------


def stored(source, size=(SIDE, SIDE), gib: float = 1.0, advance=lambda: None) -> Tensor | None:
    return decode_to_device(source, CPU, size, gib, advance)


def test_files_are_decoded_in_order_with_a_call_for_each(folder):
    source, calls = ImageFolder(folder), []
    resident = stored(source, advance=lambda: calls.append(1))
    assert len(calls) == COUNT
    for index in range(COUNT):
        assert torch.equal(resident[index], source.image(index))


def test_the_budget_is_the_bytes_of_the_images():
    exactly = COUNT * 3 * SIDE * SIDE / GIB
    assert stored(in_memory(), gib=exactly) is not None
    assert stored(in_memory(), gib=exactly * 0.999) is None


def test_images_of_another_size_stay_with_the_workers_and_a_broken_one_is_named(folder):
    assert stored(in_memory(height=8)) is None
    odd = folder / "class_2" / "odd.png"             # the last one
    Image.fromarray(noise(1, SIDE, SIDE + 1)[0]).save(odd)
    assert stored(ImageFolder(folder)) is None
    odd.write_bytes(b"no image")
    with pytest.raises(DataError, match="odd.png: not a readable image"):
        stored(ImageFolder(folder))


def test_workers_that_only_draw_are_not_sent_the_images():
    source = in_memory(count=101)
    sent, whole = (len(pickle.dumps(TrainViews(source, DRAWS, decode=decode)))
                   for decode in (False, True))
    assert sent < 3_000 < source.images.nbytes < whole
