"""JPEGs that the device decodes: the views are those of a CPU, up to rounding."""

import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitinit.data import encoded
from vitinit.data.draw import Augmentation, SampleKey, Samples
from vitinit.data.encoded import Encoded, views_of
from vitinit.data.images import DataError, JpegDecoder, jpeg_decoder
from vitinit.data.loader import TrainViews
from vitinit.data.pipeline import one_ahead
from vitinit.data.sources import LooseImages
from vitinit.recipe.files import load_recipe, overrides

SIZE = 19, 23
CPU = torch.device("cpu")
WHOLE = (
    "augment.crop_scale=[1.0, 1.0]",
    "augment.crop_ratio=[1.0, 1.0]",
    "eval.crop_pct=1.0",
    "augment.fit=squash",
)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> LooseImages:
    """Smooth images: plain JPEGs of several sizes, a grey one, and ones that a CPU has to read."""
    folder = tmp_path_factory.mktemp("photographs")
    rng = np.random.default_rng(0)
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn
    ways = [("1.jpg", {}), ("2.jpg", {}), ("3.jpg", {"exif": turned}), ("4.png", {}), ("5.jpg", {})]
    for number, (name, options) in enumerate(ways):
        coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8))
        image = coarse.resize((53 + number, 41 - number), Image.Resampling.BICUBIC)
        image.convert("L" if name == "5.jpg" else "RGB").save(folder / name, **options)
    return LooseImages(folder)


def views(source: LooseImages, *sets: str, encoded: bool) -> Tensor:
    """Three views of each image, (15, 3, 19, 23) uint8, made by a worker or by the device."""
    recipe = load_recipe("deit_base", overrides(sets=["augment.interpolation=random", *sets]))
    drawn = Augmentation(7, SIZE, recipe.augment, recipe.rand_augment, recipe.mix)
    keys = [SampleKey(0, number // 3 % len(source), number % 3) for number in range(15)]
    batch = TrainViews(source, drawn, encoded=encoded)[Samples(0, keys, np.zeros(15, np.int64))]
    return views_of(batch.images, SIZE, CPU, source) if encoded else batch.images


@pytest.mark.parametrize("sets", [(), WHOLE])
def test_views_of_encoded_images_are_those_of_a_worker_up_to_rounding(photographs, sets):
    made, expected = (views(photographs, *sets, encoded=way).int() for way in (True, False))
    assert made.shape == (15, 3, *SIZE) and (made - expected).abs().max() <= 2
    read = [encoded.read_jpeg(photographs, index)[1] for index in range(5)]
    assert [size is not None for size in read] == [True, True, False, False, True]


def test_a_device_that_refuses_a_batch_costs_no_image_that_a_cpu_reads(
    photographs, tmp_path, monkeypatch
):
    """Which one is damaged, Pillow says."""

    def refuse(files: list[Tensor], device: torch.device) -> list[Tensor]:
        raise RuntimeError("one of them")

    expected = views(photographs, encoded=True)
    decoder = jpeg_decoder()
    monkeypatch.setattr(encoded, "jpeg_decoder", lambda: JpegDecoder("none", refuse))
    assert decoder and torch.equal(views(photographs, encoded=True), expected)
    content = Path(photographs.paths[0]).read_bytes()
    (tmp_path / "1.jpg").write_bytes(content[:-9])
    assert encoded.read_jpeg(LooseImages(tmp_path), 0)[1] is None  # it has no end
    (tmp_path / "1.jpg").write_bytes(content.replace(b"\xff\xda", b"\xff\xc9", 1))
    monkeypatch.setattr(encoded, "plain_jpeg_size", lambda content, layers: (41, 53))
    with pytest.raises(DataError, match=r"1\.jpg: not a readable image"):
        views(LooseImages(tmp_path), encoded=True)


def test_a_file_that_the_device_refuses_leaves_the_pixels_of_the_others_as_they_are(
    photographs, monkeypatch
):
    """nvJPEG refuses a whole batch for one file. This device's pixels are negatives."""
    decoder, refused = jpeg_decoder(), set()

    def negatives(files: list[Tensor], device: torch.device) -> list[Tensor]:
        if refused & {file.numpy().tobytes() for file in files}:
            raise RuntimeError("one of them")
        return [255 - decoder.decode(file) for file in files]

    on_cpu = views(photographs, encoded=True)
    monkeypatch.setattr(encoded, "jpeg_decoder", lambda: JpegDecoder("negatives", negatives))
    expected = views(photographs, encoded=True)
    refused.add(Path(photographs.paths[1]).read_bytes())
    assert not torch.equal(expected[3:6], on_cpu[3:6])
    expected[3:6] = on_cpu[3:6]
    assert torch.equal(views(photographs, encoded=True), expected)


def test_a_device_without_memory_is_no_device_that_refuses_images(photographs, monkeypatch):
    def full(files: list[Tensor], device: torch.device) -> list[Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(encoded, "jpeg_decoder", lambda: JpegDecoder("full", full))
    with pytest.raises(torch.OutOfMemoryError):
        views(photographs, encoded=True)


@pytest.mark.parametrize("size", [(0, 53), (13_381, 13_397)])
def test_a_head_without_pixels_or_with_too_many_is_left_to_the_worker_that_refuses_it(
    photographs, tmp_path, size
):
    content = Path(photographs.paths[0]).read_bytes()
    place = content.index(b"\xff\xc0") + 5
    stated = struct.pack(">HH", *size)
    (tmp_path / "1.jpg").write_bytes(content[:place] + stated + content[place + 4 :])
    with pytest.raises(DataError, match=r"1\.jpg: not a readable image"):
        views(LooseImages(tmp_path), encoded=True)


@pytest.mark.parametrize("interpolation", [0, 1])
def test_a_box_of_many_times_the_view_is_averaged_before_it_is_resized(
    photographs, interpolation, monkeypatch
):
    """CUDA's interpolation has too little shared memory for more."""
    image = torch.from_numpy(
        np.random.default_rng(0).integers(0, 256, (1, 3, 7, 5)).astype(np.float32)
    )
    image = F.interpolate(image, (331, 97), mode="bilinear")[0].to(torch.uint8)
    content = image.permute(1, 2, 0).flatten()
    boxes = [[0, 3, 0, 317, 97], [0, 0, 0, 64, 96]]
    made, resize = [], F.interpolate

    def resized(part: Tensor, *args, **options) -> Tensor:
        made.append(tuple(part.shape[2:]))
        return resize(part, *args, **options)

    batch = Encoded(
        content,
        torch.tensor([[0, len(content), 331, 97]]),
        torch.tensor([[*box, 0, interpolation] for box in boxes]),
    )
    monkeypatch.setattr(F, "interpolate", resized)
    found = views_of(batch, (2, 3), CPU, photographs)
    assert made == [(64, 96), (64, 96)]
    mode, options = encoded.INTERPOLATIONS[interpolation], {"antialias": True}
    first, other = (
        resize(image[None, :, top : top + height, :width].float(), (2, 3), mode=mode, **options)
        for _, top, _, height, width in boxes
    )
    assert (found[:1].float() - first.clamp(0, 255)).abs().max() <= 2
    assert torch.equal(found[1:], other.round().clamp(0, 255).to(torch.uint8))


def test_one_batch_is_made_ahead_in_order_and_an_error_comes_in_its_place():
    made, second = [], threading.Event()

    def make(batch: int) -> int:
        made.append(batch)
        if batch == 3:
            second.set()
        if batch == 5:
            raise DataError("five")
        return 10 * batch

    ahead = one_ahead(iter(range(2, 7)), make)
    assert next(ahead) == 20
    assert second.wait(60.0) and made == [2, 3]  # made before it is asked for, and no other one
    assert next(ahead) == 30
    assert next(ahead) == 40
    with pytest.raises(DataError, match="five"):
        next(ahead)
    assert made == [2, 3, 4, 5] and list(one_ahead(iter([]), make)) == []
